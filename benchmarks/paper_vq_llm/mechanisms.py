"""Suite `cuda-mechanisms`: the kernel that VQ-LLM describes, rung by rung, and our kernel.

The rungs are those of the paper and are cumulative: codebook in global memory (GC), in shared
memory (SC), as much of it as slack allows (O1), hot entries in registers too (O2),
codebook-centric dataflow (O3), register fusion (O4). Further rows switch each mechanism on and
off, and compare shuffles with shared memory by the number of exchanges. Codes have the frequencies
of fitted normal weights, hot entries first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_vq import ops
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import RESERVED_BYTES, Arch, device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.errors import VQBackendError
from hf_vq.fit.weight import fit_weight
from hf_vq.formats.catalog import weight_scheme
from hf_vq.formats.packing import pack_bits, unpack_bits
from hf_vq.formats.scheme import VQScheme
from tests.fixtures.random_weights import random_tensors

from ..cuda.timing import cold_copies, interleave_graphs
from ..timing import Candidate, speedup, summary
from .linear import PaperLinear
from .plan import (
    STATIC_BYTES,
    Fusion,
    VqLlmPlan,
    base_plan,
    with_cache,
    with_fusion,
    with_split,
)

# Without rotations: what turns x is not part of the paper.
SCHEMES = ("vq2x8r1-universal-g128-none", "vq4x8r1-universal-g128-none", "aqlm-2", "aqlm-3",
           "gptvq-2")  # fmt: skip
SHAPES = ((4096, 4096), (14336, 4096))  # out_features, in_features
TOKENS = (1, 16)
_DTYPE = torch.float16
_FITTED = (256, 2048)  # weights whose codes are counted
_EXTRA = (0, 2, 4, 6, 8)  # exchanges beyond those of a mini-warp
_ORDERED = ("O1", "O2", "quarter in shared memory",
            "quarter in shared memory, hot entries in registers")  # fmt: skip
_HOT = 32  # entries in registers, where one rung is to have some


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 10,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every rung of every scheme at every shape; `report` gets each row when it is known.

    Args:
        tokens: rows of the input.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-mechanisms needs a CUDA device.")
    arch = device_arch(torch.cuda.current_device())
    cases = [
        (name, shape, count, plans_of(weight_scheme(name), arch, *shape, count))
        for name in schemes
        for shape in shapes
        for count in tokens
    ]
    _compile([plan for *_, plans in cases for plan in plans.values()], arch)
    found: list[dict[str, Any]] = []
    frequencies = {name: code_frequencies(weight_scheme(name)) for name in schemes}
    for name, shape, count, plans in cases:
        for row in _rows(name, frequencies[name], *shape, count, plans, rounds):
            row |= {"out_features": shape[0], "in_features": shape[1]}
            found.append(row)
            report(row)
    return {"rounds": rounds, "dtype": str(_DTYPE)[6:]}, {"rows": found}


def plans_of(
    scheme: VQScheme, arch: Arch, rows: int, in_features: int, tokens: int
) -> dict[str, VqLlmPlan]:
    """Every rung and every mechanism alone, by what it is called in the record; those whose shared
    memory no block can have are left out."""
    entries = 1 << scheme.entry_bits
    first = base_plan(scheme, in_features, tokens)
    registers = registers_of(first, arch)
    cached = with_cache(first, arch, registers, hot=False)
    base = replace(first, blocks_per_sm=cached.blocks_per_sm)  # as many blocks for all rungs
    split = with_split(first, rows, in_features, tokens)
    split_registers = registers_of(split, arch)
    plans = {
        "GC": base,
        "SC": _fitted(replace(base, shared=entries), arch),
        "O1": cached,
        "O2": with_cache(base, arch, registers),
        "O3": with_cache(split, arch, split_registers),
    }
    plans["O4"] = with_fusion(plans["O3"])
    plans |= {
        "O4 without registers": with_fusion(with_cache(split, arch, split_registers, hot=False)),
        "O4 without split": with_fusion(plans["O2"]),
        "SC, hot entries in registers": replace(plans["SC"], registers=_HOT),
        "quarter in shared memory": replace(first, shared=entries // 4),
        "quarter in shared memory, hot entries in registers": replace(
            first, shared=entries // 4, registers=_HOT
        ),
        "O1, renumbered": replace(cached, fusion=Fusion.RENUMBERED),
        "O1, split, renumbered": replace(
            with_cache(split, arch, split_registers, hot=False), fusion=Fusion.RENUMBERED
        ),
    }
    for extra in _EXTRA if scheme.vector_size > 2 else ():
        exchanges = base.exchanges + extra
        plans[f"SC, {exchanges} exchanges"] = replace(
            plans["SC"], fusion=Fusion.SHUFFLE, exchanges=exchanges
        )
    return {what: plan for what, plan in plans.items() if _fits(plan, arch)}


def _fits(plan: VqLlmPlan, arch: Arch) -> bool:
    return plan.shared_bytes + STATIC_BYTES <= arch.shared_per_block


def _fitted(plan: VqLlmPlan, arch: Arch) -> VqLlmPlan:
    """With as many blocks as shared memory holds, where it holds fewer."""
    fitting = arch.shared_per_sm // (plan.shared_bytes + STATIC_BYTES + RESERVED_BYTES)
    return replace(plan, blocks_per_sm=max(1, min(plan.blocks_per_sm, fitting)))


def registers_of(plan: VqLlmPlan, arch: Arch) -> int:
    """Registers of a thread, profiled offline as the paper does."""
    return compiler.registers_of(compiler.cubin(plan, arch.name, default_store()))


def _compile(plans: Sequence[VqLlmPlan], arch: Arch) -> None:
    """All at once: NVRTC lets other threads run."""
    store = default_store()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda plan: compiler.cubin(plan, arch.name, store), set(plans)))


def code_frequencies(scheme: VQScheme) -> Tensor:
    """Usage frequencies of codebook entries for normally distributed weights, in descending order.

    float64 [streams, entries]."""
    fitted = fit_weight(torch.randn(*_FITTED, device="cuda"), scheme).tensors["codes"]
    vectors = _FITTED[1] // scheme.vector_size
    streams = fitted.unflatten(1, (scheme.streams, -1)).unbind(1)
    columns = scheme.tile[1] // scheme.vector_size if scheme.codebook == "tile" else vectors
    counts = []
    for stream in streams:
        codes = unpack_bits(stream, scheme.entry_bits, vectors)
        books = [
            torch.bincount(book.flatten(), minlength=scheme.entries).sort(descending=True).values
            for book in codes.split(columns, 1)
        ]
        counts.append(torch.stack(books).sum(0))
    return torch.stack(counts).double()


def layer(
    scheme: VQScheme, frequencies: Tensor, rows: int, in_features: int, *, ordered: bool = True
) -> dict[str, Tensor]:
    """Stored tensors whose codes are drawn with `frequencies`.

    Args:
        ordered: whether the first entries are the most used; else any are.
    """
    tensors = {
        key: value.cuda() for key, value in random_tensors(scheme, rows, in_features).items()
    }
    vectors = in_features // scheme.vector_size
    streams = []
    for used in frequencies:
        codes = used.multinomial(rows * vectors, replacement=True).view(rows, vectors)
        if not ordered:
            codes = torch.randperm(scheme.entries, device="cuda")[codes]
        streams.append(pack_bits(codes, scheme.entry_bits, check=False))
    tensors["codes"] = torch.cat(streams, 1)
    return tensors


def _copies(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Copy the tensors so often that they exceed every cache."""
    count = cold_copies(tensors["codes"].nbytes + tensors["scale"].nbytes)
    own = ("codes", "scale")
    return [{**tensors, **{key: tensors[key].clone() for key in own}} for _ in range(count)]


