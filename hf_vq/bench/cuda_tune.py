"""Suite `cuda-tune`: which plan of the fused linear kernel is the fastest on this GPU.

For every scheme, shape and number of tokens, the plans that the model of `codegen` ranks first take
turns, in CUDA graphs over data that no cache holds. The winners are written to the table that
`codegen.tuned` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..backends import cuda_fused
from ..codegen import compiler, tuned
from ..codegen.choose_linear import LinearProblem, best, fusable
from ..codegen.device import device_arch
from ..codegen.plan import Dtype, LinearPlan
from ..codegen.store import default_store
from ..errors import VQBackendError
from ..formats.catalog import weight_scheme
from ..ops.codes import rotation_of
from .cuda_linear import copies_of
from .cuda_timing import interleave_graphs
from .timing import Contestant, summary

SCHEMES = ("vq-4", "turboquant-4", "vq-3", "vq-2", "quip-sharp-2", "quip-sharp-4", "aqlm-2",
           "aqlm-3")  # fmt: skip
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (11008, 4096), (4096, 11008), (1024, 4096),
          (6144, 4096), (28672, 4096))  # fmt: skip
TOKENS = (1, 8, 16, 32, 64)
PLANS = 24  # measured for a problem


@torch.inference_mode()
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
        table: file that is extended (default: the one on disk, beside the kernels).
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
    ranked = {asked: best(problem)[:PLANS] for asked, problem in problems.items()}
    _compile({plan for plans in ranked.values() for plan in plans}, arch.name)
    winners: dict[LinearProblem, LinearPlan] = {}
    for (name, shape, number), plans in ranked.items():
        if not plans:
            continue
        problem = problems[name, shape, number]
        times = _times(problem, plans, rounds)
        winner = min(plans, key=lambda plan: times[plan])
        for dtype in (Dtype.BFLOAT16, Dtype.FLOAT16):
            winners[replace(problem, dtype=dtype)] = winner
        report(
            {
                "scheme": name,
                "shape": f"{number}x{shape[0]}x{shape[1]}",
                "us": times[winner],
                "us of the model's choice": times[plans[0]],
                "knobs": tuned.knobs(winner),
            }
        )
    return tuned.keep(winners, table)


def _compile(plans: set[LinearPlan], target: str) -> None:
    """All at once: NVRTC lets other threads run."""
    store = default_store()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda plan: compiler.cubin(plan, target, store), plans))


def _times(
    problem: LinearProblem, plans: Sequence[LinearPlan], rounds: int
) -> dict[LinearPlan, float]:
    """Microseconds of every plan, with the rotation before it."""
    scheme, rows, columns = problem.scheme, problem.rows, problem.in_features
    sets = copies_of(scheme, rows, columns)
    x = torch.randn(problem.tokens, columns, dtype=torch.bfloat16, device="cuda")
    y = x.new_empty(problem.tokens, rows)
    ordinal = torch.cuda.current_device()

    def contestant(plan: LinearPlan) -> Contestant:
        launch = cuda_fused.prepare(plan, scheme, rows, columns, x.dtype, ordinal)

        def call(i: int) -> None:
            codes, codebook, scale = (sets[i][key] for key in ("codes", "codebook", "scale"))
            rotation = rotation_of(sets[i])
            cuda_fused.run(x, codes, codebook, scale, rotation, None, scheme, y, ordinal, launch)

        return Contestant(call, len(sets))

    contestants = {str(i): contestant(plan) for i, plan in enumerate(plans)}
    seconds = interleave_graphs(contestants, rounds)
    return {plan: summary(seconds[str(i)])["us"] for i, plan in enumerate(plans)}
