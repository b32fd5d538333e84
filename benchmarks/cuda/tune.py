"""Suite `cuda-tune`: search for the fastest plan of the fused linear kernel on this GPU.

For every scheme, shape and number of tokens, the suite runs the plans that the cost model of
`codegen` ranks first: interleaved, in CUDA graphs, with a cold L2 cache. Each winner is written at
once to the table that `codegen.tuned` reads.

As in a model, another kernel makes the input of each launch, and the time of both counts. Launches
that follow each other would overlap, and hide how a plan begins and ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_vq.codegen import tuned
from hf_vq.codegen.families.linear import LinearProblem, best, feasible, fusable
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.codegen.plan import Dtype, LinearPlan
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import weight_scheme

from ..timing import Candidate, summary
from .linear import by_plan, copies_of, launch_of
from .timing import interleave_graphs

SCHEMES = ("vq-4", "turboquant-4", "vq-3", "vq-2", "quip-sharp-2", "quip-sharp-4", "aqlm-2",
           "aqlm-3", "aqlm-2-int7", "aqlm-3-int7")  # fmt: skip
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (11008, 4096), (4096, 11008), (1024, 4096),
          (6144, 4096), (28672, 4096))  # fmt: skip
TOKENS = (1, 8, 16, 32, 64)
PLANS = 48  # measured for a problem
_UNSURE = 56  # registers that the compiler may need less than the model says


@torch.no_grad()
def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 5,
    table: Path | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Path:
    """Measure in bfloat16, and keep the winners for both 16-bit dtypes.

    Args:
        table: file that is extended (default: the one in the kernel store).
        report: gets a row for every problem.

    Returns:
        the file.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-tune needs a CUDA device.")
    arch = device_arch(torch.cuda.current_device())
    problems = {
        (name, shape, number): LinearProblem(
            weight_scheme(name), number, *shape, Dtype.BFLOAT16, arch
        )
        for name in schemes
        for shape in shapes
        for number in tokens
        if fusable(weight_scheme(name), shape[1]) is None
    }
    ranked = {key: _ranked(problem) for key, problem in problems.items()}
    _compile({plan for plans in ranked.values() for plan in plans}, arch.name)
    path = tuned.keep({}, table)  # fails before anything is measured
    for (name, shape, number), plans in ranked.items():
        if not plans:
            continue
        problem = problems[name, shape, number]
        times = _times(problem, plans, rounds)
        winner = min(times, key=lambda plan: times[plan])
        dtypes = (Dtype.BFLOAT16, Dtype.FLOAT16)
        tuned.keep({replace(problem, dtype=dtype): winner for dtype in dtypes}, path)
        report(
            {
                "scheme": name,
                "shape": f"{number}x{shape[0]}x{shape[1]}",
                "us": times[winner],
                "knobs": tuned.knobs(winner),
            }
        )
    return path


def _ranked(problem: LinearProblem) -> list[LinearPlan]:
    """The plans that are measured: those of the model, and what it knows no difference of."""
    both = (
        pair for plan in best(problem, -_UNSURE) for pair in (plan, replace(plan, prefetch_x=True))
    )
    return [plan for plan in both if feasible(plan, problem) is None][:PLANS]


def _compile(plans: set[LinearPlan], target: str) -> None:
    """All at once: NVRTC lets other threads run."""
    store = default_store()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda plan: compiler.cubin(plan, target, store), plans))


def _times(
    problem: LinearProblem, plans: Sequence[LinearPlan], rounds: int
) -> dict[LinearPlan, float]:
    """Microseconds of every plan, with the rotation and a kernel that makes x before it."""
    scheme, rows, columns = problem.scheme, problem.rows, problem.in_features
    sets = copies_of(scheme, rows, columns)
    given = torch.randn(problem.tokens, columns, dtype=torch.bfloat16, device="cuda")
    x = given.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that spill: they do not take part
        names = {
            str(i): plan
            for i, plan in enumerate(plans)
            if not launch_of(plan, scheme, rows, columns).kernel.local_bytes
        }

    def after_another(plan: LinearPlan) -> Candidate:
        linear = by_plan(x, sets, scheme, plan, rows)

        def call(i: int) -> None:
            torch.mul(given, 1, out=x)
            linear.call(i)

        return replace(linear, call=call)

    candidates = {name: after_another(plan) for name, plan in names.items()}
    seconds = interleave_graphs(candidates, rounds)
    return {plan: summary(seconds[name])["us"] for name, plan in names.items()}
