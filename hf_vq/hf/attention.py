"""The attention implementation `vq` of Transformers: `model.set_attn_implementation("vq")`.

With a `VQCache` it computes on the codes; with any other cache it is ordinary attention that also
knows soft-caps (Gemma 2) and sink logits (GPT-OSS). Models on `sdpa` need no change: `VQHandle`
intercepts that call. `vq` is for models that do not run on `sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..cache import StaticHandle, VQHandle, attend, attend_static
from ..ops.attention_reference import softmax

NAME = "vq"


def register() -> None:
    """Make `vq` known to Transformers. A mask function must be registered too: without one
    Transformers passes no mask at all, and padding is attended to."""
    AttentionInterface.register(NAME, vq_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def vq_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
        key: [B, H, T, D], or the handle of a `VQCache`.
        value: [B, H, T, Dv], or the handle of a `VQCache`.
        attention_mask: bool or additive [B, 1 or Hq, Q, T]; None = causal, or everything if the
            layer is not causal.
        dropout: of the attention weights.
        scaling: factor of the logits; None = D^-1/2.
        softcap: c of c tanh(s / c); None = off.
        s_aux: [Hq] logits that attend to nothing; None = off.

    Returns:
        [B, Q, Hq, Dv] and None (attention weights are never returned).
    """
    special = softcap is not None or s_aux is not None
    plain = dropout == 0.0 and kwargs.get("position_bias") is None
    own = special or (isinstance(key, (VQHandle, StaticHandle)) and plain)
    if own and attention_mask is None and not _causal(module, kwargs):
        # Without a mask our softmax is causal.
        attention_mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool, device=query.device)
    if isinstance(key, (VQHandle, StaticHandle)) and plain:
        run = attend if isinstance(key, VQHandle) else attend_static
        out = run(
            query, key, value,
            scaling=scaling, mask=attention_mask, softcap=softcap or 0.0, s_aux=s_aux,
        )  # fmt: skip
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    if not special:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    key, value = (x.decode() if isinstance(x, VQHandle) else x for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = (grouped @ key.mT[:, :, None]).flatten(1, 2).float() * scaling
    weights = softmax(scores, attention_mask, softcap or 0.0, s_aux).to(value.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    out = weights.unflatten(1, (key.shape[1], -1)) @ value[:, :, None]
    return out.flatten(1, 2).transpose(1, 2).contiguous(), None


def _causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)
