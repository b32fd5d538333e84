"""Suite `cuda-parts`: bottleneck of the fused kernels, from their time with parts left out.

Such a kernel computes wrong results. The time saved without a part is the cost that no other part
hides. "only" a part is the time with all other parts of the loop left out: a lower bound, however
well the parts overlap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from transformers.utils import logging

from hf_vq.backends.cuda.linear import fused as cuda_fused
from hf_vq.backends.cuda.linear import tile_codebook as cuda_tiles
from hf_vq.backends.cuda.linear import wgmma as cuda_wide
from hf_vq.codegen.families import linear as choose_linear
from hf_vq.codegen.families import linear_tile_codebook as choose_tiles
from hf_vq.codegen.families import linear_wgmma as choose_wide
from hf_vq.codegen.families.linear import LinearProblem
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import Store, default_store
from hf_vq.codegen.jit.launch import LoadedKernel
from hf_vq.codegen.plan import Dtype, LinearPlan, TilePlan, WidePlan
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import weight_scheme

from ..cuda.linear import by_launch, copies_of, dense, launch_of
from ..cuda.timing import interleave_graphs
from ..timing import speedup, summary

# What is taken apart: tokens -> schemes.
CASES: dict[int, tuple[str, ...]] = {
    1: ("vq-4", "quip-sharp-2"),
    16: ("vq-4", "turboquant-4", "quip-sharp-2", "aqlm-2", "aqlm-3", "aqlm-3-int7", "gptvq-2"),
    32: ("quip-sharp-4",),
    64: ("quip-sharp-4", "gptvq-2"),
    128: ("vq-4", "turboquant-4", "quip-sharp-4", "vq-2", "quip-sharp-2", "aqlm-2"),
}
TOKENS = tuple(CASES)
SCHEMES = tuple(dict.fromkeys(chain.from_iterable(CASES.values())))
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (11008, 4096))  # out_features, in_features
# Timed without each of their parts, too.
_WHOLLY = {("vq-4", 1), ("vq-4", 16), ("quip-sharp-2", 1), ("quip-sharp-2", 16)}

# Parts of each template that a macro leaves out, as WITHOUT_CODES does (kernels/cuda).
PARTS: dict[str, tuple[str, ...]] = {
    "linear": ("codes", "lookups", "products", "scales", "x", "tables", "meeting", "chunks"),
    "linear_wgmma": ("codes", "lookups", "products", "scales", "x"),
    "linear_tile_codebook": ("codes", "lookups", "products", "tables", "x"),
}
_LOOP = {
    "linear": ("codes", "lookups", "products", "x", "scales"),
    "linear_wgmma": ("codes", "lookups", "products", "x", "scales"),
    "linear_tile_codebook": ("codes", "lookups", "products", "x", "tables"),
}
_LONG = {  # those of a loop that can be the longest
    "linear": ("codes", "lookups"),
    "linear_wgmma": ("codes", "lookups", "products"),
    "linear_tile_codebook": ("lookups", "products", "x", "tables"),
}
ONLY: dict[str, dict[str, tuple[str, ...]]] = {
    template: {
        f"only {part}": tuple(other for other in _LOOP[template] if other != part) for part in parts
    }
    for template, parts in _LONG.items()
}
WITHOUT: dict[str, tuple[str, ...]] = {
    **{f"without {part}": (part,) for part in PARTS["linear"] if part != "chunks"},
    "no chunk": ("chunks",),
}


_Plan = LinearPlan | WidePlan | TilePlan


class _Without(Store):
    """Machine code of a plan whose template lacks parts."""

    def __init__(self, plan: _Plan, parts: Sequence[str]) -> None:
        store = default_store()
        super().__init__(store.folder, store.limit)
        self.plan, self.macros = plan, macros(parts)

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The image of the plan; `key` and `make` are those of the whole template."""
        key = hashlib.sha256("\0".join([key, *self.macros]).encode()).hexdigest()
        arch = device_arch(torch.cuda.current_device()).name
        return super().fetch(key, lambda: compiler.compile_plan(self.plan, arch, self.macros)[0])


