"""Suite `cuda-quantize`: seconds and memory of quantizing and loading on a GPU.

All matrices of Llama-3-8B, with random bfloat16 weights in GPU memory, pass through the functions
that the quantizer calls. Further rows: one matrix with kernels and without
(HF_VQ_BACKEND=reference), and the peak memory of loading a smaller model, quantized before or
during the load.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_vq.errors import VQBackendError
from hf_vq.fit import fit_weight
from hf_vq.formats.catalog import weight_scheme

from ..random_llama import llama_config
from ..timing import Candidate, interleave, speedup

SCHEMES = ("vq-4", "vq-3", "vq-2", "turboquant-4", "quip-sharp-2", "quip-sharp-4")
# out_features, in_features: q, k, v, o, gate, up, down
LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096),
         (4096, 14336))  # fmt: skip
LAYERS = 32
_COMPARED = (1024, 4096)
_LOADED_LAYERS = 8
_DTYPE = torch.bfloat16
_MB = 1e6


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    layers: int = LAYERS,
    rounds: int = 3,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Quantize and load with every scheme; `report` gets each row when it is known.

    Args:
        layers: of the model that is quantized.
        rounds: of the comparison with PyTorch alone.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-quantize needs a CUDA device.")
    rows: list[dict[str, Any]] = []
    weights = [_random(shape) for _ in range(layers) for shape in LAYER]
    for name in schemes:
        row = {"what": "quantize", "name": name, **_quantized(weights, name)}
        row["speedup"] = {"PyTorch": _against_pytorch(name, rounds)}
        rows.append(row)
        report(row)
    weights.clear()
    with tempfile.TemporaryDirectory() as folder:
        dense = f"{folder}/dense"
        with torch.device("cuda"):
            config = llama_config(4, 2048, layers=_LOADED_LAYERS)
            model = AutoModelForCausalLM.from_config(config, dtype=_DTYPE)
        model.save_pretrained(dense)
        layer = _bytes(model.model.layers[0])
        del model
        for name in schemes:
            for row in _loaded(dense, f"{folder}/{name}", name, layer):
                rows.append(row)
                report(row)
    settings = {"layers": layers, "matrices": [list(shape) for shape in LAYER],
                "dtype": str(_DTYPE)[6:], "rounds": rounds}  # fmt: skip
    return settings, {"rows": rows}


def _random(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, dtype=_DTYPE, device="cuda") * 0.02


def _quantized(weights: list[Tensor], name: str) -> dict[str, Any]:
    """Seconds for all weights, and the peak memory in addition to them and the results."""
    scheme = weight_scheme(name)
    for weight in weights[: len(LAYER)]:  # compiles
        fit_weight(weight, scheme)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    fitted = [fit_weight(weight, scheme) for weight in weights]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    stored = sum(tensor.nbytes for found in fitted for tensor in found.tensors.values())
    return {
        "seconds": seconds,
        "weights": sum(weight.numel() for weight in weights),
        "relative_error": fmean(found.relative_error for found in fitted),
        "stored_mb": stored / _MB,
        "above_mb": (torch.cuda.max_memory_allocated() - before - stored) / _MB,
    }


def _against_pytorch(name: str, rounds: int) -> float:
    scheme, weight = weight_scheme(name), _random(_COMPARED)

    def fit(backend: str) -> None:
        wanted = {"HF_VQ_BACKEND": backend}
        with patch.dict(os.environ, wanted):
            fit_weight(weight, scheme)  # ends with a number that the host waits for

    seconds = interleave(
        {
            "kernels": Candidate(lambda i: fit("")),
            "PyTorch": Candidate(lambda i: fit("reference")),
        },
        rounds,
        warmup=1,
    )
    return speedup(seconds["kernels"], seconds["PyTorch"])


def _loaded(dense: str, folder: str, name: str, dense_layer: int) -> list[dict[str, Any]]:
    """Memory while a model is quantized on the way to the GPU, and while the result is loaded."""
    from hf_vq.hf.config import VQConfig

    model, row = _peak(dense, quantization_config=VQConfig(name, activations=None))
    model.save_pretrained(folder)
    layer = _bytes(model.model.layers[0])
    del model
    loaded = _peak(folder)[1]
    return [
        {"what": "quantize while loading", "name": name, **row, "layer_mb": dense_layer / _MB},
        {"what": "load", "name": name, **loaded, "layer_mb": layer / _MB},
    ]


def _peak(model: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = AutoModelForCausalLM.from_pretrained(model, device_map="cuda", dtype=_DTYPE, **options)
    torch.cuda.synchronize()
    peak, size = torch.cuda.max_memory_allocated() - before, _bytes(loaded)
    return loaded, {"stored_mb": size / _MB, "above_mb": (peak - size) / _MB}


def _bytes(module: torch.nn.Module) -> int:
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
