"""Plans of kernels for a KV cache: codes of keys and values, and what is around attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .plan import Dtype, Plan


@dataclass(frozen=True)
class AppendPlan(Plan):
    """Keys or values to codes on a tape (kernels/cuda/kv/append.cu).

    Args:
        dtype: of the rows.
        vector_size: x of VQ<x, y, z>.
        entry_bits: y.
        dim: numbers of a row, one token of a head.
        block: of the rotation; 1 = none.
        centred: whether a mean is subtracted.
        aligned: whether rows begin at multiples of 16 bytes.
        learned: whether each group of channels has a codebook; there are no scales then.
        integers: whether codes are integers with a scale and a zero, not indexes of a codebook.
        few: whether rows are few: without a grid the warps of a block share the search for a row,
            or the lanes of a warp that for a vector under a learned codebook.
        cells: of a side of the grid over the plane that names candidates; 0 = no grid.
        lanes: of a warp, that share a row.
        width: neighbouring vectors of a lane; their codes are whole bytes.
        page: tokens of a page, where every token has a slot; 0 = a tape.
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

    @property
    def shared_search(self) -> bool:
        """Whether the warps of a block share the search for a row."""
        return self.few and not self.cells and not self.integers

    @property
    def rows_at_a_time(self) -> int:
        """Rows of a block, not of learned codebooks."""
        return 32 // self.lanes * (1 if self.shared_search else self.threads // 32)

    @property
    def blocks_across(self) -> int:
        """Blocks for all learned codebooks of a head, of which a warp has `width`."""
        return -(-self.dim // (self.vector_size * self.width * self.threads // 32))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: entries and their norms as float32, or a grid and entries;
        where warps meet."""
        entries = 1 << self.entry_bits
        table = 4 * (self.vector_size + 1) * max(4, entries)
        if self.integers:
            return 0
        if self.learned:
            return 0 if self.few else self.threads // 32 * self.width * table
        if self.cells:
            return 4 * (self.cells**2 + entries)
        uppers = -(-self.dim // (self.vector_size * self.lanes * self.width))
        return table + (8 * self.threads * uppers * self.width if self.few else 0)


@dataclass(frozen=True)
class StorePlan(Plan):
    """A step of a static KV cache (kernels/cuda/kv/kv_step.cu).

    Args:
        keys: the plan for few of them, with as many threads.
        values: the plan for few of them, with as many threads.
    """

    template: ClassVar[str] = "kv/kv_step"
    keys: AppendPlan
    values: AppendPlan

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, of keys or of values."""
        return max(self.keys.shared_bytes, self.values.shared_bytes)


@dataclass(frozen=True)
class DecodeKVPlan(Plan):
    """Codes of keys or values to dense rows (kernels/cuda/kv/dequantize_kv.cu).

    Args:
        out: dtype of the rows.
        vector_size: x of VQ<x, y, 1>.
        entry_bits: y.
        dim: channels of a head.
        slice: channels of a block.
        tokens: of a block.
        steps: tokens whose codes a thread has on their way at a time.
        learned: whether every head and group of x channels has its codebook.
        scaled: whether a token has a scale.
        zero: whether it has a zero beside its scale.
    """

    template: ClassVar[str] = "kv/dequantize_kv"
    UNIT: ClassVar[int] = 8
    out: Dtype
    vector_size: int
    entry_bits: int
    dim: int
    slice: int
    tokens: int
    steps: int
    learned: bool
    scaled: bool
    zero: bool

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the entries of its channels, or those that all share."""
        vectors = self.slice // self.vector_size if self.learned else 1
        return 2 * self.vector_size * vectors << self.entry_bits


@dataclass(frozen=True)
class MergePlan(Plan):
    """Attention to several parts of the tokens, merged (kernels/cuda/kv/softmax_merge.cu).

    Args:
        dtype: of the parts and of the result.
        dim: numbers of a row, a multiple of 8 up to `LARGEST_DIM`.
        block: of the rotation of parts that are codes; 1 = none.
    """

    template: ClassVar[str] = "kv/softmax_merge"
    LARGEST_DIM: ClassVar[int] = 256
    MOST_PARTS: ClassVar[int] = 16
    dtype: Dtype
    dim: int
    block: int

    @property
    def rows(self) -> int:
        """Rows of a block of threads."""
        return self.threads // 32 * (32 // (self.dim // 8))
