"""Suite `cpu-linear`: one token through a quantized linear layer on the CPU, against PyTorch.

Peers: `_weight_int4pack_mm_for_cpu` (4 bits, groups of 128), and dense layers in bfloat16 and
float32. In one thread also llama.cpp's Q4_K, given the folder of its libraries (`q4_K`), and for
`aqlm-2` the package `aqlm`, if it, numba and scipy are installed. Codes are random: the speed of a
kernel does not depend on them. The weights of every call come from main memory. A call follows an
untimed call of the same kind, as in generation. `read` is the memory roofline: it only reads, as
many bytes as the largest scheme has, with the same threads. `arithmetic` multiplies matrices that
stay in a cache. `us_cached` is the compute time: few rows, and more rows that stay in the L2
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch, ops
from hf_vq.formats.catalog import WEIGHT_SCHEMES, weight_scheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.ops.library import linear_problem
from tests.fixtures.random_weights import random_tensors

from ..peers import llama_cpp
from ..roofline.arithmetic import arithmetic
from ..roofline.cpu import reading
from ..timing import Candidate, cold_copies, extrapolated, interleave, speedup, summary

NAMED = (
    "vq-4", "turboquant-4", "vq-3", "vq-2", "gptvq-2", "aqlm-2", "aqlm-3",
    "quip-sharp-2", "quip-sharp-4",
)  # fmt: skip
SCALAR = [name for name in WEIGHT_SCHEMES if name.startswith("turboquant-")]
SCHEMES = (*NAMED, *(name for name in SCALAR if name not in NAMED))
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008))  # out_features, in_features
INT4_GROUP = 128
UNTIMED = 1  # calls before one that is timed
CACHED = 1 << 19  # bytes of codes that stay in the second cache
TABLE_ROWS = 512  # from which on 8-vectors of one token are computed by tables of products
PACKAGED, PACKAGE = "aqlm-2", "aqlm"  # the scheme that the package computes too


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rows: int = 1,
    rounds: int = 30,
    threads: Sequence[int] = (1, 2),
    ggml: Path | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every scheme at every shape; `report` gets each row when it is known.

    Args:
        rows: tokens that go through the layer at once.
        ggml: folder with the shared libraries of llama.cpp.

    Returns:
        (settings, results) of the record.
    """
    found: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    try:
        for out_features, in_features in shapes:
            for count in threads:
                torch.set_num_threads(count)
                peer = ggml if rows == count == 1 else None
                for row in _shape(schemes, out_features, in_features, rows, rounds, peer):
                    row["threads"] = count
                    found.append(row)
                    report(row)
        # At the end, since its threads stay.
        torch.set_num_threads(1)
        for out_features, in_features in shapes if PACKAGED in schemes and rows == 1 else ():
            for row in _package(out_features, in_features, rounds):
                found.append(row)
                report(row)
    finally:
        torch.set_num_threads(before)
    settings: dict[str, Any] = {
        "rows": rows, "rounds": rounds, "int4_group": INT4_GROUP, "dtype": "bfloat16",
    }  # fmt: skip
    if any(row["name"] == PACKAGE for row in found):
        settings["aqlm"] = version(PACKAGE)
    return settings, {"rows": found}


