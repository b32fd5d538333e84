"""Suite `cuda-w4a8`: linear layers of 4-bit weights and 8-bit inputs on a GPU, against bfloat16.

Inputs are bfloat16, and their quantization is timed in every call. Peers: dense layers, and
PyTorch's own product of 8-bit weights and inputs (`_int_mm`, which needs more than 16 tokens)
without quantization and scaling. One token is also given as a fraction of reading codes and steps;
more tokens with the time of quantization alone and the lower bound of tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch, ops
from hf_vq.backends.cuda import w4a8_inputs
from hf_vq.codegen.jit.device import device_arch, driver_attribute
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import QOQ_SCHEMES
from hf_vq.formats.qoq import encode
from hf_vq.ops.library import linear_problem

from ..roofline.cuda import PLANS, reading
from ..timing import Candidate, speedup, summary
from .linear import dense
from .timing import cold_copies, interleave_graphs

SCHEMES = ("qoq-w4a8", "qoq-w4a8-g128")
SHAPES = ((6144, 4096), (14336, 4096), (4096, 14336))  # out_features, in_features
TOKENS = (1, 16, 64, 128, 256, 1024, 4096)
_MOST_OF_INT_MM = 16  # tokens that it refuses
_OF_A_CLOCK = 4096  # products of bytes that tensor cores of a multiprocessor of Hopper add
_DTYPE = torch.bfloat16


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 10,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every scheme at every shape; `report` gets each row when it is known.

    Args:
        tokens: rows of the input.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-w4a8 needs a CUDA device.")
    found: list[dict[str, Any]] = []
    for shape in shapes:
        layers = {name: copies_of(name, *shape) for name in schemes}
        for count in tokens:
            for row in _rows(layers, *shape, count, rounds):
                found.append(row)
                report(row)
    return {"rounds": rounds, "dtype": str(_DTYPE)[6:]}, {"rows": found}


def copies_of(name: str, out_features: int, in_features: int) -> list[dict[str, Tensor]]:
    """Stored tensors of a layer, as often as no cache holds them."""
    weight = torch.randn(out_features, in_features, device="cuda")
    tensors = encode(weight, QOQ_SCHEMES[name])
    copies = cold_copies(sum(tensor.nbytes for tensor in tensors.values()))
    return [{key: tensor.clone() for key, tensor in tensors.items()} for _ in range(copies)]


@torch.no_grad()
def _rows(
    layers: dict[str, list[dict[str, Tensor]]],
    out_features: int,
    in_features: int,
    tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    x = torch.randn(tokens, in_features, dtype=_DTYPE, device="cuda")
    peers = {"bf16": dense(x, out_features)}
    if tokens > _MOST_OF_INT_MM:
        peers["int8 x int8"] = _int_mm(tokens, out_features, in_features)
    candidates, kernels, nbytes = dict(peers), {}, {}
    for name, sets in layers.items():
        candidates[name] = ours(x, sets, name)
        kernels[name] = dispatch.select(linear_problem("w4a8_linear", x, name, out_features)).name
        nbytes[name] = sum(tensor.nbytes for tensor in sets[0].values())
    if tokens > 1:
        swizzled = "cuda.w4a8_wide" in kernels.values()
        candidates["rounding"] = Candidate(lambda i: w4a8_inputs.tokens(swizzled, x), 1)
    read = {}
    if tokens == 1:
        read = {
            (name, i): reading(count, plan)
            for name, count in nbytes.items()
            for i, plan in enumerate(PLANS)
        }
    known = {**candidates, **{f"reading {name} {i}": one for (name, i), one in read.items()}}
    seconds = interleave_graphs(known, rounds)
    found = []
    for name in candidates:
        row: dict[str, Any] = {
            "name": name, "out_features": out_features, "in_features": in_features,
            "tokens": tokens, **summary(seconds[name]),
        }  # fmt: skip
        if name in layers:
            row["kernel"] = kernels[name]
            row["speedup"] = {peer: speedup(seconds[name], seconds[peer]) for peer in peers}
        if name in layers and tokens > 1:
            row["rounding_us"] = summary(seconds["rounding"])["us"]
            row |= _least_of_tensor_cores(out_features * in_features * tokens)
        if name in layers and tokens == 1:
            limits = [seconds[f"reading {name} {i}"] for i in range(len(PLANS))]
            row["of_reading"] = max(speedup(seconds[name], limit) for limit in limits)
        found.append(row)
    return found


def _least_of_tensor_cores(products: int) -> dict[str, float]:
    """Lower bound of tensor core time on a Hopper GPU at its highest clock; empty on others."""
    arch = device_arch(torch.cuda.current_device())
    if arch.name != "sm_90a":
        return {}
    clock = driver_attribute("CLOCK_RATE", torch.cuda.current_device()) * 1e3
    return {"tensor_us": 1e6 * products / (_OF_A_CLOCK * arch.sms * clock)}


def ours(x: Tensor, sets: list[dict[str, Tensor]], name: str) -> Candidate:
    """The layer by the row that the table chooses."""
    return Candidate(lambda i: ops.w4a8_linear(x, sets[i], None, name), len(sets))


def _int_mm(tokens: int, out_features: int, in_features: int) -> Candidate:
    x = torch.randint(-127, 128, (tokens, in_features), dtype=torch.int8, device="cuda")
    weight = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8, device="cuda")
    copies = [weight.clone() for _ in range(cold_copies(weight.nbytes))]
    return Candidate(lambda i: torch._int_mm(x, copies[i].T), len(copies))
