"""Plans of attention over a coded cache (kernels/cuda/kv/attention/attention.cu)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from .plan import Dtype, Plan

BANKS = 128  # bytes of shared memory that lie side by side
COLUMNS = 8  # queries of a tile
TOKENS = 16  # keys of a tile
PIECE = 16  # bytes of which copies by no thread are made
PAGE = 64  # tokens, of which a page that kernels read is a multiple


class Mask(enum.Enum):
    """What the mask of a launch is made of; NONE is causal."""

    NONE = "none"
    BOOL = "bool"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """A few queries over coded keys and values (kernels/cuda/kv/attention/attention.cu).

    Fields `key_*` and `value_*` say the same of keys and of values.

    Args:
        dtype: of queries, floats and the result; not FLOAT32.
        key_dim: numbers of a row.
        key_vector_size: x of VQ<x, y, 1>.
        key_entry_bits: y.
        key_fused: codes that lie side by side and are looked up together.
        key_learned: whether there is a codebook per kv head and channel group, and no scale; else
            there is one for all, and a scale per token.
        key_integers: whether codes are integers with a scale and a zero per token
            (kernels/cuda/kv/attention/attention_integers.cuh); there is no codebook then.
        key_block: numbers that were rotated together; 1 = none.
        one_codebook: whether keys and values have the same one, that of the universal scheme.
        query_tiles: tiles of 8 columns.
        turns: columns of a query, each of tokens that lanes look up in one of so many orders
            (kernels/cuda/kv/attention/attention_swizzle.cuh).
        paired: whether a query has two columns, which take entries of codebooks as they are
            (kernels/cuda/kv/attention/attention_gqa_small.cuh).
        steps: tiles of 16 tokens that a warp takes together.
        depth: slots for the codes of such a step that a warp has; all but one are on their way.
        bulk: whether codes and scales are copied by no thread (from sm_90 on).
        queries_in_registers: whether the queries are kept there; else in shared memory.
        mask: kind of the mask.
        softcapped: whether logits are capped.
        page: tokens of a page, where a table names those of each row; 0 = tapes.
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
    turns: int
    paired: bool
    steps: int
    depth: int
    bulk: bool
    queries_in_registers: bool
    mask: Mask
    softcapped: bool
    page: int

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return COLUMNS * self.query_tiles

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.columns // (2 if self.paired else self.turns)

    @property
    def table_bytes(self) -> int:
        """Shared memory of the tables (kernels/cuda/kv/attention/attention_table.cuh)."""
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
        """fp16 numbers that a token has beside its codes; those of keys or of values, if more."""
        return 2 if self.key_integers or self.value_integers else 1

    @property
    def step_bytes(self) -> int:
        """Slots of a warp for the codes and scales of a step (attention_mainloop.cuh)."""
        sides = (
            (self.key_dim, self.key_vector_size, self.key_entry_bits, self.key_fused, 4, 2),
            (self.value_dim, self.value_vector_size, self.value_entry_bits, self.value_fused, 8, 4),
        )
        if not self.bulk:
            codes = sum(tokens * 32 * _slot_bytes(*side) for *side, tokens in sides)
            words = 16 * self.steps if self.numbers > 1 else 8 * self.steps + 1
            return _whole(self.steps * codes + 8 * words)
        tokens = TOKENS * self.steps
        key, value = (-(-dim // x * bits // 8) for dim, x, bits, *_ in sides)
        keys, half = (
            _whole(count * row) + (PIECE if row % PIECE else 0)
            for count, row in ((tokens, key), (tokens // 2, value))
        )
        stride = half + ((64 if value == 32 else 32) - half) % BANKS
        return _whole(keys + stride + half + 2 * (2 * self.numbers * tokens + PIECE)) + PIECE

    @property
    def value_words(self) -> int:
        """Pairs of channels of a value that a lane has."""
        width = self.value_vector_size * self.value_fused
        return sum(max(part // 8, width) // 2 for part in parts(self.value_dim))

    @property
    def partial_floats(self) -> int:
        """What a block leaves for the others, in float32."""
        return 2 * self.columns + 4 * 32 * self.query_tiles * self.value_words

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: tables, queries, codes; in their place, sums of its warps."""
        steps = sum(part // (32 if self.paired else 16) for part in parts(self.key_dim))
        queries = self.query_tiles * -(-steps // 2) * 512 + 24 * self.columns
        warps, row = self.threads // 32, self.value_dim + self.value_dim // 16 + 4
        meeting = warps * (512 * self.query_tiles * self.value_words + 8 * self.columns)
        meeting += 4 * self.columns * row + 16
        needed = self.table_bytes + queries + warps * self.depth * self.step_bytes
        return max(needed, meeting)


def parts(dim: int) -> list[int]:
    """The powers of two of a head_dim, the largest first: a kernel has one or two."""
    return [1 << i for i in reversed(range(dim.bit_length())) if dim >> i & 1]


def panels(dim: int) -> int:
    """Panels, of 128 bytes, of a row of a table of learned codebooks."""
    return -(-2 * dim // BANKS)


def _whole(nbytes: int) -> int:
    """Bytes of the pieces that hold so many."""
    return -(-nbytes // PIECE) * PIECE


def _slot_bytes(dim: int, vector_size: int, bits: int, fused: int, sharers: int) -> int:
    """Bytes of shared memory for a lane and its codes of a token (attention_kv_fragments.cuh)."""
    width, row, total, first = vector_size * fused, (dim // vector_size * bits + 7) // 8, 0, 0
    for part in parts(dim):
        share = max(part // sharers, width) // vector_size * bits
        begin = first // vector_size * bits
        aligned = (share // 8 | begin // 8 | row | 16) & -(share // 8 | begin // 8 | row | 16)
        whole = share % 32 == 0 and begin % 8 == 0 and aligned >= 4
        total += 4 * (-(-share // 32) + (not whole))
        first += part
    return total
