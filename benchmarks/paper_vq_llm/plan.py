"""Plans of the kernel that VQ-LLM describes (arXiv 2503.02236; vq_llm.cu). A baseline.

Pure functions for the decisions of the paper before code generation (Algorithm 2, lines 2 to 8):
entries in registers and shared memory from slack (section V.B), the split factor (VI.A), the
mapping of threads to mini-warps and its exchanges (Algorithm 1, VI.B).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from hf_vq.codegen.jit.device import RESERVED_BYTES, Arch
from hf_vq.codegen.plan import Plan, Scope
from hf_vq.errors import VQBackendError
from hf_vq.formats.packing import packed_size
from hf_vq.formats.scheme import VQScheme

# "Fewer than five" (section VI.B), not the <= 5 of Algorithm 2: with five, shuffles lose on an H200
# in most cases (suite cuda-mechanisms). Mini-warps of 2^n lanes need 1 or 3: both decide alike.
MOST_EXCHANGES = 4
MOST_TOKENS = 16
TILE_ROWS = 16
REQUIRED = 2  # neighbouring weights that m16n8k16 wants of a lane
VECTOR_SIZES = (2, 4, 8)
_THREADS = 256
_RESIDENT_THREADS = (512, 1024)  # of a multiprocessor: at least, and as many as slack is kept for
_WARP = 32
_ROW_TILES = 4  # of a block, at most
_UNITS = {2: 32, 4: 32, 8: 64}  # 32 bytes of a row's codes in a chunk, or more
_TILE_UNIT = 16
STATIC_BYTES = 16  # of shared memory, that the kernel declares itself
_MOST_REGISTERS = 255
_SPARE = 16  # additional registers for reading a hot entry
_BATCH = 4  # octets that a warp copies to shared memory per iteration


class Fusion(enum.Enum):
    """Transport of decoded weights to the lanes that multiply them."""

    SHUFFLE = "shuffle"
    SHARED = "shared"
    RENUMBERED = "renumbered"


@dataclass(frozen=True)
class VqLlmPlan(Plan):
    """Up to 16 tokens times codes, in float16, as the paper computes it.

    Args:
        vector_size: x of VQ<x, y, z>.
        entry_bits: y.
        num_codebooks: z independent stages.
        scope: of a codebook; not E8P.
        tile_rows: rows of a tile; 0 without tiles.
        tile_columns: its columns.
        group: weights that share a scale; 0 = the whole row.
        unit: weights of two rows that a lane decodes of a chunk.
        row_tiles: tiles of 16 rows of a block.
        token_tiles: tiles of 8 tokens.
        registers: entries of each stage in the registers of a warp; whole warps of them.
        shared: end of those in shared memory, which begin where registers end.
        fusion: how weights come to their lanes.
        exchanges: shuffles of a word for each word of a mini-warp's vectors but one.
        split: parts of the stages, or of the columns with a codebook per tile, whose sums are
            reduced globally.
    """

    template: ClassVar[str] = "vq_llm"
    template_folder: ClassVar[Path | None] = Path(__file__).parent
    vector_size: int
    entry_bits: int
    num_codebooks: int
    scope: Scope
    tile_rows: int
    tile_columns: int
    group: int
    unit: int
    row_tiles: int
    token_tiles: int
    registers: int
    shared: int
    fusion: Fusion
    exchanges: int
    split: int

    @property
    def stages_of_block(self) -> int:
        """Stages whose codebooks a block has."""
        return self.num_codebooks if self.scope is Scope.TILE else self.num_codebooks // self.split

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry of all stages of a block."""
        return 2 * self.vector_size * self.stages_of_block

    @property
    def codebook_bytes(self) -> int:
        """Bytes of the codebooks that a block reads in one pass."""
        return self.entry_bytes << self.entry_bits

    @property
    def working_bytes(self) -> int:
        """Shared memory of a block without entries: weights and x of its warps, then their sums."""
        warps = self.threads // _WARP
        weights = _BATCH * 512 if self.fusion is Fusion.SHARED else 0
        inputs = 1024 * self.token_tiles
        return warps * max(weights + inputs, self.row_tiles * self.token_tiles * 512)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return max(0, self.shared - self.registers) * self.entry_bytes + self.working_bytes

    def blocks(self, rows: int) -> int:
        """Blocks of a launch."""
        return -(-rows // (TILE_ROWS * self.row_tiles)) * self.split


@dataclass(frozen=True)
class Mapping:
    """Assignment of vectors to lanes that keeps exchanges within mini-warps.

    Args:
        lane: for thread i of the sequential mapping (thread i decodes vector i), its new lane.
        mini_warps: lanes that exchange with each other.
        exchanges: rounds of shuffles: all lanes of a mini-warp but one.
    """

    lane: tuple[int, ...]
    mini_warps: tuple[tuple[int, ...], ...]
    exchanges: int


def thread_mapping(
    threads: int, items: Callable[[int], list[int]], computes: Callable[[int], int]
) -> Mapping:
    """Algorithm 1, Thread_Mapping.

    Args:
        threads: of a warp that decode.
        items: that a thread decodes in the sequential mapping.
        computes: lane that needs an item.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for thread in range(threads):
        needed_by = tuple(sorted({computes(item) for item in items(thread)}))
        groups.setdefault(needed_by, []).append(thread)
    lane = [0] * threads
    for lanes, members in groups.items():
        for i, thread in enumerate(members):
            lane[thread] = lanes[i % len(lanes)]
    return Mapping(tuple(lane), tuple(groups), max(map(len, groups)) - 1)


def mma_mapping(vector_size: int) -> Mapping:
    """The mapping of 16 rows of two vectors each to the lanes of m16n8k16: thread 2 r + h decodes
    vector h of row r, lane 4 g + t multiplies columns 2 t, 2 t + 1 of every 8, of rows g, g + 8."""
    columns = 2 * vector_size

    def items(thread: int) -> list[int]:
        return list(range(thread * vector_size, (thread + 1) * vector_size))

    def computes(item: int) -> int:
        row, column = divmod(item, columns)
        return row % 8 * 4 + column % 8 // REQUIRED

    return thread_mapping(_WARP, items, computes)


@dataclass(frozen=True)
class Slack:
    """Spare registers and shared memory at unchanged occupancy (Figure 10).

    Args:
        blocks_per_sm: blocks of a multiprocessor.
        registers: spare registers of a thread.
        shared: spare bytes of a block.
    """

    blocks_per_sm: int
    registers: int
    shared: int


def slack(arch: Arch, threads: int, registers: int, shared: int, blocks: int = 0) -> Slack:
    """The slack of a kernel.

    Args:
        threads: of a block.
        registers: of a thread, as the assembler says.
        shared: bytes of a block, static and dynamic.
        blocks: that a multiprocessor gets of a launch; 0 = any number.

    Raises:
        VQBackendError: not even one block fits.
    """
    given = -(-registers // 8) * 8  # registers are given out by eights
    resident = min(
        arch.threads_per_sm // threads,
        arch.registers_per_sm // (given * threads),
        arch.shared_per_sm // (shared + RESERVED_BYTES),
        blocks or arch.threads_per_sm,
    )
    if not resident or shared > arch.shared_per_block:
        raise VQBackendError(f"a block of {threads} threads does not fit on {arch.name}.")
    most = min(_MOST_REGISTERS, arch.registers_per_sm // (resident * threads) // 8 * 8)
    free = min(arch.shared_per_block, arch.shared_per_sm // resident - RESERVED_BYTES)
    return Slack(resident, most - registers, free - shared)


def split_factor(codebook_traffic: int, output_bytes: int) -> float:
    """Parts for which reading codebooks, traffic / parts, takes as many bytes as reducing outputs,
    parts * output_bytes."""
    return math.sqrt(codebook_traffic / output_bytes)


def switch_axes(scheme: VQScheme) -> str:
    """Axes along which codebooks change (Table III): R: residual stages, M and N: the matrix."""
    if scheme.codebook == "tile":
        return "MN"
    return "R" if scheme.residuals > 1 else ""


def base_plan(scheme: VQScheme, in_features: int, tokens: int) -> VqLlmPlan:
    """The plan with which the paper begins (section III): entries in global memory, decoded weights
    through shared memory, no split.

    Raises:
        VQBackendError: the template does not compute with such codes.
    """
    tiled = scheme.codebook == "tile"
    group = 0 if scheme.scale_group == 0 else scheme.group(in_features)
    unit, threads = _UNITS.get(scheme.vector_size, 0), _THREADS
    if tiled:  # all warps are at the same tile
        unit, threads = _TILE_UNIT, scheme.tile[1] // (4 * _TILE_UNIT) * _WARP
    reason = _unfit(scheme, in_features, tokens, unit, group)
    if reason:
        raise VQBackendError(f"{scheme.spec()} has no kernel as VQ-LLM's: {reason}.")
    tile_rows, tile_columns = scheme.tile if tiled else (0, 0)
    return VqLlmPlan(
        threads, _RESIDENT_THREADS[0] // threads,
        scheme.vector_size, scheme.entry_bits, scheme.residuals,
        Scope.TILE if tiled else Scope.SHARED, tile_rows, tile_columns,
        0 if group == in_features else group, unit, 1, -(-tokens // 8), 0, 0, Fusion.SHARED,
        mma_mapping(scheme.vector_size).exchanges, 1,
    )  # fmt: skip


def _unfit(scheme: VQScheme, in_features: int, tokens: int, unit: int, group: int) -> str | None:
    """None if the template computes with such codes, else the reason why not."""
    if scheme.vector_size not in VECTOR_SIZES or scheme.lattice or scheme.largest_entry:
        return f"entries are {' or '.join(map(str, VECTOR_SIZES))} numbers in float16"
    if scheme.stages != "independent" or scheme.codebook == "channel_group":
        return "a codebook is of all weights, or of a tile"
    if not 1 <= tokens <= MOST_TOKENS:
        return f"it multiplies 1 to {MOST_TOKENS} tokens"
    bits = unit // scheme.vector_size * scheme.entry_bits  # of one load of a lane
    stream = packed_size(in_features // scheme.vector_size, scheme.entry_bits)
    if not unit or in_features % (4 * unit) or bits % 32 or stream % math.gcd(16, bits // 8):
        return "codes of a lane are no whole words"
    if group and group % (4 * unit):
        return "a chunk has several scales"
    rows, columns = scheme.tile
    whole = (
        columns % 64 == 0 and in_features % columns == 0 and rows % (TILE_ROWS * _ROW_TILES) == 0
    )
    if scheme.codebook == "tile" and not (whole and columns <= 1024):
        return "blocks have rows of several tiles"
    return None


def with_cache(plan: VqLlmPlan, arch: Arch, registers: int, *, hot: bool = True) -> VqLlmPlan:
    """The plan with as many entries in registers and shared memory as slack allows.

    Args:
        registers: that a thread of the plan has without any, as the assembler says.
        hot: whether entries may lie in registers.
    """
    bare = replace(plan, registers=0, shared=0)
    most = _RESIDENT_THREADS[1] // plan.threads
    found = slack(arch, plan.threads, registers, bare.shared_bytes + STATIC_BYTES, most)
    words = plan.entry_bytes // 4
    slots = max(0, found.registers - _SPARE) // words if hot else 0
    entries = 1 << plan.entry_bits
    in_registers = min(slots * _WARP, entries)
    in_shared = found.shared // plan.entry_bytes // 8 * 8
    return replace(
        plan,
        blocks_per_sm=found.blocks_per_sm,
        registers=in_registers,
        shared=min(entries, in_registers + in_shared),
    )


def with_split(plan: VqLlmPlan, rows: int, in_features: int, tokens: int) -> VqLlmPlan:
    """The plan with the split factor of section VI.A, as near as there are books to split by.

    Blocks are as many as before: each has `split` times the rows of one part of the books.
    """
    tiled = plan.scope is Scope.TILE
    books = in_features // plan.tile_columns if tiled else plan.num_codebooks
    traffic = plan.blocks(rows) * plan.codebook_bytes
    traffic *= books if tiled else 1
    wanted = split_factor(traffic, 4 * rows * tokens)
    split = min((i for i in range(1, books + 1) if books % i == 0), key=lambda i: abs(i - wanted))
    tall = min(plan.row_tiles * split, _ROW_TILES)
    return replace(plan, split=split, row_tiles=1 << tall.bit_length() - 1)


def with_fusion(plan: VqLlmPlan) -> VqLlmPlan:
    """The plan with shuffles where few exchanges are needed (Algorithm 2, line 7)."""
    few = mma_mapping(plan.vector_size).exchanges <= MOST_EXCHANGES
    return replace(plan, fusion=Fusion.SHUFFLE if few else Fusion.SHARED)
