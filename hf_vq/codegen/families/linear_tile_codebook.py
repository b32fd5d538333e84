"""Plans of kernels/cuda/linear/linear_tile_codebook.cu: candidates, feasible, cost, choose.

Pure functions, no GPU. The cost model adds up the bottlenecks measured on an H200.
"""

from __future__ import annotations

import functools
import itertools

from ...formats.packing import packed_size
from ...formats.scheme import VQScheme
from ..jit.device import RESERVED_BYTES, Arch
from ..plan import Scope, TilePlan
from .dequantize import NOT_HIDDEN, Cost, decodable
from .linear import LinearProblem
from .table_layout import BANKS, load_bytes

MOST_TOKENS = 64  # of a launch
MOST_LAUNCHES = 2  # for more, dequantizing once and cuBLAS are faster

# Threads of a block, blocks of a multiprocessor, tiles of 16 rows of a warp.
_BLOCKS = ((256, 2, 2), (256, 1, 2), (256, 2, 1), (256, 1, 1), (128, 2, 2), (128, 3, 1),
           (64, 3, 1))  # fmt: skip
_COLUMN_WARPS = (1, 2, 4)
_SPLITS = (1, 2, 4, 6, 7, 8)
_DEPTHS = (3, 2)
_STEPS = 2
_UNITS = (8, 16, 32, 64, 128)
# Concurrent clusters by cluster size on 132 multiprocessors with one or two blocks each, as
# reported by the driver: GPCs have uneven sizes, so some multiprocessors stay idle.
_PLACES = {1: (132, 264), 2: (66, 132), 4: (30, 62), 6: (17, 39), 7: (15, 32), 8: (15, 30)}
_INPUT = 3.0  # wavefronts per line of x copied to shared memory
_CACHED_LINES = 5.0  # cycles of L1 for a load of eight rows
_PRODUCT = 6.0  # cycles of tensor cores for one of 16 x 8 x 16
_TOGETHER, _ALONE = 1.2, 1.65  # times the modelled cycles that a tile takes, of several blocks
_LONG = 8  # tiles of a block from which an L2 prefetch of all codes pays
_HIGH = 256  # rows of a band; tiles of lower bands took longer than modelled
_LOW = (0.25, 0.75)  # power of how much lower, of several tokens and of one
_PROLOGUE, _MEETING = 6000, 500
_THIRD_SLOT = 500  # of a low band, which copies as many inputs for fewer rows
_SPARE = 8  # margin of the register estimate


def tiled(scheme: VQScheme, in_features: int) -> str | None:
    """None if the kernel supports such codes, else the reason why not."""
    reason = decodable(scheme)
    if reason:
        return reason
    if scheme.codebook != "tile":
        return "its codebook is not one of tiles"
    if scheme.group(in_features) != in_features:
        return "a row of tiles has several scales"
    if scheme.vector_size == 1:
        return "vectors have one weight"
    if not any(_unit(scheme, in_features, warps) for warps in _COLUMN_WARPS):
        return f"codes of {scheme.tile[1]} columns of a tile are not whole words for each warp"
    return None


def _unit(scheme: VQScheme, in_features: int, column_warps: int) -> int:
    """Weights of a row that a lane decodes of a tile; 0 if its codes are not whole words."""
    unit, rest = divmod(scheme.tile[1], 4 * column_warps)
    if rest or unit not in _UNITS or unit % scheme.vector_size or in_features % unit:
        return 0
    whole = unit // scheme.vector_size * scheme.entry_bits % 32 == 0
    return unit if whole and load_bytes(scheme, unit, in_features) >= 4 else 0


def candidates(problem: LinearProblem) -> list[TilePlan]:
    """All plans of a problem, feasible or not."""
    return [
        plan_of(problem, *block, *knobs)
        for block, *knobs in itertools.product(_BLOCKS, _COLUMN_WARPS, _SPLITS, _DEPTHS)
    ]


