"""`hf_vq::kv_append` and `hf_vq::kv_attention`: what is done with one layer of a KV cache.

Both take a `KVCacheView`; `ops.kv` says what is in it, and which query reads what.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch, env
from ..dispatch import selection
from ..errors import VQBackendError, VQCacheError
from ..formats.scheme import VQScheme
from .kv import (
    GROWING,
    NUM_ARGUMENTS,
    PAGED,
    STATIC,
    KVCacheView,
    KVSide,
    append_index,
    flatten,
    unflatten,
)
from .kv import schema as view_schema
from .library import (
    append_problem,
    attention_problem,
    define,
    is_plain_eager,
    static_append_problem,
    without_autocast,
)
from .rotary_mean import rotated_key_mean


class BoundKV(NamedTuple):
    """The kernels of one growing layer, for tokens that come one by one: found once, then called
    without a look at the table. They refuse tensors that they do not take.

    Args:
        append_key: as `dispatch.Bound` of `kv_append`, like `append_value`.
        attention: as `dispatch.Bound` of `kv_attention`.
        most: tokens of the layer, up to which this is what the table says,
        rotary: while its keys have a rotary mean, or have none,
        forced: HF_VQ_BACKEND is this,
        generation: and nobody changes the table.
    """

    append_key: dispatch.Bound
    append_value: dispatch.Bound
    attention: dispatch.Bound
    most: int
    rotary: bool
    forced: str
    generation: int


def bound_to(known: BoundKV | None, key: Tensor, view: KVCacheView) -> BoundKV:
    """The kernels of a layer of a growing cache: those that are known, while they are right.

    Args:
        key: a token, decides device and dtype.
        view: of the layer.
    """
    forced, generation = env.BACKEND.get(), selection.generation
    rotary = view.key_rotary_mean is not None
    if (
        known is not None
        and view.max_seqlen <= known.most
        and known.rotary == rotary
        and known.generation == generation
        and known.forced == forced
    ):
        return known
    keys, values = (
        _bind(
            append_problem(
                key.device, key.dtype, side.scheme, 1, side.dim, side.layout,
                rotary=rotary and side is view.key,
            )
        )
        for side in (view.key, view.value)
    )  # fmt: skip
    attention = _bind(_attention_problem(key, view))
    most = dispatch.bucket(view.max_seqlen)
    return BoundKV(keys, values, attention, most, rotary, forced, generation)


def _bind(
    problem: dispatch.KVAppendProblem | dispatch.KVAttentionProblem,
) -> dispatch.Bound:
    try:
        if not problem.rotary:
            return dispatch.bind(problem) or _refuse
        # A kernel of its own for each layer: it holds the table of the layer's frequencies.
        return dispatch.select(problem).implementation.bind(problem) or _refuse
    except VQBackendError:  # HF_VQ_BACKEND leaves no entry: the op itself says so, if it is called
        return _refuse


def _refuse(*arguments: Any) -> None:
    return None


def kv_append(
    key: Tensor,
    value: Tensor,
    view: KVCacheView,
    slot_mapping: Tensor | None = None,
    bound: BoundKV | None = None,
) -> None:
    """Encode tokens, x - mean of the keys, and write them to a layer.

    growing   the n tokens that end at position `num_coded`, which counts them already; floats are
              left alone. A side whose tensor has no tokens is left alone, too.
    paged     the tokens at `slot_mapping`. Where keys have a rotary mean, the caller subtracts it:
              a slot says nothing of a token's position.
    static    the newest n tokens. Position cache_seqlens + i goes to slot (cache_seqlens + i) %
              slots of the ring, and to the sinks of the rows in which it is one of the first S
              tokens. Then the positions cache_seqlens - window .. cache_seqlens + n - window - 1
              are encoded, from the ring; those below 0 or beyond `max_seqlen` are not.
              `cache_seqlens` grows by n at last. A row whose mean is not known gets it when its
              first token after the sinks, at cache_leftpad + S, is about to be encoded: that of the
              max(window / 2, 1) tokens from there on. It is used for all tokens of this update.

    Args:
        key: [B, H, n, D]; of pages [1, H, n, D]. Only the last dimension must be dense.
        value: [B, H, n, Dv] likewise.
        view: written to.
        slot_mapping: int64 [n], of pages: where each token goes, its page times T and its place
            there. One that several tokens have gets any of them; below 0 a token goes nowhere.
        bound: of one token of a growing cache, its kernels.

    Raises:
        VQCacheError: n is larger than a static cache's ring allows.
    """
    if bound is not None and is_plain_eager(key, value):
        before = view.num_coded - 1
        done = bound.append_key(key, view.key, view.key.first + before, view)
        if done is not None:
            done = bound.append_value(value, view.value, view.value.first + before, view)
        if done is not None:
            return
    if view.memory == STATIC:
        new, slots = key.shape[2], view.key.recent.shape[2]
        if new > slots - view.window:
            raise VQCacheError(
                f"an update of {new} tokens does not fit a ring of {slots} floats for a window of "
                f"{view.window}; at most {slots - view.window} can be stored without a host."
            )
    if is_plain_eager(key, value):
        _append(key, value, view, slot_mapping)
    else:
        torch.ops.hf_vq.kv_append(key, value, *flatten(view), slot_mapping)


def kv_attention(
    query: Tensor,
    view: KVCacheView,
    *,
    softmax_scale: float,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    bound: BoundKV | None = None,
) -> Tensor:
    """Attention of the newest tokens of each row over a layer of codes.

    Args:
        query: [B, Hq, Q, D], Hq a multiple of the key/value heads; the last query is the last
            token of its row.
        view: the layer. Of a static cache, after `kv_append` of Q tokens.
        softmax_scale: factor of the logits, usually D^-1/2.
        mask: bool (True = may attend) or additive [B or 1, Hq or 1, Q or 1, >= max_seqlen]; what
            it says of positions beyond `cache_seqlens` is not read. None is causal; pages take
            none.
        softcap: c of c tanh(s / c); 0 = off.
        sink_logits: [Hq] logits that attend to nothing.
        bound: of one token of a growing cache without left padding, its kernels.

    Returns:
        [B, Hq, Q, Dv] of the dtype of `query`.

    Raises:
        VQCacheError: the shapes do not belong together.
    """
    if bound is not None and mask is sink_logits is None and is_plain_eager(query):
        out = bound.attention(query, view, softmax_scale, softcap)
        if out is not None:
            return out
    recent = view.key.recent
    if query.shape[1] % recent.shape[1] or query.shape[-1] != recent.shape[-1]:
        raise VQCacheError(
            f"attention got queries {list(query.shape)} for a cache with {recent.shape[1]} "
            f"key/value heads of {recent.shape[-1]}; the heads must be a multiple and head_dim "
            "equal."
        )
    if mask is not None and mask.shape[-1] < view.max_seqlen:
        has = "holds" if view.cache_seqlens is None else "has room for"
        raise VQCacheError(
            f"the attention mask covers {mask.shape[-1]} tokens but the cache {has} "
            f"{view.max_seqlen}; pass a mask over all of them."
        )
    if view.page_table is not None:
        _check_pages(query, view, mask)
    if is_plain_eager(query, recent, view.value.recent, mask, sink_logits):
        if view.cache_seqlens is None and (mask is sink_logits is view.cache_leftpad is None):
            run = dispatch.bind(_attention_problem(query, view))
            out = None if run is None else run(query, view, softmax_scale, softcap)
            if out is not None:
                return out
        return _attention(query, view, mask, sink_logits, softmax_scale, softcap)
    result: Tensor = torch.ops.hf_vq.kv_attention(
        query, *flatten(view), mask, sink_logits, softmax_scale, softcap
    )
    return result


def _check_pages(query: Tensor, view: KVCacheView, mask: Tensor | None) -> None:
    table, lengths, rows = view.page_table, view.cache_seqlens, query.shape[0]
    assert table is not None and lengths is not None
    width = table.shape[1] if table.dim() == 2 else -1
    enough = len(table) == rows and view.max_seqlen <= width * view.page_size
    if mask is not None or not enough or lengths.shape != (rows,):
        raise VQCacheError(
            f"attention got queries {list(query.shape)} and a table {list(table.shape)} with "
            f"lengths {list(lengths.shape)} up to {view.max_seqlen} for pages of {view.page_size} "
            "tokens; rows must be as many, pages enough, and there is no mask."
        )


def through_tables(
    keys: VQScheme, values: VQScheme, head_dim: int, page: int, like: Tensor, turns: bool = False
) -> bool:
    """Whether kernels read and write pages where they are, through tables and slots.

    Args:
        keys: scheme of the keys, rows of `head_dim` numbers.
        values: scheme of the values, likewise.
        page: tokens of a page.
        like: decides device and dtype of the queries.
        turns: keys have a rotary mean.
    """
    names, of = (keys.spec(), values.spec()), (like.device, like.dtype)
    problems: list[dispatch.Problem] = [
        attention_problem(
            *of, *names, head_dim, head_dim, 0, 0, memory=PAGED, page_size=page, rotary=turns
        )
    ]
    problems += [append_problem(*of, name, 1, head_dim, "rows", PAGED, page) for name in names]
    return all(dispatch.select(problem).name != "reference" for problem in problems)


def _append(key: Tensor, value: Tensor, view: KVCacheView, slot_mapping: Tensor | None) -> None:
    if view.memory == STATIC:
        sides = view.key, view.value
        problem = static_append_problem(
            key.device, key.dtype, tuple(side.scheme for side in sides), key.shape[2],
            tuple(side.dim for side in sides), tuple(side.layout for side in sides),
            view.key_rotary_mean is not None,
        )  # fmt: skip
        with without_autocast(key.device):
            dispatch.select(problem).run(key, value, view, None)
        return
    memory = GROWING if slot_mapping is None else PAGED
    _append_side(key, view.key, True, view, memory, slot_mapping)
    _append_side(value, view.value, False, view, memory, slot_mapping)


def _append_side(
    x: Tensor,
    side: KVSide,
    is_key: bool,
    view: KVCacheView,
    memory: str,
    slot_mapping: Tensor | None,
) -> None:
    tokens = x.shape[2]
    if not tokens:
        return
    page = 0 if memory == GROWING else side.codes.shape[2]
    problem = append_problem(
        x.device, x.dtype, side.scheme, tokens, x.shape[3], side.layout, memory, page
    )
    if is_key and view.key_rotary_mean is not None and memory == GROWING:
        turning = problem._replace(rotary=True)
        if dispatch.select(turning).name == "reference":  # another entry needs no help
            positions = torch.arange(view.num_coded - tokens, view.num_coded, device=x.device)
            x, view = (
                x.float() - rotated_key_mean(view, positions),
                view._replace(key_rotary_mean=None),
            )
            problem = problem._replace(dtype="float32")
        else:
            problem = turning
    if memory == GROWING:
        bound = dispatch.bind(problem)
        if bound is not None and bound(x, side, append_index(view, side, tokens), view) is not None:
            return
    with without_autocast(x.device):
        dispatch.select(problem).run(*((x, None) if is_key else (None, x)), view, slot_mapping)


def _attention_problem(query: Tensor, view: KVCacheView) -> dispatch.KVAttentionProblem:
    key, value, memory = view.key, view.value, view.memory
    paged = memory == PAGED  # asked about whatever their number and that of the queries
    return attention_problem(
        query.device, query.dtype, key.scheme, value.scheme, key.recent.shape[3],
        value.recent.shape[3], 0 if paged else query.shape[2],
        0 if paged else 1 << max(view.max_seqlen - 1, 0).bit_length(),
        key.layout, value.layout, memory, view.page_size, view.key_rotary_mean is not None,
    )  # fmt: skip


def _attention(
    query: Tensor,
    view: KVCacheView,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    run = dispatch.select(_attention_problem(query, view)).run
    with without_autocast(query.device):  # not in front of the op: compilers cannot trace it
        out: Tensor = run(query, view, mask, sink_logits, softmax_scale, softcap)
    return out


def _append_op(key: Tensor, value: Tensor, *arguments: Any) -> None:
    _append(key, value, unflatten(*arguments[:NUM_ARGUMENTS]), arguments[NUM_ARGUMENTS])


def _attention_op(query: Tensor, *arguments: Any) -> Tensor:
    return _attention(query, unflatten(*arguments[:NUM_ARGUMENTS]), *arguments[NUM_ARGUMENTS:])


def _fake_append(key: Tensor, value: Tensor, *arguments: Any) -> None:
    return None


def _fake_attention(query: Tensor, *arguments: Any) -> Tensor:
    view = unflatten(*arguments[:NUM_ARGUMENTS])
    return query.new_empty(*query.shape[:-1], view.value.dim)


define(
    "kv_append",
    f"(Tensor key, Tensor value, {view_schema(writes=True)}, Tensor? slot_mapping) -> ()",
    _append_op,
    _fake_append,
)
define(
    "kv_attention",
    f"(Tensor query, {view_schema(writes=False)}, Tensor? mask, Tensor? sink_logits, "
    "float softmax_scale, float softcap) -> Tensor",
    _attention_op,
    _fake_attention,
)
