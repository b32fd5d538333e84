"""Plans of the KV cache kernels: append, decode step, what a prompt decides, dequantize, merge of
partial softmaxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .plan import Dtype, Plan


@dataclass(frozen=True)
class AppendPlan(Plan):
    """Keys or values to codes of the cache (kernels/cuda/kv/append.cu).

    Args:
        dtype: dtype of the rows.
        vector_size: x of VQ<x, y, z>, channels of an entry.
        entry_bits: y, bits of a code.
        dim: head_dim; a row is one token of one head.
        block: numbers of a Hadamard block; 1 = no rotation.
        centred: subtract a mean first.
        aligned: rows begin at multiples of 16 bytes.
        learned: each channel group has its own codebook, and tokens have no scale.
        integers: codes are integers with a scale and a zero per token (KV4), not indices.
        few: there are few rows. Without a grid, the warps of a block split the search of one row;
            with learned codebooks, the lanes of a warp split the search of one vector.
        cells: cells per side of the 2-D grid of candidate entries (x = 2); 0 = no grid.
        lanes: lanes of a warp that share a row.
        width: adjacent vectors of a lane; their codes are whole bytes.
        page: tokens of a page of a paged cache; 0 = contiguous cache.
        rotary: subtract a rotary mean too (kernels/cuda/kv/append_rotary.cuh).
    """

    template: ClassVar[str] = "kv/append"
    dtype: Dtype
    vector_size: int
    entry_bits: int
    dim: int
    block: int
    centred: bool
    aligned: bool
    learned: bool
    integers: bool
    few: bool
    cells: int
    lanes: int
    width: int
    page: int
    rotary: bool = False

    @property
    def shared_search(self) -> bool:
        """True if the warps of a block split the codebook search of one row."""
        return self.few and not self.cells and not self.integers

    @property
    def rows_at_a_time(self) -> int:
        """Rows that a block encodes in one iteration (not with learned codebooks)."""
        return 32 // self.lanes * (1 if self.shared_search else self.threads // 32)

    @property
    def blocks_across(self) -> int:
        """Blocks for the learned codebooks of one head, `width` of them per warp."""
        return -(-self.dim // (self.vector_size * self.width * self.threads // 32))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes.

        float32 entries and their squared norms, or the grid and fp16 entries; with few rows, the
        best scores of the warps, and numbers of the rotary mean.
        """
        entries, warps = 1 << self.entry_bits, self.threads // 32
        table = 4 * (self.vector_size + 1) * max(4, entries)
        means = self.rows_at_a_time * self.dim
        books = 0
        if self.learned:
            means = warps * self.width * self.vector_size
            books = 0 if self.few else warps * self.width * table
        elif self.cells:
            books = 4 * (self.cells**2 + entries)
        elif not self.integers:
            books = table
            if self.few:
                uppers = -(-self.dim // (self.vector_size * self.lanes * self.width))
                books += 8 * self.threads * uppers * self.width
        return books + (4 * means if self.rotary and self.few else 0)


@dataclass(frozen=True)
class StorePlan(Plan):
    """Append of one decode step, keys and values in one launch (kernels/cuda/kv/kv_step.cu).

    Args:
        keys: plan of the keys, with `few` rows and the same number of threads.
        values: plan of the values, with the same restrictions.
    """

    template: ClassVar[str] = "kv/kv_step"
    keys: AppendPlan
    values: AppendPlan

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: the larger of keys and values."""
        return max(self.keys.shared_bytes, self.values.shared_bytes)


@dataclass(frozen=True)
class KeyMeansPlan(Plan):
    """Means of keys, and which pairs of channels turn (kernels/cuda/kv/key_means.cu).

    Args:
        dtype: of the keys.
    """

    template: ClassVar[str] = "kv/key_means"
    LARGEST_DIM: ClassVar[int] = 256
    dtype: Dtype


@dataclass(frozen=True)
class KeySmoothingPlan(Plan):
    """Factors of keys, given the queries of a prompt (kernels/cuda/kv/key_smoothing.cu).

    Args:
        dtype: of queries and keys.
    """

    template: ClassVar[str] = "kv/key_smoothing"
    LARGEST_DIM: ClassVar[int] = 256
    UNIT: ClassVar[int] = 8
    dtype: Dtype


@dataclass(frozen=True)
class DecodeKVPlan(Plan):
    """Codes of keys or values to dense rows (kernels/cuda/kv/dequantize_kv.cu).

    Args:
        out: dtype of the rows.
        vector_size: x of VQ<x, y, 1>, channels of an entry.
        entry_bits: y, bits of a code.
        dim: head_dim.
        slice: channels of a block.
        tokens: tokens of a block.
        pipeline_depth: tokens whose codes a thread has in flight.
        learned: each head and group of x channels has its own codebook.
        scaled: a token has a scale.
        zero: a token has a zero next to its scale.
    """

    template: ClassVar[str] = "kv/dequantize_kv"
    UNIT: ClassVar[int] = 8
    out: Dtype
    vector_size: int
    entry_bits: int
    dim: int
    slice: int
    tokens: int
    pipeline_depth: int
    learned: bool
    scaled: bool
    zero: bool

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, in bytes: the codebooks of its channels, or the shared one."""
        vectors = self.slice // self.vector_size if self.learned else 1
        return 2 * self.vector_size * vectors << self.entry_bits


@dataclass(frozen=True)
class MergePlan(Plan):
    """Merge of partial attention results by log-sum-exp (kernels/cuda/kv/softmax_merge.cu).

    Args:
        dtype: dtype of the partial results and of the result.
        dim: head_dim, a multiple of 8 up to `LARGEST_DIM`.
        block: numbers of the Hadamard block of coded parts; 1 = no rotation.
    """

    template: ClassVar[str] = "kv/softmax_merge"
    LARGEST_DIM: ClassVar[int] = 256
    MOST_PARTS: ClassVar[int] = 16
    dtype: Dtype
    dim: int
    block: int

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return self.threads // 32 * (32 // (self.dim // 8))
