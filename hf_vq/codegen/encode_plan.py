"""Plans of kernels that find codes (kernels/cuda/encode)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .plan import Plan, Scope


@dataclass(frozen=True)
class SearchPlan(Plan):
    """Kernels that search codebooks for the nearest entry (kernels/cuda/encode/nearest.cuh).

    Args:
        vector_size: x of VQ<x, y, z>, weights of an entry.
        entry_bits: y, bits of a code.
        num_codebooks: z; at most two, except for E8P.
        scope: weights that share a codebook; not TILE.
        beam: candidates for the first of two codes that are kept (beam search); 1 for E8P.
        lanes: lanes of a warp that share a group, or a row.
    """

    vector_size: int
    entry_bits: int
    num_codebooks: int
    scope: Scope
    beam: int
    lanes: int

    @property
    def tables_bytes(self) -> int:
        """Bytes of shared memory for the codebooks: float32 entries and half their squared norms.

        E8P needs the sign patterns of each codebook and the rows of masks instead.
        """
        if self.scope is Scope.E8P:
            return self.num_codebooks * 257 * 16 + 256 + 64
        return 4 * self.num_codebooks * (self.vector_size + 1) * max(4, 1 << self.entry_bits)


@dataclass(frozen=True)
class EncodePlan(SearchPlan):
    """Rotated rows to codes and scales (kernels/cuda/encode/encode.cu).

    Args:
        group: weights that share a scale; 0 = the whole row.
        candidates: scales that are tried; 1 = only the root mean square.
        refit: fit the scale to the codes by least squares, then search the codes again.
        slots: vectors that a lane searches in one iteration.
        one_group: all slots of a lane belong to the same group.
    """

    template: ClassVar[str] = "encode/encode"
    group: int
    candidates: int
    refit: bool
    slots: int
    one_group: bool

    @property
    def groups_of_warp(self) -> int:
        """Groups that a warp encodes in one iteration."""
        return 32 // self.lanes * (1 if self.one_group else self.slots)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: the codebooks."""
        return self.tables_bytes


@dataclass(frozen=True)
class RoundPlan(SearchPlan):
    """Rotated rows to codes, errors passed on inside of blocks (kernels/cuda/encode/round_rows.cu).

    Args:
        size: columns of a block.
    """

    template: ClassVar[str] = "encode/round_rows"
    size: int

    @property
    def rows(self) -> int:
        """Rows of a block of threads."""
        return self.threads // self.lanes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: the codebooks, then rows."""
        return self.tables_bytes + 4 * self.rows * (self.size + self.lanes)
