"""Flash attention over a `VQCache`: what it means, and when codes are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
)
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_vq import VQCache
from hf_vq.hf import attention_choice
from tests.fixtures.attention_modules import choice, filled, layer
from tests.fixtures.generation import build, greedy, prompt

pytestmark = pytest.mark.usefixtures("reference_kernels")

CONFIG = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


HOME = eager_attention_forward.__module__


def flash(calls: list[Any]) -> Any:
    """Flash attention [B, Q, H, D] in PyTorch, with padding [B, T]."""

    def run(query: Any, key: Any, value: Any, mask: Any, query_length: int, **kwargs: Any) -> Any:
        calls.append(mask)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        length, window = k.shape[2], kwargs.get("sliding_window")
        at = torch.arange(length)
        newest = at[length - query_length :, None]
        seen = (at <= newest) if kwargs["is_causal"] else torch.ones(1, 1, dtype=torch.bool)
        if window:
            seen = seen & ((newest - at).abs() < window)
        if mask is not None:
            seen = seen & mask[:, None, None].bool()
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=kwargs["softmax_scale"], enable_gqa=True
        )
        return out.nan_to_num().transpose(1, 2).contiguous()

    return run


@pytest.mark.parametrize("name", ["gqa", "gemma3"])
@pytest.mark.parametrize("padded", [False, True])
def test_flash_attention(monkeypatch: pytest.MonkeyPatch, name: str, padded: bool) -> None:
    from transformers.integrations import flash_attention

    calls: list[Any] = []
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", flash(calls))
    model = build(name, "sdpa").bfloat16()
    ids = prompt(30, batch=2)
    options: dict[str, Any] = {}
    if padded:
        ids[0, :5] = 0
        options["attention_mask"] = (ids != 0).long()
    make = lambda: VQCache(model.config, window=4, quantize_sliding=True)  # noqa: E731
    wanted = greedy(model, ids, make(), **options)
    for config in (model.config, model.model.config):
        config._attn_implementation_internal = "flash_attention_2"
    cache = make()
    out = greedy(model, ids, cache, **options)
    assert set(cache.fallbacks.values()) == {0}
    assert len(calls) == 2  # the prompt, of both layers
    assert (out == wanted).float().mean() > 0.9  # bfloat16 sums in another order
    # Several tokens at once, which see themselves causally.
    logits = []
    with torch.no_grad():
        for kind in ("sdpa", "flash_attention_2"):
            model.config._attn_implementation_internal = kind
            cache = make()
            mask = options.get("attention_mask", torch.ones_like(ids))
            cache.expect_prompt(mask[:, :20])
            model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
            logits.append(model(ids[:, 20:], attention_mask=mask, past_key_values=cache).logits)
            assert set(cache.fallbacks.values()) == {0}
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].abs().max()


@pytest.mark.parametrize(
    "change", [{"dtype": torch.float32}, {"cu_seq_lens_q": 1}, {"position_bias": 1}]
)
def test_flash_attention_that_does_something_else(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    seen: list[Any] = []
    run = choice("flash_attention_2")
    monkeypatch.setattr(
        attention_choice, "flash_attention_forward", lambda *args, **kwargs: seen.append(kwargs)
    )
    change = dict(change)
    _, query, key, value = filled(dtype=change.pop("dtype", torch.bfloat16))
    run(layer(), query, key, value, None, scaling=0.25, **change)
    assert len(seen) == 1 and change.items() <= seen[0].items()


def test_masks_of_flash() -> None:
    _, query, key, _ = filled(6, 3, batch=2)
    mask = attention_choice._mask_of_flash
    assert mask(query, key, None, None, True) is None is mask(query, key, None, 9, True)
    padding = torch.ones(2, 9)
    padding[0, :2] = 0
    causal = torch.ones(3, 9, dtype=torch.bool).tril(6)
    assert torch.equal(
        mask(query, key, padding, None, True), causal[None, None] & padding[:, None, None].bool()
    )
    near = causal & ~causal.tril(2)
    assert torch.equal(mask(query, key, None, 4, True), near[None, None])
    both = torch.ones(3, 9, dtype=torch.bool).triu(3)
    assert torch.equal(mask(query, key, None, 4, False), both[None, None])


def test_layers_share_a_mask_of_flash() -> None:
    _, query, key, _ = filled(6, 3, batch=2)
    mask, padding = attention_choice._mask_of_flash, torch.ones(2, 9)
    first = mask(query, key, padding, None, True)
    assert mask(query, key, padding, None, True) is first
    assert mask(query, key, padding, 4, True) is not first
    padding[0, :2] = 0
    changed = mask(query, key, padding, None, True)
    assert changed is not first and not changed[0, :, :, :2].any()
    with torch.inference_mode():
        padding = torch.ones(2, 9)
        mask(query, key, padding, None, True)
        padding[1, :3] = 0
        assert not mask(query, key, padding, None, True)[1, :, :, :3].any()
