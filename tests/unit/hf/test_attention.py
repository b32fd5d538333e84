"""The attention implementation `vq` on its own: with plain tensors it is ordinary attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig

from hf_vq.cache import VQCache
from hf_vq.hf import attention
from hf_vq.hf.attention import vq_attention


def module(groups: int = 2, causal: bool = True) -> Any:
    layer = torch.nn.Module()
    layer.num_key_value_groups, layer.is_causal = groups, causal
    return layer


def states(queries: int = 5, total: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, 4, queries, 16),
        torch.randn(2, 2, total, 16),
        torch.randn(2, 2, total, 16),
    )


def written_out(
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: Any,
    s_aux: Any,
) -> Tensor:
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -torch.inf)
    elif mask is not None:
        scores = scores + mask.to(dtype)
    weights = scores.exp()
    extra = 0.0 if s_aux is None else s_aux.to(dtype).exp()[None, :, None, None]
    weights = weights / (weights.sum(-1, keepdim=True) + extra)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("kind", ["bool", "additive", "none"])
def test_plain_tensors(softcap: float | None, sink: bool, kind: str) -> None:
    q, k, v = states()
    if kind == "none":
        q = q[:, :, :1]
    s_aux = torch.randn(4) if sink else None
    causal = torch.ones(q.shape[2], 12, dtype=torch.bool).tril(12 - q.shape[2])[None, None]
    mask = None
    if kind == "bool":
        mask = causal.expand(2, 1, -1, -1).clone()
        mask[1, ..., :3] = False
    elif kind == "additive":
        mask = torch.zeros(causal.shape).masked_fill(~causal, -torch.inf)
    out, weights = vq_attention(module(), q, k, v, mask, scaling=0.3, softcap=softcap, s_aux=s_aux)
    exact, plain = (
        written_out(dtype, q, k, v, mask, 0.3, softcap, s_aux)
        for dtype in (torch.float64, torch.float32)
    )
    assert weights is None and out.shape == (2, q.shape[2], 4, 16) and out.is_contiguous()
    allowed = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (out - exact).abs().max() <= allowed


@pytest.mark.parametrize("by", ["module", "argument"])
@pytest.mark.parametrize(("softcap", "sink"), [(None, False), (3.0, False), (None, True)])
def test_without_a_mask_the_layer_decides(softcap: float | None, sink: bool, by: str) -> None:
    q, k, v = states()
    s_aux = torch.randn(4) if sink else None
    causal = torch.ones(5, 12, dtype=torch.bool).tril(7)[None, None]
    options = {"scaling": 0.3, "softcap": softcap, "s_aux": s_aux}
    layer, given = (
        (module(causal=False), {}) if by == "module" else (module(), {"is_causal": False})
    )
    out, _ = vq_attention(layer, q, k, v, None, **options, **given)
    wanted = written_out(torch.float64, q, k, v, None, 0.3, softcap, s_aux)
    assert (out - wanted).abs().max() < 1e-5
    if softcap or sink:  # PyTorch's own attention aligns a causal mask to the first key
        out, _ = vq_attention(module(), q, k, v, None, **options)
        wanted = written_out(torch.float64, q, k, v, causal, 0.3, softcap, s_aux)
        assert (out - wanted).abs().max() < 1e-5


def test_codes_and_fallbacks() -> None:
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    q, k, v = states(40, 40)
    cache = VQCache(config, window=4)
    cache.update(k[:, :, :35], v[:, :, :35], 0)
    key, value = cache.update(k[:, :, 35:], v[:, :, 35:], 0)
    q = q[:, :, 35:]
    mask = torch.ones(5, 40, dtype=torch.bool).tril(35)[None, None]
    coded, _ = vq_attention(module(), q, key, value, mask)
    none, _ = vq_attention(module(), q, key, value, None)
    assert torch.equal(coded, none) and cache.fallbacks == {0: 0}
    # a layer that is not causal sees the tokens to come, with a soft-cap or without
    for softcap in (None, 3.0):
        ahead, _ = vq_attention(module(causal=False), q, key, value, None, softcap=softcap)
        every = torch.ones_like(mask)
        wanted, _ = vq_attention(module(), q, key, value, every, softcap=softcap)
        assert torch.equal(ahead, wanted) and (ahead - coded)[:, 0].abs().max() > 0.01
    assert cache.fallbacks == {0: 0}
    # dropout and a position bias: neither is what the op computes
    dense = key.decode(), value.decode()
    decoded = cache.fallbacks[0]
    bias = {"dropout": 0.0, "position_bias": torch.randn(1, 4, 5, 40)}
    out, _ = vq_attention(module(), q, key, value, None, **bias)
    wanted, _ = AttentionInterface()["sdpa"](module(), q, *dense, None, **bias)
    assert (out - wanted).abs().max() < 1e-2  # the window is that of the first query
    vq_attention(module(), q, key, value, mask, dropout=0.5)
    assert cache.fallbacks[0] == decoded  # one update is decoded once


def test_registered_with_a_mask() -> None:
    attention.register()
    assert AttentionInterface()["vq"] is vq_attention
    make = AttentionMaskInterface()["vq"]
    padding = torch.tensor([[False, True, True, True]])
    mask = make(batch_size=1, q_length=4, kv_length=4, attention_mask=padding)
    assert mask.shape == (1, 1, 4, 4) and not mask[..., 0].any() and mask[0, 0, 3, 1:].all()
