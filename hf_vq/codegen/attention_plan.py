"""Plans of attention over a quantized KV cache (kernels/cuda/kv/attention/attention.cu)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from .plan import Dtype, Plan

BANKS = 128  # bytes of one row of all shared memory banks
COLUMNS = 8  # queries of an MMA tile
TOKENS = 16  # keys of an MMA tile
PIECE = 16  # granularity of bulk copies (TMA), in bytes
PAGE = 64  # tokens; the page size is a multiple of it


class Mask(enum.Enum):
    """Dtype of the attention mask; NONE means causal without a mask tensor."""

    NONE = "none"
    BOOL = "bool"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """Few queries over quantized keys and values (kernels/cuda/kv/attention/attention.cu).

    Fields `value_*` are the same as `key_*`, for values.

    Args:
        dtype: dtype of queries, unquantized tokens and the result; not FLOAT32.
        key_dim: head_dim of keys.
        key_vector_size: x of VQ<x, y, 1>, channels of an entry.
        key_entry_bits: y, bits of a code.
        key_fused: adjacent codes that form one table index.
        key_learned: one codebook per KV head and channel group, and no scale; else one codebook
            for all, and a scale per token.
        key_integers: codes are integers with a scale and a zero per token, without a codebook
            (kernels/cuda/kv/attention/attention_integers.cuh).
        key_block: numbers of a Hadamard block; 1 = no rotation.
        one_codebook: keys and values share one universal codebook.
        query_tiles: MMA tiles of 8 columns.
        swizzle_orders: MMA columns of a query, one for each XOR swizzle order of the lookups
            (kernels/cuda/kv/attention/attention_swizzle.cuh).
        paired: a query has two MMA columns, so that table entries need no unpacking
            (kernels/cuda/kv/attention/attention_gqa_small.cuh).
        step_tiles: tiles of 16 tokens that a warp processes in one iteration.
        pipeline_depth: buffers of a warp for the codes of one iteration; all but one in flight.
        bulk: copy codes and scales with bulk copies (TMA, from sm_90 on).
        queries_in_registers: keep the queries in registers; else in shared memory.
        mask: dtype of the mask, or NONE.
        softcapped: apply logit soft-capping.
        page: tokens of a page of a paged cache; 0 = contiguous cache.
        rotary: pairs of steps whose logits of a rotary mean are found together, 1, or 2 if
            `paired`, one in each column of a query; 0 = keys have none. If `paired`, with 1 and two
            `step_tiles` a column has a tile (kernels/cuda/kv/attention/attention_rotary.cuh).
    """

    template: ClassVar[str] = "kv/attention/attention"
    dtype: Dtype
    key_dim: int
    key_vector_size: int
    key_entry_bits: int
    key_fused: int
    key_learned: bool
    key_integers: bool
    key_block: int
    value_dim: int
    value_vector_size: int
    value_entry_bits: int
    value_fused: int
    value_learned: bool
    value_integers: bool
    value_block: int
    one_codebook: bool
    query_tiles: int
    swizzle_orders: int
    paired: bool
    step_tiles: int
    pipeline_depth: int
    bulk: bool
    queries_in_registers: bool
    mask: Mask
    softcapped: bool
    page: int
    rotary: int = 0

    @property
    def columns(self) -> int:
        """MMA columns of a block."""
        return COLUMNS * self.query_tiles

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.columns // (2 if self.paired else self.swizzle_orders)

    @property
    def table_bytes(self) -> int:
        """Bytes of the codebook tables (kernels/cuda/kv/attention/attention_table.cuh)."""
        key = self.key_vector_size, self.key_entry_bits, self.key_fused
        value = self.value_vector_size, self.value_entry_bits, self.value_fused
        learned = self.key_learned * panels(self.key_dim) + self.value_learned * panels(
            self.value_dim
        )
        found = -(-learned // 2) * (2 * BANKS << 8)
        sides = (
            (key, self.key_learned or self.key_integers),
            (value, self.value_learned or self.value_integers),
        )
        universal = [side for side, other in sides if not other]
        bits = [y * fused for _, y, fused in universal]
        each = [(256 if y == 8 else BANKS) << y for y in bits]
        if self.one_codebook or bits == [8, 8]:
            return each[0]
        return found + sum(each)

    @property
    def numbers(self) -> int:
        """fp16 numbers of a token in addition to its codes: scale, and zero of integers."""
        return 2 if self.key_integers or self.value_integers else 1

    @property
    def step_bytes(self) -> int:
        """Bytes of a warp's buffer for one step: codes and scales (attention_mainloop.cuh)."""
        sides = (
            (self.key_dim, self.key_vector_size, self.key_entry_bits, self.key_fused, 4, 2),
            (self.value_dim, self.value_vector_size, self.value_entry_bits, self.value_fused, 8, 4),
        )
        if not self.bulk:
            codes = sum(tokens * 32 * _slot_bytes(*side) for *side, tokens in sides)
            words = 16 * self.step_tiles if self.numbers > 1 else 8 * self.step_tiles + 1
            return _whole(self.step_tiles * codes + 8 * words)
        tokens = TOKENS * self.step_tiles
        key, value = (-(-dim // x * bits // 8) for dim, x, bits, *_ in sides)
        keys, half = (
            _whole(count * row) + (PIECE if row % PIECE else 0)
            for count, row in ((tokens, key), (tokens // 2, value))
        )
        stride = half + ((64 if value == 32 else 32) - half) % BANKS
        return _whole(keys + stride + half + 2 * (2 * self.numbers * tokens + PIECE)) + PIECE

    @property
    def value_words(self) -> int:
        """Registers of a lane for its channels of one value, two fp16 each."""
        width = self.value_vector_size * self.value_fused
        return sum(max(part // 8, width) // 2 for part in parts(self.value_dim))

    @property
    def partial_floats(self) -> int:
        """Partial results of a block in global memory, in float32 numbers."""
        return 2 * self.columns + 4 * 32 * self.query_tiles * self.value_words

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes.

        Tables, queries and codes; afterwards the same memory holds the sums of the warps.
        """
        steps = sum(part // (32 if self.paired else 16) for part in parts(self.key_dim))
        queries = self.query_tiles * -(-steps // 2) * 512 + 24 * self.columns
        warps, row = self.threads // 32, self.value_dim + self.value_dim // 16 + 4
        meeting = warps * (512 * self.query_tiles * self.value_words + 8 * self.columns + 32)
        meeting += 4 * self.columns * row + 16
        ring = self.pipeline_depth * self.step_bytes + PIECE * (2 + (self.page > 0)) * self.bulk
        needed = self.table_bytes + queries + warps * ring
        return max(needed + self.rotary_bytes, meeting)

    @property
    def rotary_bytes(self) -> int:
        """Bytes of what adds the rotary mean: tables, queries, and logits of every warp."""
        if not self.rotary:
            return 0
        products, queries = -(-self.key_dim // 32), self.queries
        columns = 1 if self.paired or self.swizzle_orders == 8 else 2  # of a lane
        row, logits = 128 * products + 16, 512 * self.query_tiles * columns * self.step_tiles
        own = max(self.rotary * logits, 128 * products)
        shared = 16 + 128 * products + _whole(4 * queries) + queries * row
        return shared + self.rotary_tiles * products * 2048 + self.threads // 32 * own

    @property
    def rotary_tiles(self) -> int:
        """Tiles of the table of cosines and sines; 0 without a rotary mean."""
        if not self.rotary:
            return 0
        return 1 if self.paired and self.rotary == 1 else self.step_tiles


def parts(dim: int) -> list[int]:
    """Powers of two that add up to a head_dim, the largest first; kernels take one or two."""
    return [1 << i for i in reversed(range(dim.bit_length())) if dim >> i & 1]


def panels(dim: int) -> int:
    """Panels of 128 bytes in one row of a table of learned codebooks."""
    return -(-2 * dim // BANKS)


def _whole(nbytes: int) -> int:
    """Round `nbytes` up to whole pieces."""
    return -(-nbytes // PIECE) * PIECE


def _slot_bytes(dim: int, vector_size: int, bits: int, fused: int, sharers: int) -> int:
    """Bytes of shared memory for the codes of one token and lane (attention_kv_fragments.cuh)."""
    width, row, total, first = vector_size * fused, (dim // vector_size * bits + 7) // 8, 0, 0
    for part in parts(dim):
        share = max(part // sharers, width) // vector_size * bits
        begin = first // vector_size * bits
        aligned = (share // 8 | begin // 8 | row | 16) & -(share // 8 | begin // 8 | row | 16)
        whole = share % 32 == 0 and begin % 8 == 0 and aligned >= 4
        total += 4 * (-(-share // 32) + (not whole))
        first += part
    return total
