"""Attention over codes is `vq`, whatever the model's attention implementation is.

A model updates its cache and then calls `AttentionInterface.get_interface` for its attention. The
function that it gets from here checks the type of the keys: keys of a `VQCache` go to
`attend_to_codes`, all others to the attention that the model requested. The model itself is not
changed: it may run with a `VQCache` in one thread and without one in another.

    implementation   its mask                   codes are read by kernels
    sdpa             bool; None is causal       always
    flash            of padding; None is causal where flash would compute in the query's dtype
    eager            additive; None is all      if it equals `vq` on random numbers and no
                                                attention weights are requested
    flex             a block mask               never: it gets decoded keys, as its compiler cannot
                                                trace a tensor that decodes itself
    all others       unknown                    never: they decode the codes

Dropout, a position bias and gradients need decoded keys in all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..cache import LazyKV, is_coded, see_queries
from ..ops.library import without_autocast
from .attention import attend_to_codes, is_causal, vq_attention

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # a private name
    _collector: Any = None  # type: ignore[no-redef]

Attention = Callable[..., Any]
Result = tuple[Tensor, Tensor | None]

_CLOSE = 1e-3  # relative, in float64: functions that differ, differ by more
_FACTORS = (1.0, 2.5, 6.0)  # of queries, keys and values: caps and clamps show in large logits
_PACKED = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_table")  # of flash


def choose_by_cache(get_interface: Callable[..., Attention]) -> Callable[..., Attention]:
    """`AttentionInterface.get_interface`, for `patches.TABLE`.

    It has no state: Dynamo would guard the state, and recompile all models when it changes.
    """

    @functools.wraps(get_interface)
    def chosen(self: Any, attn_implementation: str, default: Attention) -> Attention:
        found = get_interface(self, attn_implementation, default)
        if found is sdpa_attention_forward:
            return _sdpa
        if found is flash_attention_forward:
            return _flash
        if found is flex_attention_forward:
            return _flex
        return functools.partial(_eager, found) if found is default else found

    return chosen


def _on_codes(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Split a call whose keys are codes: (module, query, key, value, mask), other arguments.

    Transformers' models pass the mask by position or by name. For any other call, and for keys that
    are tensors, the result is None; queries of a prompt are then shown to the layer of the cache
    that asked for them.
    """
    if len(args) == 4 and "attention_mask" in kwargs:
        kwargs = dict(kwargs)
        args = (*args, kwargs.pop("attention_mask"))
    if len(args) != 5:
        return None
    if is_coded(args[2]):
        return args, kwargs
    see_queries(args[1], args[2])
    return None


def _sdpa(*args: Any, **kwargs: Any) -> Result:
    """`sdpa_attention_forward`, unless the keys are codes."""
    call = _on_codes(args, kwargs)
    if call is not None:
        (module, query, key, value, mask), given = call
        others = given.get("position_bias") is given.get("softcap") is None
        if others and not given.get("dropout"):
            causal = query.shape[2] == 1 or is_causal(module, given)
            out = attend_to_codes(query, key, value, mask, given.get("scaling"), causal)
            if out is not None:
                return out, None
    result: Result = sdpa_attention_forward(*args, **kwargs)
    return result


def _flash(*args: Any, **kwargs: Any) -> Result:
    """`flash_attention_forward`, unless the keys are codes."""
    call = _on_codes(args, kwargs)
    if call is not None and type(call[0][2]) is LazyKV:
        (module, query, key, value, padding), given = call
        half = query.dtype in (torch.float16, torch.bfloat16)  # flash casts others
        if half and not given.get("dropout") and _are_none(given, _PACKED):
            causal = is_causal(module, given)
            mask = _mask_of_flash(query, key, padding, given.get("sliding_window"), causal)
            softcap, s_aux = given.get("softcap"), given.get("s_aux")
            scaling = given.get("scaling")
            out = attend_to_codes(query, key, value, mask, scaling, causal, softcap, s_aux)
            if out is not None:
                return out, None
    result: Result = flash_attention_forward(*args, **kwargs)
    return result


def _flex(*args: Any, **kwargs: Any) -> Result:
    """`flex_attention_forward` with decoded keys and values."""
    call = _on_codes(args, kwargs)
    if call is not None and type(call[0][2]) is LazyKV:
        (module, query, key, value, mask), kwargs = call
        args = module, query, key.decode(), value.decode(), mask
    result: Result = flex_attention_forward(*args, **kwargs)
    return result


_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by padding, for all layers


def _mask_of_flash(
    query: Tensor, key: LazyKV, padding: Tensor | None, sliding_window: int | None, causal: bool
) -> Tensor | None:
    """Build flash attention's bool mask [B or 1, 1, Q, T], True = attend; None = causal, or all.

    Args:
        padding: [B, T] of the keys, True for tokens.
        sliding_window: tokens that a query sees, itself included; None = all.
    """
    queries, length = query.shape[2], key.shape[2]
    slides = sliding_window is not None and length > sliding_window
    if padding is None and not slides:
        return None
    if padding is None or padding.is_inference():  # inference tensors have no version counter
        return _new_mask(query, length, padding, sliding_window if slides else None, causal)
    wanted = queries, length, sliding_window if slides else None, causal, padding._version
    known = _masks.get(padding)
    if known is None or known[0] != wanted:
        known = wanted, _new_mask(query, length, padding, wanted[2], causal)
        _masks[padding] = known
    mask: Tensor = known[1]
    return mask


