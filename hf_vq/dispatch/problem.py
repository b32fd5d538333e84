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
    memory            of a KV cache: `growing`, `static` (it never moves) or `paged`
    page_size         tokens of a page; 0 = there are none
    rotary            keys of a KV cache have a rotary mean (`ops.rotary_mean`)
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


class InputGradientProblem(NamedTuple):
    """dL/dx of y = W x + b, W stored by a `VQScheme`; dtype and tokens are those of dL/dy."""

    device: str
    dtype: str
    scheme: str
    tokens: int
    out_features: int
    in_features: int
    op: str = "input_gradient"


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


class RoundWeightProblem(NamedTuple):
    """Rotated rows of a weight to codes, with errors passed on inside of blocks of `size`."""

    device: str
    dtype: str
    scheme: str
    rows: int
    in_features: int
    size: int
    op: str = "round_weight"


class RotateProblem(NamedTuple):
    """Rows of `length` numbers, rotated as the scheme says."""

    device: str
    dtype: str
    scheme: str
    rows: int
    length: int
    op: str = "rotate"


class KVAppendProblem(NamedTuple):
    """`num_new` tokens of each row to one layer of a KV cache, rounded up to a power of two.

    A static cache is asked about as a whole. Of other caches keys and values are two problems, in
    which the names of what is not asked about are empty and its `head_dim` or `value_dim` is 0.
    """

    device: str
    dtype: str
    key_scheme: str
    value_scheme: str
    num_new: int
    head_dim: int
    value_dim: int
    key_layout: str
    value_layout: str
    memory: str = "growing"
    page_size: int = 0
    rotary: bool = False
    op: str = "kv_append"

    @property
    def sides(self) -> list[tuple[str, int, str]]:
        """Scheme, numbers of a head and layout of the keys, the values, or both."""
        key = self.key_scheme, self.head_dim, self.key_layout
        value = self.value_scheme, self.value_dim, self.value_layout
        return [side for side in (key, value) if side[0]]


class KVAttentionProblem(NamedTuple):
    """Attention of `queries` of each row over `length` tokens, both rounded up to powers of two.

    Layouts are empty for a new cache, which does not have them yet. The length of a static cache is
    its capacity. A problem of pages has no number of tokens and queries: both are 0.
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
    memory: str = "growing"
    page_size: int = 0
    rotary: bool = False
    op: str = "kv_attention"


class KeyMeansProblem(NamedTuple):
    """Standing and rotary means of a prompt's keys (`ops.rotary_mean`)."""

    device: str
    dtype: str
    head_dim: int
    op: str = "key_means"


class KeySmoothingProblem(NamedTuple):
    """Factors of the keys of a prompt, given its queries (`transforms.key_smoothing`)."""

    device: str
    dtype: str
    head_dim: int
    op: str = "key_smoothing"


AnyLinearProblem = LinearProblem | PublishedLinearProblem | W4A8LinearProblem
"""Problems whose fields have the same order: a product of x with one weight."""

PROBLEMS: dict[str, Any] = {
    kind._field_defaults["op"]: kind
    for kind in (
        LinearProblem, InputGradientProblem, PublishedLinearProblem, W4A8LinearProblem,
        DecodeProblem, EncodeProblem, EncodeWeightProblem, RoundWeightProblem, RotateProblem,
        KVAppendProblem, KVAttentionProblem, KeyMeansProblem, KeySmoothingProblem,
    )
}  # fmt: skip
"""The problem of each op, by the op's name."""