@torch.no_grad()
def _rows(
    name: str,
    frequencies: Tensor,
    out_features: int,
    in_features: int,
    tokens: int,
    plans: dict[str, VqLlmPlan],
    rounds: int,
) -> list[dict[str, Any]]:
    scheme = weight_scheme(name)
    x = torch.randn(tokens, in_features, dtype=_DTYPE, device="cuda")
    sets = _copies(layer(scheme, frequencies, out_features, in_features))
    mixed = _copies(layer(scheme, frequencies, out_features, in_features, ordered=False))
    candidates = {what: by_plan(x, sets, plan, out_features) for what, plan in plans.items()}
    for what in _ORDERED:
        candidates[f"{what}, entries in any order"] = by_plan(x, mixed, plans[what], out_features)
    for what in ("O1, renumbered", "O1, split, renumbered"):
        candidates[f"{what}, overlapping launches"] = by_plan(
            x, sets, plans[what], out_features, overlap=True
        )
    candidates["ops.linear"] = Candidate(lambda i: ops.linear(x, sets[i], None, scheme), len(sets))
    weight = torch.randn(out_features, in_features, dtype=_DTYPE, device="cuda")
    dense = [weight.clone() for _ in range(cold_copies(weight.nbytes))]
    candidates["fp16"] = Candidate(lambda i: torch.nn.functional.linear(x, dense[i]), len(dense))
    seconds = interleave_graphs(candidates, rounds)
    rows = []
    for what in candidates:
        row: dict[str, Any] = {"name": name, "tokens": tokens, "plan": what}
        row |= summary(seconds[what])
        row["speedup"] = {"fp16": speedup(seconds[what], seconds["fp16"])}
        if what in plans:
            plan = plans[what]
            row |= {"n_reg": plan.registers, "n_shared": plan.shared, "split": plan.split,
                    "exchanges": plan.exchanges, "fusion": plan.fusion.value,
                    "blocks_per_sm": plan.blocks_per_sm}  # fmt: skip
        rows.append(row)
    return rows


def by_plan(
    x: Tensor,
    sets: list[dict[str, Tensor]],
    plan: VqLlmPlan,
    out_features: int,
    *,
    overlap: bool = False,
) -> Candidate:
    """The paper's kernel with a plan."""
    linear = PaperLinear(plan, out_features, len(x))
    y = x.new_empty(len(x), out_features)
    return Candidate(lambda i: linear(x, sets[i], y, overlap=overlap), len(sets))
