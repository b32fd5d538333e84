"""Suite `quality-weights`: what each weight scheme costs in quality, against int4, NF4 and GPTQ.

Every scheme is quantized while it is read, `VQConfig(scheme, activations=None)`, in float32, and
predicts the same text as the original; then once more calibrated on another text, as GPTQ is.
Calibrated weights of 4 bits are measured with the default KV cache too (`banded`). Those that are
fine-tuned are of the suite `quality-finetune`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_vq.calibration.blocks import Blocks, find_blocks
from hf_vq.calibration.hessians import Listener
from hf_vq.evaluation.load import load_model, load_tokenizer
from hf_vq.evaluation.score import Reference, model_forward, score
from hf_vq.evaluation.storage import model_storage
from hf_vq.evaluation.text import read_sequences, text_facts
from hf_vq.formats.catalog import kv_scheme
from hf_vq.hf.calibration_options import CANDIDATES, FINETUNE
from hf_vq.hf.config import VQConfig

from . import baselines
from .banded import Simulation, simulate
from .kv import SINKS, WINDOW, round_trip

CALIBRATED = ("vq-4", "vq-3", "vq-2", "turboquant-4", "quip-sharp-2", "gptvq-2-int7",
              "aqlm-2-int7")  # fmt: skip
FINETUNED = ("vq-2",)
MEASURED = ("baseline", "scheme", "calibrated")
KINDS = (*MEASURED, *FINETUNE)
TARGETS = (3.0,)  # bits per weight, a scheme for each layer
CALIBRATION_TOKENS = 1 << 16
SCHEMES = ("vq-4", "vq-3", "vq-2", "turboquant-4", "turboquant-3", "turboquant-2", "quip-sharp-2",
           "gptvq-2-int7", "aqlm-2-int7")  # fmt: skip

BATCH = 4  # sequences per forward
CACHED, CACHE = "vq-4", "u4"  # weights that are measured with a cache, and its scheme
CACHED_NAME = f"{CACHED} + KV {CACHE}"

# name -> (stored bits per weight with fp16 scales, weight -> weight)
BASELINES: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "int4 g128 (round to nearest)": (4.25, baselines.round_to_nearest),
    "NF4 g64": (4.25, baselines.nf4),
}
# name -> (stored bits per weight: codes, fp16 step and as many bits of zero point, bits)
GPTQ = {f"GPTQ int{bits} g128": (bits + (16 + bits) / 128, bits) for bits in (4, 3, 2)}


def run(
    model_dir: str,
    text: str | Path,
    *,
    tokens: int = 32768,
    context: int = 1024,
    schemes: Sequence[str] = SCHEMES,
    with_baselines: bool = True,
    kinds: Sequence[str] = MEASURED,
    calibration: str | Path | None = None,
    calibration_tokens: int | None = None,
    device_map: str | None = None,
    take_up: Callable[[dict[str, Any]], Sequence[dict[str, Any]]] = lambda settings: (),
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure; `report` gets each row when it is known.

    Args:
        kinds: rows to measure, of KINDS.
        calibration: UTF-8 text that GPTQ and schemes in CALIBRATED are calibrated on, those in
            FINETUNED tuned on, and that bits are shared out by (TARGETS) where their schemes are
            measured; None leaves that out.
        calibration_tokens: of it; None is CALIBRATION_TOKENS.
        device_map: of the models, as `from_pretrained` takes it.
        take_up: given the settings, the rows of a run with the same that was stopped.

    Returns:
        (settings, results) of the record.
    """
    tokenizer = load_tokenizer(model_dir)
    sequences = read_sequences(tokenizer, text, context=context, tokens=tokens)
    settings: dict[str, Any] = {"model": Path(model_dir).name, **text_facts(text)}
    settings |= {"tokens": sequences.numel(), "context": context, "dtype": "float32"}
    calibration_tokens = calibration_tokens or CALIBRATION_TOKENS
    if calibration is not None:
        settings |= {f"calibration_{k}": fact for k, fact in text_facts(calibration).items()}
        settings["calibration_tokens"] = calibration_tokens
    load = partial(load_model, model_dir, dtype=torch.float32, device_map=device_map)
    original = load()
    reference = Reference(model_forward(original), sequences)
    steps: list[tuple[str, str, Callable[[], Iterator[dict[str, Any]]]]] = []

    def quantized(name: str, kind: str, options: dict[str, Any] | None) -> None:
        steps.append((name, kind, partial(_scheme_rows, load, name, kind, options, reference)))

    if with_baselines and "baseline" in kinds:
        for name in BASELINES:
            steps.append((name, "baseline", partial(_baseline_rows, original, name, reference)))
        if calibration is not None:
            learned_from = read_sequences(
                tokenizer, calibration, context=context, tokens=calibration_tokens
            )
            for name in GPTQ:
                rows = partial(_gptq_rows, original, name, learned_from, reference)
                steps.append((name, "baseline", rows))
    for name in schemes if "scheme" in kinds else ():
        quantized(name, "scheme", None)
    if calibration is not None:
        options = {"text": calibration, "tokens": calibration_tokens, "context": context}
        if "calibrated" in kinds:
            for name in (name for name in schemes if name in CALIBRATED):
                quantized(name, "calibrated", options)
            for target in TARGETS if set(CANDIDATES) <= set(schemes) else ():
                quantized(f"target_bits={target:g}", "calibrated", options)
        for how in (kind for kind in FINETUNE if kind in kinds):
            for name in (name for name in schemes if name in FINETUNED):
                quantized(name, how, {**options, "finetune": how})
    results: dict[str, Any] = {"perplexity": reference.perplexity, "rows": []}
    kept = {(row["name"], row["kind"]): row for row in take_up(settings)}
    for name, kind, step in steps:
        names = (name, CACHED_NAME) if (name, kind) == (CACHED, "calibrated") else (name,)
        found = [kept[one, kind] for one in names if (one, kind) in kept]
        for row in found if len(found) == len(names) else step():
            results["rows"].append(row)
            report(row)
    return settings, results


