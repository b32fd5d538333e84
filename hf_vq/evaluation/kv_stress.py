"""Two stress tests of a KV cache: its worst layer, and copying over a long distance. A mean over a
text hides both.

Worst layer: rounding the keys k changes the attention logits <q, k>. The test correlates the logits
of each query with the exact ones, over the keys that every cache holds as codes. It takes the mean
over the queries and heads of a layer, and reports the smallest of all layers.

Copying: small models follow no instructions, so a passkey test does not work. A row of random
tokens is in the text, and again at its end. A model that copies predicts the second occurrence
better because of the first one. The score is the log-probability of the second occurrence:

    gain = log p(second | first is there) - log p(second | first is not)
    recall = gain with the cache / gain without
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import VQError
from .score import model_forward

SINKS = 4
NEWEST = 132  # tokens that one of the caches may hold exactly
QUERIES = 64
SECRET = 32  # random tokens; the first CUE of their second occurrence are not scored
CUE = 4
DEPTHS = (0.1, 0.5, 0.9)
CHUNK = 4
SHORTEST = 256  # tokens of a sequence
_NAME = "hf_vq_bench_recorded"


@torch.no_grad()
def attention_states(model: Any, ids: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Queries [B, heads, T, D], keys and values [B, kv heads, T, D] of each layer, after RoPE."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def recorded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any):  # type: ignore
        found[module.layer_idx] = (query, key, value)
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    AttentionInterface.register(_NAME, recorded)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        model(ids.to(model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return found


@torch.no_grad()
def logit_correlation(
    states: dict[int, tuple[Tensor, Tensor, Tensor]], new_cache: Callable[[], Any]
) -> tuple[float, int]:
    """The least correlation of a layer's attention logits with the exact ones, and that layer.

    Args:
        states: of `attention_states`, of more than NEWEST + QUERIES + SINKS tokens.
        new_cache: makes an empty cache.
    """
    cache = new_cache()
    for layer, (_, k, v) in states.items():
        cache.update(k[:, :, :-1], v[:, :, :-1], layer)
    each = {}
    for layer, (q, k, v) in states.items():
        stored = cache.update(k[:, :, -1:], v[:, :, -1:], layer)[0] * 1.0  # decodes a lazy tensor
        if stored.shape[2] != k.shape[2]:
            continue  # a sliding window: its old keys are gone
        old = slice(SINKS, k.shape[2] - NEWEST)
        exact, coded = (_logits(q[:, :, -QUERIES:], keys[:, :, old]) for keys in (k, stored))
        each[layer] = _correlation(exact, coded).mean().item()
    if not each:
        raise VQError("every layer has a sliding window shorter than the context.")
    worst = min(each, key=lambda layer: each[layer])
    return each[worst], worst


def _logits(q: Tensor, k: Tensor) -> Tensor:
    q = q.float().unflatten(1, (k.shape[1], -1))
    return torch.einsum("bhgqd,bhkd->bhgqk", q, k.float())


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    x, y = (z - z.mean(-1, keepdim=True) for z in (x, y))
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)).clamp(min=1e-30)


class CopyProbe:
    """Random tokens to be copied from several depths of a text.

    Args:
        model: the model; its log-probabilities without a cache are computed here.
        sequences: token ids [sequences, T] of the text; each gives one row for each depth.
        depths: of the first occurrence: 0 = just after the sinks, 1 = just before what a cache may
            hold exactly.
    """

    def __init__(
        self, model: Any, sequences: Tensor, depths: Sequence[float] = DEPTHS, seed: int = 0
    ) -> None:
        self.model, self.depths = model, depths
        count, length = sequences.shape
        generator = torch.Generator().manual_seed(seed)
        known = sequences.unique()
        secrets = known[torch.randint(len(known), (count, SECRET), generator=generator)]
        without = torch.cat([sequences[:, :-SECRET], secrets], 1)
        room = length - 2 * SECRET - NEWEST - SINKS
        rows = []
        for depth in depths:
            start = SINKS + int(depth * room)
            row = without.clone()
            row[:, start : start + SECRET] = secrets
            rows.append(row)
        self._rows = torch.stack(rows)
        self._prompt = length - SECRET
        self.without = self._score(without, None).mean(-1)  # [sequences]
        exact = self._score(self._rows.flatten(0, 1), None).mean(-1)
        self.exact = exact.unflatten(0, (len(depths), count))

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return int(self._rows.shape[-1])

    def run(self, new_cache: Callable[[], Any]) -> list[dict[str, float | None]]:
        """Measure the recall through a cache, by depth.

        Returns:
            For each depth: `gain` and `gain_exact` in nats a token, and `recall`, their ratio; None
            where the model itself copies nothing (its gain is within 3 standard errors of 0).
        """
        found = []
        for row, exact, depth in zip(self._rows, self.exact, self.depths, strict=True):
            gains = exact - self.without
            gain = (self._score(row, new_cache).mean(-1) - self.without).mean().item()
            base = gains.mean().item()
            copies = base > 3 * gains.std().item() / math.sqrt(len(gains))
            found.append(
                {
                    "depth": depth,
                    "gain": gain,
                    "gain_exact": base,
                    "recall": gain / base if copies else None,
                }
            )
        return found

    @torch.no_grad()
    def _score(self, rows: Tensor, new_cache: Callable[[], Any] | None) -> Tensor:
        """Log-probabilities [rows, SECRET - CUE] of the second occurrence after its cue."""
        forward = model_forward(self.model, new_cache, prompt=self._prompt, chunk=CHUNK)
        parts = []
        for some in rows.split(4):
            log_p = forward(some)[:, -(SECRET - CUE) :].log_softmax(-1)
            targets = some[:, -(SECRET - CUE) :, None].to(log_p.device)
            parts.append(log_p.gather(-1, targets)[..., 0].cpu())
        return torch.cat(parts)
