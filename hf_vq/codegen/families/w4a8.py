"""Plans of kernels/cuda/w4a8/w4a8.cu: candidates, feasible, cost, choose.

Pure functions, no GPU. The cost model adds up the bottlenecks measured on an H200.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from ..jit.device import RESERVED_BYTES, Arch
from ..plan import Dtype
from ..w4a8_plan import CHUNK, Source, W4A8InputsPlan, W4A8Plan
from .dequantize import NOT_HIDDEN, WARP_INSTRUCTIONS, Cost

LONGEST_ROW = (
    1 << 16
)  # sums of longer ones might leave 32 bits, and a block's threads have no place
COLUMNS = 32  # neighbouring ones of a lane

_PIECE = 16  # columns that a thread rounds together
# Threads of a block, blocks of a multiprocessor, warps that share columns.
_FEW = ((256, 4, 8), (256, 3, 8), (256, 2, 8), (512, 2, 16), (512, 1, 16), (128, 6, 4), (128, 4, 4))
_MANY = ((128, 2, 1), (128, 3, 1), (128, 4, 1), (256, 1, 1), (256, 2, 2))
_ROW_TILES = (1, 2)
_TOKEN_TILES = (1, 2, 4, 8)
_STEPS = (1, 2, 3, 4)
_DECODE = 48  # instructions of a warp for 16 rows of a chunk
_CODE_LINES, _INPUT_LINES, _GRID_LINES = 16, 8, 8  # cycles of L1 for 16 rows, for 8 tokens
_PROLOGUE, _MEETING = 1800, 60  # of a block; of a warp whose sums meet others


@dataclass(frozen=True)
class W4A8Problem:
    """A product.

    Args:
        group: weights that share a step; 0 = the whole row.
        tokens: rows of the input.
        rows: of the weight.
        columns: of the weight.
        dtype: of input and output, FLOAT16 or BFLOAT16.
        bias: its dtype.
        arch: of the GPU.
        rounded: whether inputs come as integers.
    """

    group: int
    tokens: int
    rows: int
    columns: int
    dtype: Dtype
    bias: Dtype
    arch: Arch
    rounded: bool = False


def multipliable(columns: int) -> str | None:
    """None if kernels take rows of so many weights, else the reason why not."""
    if columns % COLUMNS:
        return f"a lane has {COLUMNS} columns, which does not divide {columns}"
    if columns > LONGEST_ROW:
        return f"sums of {columns} products may need more than 32 bits"
    return None


def token_bucket(tokens: int) -> int:
    """Tokens for which a plan is chosen."""
    return tokens if tokens == 1 else -(-min(tokens, 64) // 8) * 8


def candidates(problem: W4A8Problem) -> list[W4A8Plan]:
    """Every plan that could be meant for a problem, also those that cannot run."""
    return [
        _plan(problem, *block, *knobs)
        for block, *knobs in itertools.product(_FEW + _MANY, _ROW_TILES, _TOKEN_TILES, _STEPS)
    ]


def _plan(
    problem: W4A8Problem,
    threads: int,
    resident: int,
    split: int,
    row_tiles: int,
    token_tiles: int,
    steps: int,
) -> W4A8Plan:
    return W4A8Plan(
        threads, resident, problem.dtype, problem.group, problem.bias, problem.columns,
        split, row_tiles, token_tiles, steps, problem.tokens == 1,
        problem.tokens == 1 and not problem.rounded,
    )  # fmt: skip


def feasible(plan: W4A8Plan, problem: W4A8Problem) -> str | None:
    """None if the plan solves the problem on its GPU, else the reason why not."""
    arch = problem.arch
    if 8 * (plan.token_tiles - 1) >= problem.tokens:  # the last tile would begin before the first
        return "there are fewer tokens"
    if plan.split_k_warps * plan.pipeline_depth > max(plan.padded // CHUNK, plan.split_k_warps):
        return "warps have fewer chunks"
    if plan.shared_bytes > arch.shared_per_block:
        return "steps, inputs or sums do not fit into shared memory"
    if plan.blocks_per_sm * (plan.shared_bytes + RESERVED_BYTES) > arch.shared_per_sm:
        return "shared memory does not hold so many blocks"
    if plan.blocks_per_sm * plan.threads > arch.threads_per_sm:
        return "a multiprocessor has fewer threads"
    if registers(plan) > min(
        255, arch.registers_per_sm // (plan.blocks_per_sm * plan.threads) // 8 * 8
    ):
        return "sums do not fit into registers"
    return None


def registers(plan: W4A8Plan) -> int:
    """About how many registers a thread needs."""
    rows = plan.row_tiles * (8 * plan.pipeline_depth + 4 * plan.token_tiles + 8)
    addresses = 24 + 16 * (plan.row_tiles * plan.pipeline_depth > 7)
    if plan.rounds:
        return addresses + rows + 8 * pieces(plan.padded, plan.threads)
    ragged = (24 if plan.token_tiles > 2 else 8) * (plan.columns % CHUNK > 0)
    inputs = 8 * plan.token_tiles if plan.token_tiles < 8 else 56 + 8 * plan.pipeline_depth
    deep = (
        plan.group > 0 and plan.token_tiles == 4 and plan.pipeline_depth == 4
    )  # sm_120 spills there
    return addresses + rows + inputs + ragged + 24 * deep


def pieces(padded: int, threads: int) -> int:
    """Pieces of 16 columns that a thread quantizes."""
    return -(-padded // (_PIECE * threads))


def blocks(plan: W4A8Plan, rows: int, tokens: int) -> int:
    """Blocks of a launch."""
    return -(-rows // plan.tile_rows) * -(-tokens // (8 * plan.token_tiles))


def cost(plan: W4A8Plan, problem: W4A8Problem) -> Cost:
    """The modelled cost of a feasible plan."""
    arch, rows, tokens = problem.arch, problem.rows, problem.tokens
    groups = 2 * problem.columns // plan.group if plan.group else 4
    nbytes = rows * (problem.columns // 2 + groups + 2) + 2 * tokens * (problem.columns + rows)

    # The busiest multiprocessor, in chunks of its warps.
    count = blocks(plan, rows, tokens)
    levels = -(-count // arch.sms)
    uneven = 0.5 + 0.5 * levels * arch.sms / count
    warps = plan.threads // 32
    of_warp = -(-plan.padded // CHUNK // plan.split_k_warps)
    lines = plan.row_tiles * (_CODE_LINES + _GRID_LINES * (plan.group > 0))
    lines += _INPUT_LINES * plan.token_tiles
    instructions = plan.row_tiles * (_DECODE + 4 * plan.token_tiles) + 4 * plan.token_tiles
    parts = {
        "L1": float(levels * warps * of_warp * lines),
        "instructions": levels * warps * of_warp * instructions / WARP_INSTRUCTIONS * 2,
        "DRAM": nbytes / arch.sms / arch.dram_bytes_per_clock * 1.3 * uneven,
    }
    bound, longest = max(parts.items(), key=lambda part: part[1])
    cycles = longest + NOT_HIDDEN * (sum(parts.values()) - longest)
    cycles += (
        _PROLOGUE * -(-levels // plan.blocks_per_sm)
        + _MEETING * plan.split_k_warps * plan.row_tiles
    )
    # What too few warps cannot hide.
    in_flight = (
        min(levels, plan.blocks_per_sm) * warps * plan.row_tiles * plan.pipeline_depth * 1024
    )
    cycles *= 1 + (1 << 14) / in_flight / 2
    return Cost(nbytes, cycles, bound)


@functools.lru_cache(maxsize=4096)
def choose(problem: W4A8Problem) -> W4A8Plan | None:
    """The feasible plan of the lowest cost; None: there is none."""
    return next(iter(best(problem)), None)


def best(problem: W4A8Problem) -> list[W4A8Plan]:
    """The feasible plans, the one of the lowest cost first."""
    plans = [plan for plan in candidates(problem) if feasible(plan, problem) is None]
    return sorted(plans, key=lambda plan: cost(plan, problem).cycles)


def inputs_plan(
    dtype: Dtype, columns: int, swizzled: bool, source: Source = Source.TOKENS
) -> W4A8InputsPlan:
    """The plan that rounds tokens; nothing in it is a matter of choice. A thread has one piece of
    few tokens, whose blocks leave most of a GPU idle, and two of the many that are swizzled."""
    pieces = -(-columns // _PIECE)
    threads = min(1024, max(32, -(-pieces // (2 if swizzled else 1) // 32) * 32))
    return W4A8InputsPlan(threads, 1, dtype, 0, dtype, columns, swizzled, source)
