"""Suite `cuda-calibrate`: seconds and memory of calibrating a Llama-3-8B on one GPU.

A few blocks with random bfloat16 weights in GPU memory pass through the steps of a user's
calibration: hidden states of all tokens, second moments, codes with feedback, and outputs with
these codes. All blocks have one size, so 32 blocks take 32 times as long as one. The row records
the number of measured blocks and the extrapolated time of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from hf_vq.calibration.blocks import Blocks
from hf_vq.calibration.layerwise import WeightCalibration
from hf_vq.calibration.resume import CodedBlock
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import weight_scheme
from hf_vq.hf.calibration_options import OWN_WORDS
from hf_vq.hf.config import VQConfig

from ..random_llama import random_llama

SCHEMES = ("vq-4", "vq-2", "turboquant-4", "quip-sharp-2")
BLOCKS = 32  # of the model
LAYERS = 2  # measured, and one more whose outputs nobody reads
SEQUENCES, CONTEXT = 128, 2048
_MB = 1e6


def llama_3_8b(layers: int) -> LlamaConfig:
    """Its shape, with fewer blocks and a vocabulary that takes less memory."""
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=32000,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    layers: int = LAYERS,
    rounds: int = 1,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calibrate blocks with every scheme; `report` gets each row when it is known.

    Args:
        layers: blocks that are measured.
        rounds: calibrations of each scheme, of which the median block counts.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-calibrate needs a CUDA device.")
    rows = []
    for name in schemes:
        config = llama_3_8b(layers + 1)
        found = [calibrated(config, name, "cuda", SEQUENCES, CONTEXT) for _ in range(rounds)]
        row = summary(name, found)
        rows.append(row)
        report(row)
    settings = {"sequences": SEQUENCES, "context": CONTEXT, "layers": layers, "blocks": BLOCKS,
                "dtype": "bfloat16", "rounds": rounds}  # fmt: skip
    return settings, {"rows": rows}


def calibrated(
    config: LlamaConfig,
    name: str,
    device: str,
    sequences: int,
    context: int,
) -> dict[str, Any]:
    """Calibrate a model of random weights on random tokens.

    Returns:
        seconds of the whole, of each block but the last, and of what is no block, as the embedding;
        and the peak memory in addition to the model, in MB.
    """
    torch.manual_seed(0)
    model = random_llama(config, torch.bfloat16, None, device)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    options = {"text": OWN_WORDS, "tokens": sequences * context, "context": context}
    names = [name for name, _ in model.model.layers.named_modules(prefix="model.layers")
             if name.endswith("_proj")]  # fmt: skip
    scheme = weight_scheme(name)
    job = _Timed(model, dict.fromkeys(names, scheme), VQConfig(scheme, calibration=options))
    start = time.perf_counter()
    errors: dict[str, float] = {}
    facts = job.run(model, errors)
    seconds = time.perf_counter() - start
    most = torch.cuda.max_memory_allocated() if on_gpu else 0
    return {
        "seconds": seconds,
        "block_seconds": job.seconds[:-1],
        "other_seconds": seconds - sum(job.seconds),
        "above_mb": (most - before) / _MB,
        "relative_error": sum(errors.values()) / len(errors),
        "output_error": sum(facts["output_error"].values()) / len(facts["output_error"]),
    }


def summary(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of one scheme: of every block, and of the whole model, which was not run."""
    seconds = [second for one in found for second in one["block_seconds"]]
    other = median(one["other_seconds"] for one in found)
    return {
        "name": name,
        "blocks_measured": len(seconds),
        "block_seconds": median(seconds),
        "slowest_block_seconds": max(seconds),
        "other_seconds": other,
        "extrapolated_minutes": (BLOCKS * median(seconds) + other) / 60,
        "above_mb": max(one["above_mb"] for one in found),
        "relative_error": found[0]["relative_error"],
        "output_error": found[0]["output_error"],
    }


class _Timed(WeightCalibration):
    """Calibration on random tokens that records the seconds of each block."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seconds: list[float] = []

    def _sequences(self, model: Any) -> Tensor:
        tokens, context = self.options["tokens"], self.options["context"]
        shape = (tokens // context, context)
        return torch.randint(0, model.config.vocab_size, shape)

    def _code(self, model: Any, blocks: Blocks, *rest: Any) -> CodedBlock:
        start = time.perf_counter()
        done = super()._code(model, blocks, *rest)
        if blocks.model.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        return done
