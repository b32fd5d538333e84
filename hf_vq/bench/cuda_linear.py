"""Suite `cuda-linear`: quantized linear layers on a GPU, against bfloat16 and the reference path.

Also the decode kernel alone, as a fraction of what memory gives: of a kernel that only writes, and
of one that reads as much as it writes. Codes are random: how fast a kernel is does not depend on
them. The rows `cuda.*` are asked for by HF_VQ_BACKEND=cuda; each record says which row ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..backends.cuda_linear import Stored
from ..errors import VQBackendError
from ..formats.catalog import weight_scheme
from ..formats.scheme import VQScheme
from ..ops import dispatch, reference
from ..ops.codes import stored_arguments
from ..ops.library import problem
from .cpu_linear import SCHEMES, random_tensors
from .cuda_timing import cold_copies, interleave_graphs
from .timing import Contestant, speedup, summary

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # out_features, in_features
TOKENS = (1, 16, 256, 1024, 4096)
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
        raise VQBackendError("the suite cuda-linear needs a CUDA device.")
    found: list[dict[str, Any]] = []
    for shape in shapes:
        rows = _decode_rows(schemes, *shape, rounds)
        for count in tokens:
            rows += _linear_rows(schemes, *shape, count, rounds)
        for row in rows:
            row |= {"out_features": shape[0], "in_features": shape[1]}
            found.append(row)
            report(row)
    return {"rounds": rounds, "dtype": str(_DTYPE)[6:]}, {"rows": found}


@torch.inference_mode()
def _decode_rows(
    schemes: Sequence[str], out_features: int, in_features: int, rounds: int
) -> list[dict[str, Any]]:
    nbytes = 2 * out_features * in_features
    buffers = [
        torch.zeros(out_features, in_features, dtype=_DTYPE, device="cuda")
        for _ in range(cold_copies(nbytes))
    ]
    count = len(buffers)
    contestants = {
        "write": Contestant(lambda i: buffers[i].fill_(1.0), count),
        # A kernel: a copy in a graph would be a slower transfer.
        "read and write": Contestant(
            lambda i: torch.add(buffers[i - 1], 1.0, out=buffers[i]), count
        ),
    }
    moved = {"write": nbytes, "read and write": 2 * nbytes}
    for name in schemes:
        scheme = weight_scheme(name)
        sets = copies_of(scheme, out_features, in_features)
        moved[name] = nbytes + sum(
            tensor.nbytes for key, tensor in sets[0].items() if key != "signs"
        )
        contestants[name] = _decoding(sets, buffers, scheme, in_features)
    seconds = interleave_graphs(contestants, rounds)
    ceilings = {name: moved[name] / min(seconds[name]) for name in ("write", "read and write")}
    found = []
    for name in contestants:
        row: dict[str, Any] = {"what": "decode", "name": name, **summary(seconds[name])}
        row["gb_per_second"] = moved[name] / row["us"] / 1e3
        if name not in ceilings:
            row["of_ceiling"] = {
                ceiling: row["gb_per_second"] * 1e9 / rate for ceiling, rate in ceilings.items()
            }
        found.append(row)
    return found


def _decoding(
    sets: list[dict[str, Tensor]], buffers: list[Tensor], scheme: VQScheme, in_features: int
) -> Contestant:
    stored = [
        Stored(tensors["codes"], tensors["codebook"], tensors["scale"], scheme, in_features)
        for tensors in sets
    ]

    def call(i: int) -> None:
        stored[i % len(stored)].decode(0, buffers[i % len(buffers)])

    return Contestant(call, max(len(stored), len(buffers)))


@torch.inference_mode()
def _linear_rows(
    schemes: Sequence[str], out_features: int, in_features: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    x = torch.randn(tokens, in_features, dtype=_DTYPE, device="cuda")
    weight = torch.randn(out_features, in_features, dtype=_DTYPE, device="cuda")
    weights = [weight.clone() for _ in range(cold_copies(weight.nbytes))]
    contestants = {
        "bf16": Contestant(lambda i: torch.nn.functional.linear(x, weights[i]), len(weights))
    }
    kernels = {}
    for name in schemes:
        scheme = weight_scheme(name)
        sets = copies_of(scheme, out_features, in_features)
        contestants[name] = _ours(x, sets, scheme)
        contestants[f"{name} reference"] = _reference(x, sets, scheme)
        asked = problem("linear", x, scheme.spec(), out_features)
        kernels[name] = dispatch.select(asked).name
    seconds = interleave_graphs(contestants, rounds)
    found = []
    for name in contestants:
        row: dict[str, Any] = {"what": "linear", "name": name, "tokens": tokens}
        row |= summary(seconds[name])
        if name in kernels:
            row["kernel"] = kernels[name]
            row["speedup"] = {
                "bf16": speedup(seconds[name], seconds["bf16"]),
                "reference": speedup(seconds[name], seconds[f"{name} reference"]),
            }
        found.append(row)
    return found


def copies_of(scheme: VQScheme, out_features: int, in_features: int) -> list[dict[str, Tensor]]:
    """Stored tensors of a layer, as often as no cache holds their codes and scales."""
    tensors = {
        key: tensor.cuda()
        for key, tensor in random_tensors(scheme, out_features, in_features).items()
    }
    copies = cold_copies(tensors["codes"].nbytes + tensors["scale"].nbytes)
    own = ("codes", "scale")
    return [{**tensors, **{key: tensors[key].clone() for key in own}} for _ in range(copies)]


def _ours(x: Tensor, sets: list[dict[str, Tensor]], scheme: VQScheme) -> Contestant:
    return Contestant(lambda i: ops.linear(x, sets[i], None, scheme), len(sets))


def _reference(x: Tensor, sets: list[dict[str, Tensor]], scheme: VQScheme) -> Contestant:
    calls: list[tuple[Any, ...]] = [
        (x, *stored_arguments(tensors), None, scheme) for tensors in sets
    ]
    return Contestant(lambda i: reference.linear(*calls[i]), len(calls))
