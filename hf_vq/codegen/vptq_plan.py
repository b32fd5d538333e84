"""Plans of the kernels for published VPTQ checkpoints (formats/published/vptq.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .plan import Dtype, Plan


@dataclass(frozen=True)
class VptqStored(Plan):
    """Layout of a VPTQ weight (kernels/cuda/vptq/vptq.cuh).

    Args:
        dtype: dtype of codebooks, column scales and column offsets.
        vector_size: rows of a codebook entry.
        entries: entries of the main codebook.
        entry_bits: bits of a main code.
        rest_entries: entries of the residual codebook; 0 = none.
        rest_bits: bits of a residual code.
        outlier_vector: rows of an outlier entry; 0 = no outlier columns.
        outlier_entries: entries of the outlier codebook.
    """

    dtype: Dtype
    vector_size: int
    entries: int
    entry_bits: int
    rest_entries: int
    rest_bits: int
    outlier_vector: int
    outlier_entries: int


@dataclass(frozen=True)
class VptqPlan(VptqStored):
    """Few tokens times VPTQ codes (kernels/cuda/vptq/vptq.cu).

    Args:
        out: dtype of bias and y; neither it nor `dtype` is FLOAT32.
        unit: adjacent columns of a lane.
        row_vectors: vectors of `vector_size` rows of a block.
        wide: there are more than 8 tokens.
        book_in_shared: copy the main codebook to shared memory.
        rest_in_shared: copy the residual codebook to shared memory.
    """

    template: ClassVar[str] = "vptq/vptq"
    out: Dtype
    unit: int
    row_vectors: int
    wide: bool
    book_in_shared: bool
    rest_in_shared: bool

    @property
    def fragments(self) -> int:
        """MMA fragments of 8 rows that a warp accumulates."""
        return self.row_vectors * -(-self.vector_size // 8)

    @property
    def books_bytes(self) -> int:
        """Bytes of the codebooks in shared memory."""
        kept = (self.book_in_shared, self.entries), (self.rest_in_shared, self.rest_entries)
        return sum(
            -(-count * self.vector_size * 2 // 16) * 16 for in_shared, count in kept if in_shared
        )

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: codebooks, then entries or sums."""
        return self.books_bytes + self.threads // 32 * self.fragments * 512


@dataclass(frozen=True)
class VptqInputsPlan(Plan):
    """Inputs of a `VptqPlan` (kernels/cuda/vptq/vptq_inputs.cu).

    Args:
        source: dtype of x.
        dtype: dtype of the result, column scales and column offsets.
        unit: `unit` of that plan.
        wide: `wide` of that plan.
        norm: columns have a scale and an offset.
        order: columns are stored permuted.
    """

    template: ClassVar[str] = "vptq/vptq_inputs"
    source: Dtype
    dtype: Dtype
    unit: int
    wide: bool
    norm: bool
    order: bool


@dataclass(frozen=True)
class VptqDecodePlan(VptqStored):
    """VPTQ codes to a dense matrix (kernels/cuda/vptq/vptq_dequantize.cu).

    Args:
        out: dtype of the matrix.
        each: adjacent columns of a thread.
        norm: columns have a scale and an offset.
        order: columns are stored permuted.
    """

    template: ClassVar[str] = "vptq/vptq_dequantize"
    out: Dtype
    each: int
    norm: bool
    order: bool
