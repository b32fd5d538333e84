"""Plans: the compile-time constants of a generated kernel, rendered as a header of its template.

DecodePlan(vector_size=2, ...)   ->   struct Plan { static constexpr int vector_size = 2; ... };
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar


class Dtype(enum.Enum):
    """Float type of a tensor; the values are torch's names."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.FLOAT32 else 2


class Scope(enum.Enum):
    """Weights that share a codebook: the whole matrix, one tile, or the fixed E8P lattice."""

    SHARED = "shared"
    TILE = "tile"
    E8P = "e8p"


class Diagonal(enum.Enum):
    """Numbers that inputs are multiplied by before a Hadamard matrix: none, packed signs, fp16."""

    NONE = "none"
    SIGNS = "signs"
    HALVES = "halves"


@dataclass(frozen=True)
class Plan:
    """Fields of every plan.

    Args:
        threads: threads of a block.
        blocks_per_sm: minimum of resident blocks on a multiprocessor (`__launch_bounds__`); limits
            the registers of a thread.
    """

    template: ClassVar[str]  # kernels/cuda/<template>.cu, as "linear/rotate"
    template_folder: ClassVar[Path | None] = None  # folder of the template; None: kernels/cuda
    threads: int
    blocks_per_sm: int

    @property
    def kernel(self) -> str:
        """Name of the kernel function: the stem of its file."""
        return self.template.rpartition("/")[2]

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return 0


@dataclass(frozen=True)
class DecodePlan(Plan):
    """Codes to a dense matrix (kernels/cuda/linear/dequantize.cu).

    Args:
        out: dtype of the matrix.
        vector_size: x of VQ<x, y, z>, weights of an entry.
        entry_bits: y, bits of a code.
        num_codebooks: z, codebooks whose entries are added.
        scope: weights that share a codebook.
        tile_rows: rows of a tile; 0 without tiles.
        tile_columns: columns of a tile, in weights.
        group: weights that share a scale; 0 = the whole row.
        unit: weights that a thread decodes in one iteration.
        pipeline_depth: units whose codes a thread has in flight.
        panel_rows: rows of a block.
        integers: the codebook is int8, else fp16.
        codebook_in_shared: copy the codebooks to shared memory; else entries are read from L2.
    """

    template: ClassVar[str] = "linear/dequantize"
    out: Dtype
    vector_size: int
    entry_bits: int
    num_codebooks: int
    scope: Scope
    tile_rows: int
    tile_columns: int
    group: int
    unit: int
    pipeline_depth: int
    panel_rows: int
    integers: bool
    codebook_in_shared: bool

    @property
    def codebook_bytes(self) -> int:
        """Bytes of the codebooks of a row panel."""
        entries = 257 if self.scope is Scope.E8P else 1 << self.entry_bits
        return self.number_bytes * self.num_codebooks * entries * self.vector_size

    @property
    def number_bytes(self) -> int:
        """Bytes of one element of the codebook."""
        return 1 if self.integers else 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: the codebooks, or 0."""
        return self.codebook_bytes if self.codebook_in_shared else 0


@dataclass(frozen=True)
class TablePlan(Plan):
    """Kernels that look codes up in replicated tables (kernels/cuda/linear/table.cuh).

    Args:
        dtype: of input and output, and the operands of the tensor cores; not FLOAT32.
        vector_size: x of VQ<x, y, z>, weights of an entry.
        entry_bits: y, bits of a code.
        num_codebooks: z, codebooks whose entries are added.
        scope: weights that share a codebook.
        group: weights that share a scale; 0 = the whole row.
        fused: adjacent codes that form one table index.
        in_shared: the codebooks are tables in shared memory; else entries are read from L2.
        integers: the codebook and its tables are int8, else fp16.
        replicas: copies of an entry in a table, one for each group of banks.
        interleaved: codebooks whose entries of one index are adjacent, padded to a power of two;
            fewer than the number of codebooks: the tables are contiguous.
        unit: weights of one row that a lane decodes from a chunk of 4 * `unit` columns.
        load_bytes: bytes of codes that a lane loads with one instruction.
        second_bits: bits of a nested residual code, looked up together with the first; 0 = none.
        second_load_bytes: bytes of residual codes that a lane loads with one instruction.
    """

    dtype: Dtype
    vector_size: int
    entry_bits: int
    num_codebooks: int
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
        """Bytes of one table entry in shared memory."""
        numbers = 8 if self.scope is Scope.E8P else self.vector_size * self.fused
        return max(4, numbers if self.scope is Scope.E8P or self.integers else 2 * numbers)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables of all codebooks in shared memory."""
        if not self.in_shared:
            return 0
        lattice, entry = self.scope is Scope.E8P, self.entry_bytes
        entries = 256 if lattice else 1 << (self.entry_bits + self.second_bits) * self.fused
        books = self.num_codebooks + lattice
        if entry * self.replicas < 128 or self.interleaved < books:
            return books * entries * entry * self.replicas
        return entries * entry * self.replicas * self.interleaved


