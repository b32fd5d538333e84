"""Plans of kernels for weights as VPTQ publishes them (formats/published/vptq.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .plan import Dtype, Plan


@dataclass(frozen=True)
class VptqStored(Plan):
    """What a layout says (kernels/cuda/vptq/vptq.cuh).

    Args:
        dtype: of codebooks, and of scales and offsets of columns.
        vector_size: rows of an entry.
        entries: of a codebook.
        entry_bits: of a main code.
        rest_entries: of a residual codebook; 0 = none.
        rest_bits: of a residual code.
        outlier_vector: rows of an outlier's entry; 0 = there are none.
        outlier_entries: of their codebook.
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
    """A few tokens times codes (kernels/cuda/vptq/vptq.cu).

    Args:
        out: dtype of bias and y; not FLOAT32, nor is `dtype`.
        unit: neighbouring columns of a lane.
        row_vectors: rows of vectors of a block.
        wide: whether there are more than 8 tokens.
        book_in_shared: whether a block copies the codebook to shared memory.
        rest_in_shared: the same of the residual codebook.
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
        """Of 8 rows, that a warp sums."""
        return self.row_vectors * -(-self.vector_size // 8)

    @property
    def books_bytes(self) -> int:
        """Bytes of codebooks in shared memory."""
        kept = (self.book_in_shared, self.entries), (self.rest_in_shared, self.rest_entries)
        return sum(-(-count * self.vector_size * 2 // 16) * 16 for held, count in kept if held)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: codebooks, and entries or sums of its warps."""
        return self.books_bytes + self.threads // 32 * self.fragments * 512


@dataclass(frozen=True)
class VptqInputsPlan(Plan):
    """Inputs of a `VptqPlan` (kernels/cuda/vptq/vptq_inputs.cu).

    Args:
        source: dtype of x.
        dtype: of the result, and of scales and offsets of columns.
        unit: of the plan.
        wide: of the plan.
        norm: whether columns have a scale and an offset.
        order: whether columns are stored in another order.
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
    """Codes to dense rows (kernels/cuda/vptq/vptq_dequantize.cu).

    Args:
        out: dtype of the rows.
        each: neighbouring columns of a thread.
        norm: whether columns have a scale and an offset.
        order: whether columns are stored in another order.
    """

    template: ClassVar[str] = "vptq/vptq_dequantize"
    out: Dtype
    each: int
    norm: bool
    order: bool
