"""Attention over codes is `vq`, whatever the model's attention implementation is.

A model updates its cache and then asks `AttentionInterface.get_interface` for its attention. What
it gets from here looks at the keys: those of a `VQCache` are attended to by `attend_to_codes`, all
others by the function that was asked for. So the model is not changed, and may run with a `VQCache`
in one thread and without one in another.

    implementation   its mask                   codes are read by kernels
    sdpa             bool; None is causal       always
    flash            of padding; None is causal where flash would compute in the query's dtype
    eager            additive; None is all      if it computes what `vq` computes, tried on numbers,
                                                and nobody asks for attention weights
    all others       unknown                    never: they decode them

Dropout, a position bias and gradients need decoded keys in all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..cache import StaticHandle, VQHandle
from ..ops.attention import without_autocast
from .attention import attend_to_codes, is_causal, vq_attention

Attention = Callable[..., Any]
Result = tuple[Tensor, Tensor | None]

_MOST = 1024  # functions remembered
_CLOSE = 1e-3  # relative, in float64: functions that differ, differ by more
_PACKED = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_table")  # of flash


def choose_by_cache(get_interface: Callable[..., Attention]) -> Callable[..., Attention]:
    """`AttentionInterface.get_interface`, for `patches.TABLE`."""

    @functools.wraps(get_interface)
    def chosen(self: Any, attn_implementation: str, default: Attention) -> Attention:
        found = get_interface(self, attn_implementation, default)
        choice = _choices.get(found)
        if choice is None:
            choice = functools.partial(_eager, found) if found is default else found
            if len(_choices) < _MOST:
                _choices[found] = choice
        return choice

    return chosen


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Result:
    coded = type(key) is VQHandle or type(key) is StaticHandle
    if coded and not dropout and kwargs.get("position_bias") is kwargs.get("softcap") is None:
        causal = query.shape[2] == 1 or is_causal(module, kwargs)
        out = attend_to_codes(query, key, value, attention_mask, scaling, causal)
        if out is not None:
            return out, None
    result: Result = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return result


def _flash(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    half = query.dtype in (torch.float16, torch.bfloat16)  # flash casts others
    if type(key) is VQHandle and half and not dropout and _are_none(kwargs, _PACKED):
        causal = is_causal(module, kwargs)
        mask = _mask_of_flash(query, key, attention_mask, sliding_window, causal)
        out = attend_to_codes(query, key, value, mask, scaling, causal, softcap, s_aux)
        if out is not None:
            return out, None
    result: Result = flash_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
        sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, **kwargs,
    )  # fmt: skip
    return result


def _mask_of_flash(
    query: Tensor, key: VQHandle, padding: Tensor | None, sliding_window: int | None, causal: bool
) -> Tensor | None:
    """The bool mask [B or 1, 1, Q, T] of what flash attention reads; None = causal, or all.

    Args:
        padding: [B, T] of the keys, True for tokens.
        sliding_window: tokens that a query sees, itself included; None = all.
    """
    queries, length = query.shape[2], key.shape[2]
    slides = sliding_window is not None and length > sliding_window
    if padding is None and not slides:
        return None
    at = torch.arange(length, device=query.device)
    newest = at[length - queries :, None]
    mask = at <= newest if causal else torch.ones_like(at <= newest)
    if slides:
        assert sliding_window is not None
        mask &= newest - at < sliding_window
        if not causal:
            mask &= at - newest < sliding_window
    if padding is None:
        return mask[None, None]
    return mask & padding[:, None, None, :length].bool()


def _eager(
    plain: Attention,
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Result:
    """`plain`, the attention that a model defines itself, unless the keys are codes."""
    if type(key) is VQHandle and _is_vq(plain, module, query, key, value, kwargs):
        softcap, s_aux = kwargs.get("softcap"), kwargs.get("s_aux")
        scaling = kwargs.get("scaling")
        out = attend_to_codes(query, key, value, attention_mask, scaling, False, softcap, s_aux)
        if out is not None:
            return out, None
    result: Result = plain(module, query, key, value, attention_mask, **kwargs)
    return result


_choices: dict[Attention, Attention] = {
    sdpa_attention_forward: _sdpa,
    flash_attention_forward: _flash,
    vq_attention: vq_attention,
}
_tried: WeakKeyDictionary[nn.Module, tuple[Attention, bool]] = WeakKeyDictionary()


def _are_none(kwargs: dict[str, Any], names: tuple[str, ...]) -> bool:
    return all(kwargs.get(name) is None for name in names)


def _is_vq(
    plain: Attention,
    module: nn.Module,
    query: Tensor,
    key: VQHandle,
    value: VQHandle,
    kwargs: dict[str, Any],
) -> bool:
    """Whether `vq` gives all that is wanted of a call of `plain`."""
    if module.training or kwargs.get("dropout") or kwargs.get("position_bias") is not None:
        return False
    if _weights_are_wanted(module, kwargs):
        return False
    known = _tried.get(module)
    if known is None or known[0] is not plain:
        known = plain, _computes_vq(plain, module, query, key, value, kwargs)
        _tried[module] = known
    return known[1]


def _weights_are_wanted(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether somebody may read the attention weights, which `vq` does not have."""
    config = getattr(module, "config", None)
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        return True
    # Transformers' own hooks stay after a call with output_attentions, and do nothing.
    hooks = module._forward_hooks.values()
    return any(getattr(hook, "__name__", "") != "output_capturing_hook" for hook in hooks)


def _computes_vq(
    plain: Attention,
    module: nn.Module,
    query: Tensor,
    key: VQHandle,
    value: VQHandle,
    kwargs: dict[str, Any],
) -> bool:
    """Try a function on a few random numbers, with and without a mask."""
    generator = torch.Generator().manual_seed(0)
    queries, tokens = 3, 7
    shapes = (
        (1, query.shape[1], queries, query.shape[3]),
        (1, key.shape[1], tokens, key.shape[3]),
        (1, value.shape[1], tokens, value.shape[3]),
    )
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(query.device)
        for shape in shapes
    )
    none = torch.zeros(1, 1, queries, tokens, dtype=torch.float64, device=query.device)
    ahead = torch.ones_like(none, dtype=torch.bool).triu(tokens - queries + 1)
    causal = none.masked_fill(ahead, torch.finfo(none.dtype).min)
    with torch.no_grad(), without_autocast(query.device):
        for mask, same in ((causal, causal), (None, none)):
            try:
                found = plain(module, q, k, v, mask, **kwargs)[0]
                wanted = vq_attention(module, q, k, v, same, **kwargs)[0]
            except Exception:  # it needs what is not here, such as other shapes
                return False
            if found.shape != wanted.shape:
                return False
            if not (found - wanted).abs().max() <= _CLOSE * wanted.abs().max():
                return False
    return True
