"""What is asked of an op: everything that an entry of the table may look at when it decides.

One type per op. They are tuples because one is made, or looked up, at every call of an op: a frozen
dataclass takes ten times as long. `op` is the last field, so that problems of two ops differ.

Fields that several types have:

    device            device type of the input, e.g. `cpu`
    dtype             dtype of the input, e.g. `bfloat16`
    scheme            spec string of how numbers are stored; of a cache `key_scheme`, `value_scheme`
    tokens, rows      rows of the input, rounded up to a power of two (`bucket`)
    layout            order of the codes in a KV cache (`ops.layout`); `key_layout`, `value_layout`
    head_dim          numbers of a key, and of a value where there is no `value_dim`
    page_size         tokens of a page
"""

from __future__ import annotations

from typing import Any, NamedTuple


def bucket(count: int) -> int:
    """`count` rounded up to a power of two: problems that differ less have the same kernel."""
    return 1 << max(count - 1, 0).bit_length()


class LinearProblem(NamedTuple):
    """y = W x + b, W stored by a `VQScheme`."""

    device: str
    dtype: str
    scheme: str
    tokens: int
    out_features: int
    in_features: int
    op: str = "linear"

    @property
    def size(self) -> tuple[int, int]:
        """Output and input features."""
        return self.out_features, self.in_features


class PublishedLinearProblem(NamedTuple):
    """y = W x + b, W as another project published it; `published` is its `Layout.spec`."""

    device: str
    dtype: str
    published: str
    tokens: int
    out_features: int
    in_features: int
    op: str = "published_linear"

    @property
    def size(self) -> tuple[int, int]:
        """Output and input features."""
        return self.out_features, self.in_features


class W4A8LinearProblem(NamedTuple):
    """y = W round(x) + b, W stored by a `QoQScheme`."""

    device: str
    dtype: str
    scheme: str
    tokens: int
    out_features: int
    in_features: int
    op: str = "w4a8_linear"

    @property
    def size(self) -> tuple[int, int]:
        """Output and input features."""
        return self.out_features, self.in_features


class DecodeProblem(NamedTuple):
    """Codes of rows to `length` float32 numbers each."""

    device: str
    scheme: str
    rows: int
    length: int
    op: str = "decode"

    @property
    def size(self) -> tuple[int, int]:
        """Rows and their numbers."""
        return self.rows, self.length


class EncodeProblem(NamedTuple):
    """Rows of `length` numbers to codes and scales."""

    device: str
    dtype: str
    scheme: str
    rows: int
    length: int
    op: str = "encode"

    @property
    def size(self) -> tuple[int, int]:
        """Rows and their numbers."""
        return self.rows, self.length


class EncodeWeightProblem(NamedTuple):
    """Rotated rows of a weight to codes and scales; `factors` scales are tried for each group."""

    device: str
    dtype: str
    scheme: str
    rows: int
    in_features: int
    factors: int
    op: str = "encode_weight"

    @property
    def size(self) -> tuple[int, int]:
        """Rows and their weights."""
        return self.rows, self.in_features


class RotateProblem(NamedTuple):
    """Rows of `length` numbers, rotated as the scheme says."""

    device: str
    dtype: str
    scheme: str
    rows: int
    length: int
    op: str = "rotate"

    @property
    def size(self) -> tuple[int, int]:
        """Rows and their numbers."""
        return self.rows, self.length


class AppendProblem(NamedTuple):
    """Keys or values to codes at the end of a cache; `rows` counts heads and tokens."""

    device: str
    dtype: str
    scheme: str
    rows: int
    head_dim: int
    layout: str
    op: str = "append"

    @property
    def size(self) -> tuple[int, int]:
        """Rows and their numbers."""
        return self.rows, self.head_dim


class PagedAppendProblem(NamedTuple):
    """Keys or values to codes in pages."""

    device: str
    dtype: str
    scheme: str
    head_dim: int
    page_size: int
    op: str = "append_paged"

    @property
    def size(self) -> tuple[int, int]:
        """Tokens of a page and numbers of a row."""
        return self.page_size, self.head_dim


class AttentionProblem(NamedTuple):
    """Attention of `queries` of each row over `length` tokens, both rounded up to powers of two.

    Layouts are empty when a new cache asks what they should be.
    """

    device: str
    dtype: str
    key_scheme: str
    value_scheme: str
    queries: int
    length: int
    head_dim: int
    value_dim: int
    key_layout: str
    value_layout: str
    op: str = "attention"

    @property
    def size(self) -> tuple[int, int]:
        """Tokens in the cache and numbers of a key."""
        return self.length, self.head_dim


class StaticAttentionProblem(NamedTuple):
    """Attention of `queries` of each row over a cache with room for `capacity` tokens."""

    device: str
    dtype: str
    key_scheme: str
    value_scheme: str
    queries: int
    capacity: int
    head_dim: int
    value_dim: int
    key_layout: str
    value_layout: str
    op: str = "attention_static"

    @property
    def size(self) -> tuple[int, int]:
        """Room for tokens and numbers of a key."""
        return self.capacity, self.head_dim


class StoreProblem(NamedTuple):
    """`new_tokens` of each row, written to a cache with room for `capacity` tokens."""

    device: str
    dtype: str
    key_scheme: str
    value_scheme: str
    new_tokens: int
    capacity: int
    head_dim: int
    value_dim: int
    key_layout: str
    value_layout: str
    op: str = "store"

    @property
    def size(self) -> tuple[int, int]:
        """Room for tokens and numbers of a key."""
        return self.capacity, self.head_dim


class PagedAttentionProblem(NamedTuple):
    """Attention over codes in pages; keys and values have `head_dim` numbers."""

    device: str
    dtype: str
    key_scheme: str
    value_scheme: str
    head_dim: int
    page_size: int
    op: str = "attention_paged"

    @property
    def size(self) -> tuple[int, int]:
        """Tokens of a page and numbers of a key."""
        return self.page_size, self.head_dim


AnyLinearProblem = LinearProblem | PublishedLinearProblem | W4A8LinearProblem
"""Problems whose fields have the same order: a product of x with one weight."""

Problem = (
    AnyLinearProblem
    | DecodeProblem
    | EncodeProblem
    | EncodeWeightProblem
    | RotateProblem
    | AppendProblem
    | PagedAppendProblem
    | AttentionProblem
    | StaticAttentionProblem
    | StoreProblem
    | PagedAttentionProblem
)

PROBLEMS: dict[str, Any] = {
    kind._field_defaults["op"]: kind
    for kind in (
        LinearProblem,
        PublishedLinearProblem,
        W4A8LinearProblem,
        DecodeProblem,
        EncodeProblem,
        EncodeWeightProblem,
        RotateProblem,
        AppendProblem,
        PagedAppendProblem,
        AttentionProblem,
        StaticAttentionProblem,
        StoreProblem,
        PagedAttentionProblem,
    )
}
"""The problem of each op, by the op's name."""
