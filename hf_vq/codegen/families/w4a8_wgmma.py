"""Plans of kernels/cuda/w4a8/w4a8_wgmma.cu: candidates, feasible, cost, choose.

Pure functions, no GPU. The cost model adds up the bottlenecks measured on an H200.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

from ..jit.device import RESERVED_BYTES, Arch
from ..w4a8_plan import CHUNK, W4A8WidePlan
from .dequantize import Cost
from .w4a8 import W4A8Problem

FEWEST_TOKENS = 17  # with fewer w4a8.cu is faster

_WARPGROUPS = ((1, 1), (2, 1), (3, 1), (2, 2), (3, 3))  # that multiply; teams of them
_TOKEN_TILES = (32, 64, 128, 256)
_READ_AGAIN = 64  # tokens up to which smaller tiles were slower than one
_MOST_SLOTS, _FEWEST_SLOTS = 8, 3
_MOST_REGISTERS = 232  # an estimate of all 240 (wgmma_ring.cuh) leaves nothing for its error
_STEPS = (8, 4, 2)
_AHEAD, _FEW_STEPS = 8, 4  # where a warpgroup has all chunks, and few of them on their way
_TENSOR = 0.5  # cycles of a product of 64 x 32 for each token
_SHORTEST = 49.0  # cycles of such a product, however few its tokens
_DECODING, _GROUPS = 143.0, 52.0  # cycles of a warp that decodes a chunk; more with groups
_LATENCY = 490.0  # cycles until codes come
_L2_BYTES = 53.0  # a cycle of a multiprocessor
_IN_TURN = 0.265  # of what does not bind
_PROLOGUE, _STORE = 6540, 15.3


def wide(arch: Arch) -> str | None:
    """None if a GPU runs the kernel, else the reason why not."""
    return None if arch.name == "sm_90a" else f"{arch.name} has no products of warpgroups (wgmma)"


def token_bucket(tokens: int) -> int:
    """Tokens for which a plan is chosen: rounded up to three binary digits, and to tiles of 32."""
    step = max(_TOKEN_TILES[0], 1 << max(tokens.bit_length() - 3, 0))
    return -(-tokens // step) * step


def candidates(problem: W4A8Problem) -> list[W4A8WidePlan]:
    """Every plan that could be meant for a problem, also those that cannot run."""
    ways = itertools.product(_WARPGROUPS, _TOKEN_TILES, _STEPS)
    return [_plan(problem, *warpgroups, *knobs) for warpgroups, *knobs in ways]


def _plan(
    problem: W4A8Problem, warpgroups: int, teams: int, token_tile: int, steps: int
) -> W4A8WidePlan:
    """With as many slots as shared memory has."""
    arch = problem.arch
    groups = problem.columns // problem.group if problem.group else 0
    ahead = _AHEAD if teams == 1 and steps <= _FEW_STEPS else 0
    plan = W4A8WidePlan(
        128 * (warpgroups + 1), 1, problem.dtype, problem.group, groups, problem.bias,
        token_tile, teams, 0, steps, ahead,
    )  # fmt: skip
    most = min(arch.shared_per_block, arch.shared_per_sm - RESERVED_BYTES)
    left = max(0, most - plan.shared_bytes) // (plan.slot_bytes + 16)
    return replace(plan, x_stages=min(left, _MOST_SLOTS))


def feasible(plan: W4A8WidePlan, problem: W4A8Problem) -> str | None:
    """None if the plan solves the problem on its GPU, else the reason why not."""
    arch = problem.arch
    if reason := wide(arch):
        return reason
    # A team has a slot until its next one is full, so as many as teams would wait for each other.
    if plan.x_stages < max(_FEWEST_SLOTS, plan.split_k_warpgroups + 1):
        return "sums leave too little shared memory for x"
    if plan.token_tile < min(problem.tokens, _READ_AGAIN):
        return "codes would be read once more than by larger tiles"
    if registers(plan) > most_registers(plan, arch):
        return "sums do not fit into registers"
    return None


def registers(plan: W4A8WidePlan) -> int:
    """About how many registers a thread needs that multiplies."""
    return 80 + plan.token_tile // 2 + 8 * plan.pipeline_depth + 8 * (plan.split_k_warpgroups > 1)


def most_registers(plan: W4A8WidePlan, arch: Arch) -> int:
    """Registers that such a thread can have (wgmma_ring.cuh: `math_registers`)."""
    at_launch = arch.registers_per_sm // (plan.blocks_per_sm * plan.threads) // 8 * 8
    most = (at_launch * (plan.warpgroups + 1) - 24) // plan.warpgroups // 8 * 8
    return min(most, _MOST_REGISTERS)


def tiles(plan: W4A8WidePlan, rows: int, tokens: int) -> int:
    """Tiles of a launch, distributed over blocks."""
    return -(-rows // plan.tile_rows) * -(-tokens // plan.token_tile)


def blocks(plan: W4A8WidePlan, rows: int, tokens: int, arch: Arch) -> int:
    """Blocks of a launch; each processes several tiles."""
    return min(tiles(plan, rows, tokens), arch.sms * plan.blocks_per_sm)


def cost(plan: W4A8WidePlan, problem: W4A8Problem) -> Cost:
    """The modelled cost of a feasible plan."""
    arch, columns, rows, tokens = problem.arch, problem.columns, problem.rows, problem.tokens
    groups = 2 * columns // plan.group if plan.group else 4
    nbytes = rows * (columns // 2 + groups + 2) + 2 * tokens * (columns + rows)

    waves = -(-tiles(plan, rows, tokens) // (arch.sms * plan.blocks_per_sm))
    chunks, parts, across = -(-columns // CHUNK), plan.tile_rows / 64, min(plan.token_tile, tokens)
    of_chunk = {
        "tensor cores": 4 * parts * max(_TENSOR * plan.token_tile, _SHORTEST),
        "L2": CHUNK * (across + plan.tile_rows / 2) / _L2_BYTES,
        "decoding": parts * (_DECODING + _GROUPS * (plan.group > 0)),
        "latency": _LATENCY / plan.pipeline_depth / plan.split_k_warpgroups,
    }
    bound, longest = max(of_chunk.items(), key=lambda part: part[1])
    cycles = longest + _IN_TURN * (sum(of_chunk.values()) - longest)
    cycles = waves * (cycles * chunks + across * parts * _STORE) + _PROLOGUE
    dram = nbytes / arch.sms / arch.dram_bytes_per_clock * 1.2
    return Cost(nbytes, max(cycles, dram), bound if cycles > dram else "DRAM")


@functools.lru_cache(maxsize=4096)
def choose(problem: W4A8Problem) -> W4A8WidePlan | None:
    """The feasible plan of the lowest cost; None: there is none."""
    return next(iter(best(problem)), None)


def best(problem: W4A8Problem) -> list[W4A8WidePlan]:
    """The feasible plans, the one of the lowest cost first."""
    plans = [plan for plan in candidates(problem) if feasible(plan, problem) is None]
    return sorted(plans, key=lambda plan: cost(plan, problem).cycles)
