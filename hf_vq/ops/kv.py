"""`KVCacheView`: one layer of a KV cache, as the ops `hf_vq::kv_append` and `kv_attention` take it.

One data type for caches that grow, that never move and that lie in pages. What differs is who knows
the number of tokens:

    memory    cache_seqlens   page_table    max_seqlen
    growing   None            None          tokens, those of the newest update included
    static    int64 []        None          tokens that there is room for
    paged     int64 [B]       int32 [B, w]  no row has more tokens

Position 0 is the first visible token. What a query at position i reads of position j:

    position   0 .. sinks       ..             max_seqlen - recent      num_coded     max_seqlen
    growing    [ sinks: floats ]               [ recent: floats                                 ]
               [ codes and scales, from index `first` of a buffer on                 ]

    static     `recent` is a ring, position j in slot j % slots; the codes of position j at index j,
               for j < cache_seqlens - window
    paged      position j in page page_table[row, j / T], all as codes: there are no floats

    floats     if j is a sink, j > i - window, or j is one of the `num_new` newest tokens
    codes      otherwise

The fields below are the arguments of the ops: schemas, `flatten` and `unflatten` are made from
them, and nothing else lists their names. Tuples, because a layer makes one for every token.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor

from ..formats.scheme import VQScheme

GROWING, STATIC, PAGED = "growing", "static", "paged"
WRITTEN = "written by kv_append"
Written = Annotated[Tensor, WRITTEN]


class KVSide(NamedTuple):
    """The keys of a layer, or its values. B rows, H key/value heads, D numbers of a head.

    Tensors may be views whose last dimension is dense; of a static cache they are dense, but for
    scales of blocks, which end where the tokens do.

    Args:
        codes: uint8, in `layout` (`ops.layout`): a buffer [B, H, ...] longer than its tokens, of
            which what lies in front of `first` and behind the coded tokens is not read; or pages
            [pages, H, T, bytes] of canonical rows.
        scale: fp16 [B, H, buffer, numbers] or [pages, H, T, numbers]; 0 numbers for a scheme
            without scales, 2 with zeros and of mode `product`.
        codebook: fp16 [1, entries, x], or learned [H, D / x, entries, x].
        mean: float32 [B, H, 1, D] (pages: [1, H, 1, D]), subtracted from a row before it is coded
            and added to what is decoded; None = 0, as it is for all values.
        sinks: [B, H, S, D], the first S tokens of each row in the model's dtype; pages: [1, H, 0,
            D].
        recent: [B, H, n, D], the newest tokens in the model's dtype, or the ring; pages: [1, H, 0,
            D].
        first: index in the buffer of the token at position 0.
        scheme: spec string, how rows are encoded.
        layout: order of the codes.
        smoothing: float32, as `mean`, positive. A row less its means is multiplied by it before it
            is coded, and what is decoded is divided; None = 1, as it is for all values, and for
            keys whose codebooks are learned or integers.
    """

    codes: Written
    scale: Written
    codebook: Tensor
    mean: Written | None
    sinks: Written
    recent: Written
    first: int
    scheme: str
    layout: str
    smoothing: Tensor | None = None

    @property
    def parsed(self) -> VQScheme:
        """`scheme` as a `VQScheme`."""
        return VQScheme.parse(self.scheme)

    @property
    def heads(self) -> int:
        """Key/value heads."""
        return self.recent.shape[1]

    @property
    def dim(self) -> int:
        """Numbers of a head."""
        return self.recent.shape[3]


class KVCacheView(NamedTuple):
    """One layer of a KV cache.

    Args:
        key: its keys.
        value: its values.
        cache_leftpad: int64 [B], the position of each row's first token; None = all 0.
        cache_seqlens: int64, tokens with the newest ones where the device knows them: [] of a
            static cache, [B] of pages, where 0 gives zeros; None = `max_seqlen` on the host.
        page_table: int32 [B, width], pages in the order of each row's tokens; None = no pages.
        key_mean_known: bool [B, H], of a static cache whose `key.mean` is measured; else None.
        max_seqlen: tokens, or as many as there may be (see above).
        window: newest tokens that a query reads as floats.
        num_new: tokens of the newest update, which all queries read as floats; of a growing cache.
        num_coded: tokens that have codes, positions 0 .. num_coded - 1; of a growing cache.
        key_rotary_mean: float32 [B, H, 1, D] (pages: [1, H, 1, D]), m of `ops.rotary_mean`: 0 in
            channels from 2 r on, which do not turn (what is constant there is in `key.mean`). R_n m
            is subtracted from keys before they are coded, and added to what is decoded, like
            `key.mean`; None = 0.
        rotary_inv_freq: float32 [r], radians per token of each pair of channels; with
            `key_rotary_mean`.
        rotary_interleaved: pairs are channels (2 p, 2 p + 1), else (p, p + r).
        rotary_start: n of the token at position 0.
    """

    key: KVSide
    value: KVSide
    cache_leftpad: Tensor | None
    cache_seqlens: Written | None
    page_table: Tensor | None
    key_mean_known: Written | None
    max_seqlen: int
    window: int
    num_new: int
    num_coded: int
    key_rotary_mean: Written | None = None
    rotary_inv_freq: Tensor | None = None
    rotary_interleaved: bool = False
    rotary_start: int = 0

    @property
    def memory(self) -> str:
        """`growing`, `static` or `paged`."""
        if self.cache_seqlens is None:
            return GROWING
        return STATIC if self.page_table is None else PAGED

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 = no pages."""
        return 0 if self.page_table is None else self.key.codes.shape[2]

    @property
    def recent_start(self) -> int:
        """Position of the first token of `recent` in a growing cache."""
        return self.max_seqlen - self.key.recent.shape[2]

    def replace(self, **arguments: Any) -> KVCacheView:
        """The view with other arguments, by their names in the schemas (`key_codes`, `window`)."""
        unknown = arguments.keys() - ARGUMENTS.keys()
        assert not unknown, f"a view has no {sorted(unknown)}"
        return unflatten(*(arguments_of(self) | arguments).values())

    def map(self, function: Callable[[Tensor], Tensor]) -> KVCacheView:
        """The view with `function` of each tensor."""
        return unflatten(*(function(x) if isinstance(x, Tensor) else x for x in flatten(self)))


