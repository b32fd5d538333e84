"""Plans: every constant of one generated kernel, rendered into the header that its template reads.

DecodePlan(vector_size=2, ...)   ->   struct Plan { static constexpr int vector_size = 2; ... };
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar


class Dtype(enum.Enum):
    """A float type in memory; the values are torch's names."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def size(self) -> int:
        """Bytes of one number."""
        return 4 if self is Dtype.FLOAT32 else 2


class Scope(enum.Enum):
    """Who shares a codebook: all weights, a tile of them, or it is the lattice E8P."""

    SHARED = "shared"
    TILE = "tile"
    E8P = "e8p"


@dataclass(frozen=True)
class Plan:
    """What every plan has.

    Args:
        threads: of a block.
        resident: blocks that one multiprocessor shall hold at a time; bounds registers.
    """

    template: ClassVar[str]  # kernels/cuda/<template>.cu, as "linear/rotate"
    template_folder: ClassVar[Path | None] = None  # where that lies, if not in kernels/cuda
    threads: int
    resident: int

    @property
    def kernel(self) -> str:
        """Name of the kernel: that of its file."""
        return self.template.rpartition("/")[2]

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block asks for when it is launched."""
        return 0


@dataclass(frozen=True)
class DecodePlan(Plan):
    """Codes to dense rows (kernels/cuda/linear/dequantize.cu).

    Args:
        out: dtype of the rows.
        vector_size: x of VQ<x, y, z>.
        entry_bits: y.
        stages: z independent stages.
        scope: of a codebook.
        tile_rows: rows of a tile; 0 without tiles.
        tile_columns: its columns, in weights.
        group: weights that share a scale; 0 = the whole row.
        unit: weights that a thread decodes together.
        steps: units that a thread has on their way at a time.
        panel_rows: rows of a block.
        integers: whether numbers of the codebook are int8.
        codebook_in_shared: whether a block copies its codebooks to shared memory.
    """

    template: ClassVar[str] = "linear/dequantize"
    out: Dtype
    vector_size: int
    entry_bits: int
    stages: int
    scope: Scope
    tile_rows: int
    tile_columns: int
    group: int
    unit: int
    steps: int
    panel_rows: int
    integers: bool
    codebook_in_shared: bool

    @property
    def codebook_bytes(self) -> int:
        """Bytes of the codebooks of a panel."""
        entries = 257 if self.scope is Scope.E8P else 1 << self.entry_bits
        return self.number_bytes * self.stages * entries * self.vector_size

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of the codebook."""
        return 1 if self.integers else 2

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: its codebooks or nothing."""
        return self.codebook_bytes if self.codebook_in_shared else 0


@dataclass(frozen=True)
class TablePlan(Plan):
    """Products with codes that are looked up in tables (kernels/cuda/linear/table.cuh).

    Args:
        dtype: of input, output and the factors that are multiplied; not FLOAT32.
        vector_size: x of VQ<x, y, z>.
        entry_bits: y.
        stages: z independent stages.
        scope: of a codebook.
        group: weights that share a scale; 0 = the whole row.
        fused: codes that lie side by side and are looked up together.
        in_shared: whether the codebooks are tables in shared memory.
        integers: whether numbers of the codebook are int8, a byte each in the tables too.
        replicas: copies of an entry there, one for each group of banks.
        interleaved: entries of one index that lie together, one for each book, or more places;
            fewer than books: these lie one after the other.
        unit: weights of one row that a lane decodes of a chunk.
        load_bytes: bytes of codes that a lane reads at a time.
        second_bits: of a second, nested pass, whose codes are looked up with those of the first.
        second_load_bytes: bytes of those that a lane reads at a time.
    """

    dtype: Dtype
    vector_size: int
    entry_bits: int
    stages: int
    scope: Scope
    group: int
    fused: int
    in_shared: bool
    integers: bool
    replicas: int
    interleaved: int
    unit: int
    load_bytes: int
    second_bits: int = field(default=0, kw_only=True)
    second_load_bytes: int = field(default=0, kw_only=True)

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry of the tables in shared memory."""
        numbers = 8 if self.scope is Scope.E8P else self.vector_size * self.fused
        return max(4, numbers if self.scope is Scope.E8P or self.integers else 2 * numbers)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables in shared memory: of all books."""
        if not self.in_shared:
            return 0
        lattice, entry = self.scope is Scope.E8P, self.entry_bytes
        entries = 256 if lattice else 1 << (self.entry_bits + self.second_bits) * self.fused
        books = self.stages + lattice
        if entry * self.replicas < 128 or self.interleaved < books:
            return books * entries * entry * self.replicas
        return entries * entry * self.replicas * self.interleaved


@dataclass(frozen=True)
class LinearPlan(TablePlan):
    """A few tokens times codes (kernels/cuda/linear/linear.cu).

    Args:
        split: warps that share the columns of the same rows.
        row_tiles: tiles of 16 rows that a warp multiplies with the same input.
        token_tiles: tiles of 8 tokens.
        steps: chunks that a warp has on their way at a time.
        scales_together: whether the scales of two neighbouring chunks are read at once.
        ragged: whether chunks do not divide a row.
        single: whether there is one token, of which a warp keeps its columns in registers.
        rotate: whether it is rotated there (blocks of 128).
        early: whether a warp asks for it after its first chunk of codes; else, after `steps`.
        sets: times that it keeps eight pieces of one token, each of up to 32 columns of a lane; for
            several tokens, scales of eight chunks.
        share: blocks of a cluster that share the columns of the same rows.
        matrices: that have the same input, and are multiplied with it by one launch.
    """

    template: ClassVar[str] = "linear/linear"
    split: int
    row_tiles: int
    token_tiles: int
    steps: int
    scales_together: bool
    ragged: bool
    single: bool
    rotate: bool
    early: bool
    sets: int
    share: int
    matrices: int = 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: tables, and where warps meet."""
        warps = self.threads // 32
        if self.single:
            return self.table_bytes + 2 * warps * self.row_tiles * 64
        owned = -(-self.row_tiles * self.token_tiles // self.share)
        barrier = 16 if self.share > 1 else 0
        return self.table_bytes + owned * self.share * warps * 512 + barrier


@dataclass(frozen=True)
class TilePlan(TablePlan):
    """A few tokens times codes that have a codebook per tile (linear_tile_codebook.cu).

    Args:
        tile_rows: rows of a tile.
        column_warps: warps that share the columns of a tile, 4 `unit` each.
        row_tiles: tiles of 16 rows that a warp multiplies with the same input.
        token_tiles: tiles of 8 tokens.
        split: blocks of a cluster that share the tiles of the same rows.
        depth: slots for the inputs of a tile.
        steps: tiles whose codes a lane has on their way at a time.
        ragged: whether tiles do not divide a row.
        single: whether there is one token.
        prefetch: whether all codes of a block are asked into L2.
    """

    template: ClassVar[str] = "linear/linear_tile_codebook"
    tile_rows: int
    column_warps: int
    row_tiles: int
    token_tiles: int
    split: int
    depth: int
    steps: int
    ragged: bool
    single: bool
    prefetch: bool

    @property
    def band(self) -> int:
        """Rows of a block."""
        return self.threads // 32 // self.column_warps * self.row_tiles * 16

    @property
    def tile_columns(self) -> int:
        """Columns of a tile."""
        return 4 * self.unit * self.column_warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: two tables, slots, scales, where sums meet, a barrier."""
        pairs, columns = -(-self.token_tiles // 2), 32 if self.token_tiles == 1 else 16
        slot = pairs * self.tile_columns // columns * (64 if self.single else 528)
        parts, sums = self.split * self.column_warps, self.band // 16 * self.token_tiles
        meeting = -(-sums // self.split) * parts * 512 if parts > 1 else 0
        return self.table_bytes + self.depth * slot + 4 * self.band + meeting + 16


@dataclass(frozen=True)
class WidePlan(TablePlan):
    """Many tokens times codes (kernels/cuda/linear/linear_wgmma.cu).

    Args:
        token_tile: tokens of a block.
        split: blocks of a cluster that share the columns of the same rows.
        depth: slots of the ring for x, of 64 columns each.
        steps: chunks whose codes a lane has on their way at a time.
    """

    template: ClassVar[str] = "linear/linear_wgmma"
    token_tile: int
    split: int
    depth: int
    steps: int

    @property
    def warpgroups(self) -> int:
        """Those that multiply; one more reads x."""
        return self.threads // 128 - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the ring."""
        return 128 * self.token_tile

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: tables, in whole kilobytes, and what the ring needs."""
        ring = shared_of_ring(self.depth, self.token_tile, self.warpgroups, self.split)
        return -(-self.table_bytes // 1024) * 1024 + ring


def shared_of_ring(depth: int, token_tile: int, warpgroups: int, split: int) -> int:
    """Bytes of kernels/cuda/primitives/wgmma_ring.cuh: slots, sums, barriers.

    Where columns are split, a block has the sums of all for a part of the tokens.
    """
    added = -(-token_tile // 8 // split) * split
    meeting = added * 2048 * warpgroups if split > 1 else 0
    return depth * (128 * token_tile + 16) + meeting + 16


@dataclass(frozen=True)
class DensePlan(TablePlan):
    """Codes to dense rows that are rotated back (kernels/cuda/linear/dequantize_rotated.cu).

    `dtype` is that of entries: FLOAT16.

    Args:
        out: dtype of the rows; not FLOAT32.
        block: of the rotation, up to `LARGEST_BLOCK`; 1 = none.
        signs: whether it has random signs.
    """

    template: ClassVar[str] = "linear/dequantize_rotated"
    LARGEST_BLOCK: ClassVar[int] = 128
    UNIT: ClassVar[int] = 32
    out: Dtype
    block: int
    signs: bool

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: tables."""
        return self.table_bytes


@dataclass(frozen=True)
class RotatePlan(Plan):
    """Rows rotated with Hadamard matrices (kernels/cuda/linear/rotate.cu).

    Args:
        source: dtype of the input.
        out: dtype of the result.
        block: numbers that are rotated together, a power of two up to `LARGEST_BLOCK`.
        signs: whether random signs are applied too.
        inverse: whether they come after the matrix.
        arranged: unit of the plan for which numbers are put in order; 0 = rows as they are.
        swizzled: whether that is a `WidePlan`; else it is a `LinearPlan`.
    """

    template: ClassVar[str] = "linear/rotate"
    LARGEST_BLOCK: ClassVar[int] = 1024
    source: Dtype
    out: Dtype
    block: int
    signs: bool
    inverse: bool
    arranged: int = 0
    swizzled: bool = False

    @property
    def numbers_of_a_block(self) -> int:
        """What a group of lanes takes: a rotation block, or what is arranged together."""
        if not self.arranged or self.block > 1:
            return self.block
        return 4 * self.arranged if self.swizzled else 8

    @property
    def blocks_at_a_time(self) -> int:
        """Rotation blocks that one block of threads takes."""
        numbers = self.numbers_of_a_block
        if self.swizzled:
            each = 32 if numbers == 4 * self.arranged else 8
        else:
            each = 32 if numbers == 128 and not self.arranged else 8
        return self.threads // min(32, max(1, numbers // each))


@dataclass(frozen=True)
class EncodePlan(Plan):
    """Rotated rows to codes and scales (kernels/cuda/encode/encode.cu).

    Args:
        vector_size: x of VQ<x, y, z>.
        entry_bits: y.
        stages: z; at most two, but for E8P.
        beam: entries of the first of two stages that are followed; E8P follows one.
        scope: of a codebook; not TILE.
        group: weights that share a scale; 0 = the whole row.
        candidates: scales that are tried; 1 = the root mean square, untried.
        refit: whether the scale is fitted to the codes, and codes are chosen anew.
        lanes: of a warp, that share a group.
        slots: vectors that a lane has at a time.
        one_group: whether its slots are of one group.
    """

    template: ClassVar[str] = "encode/encode"
    vector_size: int
    entry_bits: int
    stages: int
    scope: Scope
    group: int
    beam: int
    candidates: int
    refit: bool
    lanes: int
    slots: int
    one_group: bool

    @property
    def groups_of_warp(self) -> int:
        """Groups that a warp has at a time."""
        return 32 // self.lanes * (1 if self.one_group else self.slots)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: float32 entries and half their squared norms; E8P: patterns of
        each stage, and the rows of masks."""
        if self.scope is Scope.E8P:
            return self.stages * 257 * 16 + 256 + 64
        return 4 * self.stages * (self.vector_size + 1) * max(4, 1 << self.entry_bits)


def render(plan: Plan) -> str:
    """The header `plan.cuh` of a plan. Enumerations keep their names (numbers.cuh); a
    plan that is a field is a type of its name."""
    lines = ["#pragma once", '#include "primitives/numbers.cuh"', *_struct("Plan", plan)]
    return "\n".join([*lines, ""])


def _struct(name: str, plan: Plan) -> list[str]:
    lines = [f"struct {name} {{"]
    for one in fields(plan):
        value = getattr(plan, one.name)
        if isinstance(value, Plan):
            lines += [f"  {line}" for line in _struct(one.name, value)]
        elif isinstance(value, enum.Enum):
            kind = type(value).__name__
            lines.append(f"  static constexpr {kind} {one.name} = {kind}::{value.name};")
        elif isinstance(value, bool):
            lines.append(f"  static constexpr bool {one.name} = {str(value).lower()};")
        else:
            lines.append(f"  static constexpr int {one.name} = {value};")
    return [*lines, "};"]