def _baseline_rows(original: Any, name: str, reference: Reference) -> Iterator[dict[str, Any]]:
    (bits, quantize), model = BASELINES[name], copy.deepcopy(original)
    skipped = model.get_output_embeddings()  # tied to the embedding, or kept like it
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not skipped:
            module.weight.data = quantize(module.weight.data)
    found = score(model_forward(model), reference, BATCH).to_dict()
    yield _row(name, "baseline", bits, None, found)


def _gptq_rows(
    original: Any, name: str, sequences: Tensor, reference: Reference
) -> Iterator[dict[str, Any]]:
    (stored, bits), model, start = GPTQ[name], copy.deepcopy(original), time.perf_counter()
    quantize_blocks(model, sequences, partial(baselines.gptq, bits=bits))
    seconds = time.perf_counter() - start
    found = score(model_forward(model), reference, BATCH).to_dict()
    yield _row(name, "baseline", stored, seconds, found)


@torch.no_grad()
def quantize_blocks(
    model: Any, sequences: Tensor, quantize: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Quantize the linear layers of a model's blocks, each given the second moments of its inputs
    in the model that is quantized up to its block."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    prefix = find_blocks(model, names)
    blocks = Blocks(model, prefix, sequences)
    for index in range(len(blocks)):
        start = f"{prefix}.{index}."
        layers = {name: model.get_submodule(name) for name in names if name.startswith(start)}
        listener = Listener()
        for hidden in blocks.hidden:
            with listener.listening(layers):
                blocks.run(index, hidden, model.device)
        for site in listener.sites:
            for name in site.layers:
                layers[name].weight.data = quantize(layers[name].weight.data, site.hessian(0))
        blocks.hidden = [blocks.run(index, hidden, model.device) for hidden in blocks.hidden]


def _scheme_rows(
    load: Callable[..., Any],
    name: str,
    kind: str,
    calibration: dict[str, Any] | None,
    reference: Reference,
) -> Iterator[dict[str, Any]]:
    argument, _, bits = name.partition("=")  # as in target_bits=3, or the name of a scheme
    requested: dict[str, Any] = {argument: float(bits)} if bits else {"scheme": name}
    config = VQConfig(**requested, calibration=calibration, activations=None)
    start = time.perf_counter()
    model = load(config=config)
    seconds = time.perf_counter() - start
    stored = model_storage(model).bits_per_weight
    found = score(model_forward(model), reference, BATCH).to_dict()
    yield _row(name, kind, stored, seconds, found)
    if kind == "calibrated" and name == CACHED:
        scheme = kv_scheme(CACHE)
        keys = round_trip(scheme.key, centre=scheme.centre_keys, config=model.config)
        cache = Simulation(keys, round_trip(scheme.value, centre=False), WINDOW, SINKS)
        with simulate(model, cache):
            found = score(model_forward(model), reference).to_dict()
        yield _row(CACHED_NAME, kind, stored, seconds, found)


def _row(
    name: str, kind: str, bits: float, seconds: float | None, scores: dict[str, float]
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "bits_per_weight": bits,
        "quantize_seconds": seconds,
        **scores,
    }