@dataclass(frozen=True)
class LinearPlan(TablePlan):
    """Few tokens times coded weights (kernels/cuda/linear/linear.cu).

    Args:
        split_k_warps: warps that split the columns of the same rows (split-K).
        row_tiles: tiles of 16 rows that a warp multiplies with the same input.
        token_tiles: tiles of 8 tokens.
        pipeline_depth: chunks whose codes a warp has in flight.
        scales_together: read the scales of two adjacent chunks with one load.
        ragged: the row is not a whole number of chunks.
        single: there is one token; a warp keeps its columns of x in registers.
        rotate: rotate x in this kernel (Hadamard blocks of 128).
        scaled: with `rotate`, behind a diagonal in fp16; else behind signs, or nothing.
        prefetch_x: load x after the first chunk of codes; else after `pipeline_depth` chunks.
        x_sets: register sets for the inputs of a warp. One token: eight pieces of x each, of up to
            32 columns of a lane. Several tokens: the scales of eight chunks each.
        cluster_size: blocks of a cluster that split the columns of the same rows.
        matrices: weights with the same x that one launch multiplies.
    """

    template: ClassVar[str] = "linear/linear"
    split_k_warps: int
    row_tiles: int
    token_tiles: int
    pipeline_depth: int
    scales_together: bool
    ragged: bool
    single: bool
    rotate: bool
    prefetch_x: bool
    x_sets: int
    cluster_size: int
    matrices: int = 1
    scaled: bool = False

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: the tables, and partial sums."""
        warps = self.threads // 32
        if self.single:
            return self.table_bytes + 2 * warps * self.row_tiles * 64
        owned = -(-self.row_tiles * self.token_tiles // self.cluster_size)
        barrier = 16 if self.cluster_size > 1 else 0
        return self.table_bytes + owned * self.cluster_size * warps * 512 + barrier


@dataclass(frozen=True)
class TilePlan(TablePlan):
    """Few tokens times weights with one codebook per tile (linear_tile_codebook.cu).

    Args:
        tile_rows: rows of a tile.
        column_warps: warps that split the columns of a tile, 4 * `unit` each.
        row_tiles: tiles of 16 rows that a warp multiplies with the same input.
        token_tiles: tiles of 8 tokens.
        cluster_size: blocks of a cluster that split the tiles of the same rows.
        x_stages: buffers for the inputs of one tile each.
        pipeline_depth: tiles whose codes a lane has in flight.
        ragged: the row is not a whole number of tiles.
        single: there is one token.
        prefetch: prefetch all codes of a block to L2 when it starts.
    """

    template: ClassVar[str] = "linear/linear_tile_codebook"
    tile_rows: int
    column_warps: int
    row_tiles: int
    token_tiles: int
    cluster_size: int
    x_stages: int
    pipeline_depth: int
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
        """Dynamic shared memory, in bytes: two tables, inputs, scales, sums, a barrier."""
        pairs, columns = -(-self.token_tiles // 2), 32 if self.token_tiles == 1 else 16
        slot = pairs * self.tile_columns // columns * (64 if self.single else 528)
        parts, sums = self.cluster_size * self.column_warps, self.band // 16 * self.token_tiles
        meeting = -(-sums // self.cluster_size) * parts * 512 if parts > 1 else 0
        return self.table_bytes + self.x_stages * slot + 4 * self.band + meeting + 16


@dataclass(frozen=True)
class WidePlan(TablePlan):
    """Many tokens times coded weights with wgmma (kernels/cuda/linear/linear_wgmma.cu).

    Args:
        out: dtype of y and of the bias.
        activations_bits: 16: x is of `dtype`. 8: x and W are int8, and `dtype` is FLOAT16, that of
            the entries before they are rounded.
        token_tile: tokens of a block.
        cluster_size: blocks of a cluster that split the columns of the same rows.
        x_stages: buffers of the TMA ring for x, 128 bytes of each token.
        pipeline_depth: chunks whose codes a lane has in flight.
    """

    template: ClassVar[str] = "linear/linear_wgmma"
    out: Dtype
    activations_bits: int
    token_tile: int
    cluster_size: int
    x_stages: int
    pipeline_depth: int

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; one producer warpgroup more loads x."""
        return self.threads // 128 - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of one buffer of the ring."""
        return 128 * self.token_tile

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: the tables in whole KiB, then the ring."""
        ring = ring_bytes(self.x_stages, self.token_tile, self.warpgroups, self.cluster_size)
        factors = self.warpgroups * (512 + 4 * self.token_tile * (self.activations_bits == 8))
        return -(-self.table_bytes // 1024) * 1024 + ring + factors


def ring_bytes(x_stages: int, token_tile: int, warpgroups: int, cluster_size: int) -> int:
    """Shared memory of kernels/cuda/primitives/wgmma_ring.cuh, in bytes: buffers, sums, barriers.

    In a cluster, each block receives the partial sums of all blocks for its share of the tokens.
    """
    added = -(-token_tile // 8 // cluster_size) * cluster_size
    sums = added * 2048 * warpgroups if cluster_size > 1 else 0
    return x_stages * (128 * token_tile + 16) + sums + 16


@dataclass(frozen=True)
class DensePlan(TablePlan):
    """Codes to a dense matrix in the original basis (kernels/cuda/linear/dequantize_rotated.cu).

    `dtype` is the dtype of the entries: FLOAT16.

    Args:
        out: dtype of the matrix; not FLOAT32.
        block: numbers of a Hadamard block, up to `LARGEST_BLOCK`; 1 = no rotation.
        diagonal: what the columns of the rotated rows are multiplied by.
    """

    template: ClassVar[str] = "linear/dequantize_rotated"
    LARGEST_BLOCK: ClassVar[int] = 128
    UNIT: ClassVar[int] = 32
    out: Dtype
    block: int
    diagonal: Diagonal

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: the tables."""
        return self.table_bytes