def append_index(view: KVCacheView, side: KVSide, tokens: int) -> int:
    """Where `tokens` that `kv_append` writes to a growing cache begin in the buffer."""
    return side.first + view.num_coded - tokens


_SIDE = len(KVSide._fields)


def flatten(view: KVCacheView) -> tuple[Any, ...]:
    """The arguments of an op, in the order of the schema."""
    return (*view[0], *view[1], *view[2:])


def unflatten(*arguments: Any) -> KVCacheView:
    """The inverse of `flatten`."""
    key, value = KVSide(*arguments[:_SIDE]), KVSide(*arguments[_SIDE : 2 * _SIDE])
    return KVCacheView(key, value, *arguments[2 * _SIDE :])


def arguments_of(view: KVCacheView) -> dict[str, Any]:
    """`flatten` by name."""
    return dict(zip(ARGUMENTS, flatten(view), strict=True))


def _leaves(kind: type, prefix: str = "") -> dict[str, Any]:
    """Annotations of all fields, those of a side under its name."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        found |= _leaves(KVSide, f"{name}_") if hint is KVSide else {prefix + name: hint}
    return found


ARGUMENTS = _leaves(KVCacheView)
"""Name and annotation of each argument of an op that a view gives."""
NUM_ARGUMENTS = len(ARGUMENTS)


def schema(writes: bool) -> str:
    """The arguments of a view as torch.library writes them.

    Args:
        writes: whether the op writes what it may.
    """
    letters = iter(ascii_lowercase)
    found = []
    for name, hint in ARGUMENTS.items():
        options = [option for option in get_args(hint) if option is not type(None)]
        optional = type(None) in get_args(hint)
        kind = options[0] if optional else hint
        written = get_origin(kind) is Annotated and writes
        base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        text = f"Tensor({next(letters)}!)" if written else base.__name__
        found.append(f"{text}{'?' * optional} {name}")
    return ", ".join(found)
