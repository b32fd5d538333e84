"""Suite `cuda-parts`: what binds the fused kernel, told by its time with one part of it left out.

What such a kernel computes is wrong. A part costs what leaving it out saves, as far as no other
part takes as long at the same time; "only" a part is what remains where all others are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from ..codegen import compiler
from ..codegen.choose_linear import LinearProblem, choose
from ..codegen.device import device_arch
from ..codegen.launch import Kernel
from ..codegen.plan import Dtype, LinearPlan, render
from ..codegen.store import Store, default_store
from ..errors import VQBackendError
from ..formats.catalog import weight_scheme
from .cuda_linear import by_plan, copies_of, dense, launch_of
from .cuda_timing import interleave_graphs
from .timing import speedup, summary

SCHEMES = ("vq-4", "quip-sharp-2")
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # out_features, in_features
TOKENS = (1, 16)

# In kernels/cuda: a file, what stands there once, and what becomes of it.
PARTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "codes": (
        ("codes.cuh", "stream_words<Bytes>(from + i * Bytes, word + i * Bytes / 4);",
         "for (int k = 0; k < Bytes / 4; ++k) word[i * Bytes / 4 + k] = 12345 * k + threadIdx.x;"),
    ),
    "lookups": (
        ("numbers.cuh", "  if constexpr (Bytes == 4) {\n    asm volatile(\"ld.shared.u32",
         "  for (int i = 0; i < Bytes / 4; ++i) word[i] = from + i;\n  return;\n"
         "  if constexpr (Bytes == 4) {\n    asm volatile(\"ld.shared.u32"),
    ),
    "products": (
        ("mma.cuh", "  if constexpr (D == Dtype::FLOAT16) {\n    asm(\"mma.sync",
         "  d[0] += __uint_as_float(a0 ^ a1 ^ a2 ^ a3 ^ b0 ^ b1);\n  return;\n"
         "  if constexpr (D == Dtype::FLOAT16) {\n    asm(\"mma.sync"),
    ),
    "scales": (
        ("linear.cu", "if constexpr (Plan::group > 0)", "if constexpr (false)"),
        ("linear.cu", "return Plan::group ? half_to_float", "return false ? half_to_float"),
        ("linear.cu", "if constexpr (!Plan::group) return 1.0f;", "return 1.0f;"),
    ),
    "x": (
        ("linear.cu", "load_words<16 * piece>(a.x + from, word);", ";"),
        ("linear.cu", "if (n * 8 + lane / 4 < tokens) load", "if (lane > 31) load"),
        ("linear.cu", "  if constexpr (Plan::rotate)\n", "  if constexpr (false)\n"),
    ),
    "tables": (
        ("linear.cu", "  table.begin_fill(batch);\n", ""),
        ("linear.cu", "  table.end_fill(batch);\n", ""),
    ),
    "meeting": (
        ("linear.cu", " finish_one(a, table,", " if (sums[0][0][0] == 1.25f) finish_one(a, table,"),
        ("linear.cu", " finish(a, table,", " if (sums[0][0][0] == 1.25f) finish(a, table,"),
    ),
    "chunks": (("linear.cu", "end = min(begin + each, chunks);", "end = begin;"),),
}  # fmt: skip
_LOOP = ("codes", "lookups", "products", "scales", "x")
WITHOUT: dict[str, tuple[str, ...]] = {
    **{f"without {part}": (part,) for part in PARTS if part != "chunks"},
    "only codes": tuple(part for part in _LOOP if part != "codes"),
    "only lookups": tuple(part for part in _LOOP if part != "lookups"),
    "no chunk": ("chunks",),
}


class _Without(Store):
    """Machine code of a plan whose template lacks parts."""

    def __init__(self, plan: LinearPlan, parts: Sequence[str]) -> None:
        store = default_store()
        super().__init__(store.folder, store.limit)
        self._plan, self._sources = plan, edited(compiler.sources(), parts)

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The image of the plan; `key` and `make` are those of the whole template."""
        texts = {**self._sources, "plan.cuh": render(self._plan)}
        key = hashlib.sha256("\0".join([key, *texts.values()]).encode()).hexdigest()
        arch = device_arch(torch.cuda.current_device()).name
        source = texts.pop(f"{self._plan.template}.cu")
        return super().fetch(
            key,
            lambda: compiler.compile_source(source, "linear.cu", texts, arch, str(self._plan))[0],
        )


def edited(sources: Mapping[str, str], parts: Sequence[str]) -> dict[str, str]:
    """Templates that lack parts.

    Raises:
        VQBackendError: what is to be left out is not there.
    """
    texts = dict(sources)
    for file, old, new in (change for part in parts for change in PARTS[part]):
        if texts[file].count(old) != 1:
            raise VQBackendError(f"{file} does not have {old!r} once.")
        texts[file] = texts[file].replace(old, new)
    return texts


@torch.no_grad()
def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 10,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time the chosen plan of every scheme, whole and without its parts; `report` gets each row.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-parts needs a CUDA device.")
    arch = device_arch(torch.cuda.current_device())
    found: list[dict[str, Any]] = []
    for name in schemes:
        for shape in shapes:
            for count in tokens:
                asked = LinearProblem(weight_scheme(name), count, *shape, Dtype.BFLOAT16, arch)
                plan = choose(asked)
                if plan is None:
                    continue
                for row in _rows(asked, plan, rounds):
                    row |= {"name": name, "tokens": count}
                    row |= {"out_features": shape[0], "in_features": shape[1]}
                    found.append(row)
                    report(row)
    return {"rounds": rounds, "dtype": "bfloat16"}, {"rows": found}


def _rows(asked: LinearProblem, plan: LinearPlan, rounds: int) -> list[dict[str, Any]]:
    ordinal, shape = torch.cuda.current_device(), (asked.rows, asked.in_features)
    whole = launch_of(plan, asked.scheme, *shape)
    stores = {what: _Without(plan, parts) for what, parts in WITHOUT.items()}
    with ThreadPoolExecutor() as pool:  # NVRTC lets other threads run
        target = device_arch(ordinal).name
        list(pool.map(lambda store: compiler.cubin(plan, target, store), stores.values()))
    launches = {"whole": whole} | {
        what: replace(whole, kernel=Kernel(plan, whole.kernel.arguments, ordinal, store))
        for what, store in stores.items()
    }
    if whole.before is not None:
        launches["without the kernel before"] = replace(whole, before=None)
    x = torch.randn(asked.tokens, asked.in_features, dtype=torch.bfloat16, device="cuda")
    sets = copies_of(asked.scheme, *shape)
    seconds = interleave_graphs(
        {"bf16": dense(x, asked.rows)}
        | {
            what: by_plan(x, sets, asked.scheme, plan, asked.rows, launch=launch)
            for what, launch in launches.items()
        },
        rounds,
    )
    return [
        {"what": what, **summary(times), "of whole": 1 / speedup(times, seconds["whole"])}
        for what, times in seconds.items()
    ]
