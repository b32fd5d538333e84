"""Suite `cuda-offload`: residual passes that are copied to the GPU while a model runs.

The model is a Llama with random weights and some layers of an 8B model, its linear layers
`turboquant-4+4` and others. It runs prompts and single tokens with resident and with offloaded
residual passes. Each row also has the bytes that are copied, the time of these copies alone, the
bandwidth of the bus for one large copy, and the fraction of the copy time that is hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from hf_vq.errors import VQBackendError
from hf_vq.nn.replace import vq_modules
from hf_vq.nn.residual_offload import OFFLOADED, place, pool_of

from ..random_llama import llama_config, random_llama

SCHEMES = ("turboquant-4+4", "turboquant-4+2")
TOKENS = (1, 512, 2048, 4096, 8192)
LAYERS, KV_HEADS, HIDDEN, FFN = 8, 8, 4096, 14336
_DTYPE = torch.bfloat16
_MB = 1e6
_WARMUPS = 3
_LARGE_COPY = 512 << 20  # bytes


@torch.no_grad()
def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    tokens: Sequence[int] = TOKENS,
    layers: int = LAYERS,
    rounds: int = 10,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every scheme; `report` gets each row when it is known.

    Args:
        tokens: of the inputs.
        layers: of the model.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-offload needs a CUDA device.")
    rows, bus = [], _bus(rounds)
    for name in schemes:
        config = llama_config(KV_HEADS, max(tokens), layers, HIDDEN, FFN)
        model = random_llama(config, _DTYPE, name, "cuda").eval()
        modules = list(vq_modules(model).values())
        for count in tokens:
            found = _compared(model, modules, count, rounds)
            of_bus = {"bus_gb_per_second": bus, "of_bus": found["gb_per_second"] / bus}
            row = {"name": name, "tokens": count, **found, **of_bus}
            rows.append(row)
            report(row)
    settings = {"layers": layers, "hidden": HIDDEN, "ffn": FFN, "dtype": str(_DTYPE)[6:]}
    return {**settings, "rounds": rounds}, {"rows": rows}


def _compared(model: Any, modules: list[Any], count: int, rounds: int) -> dict[str, Any]:
    ids = torch.randint(3, 32000, (1, count), device="cuda")

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(ids, logits_to_keep=1, use_cache=False).logits
        return logits

    def placed(policy: str) -> torch.Tensor:
        place(modules, [policy] * len(modules))
        return step()

    resident = placed("resident")
    before = torch.cuda.memory_allocated()
    same = torch.equal(placed("offload"), resident)
    pool = pool_of(torch.device("cuda", torch.cuda.current_device()))
    nbytes = [
        sum(module.get_parameter(name).nbytes for name in module.specs if name.endswith(OFFLOADED))
        for module in modules
    ]
    saved = before - torch.cuda.memory_allocated()
    offloaded, offloaded_host = _seconds(step, rounds)
    copying, _ = _seconds(_copies(modules), rounds)
    placed("resident")
    kept, kept_host = _seconds(step, rounds)
    hidden = 1 - max(offloaded - kept, 0.0) / copying
    return {
        "same_logits": same,
        "resident_ms": 1e3 * kept,
        "resident_host_ms": 1e3 * kept_host,
        "offload_ms": 1e3 * offloaded,
        "offload_host_ms": 1e3 * offloaded_host,
        "copies_ms": 1e3 * copying,
        "hidden": hidden,
        "copied_mb": sum(nbytes) / _MB,
        "gb_per_second": sum(nbytes) / copying / 1e9,
        "slots_mb": pool.nbytes / _MB,
        "largest_mb": max(nbytes) / _MB,
        "saved_mb": saved / _MB,
    }


def _seconds(step: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Seconds of one step, and of its host part: until the last launch returns."""
    for _ in range(_WARMUPS):
        step()
    times, launching = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        launching.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times), median(launching)


def _copies(modules: list[Any]) -> Callable[[], None]:
    """The same bytes, one tensor after the other, from pinned memory, and nothing else."""
    sources = [
        module.get_parameter(name)
        for module in modules
        for name in module.specs
        if name.endswith(OFFLOADED)
    ]
    room = torch.empty(max(s.nbytes for s in sources), dtype=torch.uint8, device="cuda")
    pairs = [(room[: s.nbytes].view(s.dtype).view(s.shape), s) for s in sources]

    def step() -> None:
        for to, source in pairs:
            to.copy_(source, non_blocking=True)

    return step


def _bus(rounds: int) -> float:
    """Gigabytes per second of one large copy from pinned memory."""
    source = torch.empty(_LARGE_COPY, dtype=torch.uint8, pin_memory=True)
    to = torch.empty_like(source, device="cuda")
    seconds, _ = _seconds(lambda: to.copy_(source, non_blocking=True), rounds)
    return _LARGE_COPY / seconds / 1e9
