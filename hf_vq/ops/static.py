"""`hf_vq::store` and `hf_vq::attention_static`: one layer of a KV cache whose memory never moves.

A decoding step that is compiled, or replayed from a CUDA graph, knows shapes and addresses, but not
how many tokens there are: `length` is a tensor. Everything else follows from it.

position    0 .. sinks       ..            length - window            length          capacity
            [ sink floats ]                [ ring of floats: position j in slot j % slots ]
            [ codes and scales of a tape, position j at index j          ]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..errors import VQCacheError
from .attention import without_autocast
from .library import define, name_of, parse


class StaticKV(NamedTuple):
    """One layer's keys and values. B rows, H key/value heads; see `ops.attention.CachedKV`.

    All tensors stay where they are for as long as the layer lives, and are dense but for scales of
    blocks, which end where the tokens do.

    Args:
        sink_k: [B, H, S, D] the first S tokens of each row in the model's dtype.
        sink_v: [B, H, S, Dv].
        k_codes: uint8 [B, H, capacity, bytes], canonical rows, or blocks (`ops.layout`).
        k_scale: fp16 [B, H, capacity, 1], or [..., 0] for a scheme without scales.
        k_mean: float32 [B, H, 1, D], subtracted from keys before they are coded; None = 0.
        v_codes: like `k_codes`.
        v_scale: like `k_scale`.
        tail_k: [B, H, slots, D], the ring: the newest tokens in the model's dtype. An update brings
            at most slots - window tokens.
        tail_v: [B, H, slots, Dv].
        codebook_k: fp16 [1, entries, x], or learned [H, D / x, entries, x].
        codebook_v: fp16 [1, entries, x], or learned [H, Dv / x, entries, x].
        start: int64 [B], the position of each row's first token (left padding); None = all 0.
        length: int64 [], tokens held.
        frozen: bool [B, H], whether the mean of the keys is known; None = `k_mean` is given.
        window: newest tokens that a query reads as floats.
        key_scheme: spec string, how keys are encoded.
        value_scheme: spec string, how values are encoded.
        key_layout: order of the codes of the keys.
        value_layout: order of the codes of the values.
    """

    sink_k: Tensor
    sink_v: Tensor
    k_codes: Tensor
    k_scale: Tensor
    k_mean: Tensor | None
    v_codes: Tensor
    v_scale: Tensor
    tail_k: Tensor
    tail_v: Tensor
    codebook_k: Tensor
    codebook_v: Tensor
    start: Tensor | None
    length: Tensor
    frozen: Tensor | None
    window: int
    key_scheme: str
    value_scheme: str
    key_layout: str
    value_layout: str

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.k_scale.shape[2]


def store(keys: Tensor, values: Tensor, cached: StaticKV) -> None:
    """Append n tokens: write them to the ring and to the sinks, encode those that leave the window.

    Position length + i goes to slot (length + i) % slots of the ring, and to the sinks of the rows
    in which it is one of the first S tokens. Then the positions length - window .. length + n -
    window - 1 are encoded, from the ring; those below 0 or beyond the capacity are not. `length`
    grows by n at last.

    A row that is not frozen gets its mean when its first token after the sinks, at start + S, is
    about to be encoded: that of the max(window / 2, 1) tokens from there on. It is used for all
    tokens of this update.

    Args:
        keys: [B, H, n, D], n <= slots - window; only the last dimension must be dense.
        values: [B, H, n, Dv].
        cached: written to: sinks, codes, scales, k_mean, ring, length, frozen.

    Raises:
        VQCacheError: n is larger than the ring allows.
    """
    new, slots = keys.shape[2], cached.tail_k.shape[2]
    if new > slots - cached.window:
        raise VQCacheError(
            f"an update of {new} tokens does not fit a ring of {slots} floats for a window of "
            f"{cached.window}; at most {slots - cached.window} can be stored without a host."
        )
    torch.ops.hf_vq.store(keys, values, *cached)


def attention_static(
    query: Tensor,
    cached: StaticKV,
    *,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of the tokens that were stored last, as `ops.attention.attention` computes it with
    fresh = Q, coded = max(length - window, 0) and the ring as its tail.

    Args:
        query: [B, Hq, Q, D], Hq a multiple of H, Q <= slots - window.
        cached: after `store`: the last query is the token at length - 1.
        scaling: factor of the logits, usually D^-1/2.
        mask: bool (True = may attend) or additive [B or 1, Hq or 1, Q or 1, >= capacity]; what it
            says of positions beyond `length` is not read. None is causal.
        softcap: c of c tanh(s / c); 0 = off.
        s_aux: [Hq] logits that attend to nothing.

    Returns:
        [B, Hq, Q, Dv] of the dtype of `query`.

    Raises:
        VQCacheError: the shapes do not belong together.
    """
    heads, dim, capacity = cached.tail_k.shape[1], cached.tail_k.shape[3], cached.capacity
    if query.shape[1] % heads or query.shape[3] != dim:
        raise VQCacheError(
            f"attention got queries {list(query.shape)} for a cache with {heads} key/value "
            f"heads of {dim}; the heads must be a multiple and head_dim equal."
        )
    if mask is not None and mask.shape[-1] < capacity:
        raise VQCacheError(
            f"the attention mask covers {mask.shape[-1]} tokens but the cache has room for "
            f"{capacity}; pass a mask over all of them."
        )
    out: Tensor = torch.ops.hf_vq.attention_static(
        query, *cached[:12], mask, s_aux, cached.length, cached.window, scaling, softcap,
        *cached[15:],
    )  # fmt: skip
    return out


