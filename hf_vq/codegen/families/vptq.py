"""Plans of the kernels for VPTQ's layout: candidates, feasible, cost, choose.

Pure functions, no GPU. Lookups of entries in L2 or in shared memory are the bottleneck; their rates
are those of dequantize.py, measured on an H200.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from ...formats.published import VptqLayout
from ..jit.device import RESERVED_BYTES, Arch
from ..plan import Dtype
from ..vptq_plan import VptqDecodePlan, VptqInputsPlan, VptqPlan
from .dequantize import L2_LOOKUPS, NOT_HIDDEN, Cost

MOST_TOKENS = 16  # rows of a product of tensor cores
LARGEST_VECTOR = 32  # rows of an entry, that a thread has in registers

_BLOCKS = ((256, 1), (256, 2), (256, 3), (512, 1), (512, 2), (1024, 1))
_SHARED_LOOKUPS = 3.06  # per clock, of 16 bytes at random
_L2_BYTES = 40.0  # per clock
_STEP = 30  # instructions of a warp for 32 columns, and for each vector of them
_VECTOR = 14
_PROLOGUE = 3000  # cycles until the first product, of which few are hidden
_SUMS = 40  # cycles in which a warp's sums of a fragment are added
_WAITING = 900  # cycles of 32 columns from a code to its product
_INPUTS_THREADS = 1024
_DECODE_THREADS = 512
_DECODE_REGISTERS = 64  # of each of them, two blocks resident


@dataclass(frozen=True)
class VptqProblem:
    """y = W x for a few tokens.

    Args:
        layout: of W.
        tokens: rows of x.
        rows: out_features.
        dtype: of x and y.
        arch: of the GPU.
    """

    layout: VptqLayout
    tokens: int
    rows: int
    dtype: Dtype
    arch: Arch


def decodable(layout: VptqLayout) -> str | None:
    """None if a kernel decodes such rows, else the reason why not."""
    if layout.vector > LARGEST_VECTOR:
        return f"vectors have {layout.vector} rows, more than {LARGEST_VECTOR}"
    return None


def fusable(layout: VptqLayout, dtype: Dtype) -> str | None:
    """None if a plan multiplies with such codes, else the reason why not."""
    if dtype is Dtype.FLOAT32:
        return "factors of tensor cores have 16 bits, x has 32"
    if layout.dtype == "float32":
        return "factors of tensor cores have 16 bits, codebooks have 32"
    if layout.dtype == "bfloat16" and dtype is Dtype.FLOAT16:
        return "codebooks are bfloat16: x would lose three of its bits"
    if layout.vector % 2:
        return f"vectors have an odd number of rows, {layout.vector}"
    return decodable(layout)


def stored(layout: VptqLayout) -> dict[str, Any]:
    """The fields of a plan that the layout says."""
    main, rest = layout.bits
    return dict(
        dtype=Dtype(layout.dtype), vector_size=layout.vector, entries=layout.centroids,
        entry_bits=main, rest_entries=layout.residual, rest_bits=rest,
        outlier_vector=layout.outlier_vector, outlier_entries=layout.outlier_centroids,
    )  # fmt: skip


def candidates(problem: VptqProblem) -> list[VptqPlan]:
    """Every plan that could be meant for a problem, also those that cannot run."""
    layout = problem.layout
    unit = next(unit for unit in (8, 4, 2, 1) if layout.group_size % unit == 0)
    return [
        VptqPlan(
            threads, resident, **stored(layout), out=problem.dtype, unit=unit,
            row_vectors=row_vectors, wide=problem.tokens > 8, book_in_shared=book,
            rest_in_shared=rest,
        )
        for (threads, resident), row_vectors, book, rest in itertools.product(
            _BLOCKS, (1, 2, 4), (True, False), (True, False)
        )
    ]  # fmt: skip


def registers(plan: VptqPlan) -> int:
    """About how many registers a thread needs."""
    codes = 2 * plan.row_vectors * -(-plan.unit * (plan.entry_bits + plan.rest_bits) // 32)
    return 48 + codes + plan.fragments * 11 + (8 if plan.rest_bits else 24)


def feasible(plan: VptqPlan, problem: VptqProblem) -> str | None:
    """None if the plan solves the problem on its GPU, else the reason why not."""
    layout, arch = problem.layout, problem.arch
    if layout.groups > 1 and (plan.book_in_shared or plan.rest_in_shared):
        return "groups have separate codebooks"
    if plan.rest_in_shared and not layout.residual:
        return "there are no residuals"
    if plan.shared_bytes > arch.shared_per_block:
        return "codebooks do not fit into shared memory"
    if plan.blocks_per_sm * (plan.shared_bytes + RESERVED_BYTES) > arch.shared_per_sm:
        return "shared memory does not hold so many blocks"
    if plan.blocks_per_sm * plan.threads > arch.threads_per_sm:
        return "a multiprocessor does not hold so many threads"
    most = min(255, arch.registers_per_sm // (plan.blocks_per_sm * plan.threads) // 8 * 8)
    if registers(plan) > most:
        return "sums and codes do not fit into registers"
    return None


def blocks(plan: VptqPlan, rows: int) -> int:
    """Blocks of a launch."""
    return -(-rows // (plan.vector_size * plan.row_vectors))


def cost(plan: VptqPlan, problem: VptqProblem) -> Cost:
    """The modelled cost of a feasible plan."""
    layout, arch, rows = problem.layout, problem.arch, problem.rows
    vectors, columns = -(-rows // layout.vector), layout.groups * layout.group_size
    books = 2 * layout.groups * layout.vector * (layout.centroids + layout.residual)
    inputs = problem.tokens * (columns + layout.outliers)
    nbytes = vectors * columns * sum(layout.bits) // 8 + books + 2 * inputs
    nbytes += 2 * problem.tokens * rows

    # The busiest multiprocessor, in rows of vectors; and the busiest warp, in steps of 32 columns.
    count = blocks(plan, rows)
    levels = -(-count // arch.sms)
    together, warps = min(levels, plan.blocks_per_sm), plan.threads // 32
    share = levels * plan.row_vectors
    chunk = 32 * plan.unit
    steps = -(-(layout.groups * -(-layout.group_size // chunk)) // warps) * plan.unit

    lookups = share * columns * max(1, plan.vector_size / 16)
    shared = fabric = 0.0
    for in_shared, there in (
        (plan.book_in_shared, True),
        (plan.rest_in_shared, layout.residual > 0),
    ):
        shared += lookups / _SHARED_LOOKUPS if in_shared and there else 0
        fabric += lookups / L2_LOOKUPS if there and not in_shared else 0
    tiles = share * columns * -(-plan.vector_size // 8) * 2 * 16 / 128  # to shared memory and back
    x_bytes = levels * columns * (32 if plan.wide else 16)
    warp_steps = levels * columns / 32
    parts = {
        "DRAM": nbytes / arch.sms / arch.dram_bytes_per_clock,
        "L2": fabric + x_bytes / _L2_BYTES,
        "shared memory": shared + tiles,
        "instructions": warp_steps * (_STEP + plan.fragments * _VECTOR) / 4,
        "latency": -(-levels // together) * steps * _WAITING,
    }
    bound, longest = max(parts.items(), key=lambda part: part[1])
    busy = longest + NOT_HIDDEN * (sum(parts.values()) - longest)
    busy += levels * plan.books_bytes / _L2_BYTES + -(-levels // plan.blocks_per_sm) * _PROLOGUE
    return Cost(nbytes, busy + levels * plan.fragments * warps * _SUMS / together, bound)


def l2_lookups(plan: VptqPlan, problem: VptqProblem) -> float:
    """Lookups of up to 16 bytes in L2, of a whole product."""
    layout = problem.layout
    codes = -(-problem.rows // layout.vector) * layout.groups * layout.group_size
    books = (not plan.book_in_shared) + (layout.residual > 0 and not plan.rest_in_shared)
    return codes * books * max(1.0, plan.vector_size / 16)


@functools.lru_cache(maxsize=4096)
def choose(problem: VptqProblem) -> VptqPlan | None:
    """The feasible plan of the lowest cost; None: there is none."""
    if problem.tokens > MOST_TOKENS or fusable(problem.layout, problem.dtype):
        return None
    return next(iter(best(problem)), None)


def best(problem: VptqProblem) -> list[VptqPlan]:
    """The feasible plans, the one of the lowest cost first."""
    plans = [plan for plan in candidates(problem) if feasible(plan, problem) is None]
    return sorted(plans, key=lambda plan: cost(plan, problem).cycles)


def inputs_plan(plan: VptqPlan, layout: VptqLayout) -> VptqInputsPlan:
    """The kernel that makes the inputs of a plan: nothing in it is a matter of choice."""
    return VptqInputsPlan(
        _INPUTS_THREADS, 1, plan.out, plan.dtype, plan.unit, plan.wide, layout.norm, layout.perm
    )


def decode_plan(layout: VptqLayout, in_features: int, out: Dtype) -> VptqDecodePlan:
    """The kernel that decodes rows: nothing in it is a matter of choice."""
    each = 2 if in_features % 2 == 0 and layout.vector <= LARGEST_VECTOR // 2 else 1
    # Entries of a thread's columns and a residual's; what finds an outlier's numbers is unrolled.
    numbers = each * layout.vector + (layout.vector if layout.residual else 0)
    needed = 40 + 4 * numbers if layout.outliers else 28 + numbers
    times = next((times for times in (1, 2) if needed < times * _DECODE_REGISTERS), 4)
    return VptqDecodePlan(
        _DECODE_THREADS // times, 2, **stored(layout), out=out, each=each, norm=layout.norm,
        order=layout.perm,
    )  # fmt: skip
