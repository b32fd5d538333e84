"""Plans: every constant of one generated kernel, rendered into the header that its template reads.

DecodePlan(vector_size=2, ...)   ->   struct Plan { static constexpr int vector_size = 2; ... };
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
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

    template: ClassVar[str]  # kernels/cuda/<template>.cu, whose kernel has the same name
    threads: int
    resident: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block asks for when it is launched."""
        return 0


@dataclass(frozen=True)
class DecodePlan(Plan):
    """Codes to dense rows (kernels/cuda/decode.cu).

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
        codebook_in_shared: whether a block copies its codebooks to shared memory.
    """

    template: ClassVar[str] = "decode"
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
    codebook_in_shared: bool

    @property
    def codebook_bytes(self) -> int:
        """Bytes of the codebooks of a panel."""
        entries = 257 if self.scope is Scope.E8P else 1 << self.entry_bits
        return 2 * self.stages * entries * self.vector_size

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: its codebooks or nothing."""
        return self.codebook_bytes if self.codebook_in_shared else 0


@dataclass(frozen=True)
class RotatePlan(Plan):
    """Rows rotated with Hadamard matrices (kernels/cuda/rotate.cu).

    Args:
        source: dtype of the input.
        out: dtype of the result.
        block: numbers that are rotated together, a power of two up to `LARGEST_BLOCK`.
        signs: whether random signs are applied too.
        inverse: whether they come after the matrix.
    """

    template: ClassVar[str] = "rotate"
    LARGEST_BLOCK: ClassVar[int] = 1024
    source: Dtype
    out: Dtype
    block: int
    signs: bool
    inverse: bool

    @property
    def blocks_at_a_time(self) -> int:
        """Rotation blocks that one block of threads takes."""
        return self.threads // min(32, max(1, self.block // 8))


def render(plan: Plan) -> str:
    """The header `plan.cuh` of a plan. Enumerations keep their names (kernels/cuda/numbers.cuh)."""
    lines = ["#pragma once", '#include "numbers.cuh"', "struct Plan {"]
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, enum.Enum):
            kind = type(value).__name__
            lines.append(f"  static constexpr {kind} {field.name} = {kind}::{value.name};")
        elif isinstance(value, bool):
            lines.append(f"  static constexpr bool {field.name} = {str(value).lower()};")
        else:
            lines.append(f"  static constexpr int {field.name} = {value};")
    return "\n".join([*lines, "};", ""])
