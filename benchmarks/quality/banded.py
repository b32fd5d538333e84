"""Teacher-forced attention over a quantized KV cache with a recent window, without approximation.

While text is generated, query t sees keys and values t - W + 1 ... t in the model's dtype, the
first `sinks` ones too, and everything between quantized. One pass over a whole sequence must give
every query its own window: scores are computed against both the exact and the quantized keys, and
a band selects.

    score[t, s] = <q_t, k_s>   if s < sinks or s > t - W     else  <q_t, Q(k_s)>
    out[t]      = sum_s softmax(score)[t, s] (v_s or Q(v_s), by the same rule)

W = 0 quantizes the query's own token too: the worst case, and the one that tells schemes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vq.errors import VQError

NAME = "hf_vq_bench_banded"
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux")  # arguments of Transformers' attention
_QUERIES = 128  # queries per block: bounds the memory of the scores

RoundTrip = Callable[[Tensor, int], Tensor]
"""Keys or values [kv heads, tokens, head_dim] float32 of a layer (by its number) -> the same,
stored and read back."""

Scores = Callable[[Tensor, int], Tensor]
"""Scaled queries [kv heads, queries per kv head, Q, head_dim] -> scores [..., end] of the first
`end` stored keys."""


def dot_products(k_stored: Tensor, layer: int) -> Scores:
    """Scores by definition, of stored keys [kv heads, tokens, head_dim]."""
    return lambda q, end: torch.einsum("hgqd,hkd->hgqk", q, k_stored[:, :end])


@dataclass(frozen=True)
class Simulation:
    """Simulated storage of keys and values, with tokens that stay unquantized.

    Args:
        keys: quantize and dequantize keys.
        values: quantize and dequantize values.
        window: number of recent tokens that stay unquantized.
        sinks: number of first tokens that stay unquantized.
        scores: scores of a query against stored keys; gets both and the layer's number.
    """

    keys: RoundTrip
    values: RoundTrip
    window: int
    sinks: int = 4
    scores: Callable[[Tensor, int], Scores] = dot_products


_active: list[Simulation] = []


@contextmanager
def simulate(model: Any, simulation: Simulation) -> Iterator[None]:
    """Run `model` with the simulated cache inside the `with` block; batches of one sequence.

    Raises:
        VQError: inside, when a layer's attention is more than causal softmax attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    # Causal by construction: no mask is needed, and an unregistered name would be an error later.
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _active.append(simulation)
    try:
        yield
    finally:
        _active.pop()
        model.set_attn_implementation(before)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of Transformers: query [1, heads, T, D], key [1, kv heads, T, D]."""
    unknown = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown or len(query) != 1 or key.shape[2] != query.shape[2]:
        what = ", ".join(unknown) or "several sequences, or its own cache"
        raise VQError(f"the simulated cache cannot be used with this model's attention: {what}.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, kv_heads, tokens = query.shape[1], key.shape[1], query.shape[2]
    q = (query[0] * scale).float().reshape(kv_heads, heads // kv_heads, tokens, -1)
    out = banded_attention(q, key[0].float(), value[0].float(), _active[-1], module.layer_idx)
    out = out.reshape(1, heads, tokens, -1).transpose(1, 2).contiguous()
    return out.to(query.dtype), None


def banded_attention(
    q: Tensor, k: Tensor, v: Tensor, simulation: Simulation, layer: int = 0
) -> Tensor:
    """Causal attention by the rule of the module.

    Args:
        q: scaled queries [kv heads, queries per kv head, T, D].
        k: exact keys [kv heads, T, D]; `v`: exact values of the same shape.
        simulation: how keys and values are stored, and the window.
        layer: its number.

    Returns:
        [kv heads, queries per kv head, T, D].
    """
    window, sinks = simulation.window, simulation.sinks
    stored_scores = simulation.scores(simulation.keys(k, layer), layer)
    v_stored = simulation.values(v, layer).clone()
    v_stored[:, :sinks] = v[:, :sinks]
    tokens = q.shape[2]
    blocks = []
    for start in range(0, tokens, _QUERIES):
        end = min(start + _QUERIES, tokens)
        first = max(0, start - window + 1) if window else end  # oldest token in any query's window
        position = torch.arange(start, end, device=q.device)[:, None]
        in_window = torch.arange(first, end, device=q.device)[None] > position - window
        future = torch.arange(end, device=q.device)[None] > position
        block = q[:, :, start:end]
        scores = stored_scores(block, end)
        scores[..., :sinks] = torch.einsum("hgqd,hkd->hgqk", block, k[:, : min(sinks, end)])
        exact = torch.einsum("hgqd,hkd->hgqk", block, k[:, first:end])
        scores[..., first:] = torch.where(in_window, exact, scores[..., first:])
        p = scores.masked_fill_(future, -torch.inf).softmax(-1)
        out = torch.einsum("hgqk,hkd->hgqd", p, v_stored[:, :end])
        difference = (v - v_stored)[:, first:end]
        out += torch.einsum("hgqk,hkd->hgqd", p[..., first:] * in_window, difference)
        blocks.append(out)
    return torch.cat(blocks, 2)


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same without quantization, for tests; shapes as in `banded_attention`."""
    repeats = q.shape[1]
    q = q.flatten(0, 1)[None]
    k, v = (x.repeat_interleave(repeats, 0)[None] for x in (k, v))
    out: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    return out[0].unflatten(0, (-1, repeats))
