"""Plans of kernels/cuda/linear/linear_wgmma.cu: candidates, feasible, cost, choose.

Pure functions, no GPU. The cost model adds up the bottlenecks measured on an H200.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

from ...formats.packing import packed_size
from ...formats.scheme import VQScheme
from ..jit.device import RESERVED_BYTES, Arch
from ..plan import Dtype, RotateInt8Plan, Scope, WidePlan
from .dequantize import Cost, decodable, diagonal_of
from .linear import LinearProblem, fusable
from .table_layout import LARGEST_INDEX, copies, fused, load_bytes, tables

_FEWEST_TOKENS, _FEWEST_OF_LATTICES = 33, 17  # with fewer the kernel for few is faster
MOST_TOKENS = 1024  # beyond, decoded rows are used often enough; not where inputs are int8
FEWEST_INT8_TOKENS = 65

_WARPGROUPS = (2, 3, 4)  # that multiply
_TOKEN_TILES = (32, 64, 128, 256)
_SPLITS = (1, 2, 3, 4, 5, 6)
_UNITS = (32, 64, 128, 16)  # the first that codes allow
_SHORTEST_BLOCK, _LONGEST_UNIT = 8, 64  # that rotate.cu exchanges within a warp
_MOST_SLOTS, _FEWEST_SLOTS = 8, 3
_STEPS, _MORE_STEPS = 2, 3  # where there are registers for more
_INT8_STEPS = 4
_INT8_UNIT, _INT8_COLUMNS = 32, 1 << 15  # of int8 inputs, of which a thread rounds 32
_INT8_ROWS = 4  # whose scale a warp finds
_LEFT_OUT = 12  # multiprocessors of 132 that have no place in clusters of more than two
_COLUMNS = 64  # of a slot; 128 of int8
_TENSOR = 0.52  # cycles of a product of 64 x 16 for each token
_SHORTEST = 66.0  # cycles of such a product, however few its tokens
_SHARED = 0.25  # wavefronts of shared memory that read x for each token
_LOOKUPS = 16  # those for the weights of such a product, for each stage
_LATTICE = 1.5  # times as many, with the instructions that put a lattice's weights together
_WAVEFRONTS = 0.62  # of a clock
_WARP = 165.0  # cycles of a warp for its part of such a product
_PROLOGUE, _STORE, _MEETING = 6000, 6.0, 400
_PATTERNS = 3000  # cycles more for each stage of a lattice
_IN_TURN = 0.1  # of what does not bind


def wide(scheme: VQScheme, in_features: int, arch: Arch, activations_bits: int = 16) -> str | None:
    """None if the kernel computes with such codes on such a GPU, else the reason why not."""
    if arch.name != "sm_90a":
        return f"{arch.name} has no products of warpgroups (wgmma)"
    reason = decodable(scheme) or fusable(scheme, in_features)
    if reason:
        return reason
    if tables(scheme)[1] > LARGEST_INDEX:
        return "its codebook does not fit into shared memory"
    unit = _unit(scheme, in_features)
    if unit is None:
        return f"codes of {in_features} weights are not whole words for every 64 columns"
    block = scheme.block(in_features)
    if activations_bits == 8:
        if unit != _INT8_UNIT:
            return f"codes of {in_features} weights are not whole words for every 128 columns"
        if block > RotateInt8Plan.LARGEST_BLOCK:
            return f"inputs that are rotated by {block} are not rounded"
        if in_features > _INT8_COLUMNS:
            return f"a block of threads does not round inputs of {in_features} numbers"
    elif block > 1 and block != 4 * unit and (block < _SHORTEST_BLOCK or unit > _LONGEST_UNIT):
        return f"inputs that are rotated by {block} have no order for units of {unit}"
    return None


def _unit(scheme: VQScheme, in_features: int) -> int | None:
    """Weights of a row that a lane decodes of a chunk: whole words and chunks, one scale."""
    group, together = scheme.group(in_features), fused(scheme)
    width, bits = scheme.vector_size * together, scheme.entry_bits * together
    for unit in _UNITS:
        words = unit % width == 0 and unit // width * bits % 32 == 0
        chunks = in_features % (4 * unit) == 0 and group % (4 * unit) == 0
        if words and chunks and load_bytes(scheme, unit, in_features) >= 4:
            return unit
    return None


def fewest_tokens(scheme: VQScheme) -> int:
    """Smallest number of tokens for which this kernel is faster than linear.cu."""
    return _FEWEST_OF_LATTICES if scheme.lattice and scheme.streams > 1 else _FEWEST_TOKENS


def token_bucket(tokens: int) -> int:
    """Tokens for which a plan is chosen: rounded up to three binary digits, and to tiles of 32."""
    step = max(_TOKEN_TILES[0], 1 << max(tokens.bit_length() - 3, 0))
    return -(-tokens // step) * step


def candidates(problem: LinearProblem) -> list[WidePlan]:
    """Every plan that could be meant for a problem, also those that cannot run."""
    return [
        _plan(problem, warpgroups, token_tile, split)
        for warpgroups, token_tile, split in itertools.product(_WARPGROUPS, _TOKEN_TILES, _SPLITS)
    ]


def _plan(problem: LinearProblem, warpgroups: int, token_tile: int, split: int) -> WidePlan:
    """With as many slots as shared memory has."""
    scheme, columns, arch = problem.scheme, problem.in_features, problem.arch
    replicas, interleaved = copies(scheme, arch)
    unit = _unit(scheme, columns) or _UNITS[0]
    group = scheme.group(columns)
    int8 = problem.activations_bits == 8
    # Slots of all steps are even in number: decoded weights alternate between two places.
    more = warpgroups == 2 and token_tile == 128 and unit > _COLUMNS // 4 and not int8
    plan = WidePlan(
        threads=128 * (warpgroups + 1),
        blocks_per_sm=1,
        dtype=Dtype.FLOAT16 if int8 else problem.dtype,
        vector_size=scheme.vector_size,
        entry_bits=scheme.entry_bits,
        num_codebooks=scheme.streams,
        scope=Scope.E8P if scheme.lattice else Scope.SHARED,
        group=0 if group == columns else group,
        fused=fused(scheme),
        in_shared=True,
        integers=scheme.largest_entry > 0,
        replicas=replicas,
        interleaved=interleaved,
        unit=unit,
        load_bytes=load_bytes(scheme, unit, columns),
        out=problem.dtype,
        activations_bits=problem.activations_bits,
        token_tile=token_tile,
        cluster_size=split,
        x_stages=0,
        pipeline_depth=_INT8_STEPS if int8 else _MORE_STEPS if more else _STEPS,
    )
    if int8 and spare_registers(plan, arch) < 0:
        plan = replace(plan, pipeline_depth=_STEPS)
    most = min(arch.shared_per_block, arch.shared_per_sm - RESERVED_BYTES)
    left = max(0, most - plan.shared_bytes) // (plan.slot_bytes + 16)
    return replace(plan, x_stages=min(left, _MOST_SLOTS))


def feasible(plan: WidePlan, problem: LinearProblem) -> str | None:
    """None if the plan solves the problem on its GPU, else the reason why not."""
    arch = problem.arch
    if plan.x_stages < _FEWEST_SLOTS:
        return "tables leave too little shared memory for x"
    if plan.blocks_per_sm * (plan.shared_bytes + RESERVED_BYTES) > arch.shared_per_sm:
        return "sums do not fit into shared memory"
    if spare_registers(plan, arch) < 0:
        return "sums do not fit into registers"
    if not clusters(plan, arch):
        return "the GPU has no place for such a cluster"
    if plan.cluster_size > problem.in_features // (4 * plan.unit):
        return "there are fewer chunks of columns than blocks"
    return None


def registers(plan: WidePlan) -> int:
    """About how many registers a thread needs that multiplies."""
    words = plan.unit // plan.vector_size * plan.entry_bits // 32
    codes = 2 * plan.pipeline_depth * (plan.num_codebooks * words + (plan.group > 0))
    weights = 16 + 16 * (plan.num_codebooks > 1) + 16 * (plan.scope is Scope.E8P)
    if plan.activations_bits == 8:
        weights += 20  # entries on their way, and factors of rows and tokens
    fields = 16 if plan.entry_bits * plan.fused % 8 else 0  # codes that are not whole bytes
    return 30 + plan.token_tile // 2 + codes + 4 * plan.num_codebooks + weights + fields


def spare_registers(plan: WidePlan, arch: Arch) -> int:
    """Registers of such a thread beyond those it needs (linear_wgmma.cu: `math_registers`)."""
    at_launch = arch.registers_per_sm // (plan.blocks_per_sm * plan.threads) // 8 * 8
    producer = 32 if plan.activations_bits == 8 or plan.warpgroups > 2 else 24
    most = (at_launch * (plan.warpgroups + 1) - producer) // plan.warpgroups // 8 * 8
    return min(most, 240) - registers(plan)


def tiles(plan: WidePlan, rows: int, tokens: int) -> int:
    """Tiles of a launch, distributed over clusters."""
    across = -(-rows // (64 * plan.warpgroups))
    return across * -(-tokens // plan.token_tile)


def clusters(plan: WidePlan, arch: Arch) -> int:
    """Concurrent clusters; GPCs have uneven sizes, so some multiprocessors stay idle."""
    sms = arch.sms if plan.cluster_size <= 2 else arch.sms - _LEFT_OUT
    return sms * plan.blocks_per_sm // plan.cluster_size


def blocks(plan: WidePlan, rows: int, tokens: int, arch: Arch) -> int:
    """Blocks of a launch; each processes several tiles, or one tile if columns are split."""
    count = tiles(plan, rows, tokens)
    at_a_time = count if plan.cluster_size > 1 else min(count, clusters(plan, arch))
    return at_a_time * plan.cluster_size


def cost(plan: WidePlan, problem: LinearProblem) -> Cost:
    """The modelled cost of a feasible plan."""
    arch, columns, rows, tokens = problem.arch, problem.in_features, problem.rows, problem.tokens
    stream = packed_size(columns // plan.vector_size, plan.entry_bits)
    scales = 2 * (columns // plan.group if plan.group else 1)
    codes = rows * (plan.num_codebooks * stream + scales)
    nbytes = codes + 2 * tokens * (columns + rows)

    waves = -(-tiles(plan, rows, tokens) // clusters(plan, arch))
    # Products of 16 columns in one tile, and cycles of one, of all warpgroups together.
    steps = -(-(columns // (4 * plan.unit)) // plan.cluster_size) * plan.unit // 4
    if plan.activations_bits == 8:  # of 32 columns, with twice the weights
        steps = -(-steps // 2)
    lattice = plan.scope is Scope.E8P
    lookups = _LOOKUPS * plan.num_codebooks * (_LATTICE if lattice else 1.0)
    lookups *= 16 // plan.activations_bits if plan.replicas > 1 else 3 * 16 // plan.activations_bits
    wavefronts = plan.warpgroups * (_SHARED * plan.token_tile + lookups)
    parts = {
        "tensor cores": plan.warpgroups * max(_TENSOR * plan.token_tile, _SHORTEST),
        "shared memory": wavefronts / _WAVEFRONTS,
        "latency": _WARP + 25 * (plan.num_codebooks - 1 + lattice),
    }
    bound, longest = max(parts.items(), key=lambda part: part[1])
    cycles = longest + _IN_TURN * (sum(parts.values()) - longest)
    cycles *= waves * steps
    prologue = _PROLOGUE + _PATTERNS * plan.num_codebooks * lattice
    cycles += prologue * (waves if plan.cluster_size > 1 else 1)  # new blocks for every tile
    cycles += waves * plan.token_tile * plan.warpgroups * _STORE
    cycles += _MEETING * (plan.cluster_size > 1)
    dram = nbytes / arch.sms / arch.dram_bytes_per_clock * 1.2
    return Cost(nbytes, max(cycles, dram), bound if cycles > dram else "DRAM")


@functools.lru_cache(maxsize=4096)
def choose(problem: LinearProblem) -> WidePlan | None:
    """The feasible plan of the lowest cost; None: there is none."""
    if problem.activations_bits == 16 and problem.tokens > MOST_TOKENS:
        return None
    if wide(problem.scheme, problem.in_features, problem.arch, problem.activations_bits):
        return None
    return next(iter(best(problem)), None)


def best(problem: LinearProblem) -> list[WidePlan]:
    """The feasible plans, the one of the lowest cost first."""
    plans = [plan for plan in candidates(problem) if feasible(plan, problem) is None]
    return sorted(plans, key=lambda plan: cost(plan, problem).cycles)


def rotate_int8_plan(problem: LinearProblem) -> RotateInt8Plan:
    """The plan of the rotation before int8 products: nothing in it is a matter of choice."""
    scheme, columns = problem.scheme, problem.in_features
    threads = -(-columns // 1024) * 32
    return RotateInt8Plan(
        threads=threads,
        blocks_per_sm=max(1, 1024 // threads),
        source=problem.dtype,
        columns=columns,
        block=scheme.block(columns),
        diagonal=diagonal_of(scheme),
        vector_size=scheme.vector_size,
        entry_bits=scheme.entry_bits,
        num_codebooks=scheme.streams,
        scope=Scope.E8P if scheme.lattice else Scope.SHARED,
        integers=scheme.largest_entry > 0,
        groups=columns // scheme.group(columns),
        rows_of_warp=_INT8_ROWS,
    )