def macros(parts: Sequence[str]) -> tuple[str, ...]:
    """The macros that leave parts of a template out."""
    return tuple(f"WITHOUT_{part.upper()}" for part in parts)


@torch.no_grad()
def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 10,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time the chosen plan of every case, whole and without its parts; `report` gets each row.

    Args:
        schemes: of which cases are timed.
        tokens: the same.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-parts needs a CUDA device.")
    arch = device_arch(torch.cuda.current_device())
    cases = [
        LinearProblem(weight_scheme(name), count, *shape, Dtype.BFLOAT16, arch)
        for name in schemes
        for shape in shapes
        for count in tokens
        if name in CASES.get(count, ())
    ]
    names = {weight_scheme(name): name for name in schemes}
    variants = {problem: _variants(problem, names[problem.scheme]) for problem in cases}
    _compile(variants, arch.name)
    found: list[dict[str, Any]] = []
    for problem in cases:
        for row in _rows(problem, variants[problem], rounds):
            row |= {"name": names[problem.scheme], "tokens": problem.tokens}
            row |= {"out_features": problem.rows, "in_features": problem.in_features}
            found.append(row)
            report(row)
    return {"rounds": rounds, "dtype": "bfloat16"}, {"rows": found}


def _chosen(problem: LinearProblem) -> _Plan | None:
    if problem.scheme.codebook == "tile":
        return choose_tiles.choose(problem)
    if problem.tokens >= choose_wide.fewest_tokens(problem.scheme):
        return choose_wide.choose(problem)
    return choose_linear.choose(problem)


def _launch(plan: _Plan, problem: LinearProblem) -> cuda_fused.Launch:
    scheme, shape = problem.scheme, (problem.rows, problem.in_features)
    ordinal = torch.cuda.current_device()
    if isinstance(plan, TilePlan):
        return cuda_tiles.prepare(plan, scheme, *shape, torch.bfloat16, ordinal)
    if isinstance(plan, WidePlan):
        return cuda_wide.prepare(plan, scheme, *shape, problem.tokens, torch.bfloat16, ordinal)
    return launch_of(plan, scheme, *shape)


def _variants(problem: LinearProblem, name: str) -> dict[str, _Without]:
    """The machine code of the chosen plan without some of its parts; none if there is no plan."""
    plan = _chosen(problem)
    if plan is None:
        return {}
    each = WITHOUT if (name, problem.tokens) in _WHOLLY else {}
    return {what: _Without(plan, parts) for what, parts in (each | ONLY[plan.kernel]).items()}


def _compile(variants: Mapping[LinearProblem, Mapping[str, _Without]], target: str) -> None:
    """All of them at once: NVRTC lets other threads run."""
    every = [store for of in variants.values() for store in of.values()]
    with ThreadPoolExecutor() as pool:
        done = pool.map(lambda store: compiler.cubin(store.plan, target, store), every)
        list(logging.tqdm(done, total=len(every), desc="compiling", leave=False))


def _rows(
    problem: LinearProblem, variants: Mapping[str, _Without], rounds: int
) -> list[dict[str, Any]]:
    plan = _chosen(problem)
    if plan is None:
        return []
    whole, ordinal = _launch(plan, problem), torch.cuda.current_device()
    launches = {"whole": whole} | {
        what: replace(whole, kernel=LoadedKernel(plan, whole.kernel.arguments, ordinal, store))
        for what, store in variants.items()
    }
    if whole.before is not None:
        launches["without the kernel before"] = replace(whole, before=None)
    x = torch.randn(problem.tokens, problem.in_features, dtype=torch.bfloat16, device="cuda")
    sets = copies_of(problem.scheme, problem.rows, problem.in_features)
    seconds = interleave_graphs(
        {"bf16": dense(x, problem.rows)}
        | {
            what: by_launch(x, sets, problem.scheme, launch, problem.rows)
            for what, launch in launches.items()
        },
        rounds,
    )
    return [
        {"what": what, **summary(times), "of whole": 1 / speedup(times, seconds["whole"])}
        for what, times in seconds.items()
    ]
