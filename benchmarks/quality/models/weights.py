"""Rows of weights: schemes of this package, and other methods on the same model and text."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_vq.errors import VQError
from hf_vq.evaluation import libraries
from hf_vq.evaluation.load import load_model
from hf_vq.evaluation.storage import model_storage
from hf_vq.hf.config import VQConfig

from .. import baselines
from ..int8 import simulate_int8
from ..weights import quantize_blocks
from .ggml import TYPES, Ggml

SCHEMES = (
    "turboquant-8", "vq-4", "turboquant-4", "vq-3", "turboquant-3", "vq-2", "turboquant-2",
)  # fmt: skip
CALIBRATED = ("vq-4", "vq-3", "vq-2")
WITH_ACTIVATIONS = ("turboquant-8", "vq-4", "vq-3", "vq-2")
EMBEDDINGS = ("int8", "turboquant-6", "int4", "turboquant-4")
BESIDE = "vq-4"  # weights of the rows of embeddings
IMATRIX = ("q4_k", "iq4_xs", "q3_k", "iq3_s", "iq3_xxs", "q2_k", "iq2_xs", "iq2_xxs")

SAME, PARTLY = "same", "partly"
"""Whether a format has the grid of the file that a model came from: blocks of 32 with a minimum and
16 levels (Q4_1, Q4_K). Integers of other groups share their levels in part."""


@dataclass
class Job:
    """A model to quantize, and what methods learn from.

    Args:
        model_dir: its folder.
        original: in float32.
        learned_from: token ids [sequences, context]; None = no method that learns is possible.
        calibration: options of `VQConfig(calibration=...)` on the same text; None as well.
        ggml: folder of llama.cpp's libraries; None without.
        device: as `from_pretrained` takes it.
    """

    model_dir: str
    original: Any
    learned_from: Tensor | None = None
    calibration: dict[str, Any] | None = None
    ggml: Path | None = None
    device: str | None = None

    def layers(self, model: Any) -> dict[str, nn.Linear]:
        """The layers that are quantized: all linear ones but the head."""
        head = model.get_output_embeddings()
        return {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not head
        }

    def text(self) -> Tensor:
        """Token ids that a method learns from.

        Raises:
            VQError: there are none.
        """
        if self.learned_from is None:
            raise VQError("needs a text to learn from: give --calibration TEXT")
        return self.learned_from

    @cached_property
    def importance(self) -> dict[str, Tensor]:
        """E x_i^2 [in] of the inputs of each layer on the text, as llama.cpp's imatrix has it."""
        found: dict[str, Tensor] = {}

        def listen(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            energy = args[0].detach().float().flatten(0, -2).square().mean(0)
            found[name] = found.get(name, torch.zeros_like(energy)) + energy

        hooks = [
            layer.register_forward_pre_hook(partial(listen, name))
            for name, layer in self.layers(self.original).items()
        ]
        try:
            with torch.no_grad():
                for row in self.text():
                    self.original(row[None].to(self.original.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return found


@dataclass(frozen=True)
class Quantized:
    """A quantized model: its stored bits a weight, and what a record also says."""

    model: Any
    bits: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightRow:
    """A way to quantize weights; `grid` says whether it shares that of the model's source file."""

    name: str
    kind: str
    quantize: Callable[[Job], Quantized]
    grid: str | None = None

    def measure(self, job: Job) -> tuple[Quantized, float]:
        """The quantized model, and the seconds that it took."""
        start = time.perf_counter()
        return self.quantize(job), time.perf_counter() - start


def _scheme(name: str, job: Job, **options: Any) -> Quantized:
    config = VQConfig(name, **options)
    model = load_model(job.model_dir, dtype=torch.float32, config=config, device_map=job.device)
    stored = model_storage(model)
    return Quantized(model, stored.bits_per_weight, {"megabytes": stored.nbytes / 1e6})


def _int8(name: str, job: Job) -> Quantized:
    """The same with `activations_bits=8`, simulated."""
    found = _scheme(name, job, activations="model")
    found.facts["int8_share"] = simulate_int8(found.model)
    return found


def _calibrated(name: str, job: Job) -> Quantized:
    job.text()
    return _scheme(name, job, calibration=job.calibration)


def _elementwise(
    quantize: Callable[[Tensor], Tensor], bits: Callable[[int], float], job: Job
) -> Quantized:
    """Args: quantize: weight -> weight; bits: columns -> stored bits of a weight."""
    model = copy.deepcopy(job.original)
    layers = job.layers(model).values()
    for layer in layers:
        layer.weight.data = quantize(layer.weight.data)
    return Quantized(model, _mean_bits(layers, bits))


def _by_moments(
    quantize: Callable[[Tensor, Tensor], Tensor], bits: Callable[[int], float], job: Job
) -> Quantized:
    """GPTQ and AWQ: quantize: (weight, moments of the inputs) -> weight."""
    text, model = job.text(), copy.deepcopy(job.original)
    quantize_blocks(model, text.to(model.device), quantize)
    return Quantized(model, _mean_bits(job.layers(model).values(), bits))


def _mean_bits(layers: Any, bits: Callable[[int], float]) -> float:
    counts = [(layer.weight.numel(), bits(layer.weight.shape[1])) for layer in layers]
    return sum(n * one for n, one in counts) / sum(n for n, _ in counts)


def _integer_bits(bits: int, group: int, zero: int = 16) -> Callable[[int], float]:
    """Stored bits: codes, an fp16 step and `zero` bits of minimum for each group of a row."""
    return lambda columns: bits + (16 + zero) * -(-columns // group) / columns


def _ggml(name: str, imatrix: bool, joined: bool, job: Job) -> Quantized:
    if job.ggml is None:
        raise VQError("needs llama.cpp's libraries: give --ggml FOLDER")
    library, model, used = Ggml(job.ggml), copy.deepcopy(job.original), dict[str, int]()
    importance = job.importance if imatrix else {}
    nbytes = weights = 0
    for layer, module in job.layers(model).items():
        decoded, stored, kind = library.round_trip(
            module.weight.data, name, importance.get(layer), joined
        )
        module.weight.data = decoded
        nbytes, weights = nbytes + stored, weights + decoded.numel()
        used[kind] = used.get(kind, 0) + decoded.numel()
    shares = {kind: round(count / weights, 4) for kind, count in used.items()}
    return Quantized(model, 8 * nbytes / weights, {"types": shares})


def _library(peer: libraries.Peer, job: Job) -> Quantized:
    plain = libraries.Job(job.model_dir, torch.float32, job.device, None, 0)
    return Quantized(*libraries.quantized(peer, plain))


def embeddings() -> list[WeightRow]:
    """Rows of one scheme of weights with each kind of embedding; without one, it is in `rows`."""
    return [
        WeightRow(kind, "scheme", partial(_scheme, BESIDE, activations=None, embeddings=kind))
        for kind in EMBEDDINGS
    ]


def rows() -> list[WeightRow]:
    """Every row of weights, in the order of the table."""
    found = [
        WeightRow(name, "scheme", partial(_scheme, name, activations=None)) for name in SCHEMES
    ]
    found += [
        WeightRow(f"{name}-activations", "scheme", partial(_scheme, name, activations="model"))
        for name in WITH_ACTIVATIONS
    ]
    found += [
        WeightRow(f"{name}-activations-int8", "scheme", partial(_int8, name))
        for name in WITH_ACTIVATIONS
    ]
    found += [
        WeightRow(f"{name}-calibrated", "calibrated", partial(_calibrated, name))
        for name in CALIBRATED
    ]
    # bitsandbytes stores an fp32 absolute maximum for 64 weights.
    nf4 = partial(_elementwise, baselines.nf4, lambda columns: 4 + 32 / 64)
    found.append(WeightRow("nf4-g64", "peer", nf4))
    for bits, group in ((4, 64), (4, 128), (3, 128), (2, 128)):
        cost = _integer_bits(bits, group)
        code = partial(baselines.searched_integers, bits=bits, group=group)
        found.append(
            WeightRow(f"int{bits}-g{group}", "peer", partial(_elementwise, code, cost), PARTLY)
        )
    for bits in (4, 3, 2):
        peer = libraries.WEIGHT_PEERS[f"hqq-{bits}"]
        found.append(WeightRow(f"hqq-{bits}-g64", "peer", partial(_library, peer), PARTLY))
    for name, method in (("gptq", baselines.gptq), ("awq", baselines.awq)):
        for bits in (4, 3, 2):
            cost = _integer_bits(bits, 128)
            run = partial(_by_moments, partial(method, bits=bits), cost)
            found.append(WeightRow(f"{name}-{bits}-g128", "peer", run, PARTLY))
    for name in IMATRIX:
        grid = SAME if name == "q4_k" else PARTLY if name in ("q3_k", "q2_k") else None
        for suffix, joined in (("", False), ("-joined", True)):
            run = partial(_ggml, name, True, joined)
            found.append(WeightRow(f"{name}-imatrix{suffix}", "peer", run, grid))
    for name in ("q4_0", "q4_1"):
        found.append(WeightRow(name, "peer", partial(_ggml, name, False, False), SAME))
    assert set(IMATRIX) <= set(TYPES)
    return found