@dataclass(frozen=True)
class RotatePlan(Plan):
    """Rows times block-diagonal Hadamard matrices (kernels/cuda/linear/rotate.cu).

    Args:
        source: dtype of the input.
        out: dtype of the result.
        block: numbers of a Hadamard block, a power of two up to `LARGEST_BLOCK`.
        diagonal: what numbers are multiplied by.
        inverse: multiply by it after the matrix, not before it.
        fragment_unit: if non-zero, write x in the MMA-fragment order that a plan with this `unit`
            reads; 0 keeps row-major order.
        swizzled: the order is that of a `WidePlan` (128-byte swizzle); else of a `LinearPlan`.
    """

    template: ClassVar[str] = "linear/rotate"
    LARGEST_BLOCK: ClassVar[int] = 1024
    source: Dtype
    out: Dtype
    block: int
    diagonal: Diagonal
    inverse: bool
    fragment_unit: int = 0
    swizzled: bool = False

    @property
    def numbers_of_a_block(self) -> int:
        """Numbers of one group of lanes: a Hadamard block, or one piece of the fragment order."""
        if not self.fragment_unit or self.block > 1:
            return self.block
        return 4 * self.fragment_unit if self.swizzled else 8

    @property
    def blocks_at_a_time(self) -> int:
        """Hadamard blocks that one thread block rotates in one iteration."""
        numbers = self.numbers_of_a_block
        if self.swizzled:
            each = 32 if numbers == 4 * self.fragment_unit else 8
        else:
            each = 32 if numbers == 128 and not self.fragment_unit else 8
        return self.threads // min(32, max(1, numbers // each))


@dataclass(frozen=True)
class RotateInt8Plan(Plan):
    """Tokens, rotated, to int8 in MMA-fragment order (kernels/cuda/linear/rotate_int8.cu).

    Args:
        source: dtype of the input.
        columns: numbers of a token, a multiple of 128.
        block: numbers of a Hadamard block, a power of two up to `LARGEST_BLOCK`; 1 = no rotation.
        diagonal: what numbers are multiplied by.
        vector_size: x of VQ<x, y, z> of the weight.
        entry_bits: y, bits of a code.
        num_codebooks: z, codebooks whose entries are added.
        scope: weights that share a codebook; not TILE.
        integers: the codebook is int8, else fp16.
        groups: scales of a row of the weight.
        rows_of_warp: rows of the weight whose scale a warp finds.
    """

    template: ClassVar[str] = "linear/rotate_int8"
    LARGEST_BLOCK: ClassVar[int] = 128
    source: Dtype
    columns: int
    block: int
    diagonal: Diagonal
    vector_size: int
    entry_bits: int
    num_codebooks: int
    scope: Scope
    integers: bool
    groups: int
    rows_of_warp: int

    def blocks(self, tokens: int, rows: int) -> int:
        """Blocks of a launch: one for each token, and those of rows of the weight."""
        return tokens + -(-rows // (self.rows_of_warp * self.threads // 32))


def render(plan: Plan) -> str:
    """Text of the header `plan.cuh`: one constant per field, in order.

    Enumerations keep their names (numbers.cuh). A field that is a plan becomes a nested struct.
    """
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