def _store(keys: Tensor, values: Tensor, *arguments: Any) -> None:
    *tensors, key_scheme, value_scheme, key_layout, value_layout = arguments
    problem = dispatch.StoreProblem(*_described(keys, keys, values, tensors[3], arguments[-4:]))
    with without_autocast(keys.device):
        dispatch.select(problem).run(
            keys, values, *tensors, parse(key_scheme), parse(value_scheme), key_layout, value_layout
        )


def _attention_static(query: Tensor, *arguments: Any) -> Tensor:
    *tensors, key_scheme, value_scheme, key_layout, value_layout = arguments
    problem = dispatch.StaticAttentionProblem(
        *_described(query, tensors[7], tensors[8], tensors[3], arguments[-4:])
    )
    with without_autocast(query.device):
        out: Tensor = dispatch.select(problem).run(
            query, *tensors, parse(key_scheme), parse(value_scheme), key_layout, value_layout
        )
    return out


def _described(
    x: Tensor, k: Tensor, v: Tensor, scale: Tensor, names: tuple[str, ...]
) -> tuple[Any, ...]:
    """The fields of a problem; `names` are schemes and layouts."""
    return (
        x.device.type, name_of(x.dtype), *names[:2],
        dispatch.bucket(x.shape[2]), dispatch.bucket(scale.shape[2]),
        k.shape[3], v.shape[3], *names[2:],
    )  # fmt: skip


def _fake_store(keys: Tensor, *arguments: Any) -> None:
    return None


def _fake_attention_static(query: Tensor, *arguments: Any) -> Tensor:
    tail_v: Tensor = arguments[8]
    return query.new_empty(*query.shape[:-1], tail_v.shape[-1])


define(
    "store",
    "(Tensor keys, Tensor values, Tensor(a!) sink_k, Tensor(b!) sink_v, Tensor(c!) k_codes, "
    "Tensor(d!) k_scale, Tensor(e!)? k_mean, Tensor(f!) v_codes, Tensor(g!) v_scale, "
    "Tensor(h!) tail_k, Tensor(i!) tail_v, Tensor codebook_k, Tensor codebook_v, Tensor? start, "
    "Tensor(j!) length, Tensor(k!)? frozen, int window, str key_scheme, str value_scheme, "
    "str key_layout, str value_layout) -> ()",
    _store,
    _fake_store,
)
define(
    "attention_static",
    "(Tensor query, Tensor sink_k, Tensor sink_v, Tensor k_codes, Tensor k_scale, Tensor? k_mean, "
    "Tensor v_codes, Tensor v_scale, Tensor tail_k, Tensor tail_v, Tensor codebook_k, "
    "Tensor codebook_v, Tensor? start, Tensor? mask, Tensor? s_aux, Tensor length, int window, "
    "float scaling, float softcap, str key_scheme, str value_scheme, str key_layout, "
    "str value_layout) -> Tensor",
    _attention_static,
    _fake_attention_static,
)