@torch.inference_mode()
def _shape(
    schemes: Sequence[str], out_features: int, in_features: int, rows: int, rounds: int,
    ggml: Path | None,
) -> list[dict[str, Any]]:  # fmt: skip
    x = torch.randn(rows, in_features, dtype=torch.bfloat16)
    candidates = peers(x, out_features)
    if ggml is not None:
        candidates["q4_K"] = llama_cpp.candidate(ggml, out_features, in_features)
    others = list(candidates)
    kernels, nbytes = {}, {}
    for name in schemes:
        scheme = weight_scheme(name)
        candidates[name] = _ours(scheme, x, out_features)
        nbytes[name] = int(scheme.bits(in_features, out_features) / 8 * in_features * out_features)
        problem = linear_problem("linear", x, scheme.spec(), out_features)
        kernels[name] = dispatch.select(problem).name
    cached = {
        name: _cached(scheme, x)
        for name in schemes
        # Each tile needs its table, which does not pay for few rows.
        if (scheme := weight_scheme(name)).codebook != "tile" and torch.get_num_threads() == 1
    }
    for name, (few, more, *_) in cached.items():
        candidates |= {f"{name} cached": few, f"{name} cached, more": more}
    size = max(nbytes.values())
    read = reading(size)
    if read is not None:
        candidates["read"] = read
    candidates["arithmetic"] = arithmetic()
    seconds = interleave(candidates, rounds, untimed=UNTIMED)
    found = []
    for name in (name for name in candidates if " cached" not in name):
        row: dict[str, Any] = {
            "name": name,
            "out_features": out_features,
            "in_features": in_features,
            **summary(seconds[name]),
        }
        if name in kernels:
            row["kernel"] = kernels[name]
            row["speedup"] = {peer: speedup(seconds[name], seconds[peer]) for peer in others}
            row["gb_per_second"] = nbytes[name] / row["us"] / 1e3
            if name in cached:
                _, _, few_rows, more_rows = cached[name]
                sizes = (f"{name} cached", few_rows), (f"{name} cached, more", more_rows)
                row["us_cached"] = extrapolated(seconds, *sizes, out_features) * 1e6
            if read is not None:
                share = nbytes[name] / size
                row["of_bandwidth"] = speedup(seconds[name], seconds["read"]) * share
        if name == "read":
            row["gb_per_second"] = size / row["us"] / 1e3
        found.append(row)
    return found


def _ours(scheme: VQScheme, x: Tensor, out_features: int) -> Candidate:
    in_features = x.shape[-1]
    stored = random_tensors(scheme, out_features, in_features)
    of_rows = [key for key in ("codes", "codes_2", "scale") if key in stored]
    copies = cold_copies(sum(stored[key].nbytes for key in of_rows))
    sets = [stored | {key: stored[key].clone() for key in of_rows} for _ in range(copies)]
    return Candidate(lambda i: ops.linear(x, sets[i], None, scheme), copies)


def _cached(scheme: VQScheme, x: Tensor) -> tuple[Candidate, Candidate, int, int]:
    """A layer of few rows, one of more whose codes stay in a cache, and the rows of both."""
    row_bytes = int(scheme.bits(x.shape[-1], 1) / 8 * x.shape[-1])
    least = TABLE_ROWS if scheme.vector_size == 8 else 8
    most = max(CACHED // row_bytes, 2 * least)
    few, more = (random_tensors(scheme, count, x.shape[-1]) for count in (least, most))
    return (
        Candidate(lambda i: ops.linear(x, few, None, scheme), calls=16),
        Candidate(lambda i: ops.linear(x, more, None, scheme), calls=16),
        least,
        most,
    )


def peers(x: Tensor, out_features: int) -> dict[str, Candidate]:
    """PyTorch's products with 4-bit weights and with dense ones."""
    in_features = x.shape[-1]
    found: dict[str, Candidate] = {}
    codes = torch.randint(16, (out_features, in_features), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(in_features // INT4_GROUP, out_features, 2).to(torch.bfloat16)
    weights = [packed.clone() for _ in range(cold_copies(packed.nbytes))]
    found["int4"] = Candidate(
        lambda i: torch.ops.aten._weight_int4pack_mm_for_cpu(x, weights[i], INT4_GROUP, scales),
        len(weights),
    )
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        dense = torch.randn(out_features, in_features, dtype=torch.float32).to(dtype)
        copies = [dense.clone() for _ in range(cold_copies(dense.nbytes))]
        found[name] = _dense(x.to(dtype), copies)
    return found


@torch.inference_mode()
def _package(out_features: int, in_features: int, rounds: int) -> list[dict[str, Any]]:
    """The package and our kernel for its scheme, in one thread; nothing if it is missing."""
    try:
        from ..peers import aqlm_numba
    except ImportError:
        return []
    x = torch.randn(1, in_features, dtype=torch.bfloat16)
    ours = _ours(weight_scheme(PACKAGED), x, out_features)
    package = aqlm_numba.candidate(out_features, in_features)
    seconds = interleave({PACKAGED: ours, PACKAGE: package}, rounds, untimed=UNTIMED)
    return [
        {
            "name": PACKAGE, "out_features": out_features, "in_features": in_features, "threads": 1,
            **summary(seconds[PACKAGE]), "times_ours": speedup(*seconds.values()),
        }
    ]  # fmt: skip


def _dense(x: Tensor, copies: list[Tensor]) -> Candidate:
    return Candidate(lambda i: torch.nn.functional.linear(x, copies[i]), len(copies))
