"""Problem types, one per op: all facts of a call by which the table selects an entry.

They are tuples because one is made or hashed at every call of an op: a frozen dataclass takes twice
as long to make, and six times as long to hash. `op` is the last field, so that problems of two ops
differ.

Fields that several types have:

    device            device type of the input, e.g. `cpu`
    dtype             dtype of the input, e.g. `bfloat16`
    scheme            spec string of the scheme; for a cache `key_scheme`, `value_scheme`
    tokens, rows      rows of the input, rounded up to a power of two (`bucket`)
    layout            order of the codes in a KV cache (`ops.layout`); `key_layout`, `value_layout`
    head_dim          numbers of a key, and of a value where there is no `value_dim`
    page_size         tokens of a page
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


def bucket(count: int) -> int:
    """`count` rounded up to a power of two: problems that differ less have the same kernel."""
    return 1 << max(count - 1, 0).bit_length()


class Problem(Protocol):
    """Fields of the problems of all ops."""

    @property
    def device(self) -> str:
        """Device type of the input."""

    @property
    def op(self) -> str:
        """Name of the op."""


class LinearProblem(NamedTuple):
    """y = W x + b, W stored by a `VQScheme`."""

    device: str
    dtype: str
    scheme: str
    tokens: int
    out_features: int
    in_features: int
    op: str = "linear"


class PublishedLinearProblem(NamedTuple):
    """y = W x + b, W as another project published it; `published` is its `Layout.spec`."""

    device: str
    dtype: str
    published: str
    tokens: int
    out_features: int
    in_features: int
    op: str = "published_linear"


class W4A8LinearProblem(NamedTuple):
    """y = W round(x) + b, W stored by a `QoQScheme`."""

    device: str
    dtype: str
    scheme: str
    tokens: int
    out_features: int
    in_features: int
    op: str = "w4a8_linear"


class DecodeProblem(NamedTuple):
    """Codes of rows to `length` float32 numbers each."""

    device: str
    scheme: str
    rows: int
    length: int
    op: str = "decode"


class EncodeProblem(NamedTuple):
    """Rows of `length` numbers to codes and scales."""

    device: str
    dtype: str
    scheme: str
    rows: int
    length: int
    op: str = "encode"


class EncodeWeightProblem(NamedTuple):
    """Rotated rows of a weight to codes and scales; `factors` scales are tried for each group."""

    device: str
    dtype: str
    scheme: str
    rows: int
    in_features: int
    factors: int
    op: str = "encode_weight"


class RotateProblem(NamedTuple):
    """Rows of `length` numbers, rotated as the scheme says."""

    device: str
    dtype: str
    scheme: str
    rows: int
    length: int
    op: str = "rotate"


class AppendProblem(NamedTuple):
    """Keys or values to codes at the end of a cache; `rows` counts heads and tokens."""

    device: str
    dtype: str
    scheme: str
    rows: int
    head_dim: int
    layout: str
    op: str = "append"


class PagedAppendProblem(NamedTuple):
    """Keys or values to codes in pages."""

    device: str
    dtype: str
    scheme: str
    head_dim: int
    page_size: int
    op: str = "append_paged"


class AttentionProblem(NamedTuple):
    """Attention of `queries` of each row over `length` tokens, both rounded up to powers of two.

    Layouts are empty for a new cache, which does not have them yet.
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


class PagedAttentionProblem(NamedTuple):
    """Attention over codes in pages; keys and values have `head_dim` numbers."""

    device: str
    dtype: str
    key_scheme: str
    value_scheme: str
    head_dim: int
    page_size: int
    op: str = "attention_paged"


AnyLinearProblem = LinearProblem | PublishedLinearProblem | W4A8LinearProblem
"""Problems whose fields have the same order: a product of x with one weight."""

PROBLEMS: dict[str, Any] = {
    kind._field_defaults["op"]: kind
    for kind in (
        LinearProblem, PublishedLinearProblem, W4A8LinearProblem, DecodeProblem, EncodeProblem,
        EncodeWeightProblem, RotateProblem, AppendProblem, PagedAppendProblem, AttentionProblem,
        StaticAttentionProblem, StoreProblem, PagedAttentionProblem,
    )
}  # fmt: skip
"""The problem of each op, by the op's name."""