def plan_of(
    problem: LinearProblem,
    threads: int,
    resident: int,
    row_tiles: int,
    column_warps: int,
    split: int,
    depth: int,
) -> TilePlan:
    """Plan of a problem and values of its tunable fields."""
    scheme, columns = problem.scheme, problem.in_features
    unit, single = _unit(scheme, columns, column_warps), problem.tokens == 1
    in_turn = -(-columns // scheme.tile[1]) // split  # tiles of a block
    return TilePlan(
        threads=threads,
        blocks_per_sm=resident,
        dtype=problem.dtype,
        vector_size=scheme.vector_size,
        entry_bits=scheme.entry_bits,
        num_codebooks=1,
        scope=Scope.TILE,
        group=0,
        fused=1,
        in_shared=True,
        integers=False,
        replicas=BANKS // (2 * scheme.vector_size),
        interleaved=2,
        unit=unit,
        load_bytes=load_bytes(scheme, unit, columns) if unit else 0,
        tile_rows=scheme.tile[0],
        column_warps=column_warps,
        row_tiles=row_tiles,
        token_tiles=-(-problem.tokens // 8),
        cluster_size=split,
        x_stages=depth,
        pipeline_depth=_STEPS,
        ragged=columns % scheme.tile[1] > 0,
        single=single,
        prefetch=in_turn >= _LONG and (single or problem.tokens > 32),
    )


def feasible(plan: TilePlan, problem: LinearProblem) -> str | None:
    """None if the plan solves the problem on its GPU, else the reason why not."""
    arch = problem.arch
    if not plan.unit:
        return "codes of a warp's columns are not whole words"
    if plan.threads // 32 % plan.column_warps or plan.tile_rows % plan.band:
        return "a band has rows of two tiles"
    if plan.threads % (plan.tile_columns // 2):
        return "threads do not share the columns of a tile evenly"
    sharers = max(1, plan.threads >> plan.entry_bits)
    if (plan.threads > 1 << plan.entry_bits and plan.threads % (1 << plan.entry_bits)) or (
        sharers > min(8, plan.replicas)
    ):
        return "threads do not share the entries of a codebook evenly"
    if plan.cluster_size > 1 and not arch.overlaps_launches:
        return f"{arch.name} has no clusters"
    if plan.cluster_size > -(-problem.in_features // plan.tile_columns):
        return "there are fewer tiles in a row than blocks"
    if plan.shared_bytes > arch.shared_per_block:
        return "tables and inputs do not fit into shared memory"
    if plan.blocks_per_sm * (plan.shared_bytes + RESERVED_BYTES) > arch.shared_per_sm:
        return "shared memory does not hold so many blocks"
    if spare_registers(plan, arch) < _SPARE:
        return "sums do not fit into registers"
    return None


def registers(plan: TilePlan) -> int:
    """Estimated registers of a thread."""
    words = plan.unit // plan.vector_size * plan.entry_bits // 32
    sums = 4 if plan.token_tiles == 1 else 4 * plan.token_tiles
    entries = max(1, (1 << plan.entry_bits) // plan.threads) * plan.vector_size // 2
    return 26 + entries + plan.row_tiles * (2 * plan.pipeline_depth * words + sums + 8) * 6 // 5


def spare_registers(plan: TilePlan, arch: Arch) -> int:
    """Registers available to a thread minus the estimated need; negative: it might spill."""
    most = min(255, arch.registers_per_sm // (plan.blocks_per_sm * plan.threads) // 8 * 8)
    return most - registers(plan)


def blocks(plan: TilePlan, rows: int) -> int:
    """Blocks of a launch."""
    return -(-rows // plan.band) * plan.cluster_size


def places(split: int, resident: int, arch: Arch) -> int:
    """Concurrent clusters of `split` blocks, with one or two blocks per multiprocessor."""
    return _PLACES[split][resident - 1] * arch.sms // _PLACES[1][0]


def _levels(plan: TilePlan, bands: int, arch: Arch) -> int:
    """Blocks of the busiest multiprocessor, sequential or concurrent."""
    one = max(1, places(plan.cluster_size, 1, arch))
    if plan.blocks_per_sm == 1 or bands <= one:
        return -(-bands // one)
    return max(2, -(-2 * bands // places(plan.cluster_size, 2, arch)))


def cost(plan: TilePlan, problem: LinearProblem) -> Cost:
    """The modelled cost of a feasible plan."""
    arch, rows, columns, tokens = problem.arch, problem.rows, problem.in_features, problem.tokens
    stream = packed_size(columns // plan.vector_size, plan.entry_bits)
    across, bands = -(-columns // plan.tile_columns), -(-rows // plan.band)
    numbers = -(-rows // plan.tile_rows) * across * plan.vector_size << plan.entry_bits
    nbytes = rows * (stream + 2) + 2 * numbers + 2 * tokens * (columns + rows)

    # The busiest multiprocessor, in tiles.
    levels = _levels(plan, bands, arch)
    together = min(levels, plan.blocks_per_sm)
    tiles = levels * -(-across // plan.cluster_size)

    # Cycles of a tile: of the pipe of shared memory, and of tensor cores.
    warps, fragments = plan.threads // 32, plan.band // 16 * plan.column_warps
    pairs, pieces = -(-plan.token_tiles // 2), plan.unit // (8 if plan.token_tiles == 1 else 4)
    words = plan.unit // plan.vector_size * plan.entry_bits // 32
    pipe = float(1 << plan.entry_bits)
    pipe += plan.band * plan.tile_columns * 2 / BANKS
    pipe += warps * pairs * pieces * (1 if plan.single else 4)
    pipe += _INPUT * problem.tokens * plan.tile_columns * 2 / BANKS
    pipe += _CACHED_LINES * fragments * 2 * words * 4 / max(plan.load_bytes, 4)
    tensor = _PRODUCT * fragments * plan.unit / 4 * max(1, plan.token_tiles) / 4
    parts = {"shared memory": pipe, "tensor cores": tensor}
    bound, longest = max(parts.items(), key=lambda part: part[1])
    busy = longest + NOT_HIDDEN * (sum(parts.values()) - longest)
    busy *= _TOGETHER if together > 1 else _ALONE
    busy *= max(1.0, _HIGH / plan.band) ** _LOW[plan.single]
    cycles = tiles * busy + _PROLOGUE * -(-levels // plan.blocks_per_sm)
    cycles += _MEETING * (plan.cluster_size > 1)
    cycles += _THIRD_SLOT * (plan.x_stages > 2 and plan.band < _HIGH and tokens > 8)
    dram = nbytes / arch.sms / arch.dram_bytes_per_clock * 1.3
    return Cost(nbytes, max(cycles, dram), bound if cycles > dram else "DRAM")


@functools.lru_cache(maxsize=4096)
def choose(problem: LinearProblem) -> TilePlan | None:
    """The feasible plan of the lowest cost; None: no plan."""
    if problem.tokens > MOST_TOKENS or tiled(problem.scheme, problem.in_features):
        return None
    return next(iter(best(problem)), None)


def best(problem: LinearProblem) -> list[TilePlan]:
    """Feasible plans by ascending cost."""
    plans = [plan for plan in candidates(problem) if feasible(plan, problem) is None]
    return sorted(plans, key=lambda plan: cost(plan, problem).cycles)