def _new_mask(
    query: Tensor, length: int, padding: Tensor | None, sliding_window: int | None, causal: bool
) -> Tensor:
    at = torch.arange(length, device=query.device)
    newest = at[length - query.shape[2] :, None]
    mask = at <= newest if causal else torch.ones_like(at <= newest)
    if sliding_window is not None:
        mask &= newest - at < sliding_window
        if not causal:
            mask &= at - newest < sliding_window
    if padding is None:
        return mask[None, None]
    return mask & padding[:, None, None, :length].bool()


def _eager(plain: Attention, *args: Any, **kwargs: Any) -> Result:
    """`plain`, the attention that a model defines itself, unless the keys are codes."""
    call = _on_codes(args, kwargs)
    if call is not None and type(call[0][2]) is LazyKV:
        (module, query, key, value, mask), given = call
        if _is_vq(plain, module, query, key, value, given):
            softcap, s_aux = given.get("softcap"), given.get("s_aux")
            scaling = given.get("scaling")
            out = attend_to_codes(query, key, value, mask, scaling, False, softcap, s_aux)
            if out is not None:
                return out, None
    result: Result = plain(*args, **kwargs)
    return result


# Keys: layer of a cache, then layer of a model. Weak: an entry lives no longer than its cache.
_Tried = WeakKeyDictionary[nn.Module, tuple[Attention, bool]]
_tried: WeakKeyDictionary[Any, _Tried] = WeakKeyDictionary()


def _are_none(kwargs: dict[str, Any], names: tuple[str, ...]) -> bool:
    return all(kwargs.get(name) is None for name in names)


def _is_vq(
    plain: Attention,
    module: nn.Module,
    query: Tensor,
    key: LazyKV,
    value: LazyKV,
    kwargs: dict[str, Any],
) -> bool:
    """True if `vq` can replace this call of `plain`; tried once per cache layer and module."""
    if module.training or kwargs.get("dropout") or kwargs.get("position_bias") is not None:
        return False
    if not _is_of_model(plain, module) or _weights_are_wanted(module, kwargs):
        return False
    tried = _tried.get(key.update.owner)
    if tried is None:
        tried = _tried.setdefault(key.update.owner, WeakKeyDictionary())
    known = tried.get(module)
    if known is None or known[0] is not plain:
        known = plain, _computes_vq(plain, module, query, key, value, kwargs)
        tried[module] = known
    return known[1]


def _is_of_model(plain: Attention, module: nn.Module) -> bool:
    """True if `plain` is the function of the Transformers module that defines the layer's class.

    A function that a user put in its place may count calls or record values, so it is called.
    """
    home = getattr(plain, "__module__", None) or ""
    same_module = any(kind.__module__ == home for kind in type(module).__mro__)
    upstream = home.startswith("transformers.models.") and not hasattr(plain, "__wrapped__")
    return same_module and upstream


def _weights_are_wanted(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """True if the caller may read the attention weights, which `vq` does not return."""
    config = getattr(module, "config", None)
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        return True
    hooks = module._forward_hooks.values()
    if _collector is None:
        return bool(hooks)
    # StableLM and others do not pass the arguments of a call to their layers: ask the collector.
    if any("attentions" in name for name in _collector.get() or ()):
        return True
    # Transformers' own hooks stay after a call with output_attentions, and do nothing.
    return any(getattr(hook, "__name__", "") != "output_capturing_hook" for hook in hooks)


def _computes_vq(
    plain: Attention,
    module: nn.Module,
    query: Tensor,
    key: LazyKV,
    value: LazyKV,
    kwargs: dict[str, Any],
) -> bool:
    """Compare `plain` with `vq` on random numbers, small and large, with and without a mask."""
    generator = torch.Generator().manual_seed(0)
    queries, tokens = 8, 32
    shapes = (
        (1, query.shape[1], queries, query.shape[3]),
        (1, key.shape[1], tokens, key.shape[3]),
        (1, value.shape[1], tokens, value.shape[3]),
    )
    dtype = _exact_dtype(query.device)
    numbers = [
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        .to(query.device)
        .to(dtype)
        for shape in shapes
    ]
    none = torch.zeros(1, 1, queries, tokens, dtype=dtype, device=query.device)
    ahead = torch.ones_like(none, dtype=torch.bool).triu(tokens - queries + 1)
    causal = none.masked_fill(ahead, torch.finfo(dtype).min)
    cases = [(f, *masks) for f in _FACTORS for masks in ((causal, causal), (None, none))]
    with torch.no_grad(), without_autocast(query.device):
        for factor, mask, same in cases:
            q, k, v = (factor * one for one in numbers)
            try:
                found = plain(module, q, k, v, mask, **kwargs)[0]
                wanted = vq_attention(module, q, k, v, same, **kwargs)[0]
            except Exception:  # `plain` needs other arguments or shapes
                return False
            if found.shape != wanted.shape:
                return False
            if not (found - wanted).abs().max() <= _CLOSE * wanted.abs().max():
                return False
    return True


def _exact_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it, such as MPS."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64
