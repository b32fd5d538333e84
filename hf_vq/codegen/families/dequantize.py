"""Plans of kernels/cuda/linear/dequantize.cu: candidates, feasible, cost, choose.

Pure functions, no GPU. The cost is a model: bytes are exact; cycles add up the load of each part of
the machine, at rates measured on an H200 (per multiprocessor and clock). It ranks plans; it does
not predict times.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...errors import VQBackendError
from ...formats.packing import packed_size
from ...formats.scheme import VQScheme
from ..jit.device import RESERVED_BYTES, Arch
from ..plan import DecodePlan, Diagonal, Dtype, RotatePlan, Scope

LARGEST_VECTOR = 16
MOST_STAGES = 4
LARGEST_PANEL = 256  # rows; smaller panels divide it

_THREADS = (128, 256, 512, 1024)
_STEPS = (1, 2, 4)
_WARP = 32
_LARGEST_UNIT = 16
# Random lookups of entries of 4, 8 and 16 bytes in shared memory, and of any entry in L2.
_SHARED_LOOKUPS = {4: 9.0, 8: 5.2, 16: 3.06}
L2_LOOKUPS = 0.62
_L2_BYTES = 40.0  # per clock
_SECTOR_BYTES = 32  # granularity of L2, also for a store of half a sector
_LINE_BYTES = 128  # a store takes a clock for every line that a warp touches
WARP_INSTRUCTIONS = 4.0
_LATENCY = 1200  # clocks from a load to a store that depends on it, through one lookup
_START = 1500  # clocks before a block's first load
_DRAM_REACHED = 0.8  # fraction of peak bandwidth that a read-bound kernel reaches
NOT_HIDDEN = 0.2  # fraction of the other parts that the bottleneck does not hide


@dataclass(frozen=True)
class DecodeProblem:
    """Rows to dequantize.

    Args:
        scheme: scheme of the codes; see `decodable`.
        rows: number of rows.
        in_features: weights of a row.
        out: dtype of the result.
        arch: architecture of the GPU.
    """

    scheme: VQScheme
    rows: int
    in_features: int
    out: Dtype
    arch: Arch


class Cost(NamedTuple):
    """Modelled cost of a plan on its problem.

    Args:
        bytes: bytes to and from DRAM.
        cycles: clock cycles until the last block is done.
        bound: the bottleneck, the part that takes most of the cycles.
    """

    bytes: int
    cycles: float
    bound: str


def decodable(scheme: VQScheme) -> str | None:
    """None if a plan can have this scheme, else the reason why not."""
    if scheme.stages != "independent":
        return f"{scheme.stages} stages have a second pass"
    if scheme.mode != "unbiased":
        return f"mode {scheme.mode!r} is not computed by kernels"
    if scheme.codebook == "channel_group":
        return "it has codebooks per channel group"
    if scheme.has_zero:
        return "rows have a zero"
    if scheme.codebook == "tile" and scheme.largest_entry:
        return "codebooks of tiles hold integers"
    if scheme.vector_size > LARGEST_VECTOR:
        return f"vectors have {scheme.vector_size} weights, more than {LARGEST_VECTOR}"
    if scheme.residuals > MOST_STAGES:
        return f"it has {scheme.residuals} stages, more than {MOST_STAGES}"
    return None


def rotatable(scheme: VQScheme, in_features: int) -> str | None:
    """None if a plan can rotate rows as this scheme says, else the reason why not."""
    if scheme.rotation == "qr":
        return "a QR rotation is a matrix product"
    block = scheme.block(in_features)
    largest = RotatePlan.LARGEST_BLOCK
    return f"a rotation block has {block} weights, more than {largest}" if block > largest else None


def candidates(problem: DecodeProblem) -> list[DecodePlan]:
    """Every plan that could be meant for a problem, also those that cannot run."""
    scheme = problem.scheme
    tiled = scheme.codebook == "tile"
    scope = Scope.E8P if scheme.lattice else Scope.TILE if tiled else Scope.SHARED
    group = scheme.group(problem.in_features)
    tile_rows, tile_columns = scheme.tile if tiled else (0, 0)
    odd, largest = scheme.odd_factor, max(scheme.vector_size, _LARGEST_UNIT)
    units = [odd * size for size in _powers_of_two(largest // odd)]
    plans = (
        DecodePlan(
            threads, 0, problem.out, scheme.vector_size, scheme.entry_bits, scheme.streams, scope,
            tile_rows, tile_columns, 0 if group == problem.in_features else group,
            unit, steps, panel_rows, scheme.largest_entry > 0, in_shared,
        )
        for threads, steps, unit, panel_rows, in_shared in itertools.product(
            _THREADS, _STEPS, units, _powers_of_two(LARGEST_PANEL), (True, False)
        )
    )  # fmt: skip
    return [replace(plan, blocks_per_sm=_resident(plan, problem.arch)) for plan in plans]


def registers(plan: DecodePlan) -> int:
    """About how many registers a thread needs; the compiler is left at least so many."""
    words = -(-plan.unit // plan.vector_size * plan.entry_bits // 32)
    entries = plan.num_codebooks * plan.vector_size // 2
    lattice = 8 if plan.scope is Scope.E8P else 0
    addresses = 0 if plan.codebook_in_shared else 4 * (plan.num_codebooks - 1)
    count = (
        32
        + plan.unit
        + plan.pipeline_depth * plan.num_codebooks * words
        + entries
        + lattice
        + addresses
    )
    return -(-count // 8) * 8  # they are given out by eights


def _resident(plan: DecodePlan, arch: Arch) -> int:
    """Blocks of a plan that one multiprocessor can hold."""
    return min(
        arch.threads_per_sm // plan.threads,
        arch.registers_per_sm // (registers(plan) * plan.threads),
        arch.shared_per_sm // (plan.shared_bytes + RESERVED_BYTES),
    )


def _powers_of_two(largest: int) -> list[int]:
    return [1 << i for i in range(largest.bit_length())]


def feasible(plan: DecodePlan, problem: DecodeProblem) -> str | None:
    """None if the plan solves the problem on its GPU, else the reason why not."""
    if plan.unit < plan.vector_size:
        return "a unit is part of a vector"
    if problem.in_features % plan.unit or plan.tile_columns % plan.unit:
        return "units do not divide a row"
    if plan.group % plan.unit:
        return "a unit has several scales"
    if plan.tile_rows % plan.panel_rows:
        return "a panel has rows of two tiles"
    if plan.shared_bytes > problem.arch.shared_per_block:
        return "the codebooks do not fit into shared memory"
    if not plan.blocks_per_sm:
        return "the threads of a block need too many registers"
    if plan.scope is Scope.E8P and not plan.codebook_in_shared:
        return "E8P needs its patterns in shared memory"
    return None


def cost(plan: DecodePlan, problem: DecodeProblem) -> Cost:
    """The modelled cost of a feasible plan."""
    arch, columns = problem.arch, problem.in_features
    weights = problem.rows * columns
    across = -(-columns // plan.tile_columns) if plan.tile_columns else 1
    books = -(-problem.rows // plan.tile_rows) * across if plan.tile_rows else 1
    stream = packed_size(columns // plan.vector_size, plan.entry_bits)
    scales = columns // plan.group if plan.group else 1
    nbytes = problem.rows * (plan.num_codebooks * stream + 2 * scales) + weights * plan.out.size
    nbytes += books * plan.codebook_bytes

    # The busiest multiprocessor: the others wait for its last block.
    blocks = panels(plan, problem.rows, columns)
    busiest = -(-blocks // arch.sms)
    share = weights / blocks * busiest
    width = min(plan.tile_columns or columns, columns)
    units_of_block = min(plan.panel_rows, problem.rows) * width // plan.unit
    on_their_way = min(plan.blocks_per_sm, busiest) * min(
        plan.threads * plan.pipeline_depth, units_of_block
    )

    lookups = share / plan.vector_size * plan.num_codebooks
    entry_bytes = plan.number_bytes * plan.vector_size
    entry = min(max(1 << (entry_bytes - 1).bit_length(), 4), 16)
    rate = _SHARED_LOOKUPS[entry] if plan.codebook_in_shared else L2_LOOKUPS
    span = plan.unit * plan.out.size  # bytes between the stores of neighbouring threads
    units = share / plan.unit
    lookup = lookups / rate * max(1, entry_bytes // 16)
    stores = units * -(-span // 16)  # of a thread, of up to 16 bytes
    lines = stores * max(span / _LINE_BYTES, 1 / _WARP)
    sectors = stores * (span if span <= 16 else _SECTOR_BYTES)
    parts = {
        "DRAM": nbytes / arch.sms / arch.dram_bytes_per_clock,
        "L1": lines + (lookup if plan.codebook_in_shared else 0),
        "L2": sectors / _L2_BYTES + (0 if plan.codebook_in_shared else lookup),
        "instructions": (40 * units + 2.5 * share + 6 * lookups) / _WARP / WARP_INSTRUCTIONS,
        "latency": units / on_their_way * _LATENCY,
    }
    bound, longest = max(parts.items(), key=lambda part: part[1])
    busy = longest + NOT_HIDDEN * (sum(parts.values()) - longest)
    fill = busiest * plan.shared_bytes / _L2_BYTES
    return Cost(nbytes, busy + fill + -(-busiest // plan.blocks_per_sm) * _START, bound)


def times_dense(lookups: float, rows: int, columns: int, arch: Arch) -> float:
    """Lower bound of the time of a one-token product with so many L2 lookups, relative to reading a
    dense bfloat16 weight."""
    dense = 2 * rows * columns / (_DRAM_REACHED * arch.dram_bytes_per_clock)
    return lookups / L2_LOOKUPS / dense


def panels(plan: DecodePlan, rows: int, columns: int) -> int:
    """Blocks of a launch: panels of `rows` rows."""
    across = -(-columns // plan.tile_columns) if plan.tile_columns else 1
    return -(-rows // plan.panel_rows) * across


@functools.lru_cache(maxsize=1024)
def choose(problem: DecodeProblem) -> DecodePlan:
    """The feasible plan of the lowest cost; among equals, the first.

    Raises:
        VQBackendError: the scheme has no plan.
    """
    reason = decodable(problem.scheme)
    if reason:
        raise VQBackendError(f"{problem.scheme.spec()} has no decode kernel: {reason}.")
    plans = [plan for plan in candidates(problem) if feasible(plan, problem) is None]
    return min(plans, key=lambda plan: cost(plan, problem).cycles)


def diagonal_of(scheme: VQScheme) -> Diagonal:
    """Numbers that a scheme multiplies inputs by before its Hadamard matrix."""
    if scheme.is_scaled:
        return Diagonal.HALVES
    return Diagonal.SIGNS if scheme.rotation == "random_hadamard" else Diagonal.NONE


def rotate_plan(
    source: Dtype,
    out: Dtype,
    block: int,
    diagonal: Diagonal,
    inverse: bool,
    arranged: int = 0,
    swizzled: bool = False,
) -> RotatePlan:
    """The plan of a rotation: nothing in it is a matter of choice."""
    threads, resident = (64, 16) if swizzled else (256, 4)  # there are fewer, with more to do
    return RotatePlan(threads, resident, source, out, block, diagonal, inverse, arranged, swizzled)
