"""The attention implementation `vq` of Transformers: `model.set_attn_implementation("vq")`.

With a `VQCache` it computes on the codes. With any other cache it is ordinary attention with
soft-capping (Gemma 2) and sink logits (GPT-OSS). Setting it is optional: `attention_choice` runs
the same kernels for models with another attention implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..cache import LazyKV, attend, is_coded, see_queries
from ..ops.reference.kv_attention import softmax

NAME = "vq"


def register() -> None:
    """Register `vq` with Transformers, attention and mask function.

    Without a mask function Transformers passes no mask at all, and padding is attended to.
    """
    AttentionInterface.register(NAME, vq_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def vq_attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it.

    Args:
        module: the attention layer.
        query: [B, Hq, Q, D].
        key: [B, H, T, D], or what a `VQCache` returned.
        value: [B, H, T, Dv], or what a `VQCache` returned.
        attention_mask: bool or additive [B, 1 or Hq, Q, T]; None = causal, or everything if the
            layer is not causal.
        dropout: probability that an attention weight is dropped.
        scaling: softmax scale, the factor of the logits; None = D^-1/2.
        softcap: c of c tanh(s / c); None = off.
        s_aux: [Hq] sink logits, which attend to no token; None = off.

    Returns:
        [B, Q, Hq, Dv] and None (attention weights are never returned).
    """
    special = softcap is not None or s_aux is not None
    plain = dropout == 0.0 and kwargs.get("position_bias") is None
    coded = is_coded(key)
    causal = query.shape[2] == 1 or is_causal(module, kwargs)
    if coded and plain:
        out = attend_to_codes(query, key, value, attention_mask, scaling, causal, softcap, s_aux)
        if out is not None:
            return out, None
    if not coded:
        see_queries(query, key)
    if not special:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    if attention_mask is None and not causal:
        attention_mask = _everything(query, key)
    key, value = (x.decode() if isinstance(x, LazyKV) else x for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = (grouped @ key.mT[:, :, None]).flatten(1, 2).float() * scaling
    weights = softmax(scores, attention_mask, softcap or 0.0, s_aux).to(value.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    out = weights.unflatten(1, (key.shape[1], -1)) @ value[:, :, None]
    return out.flatten(1, 2).transpose(1, 2).contiguous(), None


def attend_to_codes(
    query: Tensor,
    key: Any,
    value: Any,
    mask: Tensor | None,
    scaling: float | None,
    causal: bool,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor | None:
    """Attention on the codes of a `VQCache`, by the kernels of `hf_vq::kv_attention`.

    Args:
        query: [B, Hq, Q, D], the tokens of the newest update.
        key: what the update returned for the keys, T tokens.
        value: what the update returned for the values, T tokens.
        mask: bool or additive, broadcast to [B, Hq, Q, T].
        causal: meaning of `mask=None`: causal attention if True, else every query reads every key.

    Returns:
        [B, Q, Hq, Dv] contiguous; None if decoded tensors are needed, for example for gradients.
    """
    if mask is None and not causal and query.shape[2] > 1:
        mask = _everything(query, key)
    out = attend(query, key, value, scaling=scaling, mask=mask, softcap=softcap or 0.0, s_aux=s_aux)
    return None if out is None else out.transpose(1, 2).contiguous()


def _everything(query: Tensor, key: Any) -> Tensor:
    return torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool, device=query.device)


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """True if an attention layer without a mask is causal; the rule of Transformers' functions."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)
