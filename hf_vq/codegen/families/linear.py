"""Plans of kernels/cuda/linear/linear.cu: candidates, feasible, cost, choose. No GPU.

`choose` first looks into the table of measured plans (`tuned`), made by `python -m benchmarks
cuda-tune`. The cost model ranks all other plans; its parts are the bottlenecks that a profile of
the kernel on an H200 showed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...formats.packing import packed_size
from ...formats.scheme import VQScheme
from .. import tuned
from ..jit.device import RESERVED_BYTES, Arch
from ..plan import Dtype, LinearPlan, Scope
from .dequantize import L2_LOOKUPS, NOT_HIDDEN, WARP_INSTRUCTIONS, Cost, decodable
from .table_layout import BANKS, LARGEST_INDEX, fused, load_bytes, second_load_bytes, tables

MOST_TOKENS = 64  # for more, dequantizing once and cuBLAS are faster
TILE_ROWS = 16
FUSED_ROTATION = 128  # Hadamard block that this kernel can rotate
PIECE, HELD = 32, 8  # weights of a lane in a piece of one token; pieces of a register set

_BLOCKS = ((256, 1), (256, 2), (256, 3), (384, 1), (384, 2), (448, 1), (512, 1), (512, 2),
           (768, 1), (896, 1))  # fmt: skip
_SPLITS = (1, 2, 4, 6, 7, 8, 11, 14, 16)
_UNITS = (8, 16, 32, 64, 128)
_TEAMS = 15  # teams of a block: each needs a named barrier, and there are 16
_SHARED_BOOKS = 160 << 10  # largest tables, in bytes
_SPREAD = 3.0  # phases of a lookup with bank conflicts
_CACHED_LINES = 8.0  # cycles of L1 for a load of eight rows
_ROTATION = 600  # cycles for eight pieces of one token
_KERNEL_BEFORE = 2800  # cycles of a kernel that rotates x
_PROLOGUE = 3000  # cycles until the first product, part of them hidden
_LATENCY = 500  # cycles of latency of a load of codes, partly hidden
_SPARE = 8  # margin of the register estimate
_WAITS = 6.0  # cycles from one instruction of a warp to its next


@dataclass(frozen=True)
class LinearProblem:
    """y = W x for a few tokens.

    Args:
        scheme: scheme of the codes.
        tokens: rows of x.
        rows: out_features.
        in_features: columns of W.
        dtype: dtype of x and y.
        arch: architecture of the GPU.
        activations_bits: 16, or 8: x is rounded to int8 (linear_wgmma.cu only).
    """

    scheme: VQScheme
    tokens: int
    rows: int
    in_features: int
    dtype: Dtype
    arch: Arch
    activations_bits: int = 16


def fusable(scheme: VQScheme, in_features: int) -> str | None:
    """None if the fused kernel supports such codes, else the reason why not."""
    reason = None if scheme.stages == "nested" else decodable(scheme)
    if reason:
        return reason
    if scheme.codebook == "tile":
        return "a codebook per tile has another kernel"
    if not list(_units(scheme, in_features)):
        return f"codes of {in_features} weights have no whole words for each scale"
    return None


def _units(scheme: VQScheme, in_features: int) -> Iterator[int]:
    """Values of `unit` that codes, scales and loads allow."""
    group = 0 if scheme.scale_group == 0 else scheme.group(in_features)
    width, bits = scheme.vector_size * fused(scheme), scheme.entry_bits * fused(scheme)
    for unit in _UNITS:
        whole_words = unit % width == 0 and unit // width * bits % 32 == 0
        whole_words = whole_words and unit * scheme.second_bits % 32 == 0
        one_scale = group in (0, in_features) or group % (4 * unit) == 0
        loads = [load_bytes(scheme, unit, in_features)]
        if scheme.two_passes:
            loads.append(second_load_bytes(scheme, unit, in_features))
        if whole_words and one_scale and in_features % unit == 0 and min(loads) >= 4:
            yield unit


def token_bucket(tokens: int) -> int:
    """Bucket of a number of tokens: 1, 8, 16, 32, .."""
    return 1 if tokens == 1 else 8 << max(-(-tokens // 8) - 1, 0).bit_length()


def candidates(problem: LinearProblem) -> list[LinearPlan]:
    """All plans of a problem, feasible or not.

    None has `prefetch_x`: the model gives it the same cost. `cuda-tune` tries both.
    """
    *choices, _, share = _choices(problem)
    found = (
        dict(zip(tuned.KNOBS, (*block, *knobs), strict=True))
        for block, *knobs in itertools.product(*choices, (0,), share)
    )
    return [_plan(problem, one) for one in found if _fills_blocks(one)]


def _fills_blocks(chosen: dict[str, int]) -> bool:
    """True if whole teams fill a block (one team in a cluster)."""
    warps, split = chosen["threads"] // 32, chosen["split_k_warps"]
    return warps == split or (warps % split == 0 and chosen["cluster_size"] == 1)


def _choices(problem: LinearProblem) -> list[Sequence[Any]]:
    """Values of the tunable fields, in the order of `tuned.KNOBS`; the first two are one choice."""
    scheme, columns = problem.scheme, problem.in_features
    entry, index_bits, books = tables(scheme)
    together = 1 << (books - 1).bit_length()
    copies = [max(1, BANKS // entry)] if index_bits <= LARGEST_INDEX else [1]
    if together * entry * copies[0] << index_bits > problem.arch.shared_per_block:
        copies = [1, 2]
    places = [together, 2] if together == 1 and index_bits == 8 else [together]
    places += [1] if books == 3 else []  # a fourth place would be empty
    rotations = [0]
    if problem.tokens == 1 and "hadamard" in scheme.rotation:
        rotations += [1] if scheme.block(columns) == FUSED_ROTATION else []
    units = list(_units(scheme, columns))[-2:]
    one = problem.tokens == 1
    row_tiles, early = ((1, 2), (0, 1)) if one else ((1, 2, 3, 4), (0,))
    share = (1,) if one or not problem.arch.overlaps_launches else (1, 2)
    steps = (1, 2, 4, 8) if one else (1, 2, 4)
    return [_BLOCKS, copies, places, units, _SPLITS, row_tiles, steps, rotations, early, share]


def _plan(problem: LinearProblem, chosen: dict[str, int]) -> LinearPlan:
    """Plan of a problem and values of its tunable fields (`tuned.KNOBS`)."""
    scheme, columns = problem.scheme, problem.in_features
    entry, index_bits, books = tables(scheme)
    group = 0 if scheme.group(columns) == columns else scheme.group(columns)
    unit, steps, parts = (
        chosen["unit"],
        chosen["pipeline_depth"],
        chosen["split_k_warps"] * chosen["cluster_size"],
    )
    single, each = problem.tokens == 1, chunks_of_warp(columns, unit, parts, steps)
    return LinearPlan(
        threads=chosen["threads"],
        blocks_per_sm=chosen["blocks_per_sm"],
        dtype=problem.dtype,
        vector_size=scheme.vector_size,
        entry_bits=scheme.entry_bits,
        num_codebooks=scheme.streams,
        scope=Scope.E8P if scheme.lattice else Scope.SHARED,
        group=group,
        fused=fused(scheme),
        in_shared=index_bits <= LARGEST_INDEX and books * entry << index_bits <= _SHARED_BOOKS,
        integers=scheme.largest_entry > 0,
        replicas=chosen["replicas"],
        interleaved=chosen["interleaved"],
        unit=unit,
        load_bytes=load_bytes(scheme, unit, columns),
        split_k_warps=chosen["split_k_warps"],
        row_tiles=chosen["row_tiles"],
        token_tiles=-(-problem.tokens // 8),
        pipeline_depth=steps,
        scales_together=group == 4 * unit and each % 2 == 0 and columns // group % 2 == 0,
        ragged=columns % (4 * unit) > 0,
        single=single,
        rotate=bool(chosen["rotate"]),
        scaled=bool(chosen["rotate"]) and scheme.is_scaled,
        prefetch_x=bool(chosen["prefetch_x"]),
        x_sets=x_sets_of(columns, unit, parts, steps, single),
        cluster_size=chosen["cluster_size"],
        second_bits=scheme.second_bits,
        second_load_bytes=second_load_bytes(scheme, unit, columns),
    )


def chunks_of_warp(in_features: int, unit: int, parts: int, steps: int) -> int:
    """Chunks per warp if `parts` warps split the columns; the last warp may have fewer."""
    chunks = -(-in_features // (4 * unit))
    return -(-chunks // (parts * steps)) * steps


def x_sets_of(in_features: int, unit: int, parts: int, steps: int, single: bool) -> int:
    """Register sets of a warp (`x_sets`): eight pieces of x each, or scales of eight chunks."""
    each = chunks_of_warp(in_features, unit, parts, steps)
    return -(-each * (max(1, unit // PIECE) if single else 1) // HELD)


def registers(plan: LinearPlan) -> int:
    """Estimated registers of a thread."""
    words = plan.unit // plan.vector_size * (plan.entry_bits + plan.second_bits) // 32
    rows = 2 * plan.row_tiles
    codes = rows * plan.num_codebooks * words * plan.pipeline_depth
    scales = rows * (2 if plan.single or plan.x_sets > 1 else 1) if plan.group else 0
    sums = (plan.row_tiles + (2 if plan.token_tiles == 1 else 1)) * plan.token_tiles * 4
    kept = min(2, plan.unit // 8) if plan.token_tiles > 4 else plan.unit // 8
    octets = plan.x_sets * min(plan.unit, PIECE) // 8 if plan.single else kept * plan.token_tiles
    weights = (
        8
        + (16 if plan.integers else 40) * (plan.num_codebooks > 1)
        + 16 * (plan.scope is Scope.E8P)
    )
    weights += 12 * (plan.scope is Scope.E8P and not plan.single and plan.row_tiles > 1)
    weights += 28 * (plan.unit > 64) + 44 * (not plan.in_shared)
    weights += 44 * (plan.vector_size * plan.fused == 1)
    weights += 16 * (plan.pipeline_depth > 2 and not plan.single)  # addresses of chunks in flight
    if plan.num_codebooks > 1 and not plan.single:
        weights += 8 * (plan.row_tiles > 2) + 44 * (plan.pipeline_depth > 1)
    weights += 4 * (plan.scales_together and not plan.single)  # a lane's own, and that it passes on
    if plan.single and plan.num_codebooks > 1:  # lookups of many octets are in flight
        weights += (24 if plan.integers else 40) + 12 * (plan.unit > 64)
    return 26 + codes + scales + sums + 4 * octets + weights + 4 * rows


def feasible(plan: LinearPlan, problem: LinearProblem) -> str | None:
    """None if the plan solves the problem on its GPU, else the reason why not."""
    arch, warps = problem.arch, plan.threads // 32
    shared = plan.shared_bytes
    if warps % plan.split_k_warps or warps // plan.split_k_warps > _TEAMS:
        return "teams do not fill a block"
    if plan.token_tiles > 4 and plan.row_tiles > 1:
        return "inputs of many tokens are not kept for several tiles of rows"
    if shared > arch.shared_per_block:
        return "tables do not fit into shared memory"
    if plan.blocks_per_sm * (shared + RESERVED_BYTES) > arch.shared_per_sm:
        return "shared memory does not hold so many blocks"
    if plan.blocks_per_sm * plan.threads > arch.threads_per_sm:
        return "a multiprocessor does not hold so many threads"
    if plan.single and plan.pipeline_depth * max(1, plan.unit // PIECE) > HELD:
        return "the chunks in flight have more pieces than a warp's products have columns"
    parts = plan.split_k_warps * plan.cluster_size
    if plan.x_sets < x_sets_of(
        problem.in_features, plan.unit, parts, plan.pipeline_depth, plan.single
    ):
        return "a warp does not keep x, or scales, of all of its columns"
    bits = max(plan.entry_bits, plan.second_bits)
    row = plan.num_codebooks * packed_size(problem.in_features // plan.vector_size, bits)
    if not plan.single and problem.rows * row >= 1 << 32:
        return "places of codes of several tokens have 32 bits"
    if plan.cluster_size > 1 and plan.split_k_warps != warps:
        return "blocks of a cluster have one team"
    tiles = -(-problem.rows // (TILE_ROWS * plan.row_tiles))
    if plan.cluster_size > 1 and plan.cluster_size * tiles > arch.sms * plan.blocks_per_sm:
        return "a cluster has one turn: some would wait for others, and fill tables again"
    if plan.prefetch_x and (plan.pipeline_depth == 1 or not plan.single):
        return "there is nothing to ask for after x"
    if plan.rotate and plan.unit != PIECE:
        return "four lanes do not have a block of the rotation"
    return None


def blocks_of(plan: LinearPlan, tiles: Sequence[int], arch: Arch) -> list[int]:
    """Blocks of a launch for each of several matrices with so many tiles.

    Either all teams get the same number of tiles, which leaves multiprocessors idle if there are
    few waves. Or, for one token, all multiprocessors are full and share the tiles of the last wave,
    if that gives the busiest one fewer tiles.
    """
    if plan.cluster_size > 1:  # a cluster has one turn
        return [plan.cluster_size * of for of in tiles]
    teams, full, total = (
        plan.threads // 32 // plan.split_k_warps,
        arch.sms * plan.blocks_per_sm,
        sum(tiles),
    )
    waves = -(-total // (full * teams))
    while sum(even := [-(-of // (waves * teams)) for of in tiles]) > full:
        waves += 1
    spread = [max(1, min(of, full * of // total)) for of in tiles]
    longest = max(-(-of // count) for of, count in zip(tiles, spread, strict=True))
    if not plan.single or sum(spread) > full or longest > waves * teams:
        return even
    return min((even, spread), key=lambda blocks: busiest(tiles, blocks, arch.sms))


def busiest(tiles: Sequence[int], blocks: Sequence[int], sms: int) -> int:
    """Tiles of the busiest multiprocessor, if blocks are assigned round-robin."""
    found = [0] * sms
    first = 0
    for of, count in zip(tiles, blocks, strict=True):
        for block in range(count):
            found[(first + block) % sms] += -(-(of - block) // count)
        first += count
    return max(found)


def spare_registers(plan: LinearPlan, arch: Arch) -> int:
    """Registers available to a thread minus the estimated need; negative: it might spill."""
    most = min(255, arch.registers_per_sm // (plan.blocks_per_sm * plan.threads) // 8 * 8)
    return most - registers(plan)


def cost(plan: LinearPlan, problem: LinearProblem) -> Cost:
    """The modelled cost of a feasible plan."""
    arch, columns = problem.arch, problem.in_features
    lattice, octets, rows = plan.scope is Scope.E8P, plan.unit // 8, 2 * plan.row_tiles
    entry = plan.entry_bytes
    width = plan.vector_size * plan.fused
    books = plan.num_codebooks + lattice
    words = plan.unit // plan.vector_size * (plan.entry_bits + plan.second_bits) // 32
    stream = packed_size(columns // plan.vector_size, plan.entry_bits)
    stream += packed_size(columns, plan.second_bits)
    nbytes = problem.rows * (
        plan.num_codebooks * stream + 2 * (columns // plan.group if plan.group else 1)
    ) + 2 * problem.tokens * (columns + problem.rows)

    # The busiest multiprocessor, in chunks of a warp.
    warps = plan.threads // 32
    teams = warps // plan.split_k_warps
    tiles = -(-problem.rows // (TILE_ROWS * plan.row_tiles))
    chunks = -(-columns // (4 * plan.unit))
    each = chunks_of_warp(
        columns, plan.unit, plan.split_k_warps * plan.cluster_size, plan.pipeline_depth
    )
    waves = -(-tiles * plan.cluster_size // (arch.sms * plan.blocks_per_sm * teams))
    busiest = min(-(-tiles * plan.cluster_size // arch.sms), waves * plan.blocks_per_sm * teams)
    work = busiest * chunks / plan.cluster_size

    # Cycles of one chunk: of the pipe of loads, and of issuing.
    lookups = octets * rows * books * (8 // min(width, 8) if not lattice else 1)
    phases = min(max(entry // 4, 1), 4)
    spread = 1.0 if plan.replicas * entry >= BANKS else _SPREAD
    loads = rows * plan.num_codebooks * words * 4 / plan.load_bytes
    scales_of = 4 * (plan.pipeline_depth if plan.scales_together else 1)
    scales = rows / min(scales_of, HELD) if plan.group else 0.0
    pipe = 0.0 if plan.single else 4.0 * octets * plan.token_tiles
    pipe += lookups * phases * spread if plan.in_shared else 0
    pipe += _CACHED_LINES * (loads + scales)
    byte_wide = plan.replicas * entry * plan.interleaved == 256 and (lattice or _byte(plan))
    instructions = 1.0 * lookups * (2 if byte_wide else 3) + 4 * octets * rows * (
        plan.num_codebooks - 1
    )
    instructions += octets * plan.row_tiles * 2 * plan.token_tiles
    instructions += (
        octets * rows * 12 * plan.num_codebooks * lattice + 4 * loads + 30 * plan.row_tiles
    )
    parts = {
        "DRAM": nbytes / arch.sms / arch.dram_bytes_per_clock * 1.3,
        "L1": work * pipe,
        "L2": 0.0 if plan.in_shared else work * 32 * lookups / L2_LOOKUPS,
        "instructions": 1.3 * work * instructions / WARP_INSTRUCTIONS,
        "latency": waves * each * (_WAITS * instructions + _LATENCY / plan.pipeline_depth),
    }
    bound, longest = max(parts.items(), key=lambda part: part[1])
    busy = longest + NOT_HIDDEN * (sum(parts.values()) - longest)
    # The prologue overlaps the previous kernel if both fit on a multiprocessor.
    halves = 2 * plan.blocks_per_sm * plan.threads * registers(plan) <= arch.registers_per_sm
    shared = 2 * plan.blocks_per_sm * (plan.shared_bytes + RESERVED_BYTES)
    no_overlap = not halves or shared > arch.shared_per_sm
    prologue = _PROLOGUE * (1.0 if no_overlap else 0.6) + plan.table_bytes / 128
    prologue += _ROTATION * plan.x_sets * plan.rotate
    if not plan.rotate and problem.scheme.rotation != "none":
        prologue += _KERNEL_BEFORE
    return Cost(nbytes, busy + prologue + 400 * waves, bound)


def _byte(plan: LinearPlan) -> bool:
    return (plan.entry_bits + plan.second_bits) * plan.fused == 8


@functools.lru_cache(maxsize=4096)
def choose(problem: LinearProblem) -> LinearPlan | None:
    """The measured plan of a problem, else the feasible plan of the lowest cost; None: no plan.

    It may be a plan for more tokens, which needs fewer registers or less shared memory for x.
    """
    if fusable(problem.scheme, problem.in_features) or problem.tokens > MOST_TOKENS:
        return None
    measured = tuned.find(problem)
    if measured is not None and _known(problem, measured):
        plan = _plan(problem, measured)
        if feasible(plan, problem) is None:
            return plan
    found = next(iter(best(problem, _SPARE)), None)
    if found is None and problem.tokens < MOST_TOKENS:
        return choose(replace(problem, tokens=token_bucket(problem.tokens + 1)))
    return found


def _known(problem: LinearProblem, knobs: dict[str, int]) -> bool:
    """True if all knobs have values of a candidate; a tuned file may hold anything."""
    threads, resident, *others = (knobs[name] for name in tuned.KNOBS)
    blocks, *choices = _choices(problem)
    return (threads, resident) in blocks and all(
        value in choice for value, choice in zip(others, choices, strict=True)
    )


def best(problem: LinearProblem, spare: int = 0) -> list[LinearPlan]:
    """Feasible plans with at least `spare` spare registers, by ascending cost."""
    plans = [
        plan
        for plan in candidates(problem)
        if spare_registers(plan, problem.arch) >= spare and feasible(plan, problem) is None
    ]
    return sorted(plans, key=lambda plan: cost(plan, problem).cycles)
