"""Keys and values that codes cannot hold: huge ones, and those that are not finite."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from hf_vq.cache import VQCache
from hf_vq.cache.codebooks import needs_codebooks
from hf_vq.errors import VQCacheError
from hf_vq.formats.catalog import KV_SCHEMES

Tokens = Callable[..., tuple[Tensor, Tensor]]
Feed = Callable[..., Any]

CODED = [name for name in KV_SCHEMES if not needs_codebooks(KV_SCHEMES[name])]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", CODED)
def test_finite_keys_and_values_give_finite_attention(
    config: LlamaConfig, feed: Feed, scheme: str, dtype: torch.dtype
) -> None:
    """Of any size: scales saturate. Layers that see huge rows say so once, on a CPU."""
    largest = torch.finfo(dtype).max
    for size in (3e4, 6e4, 65504.0, 1e6, 1e20, 1e38, largest):
        if size > largest:
            continue
        for states in (torch.randn(2, 1, 2, 60, 16), torch.randn(2, 1, 2, 60, 16).sign()):
            keys, values = (states.clamp(-1, 1) * size).to(dtype).unbind(0)
            cache = VQCache(config, scheme, sinks=0, window=4)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                feed(cache, (keys, values), 0, 50)
                k, v = feed(cache, (keys, values), 50, 60)
            stores = cache.layers[0].k, cache.layers[0].v
            assert all(store.codes.scales().isfinite().all() for store in stores)
            assert (k + 0).isfinite().all() and (v + 0).isfinite().all()
            query = (torch.randn(1, 2, 3, 16) / size).to(dtype)
            attention = torch.nn.functional.scaled_dot_product_attention
            dense = attention(query, keys, values).isfinite().all()  # sums of 3e38 are not
            assert attention(query, k, v).isfinite().all() or not dense, size
            assert dense or size > 1e37


@pytest.mark.slow
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize(
    ("value", "says"), [(torch.nan, "NaN or infinity"), (-torch.inf, "NaN or infinity"),
                        (1e9, "beyond 65504")]
)  # fmt: skip
@pytest.mark.parametrize("single", [False, True])
def test_a_row_without_a_right_code_is_named_once(
    config: LlamaConfig, tokens: Tokens, feed: Feed, side: str, value: float, says: str,
    single: bool,
) -> None:  # fmt: skip
    states = tokens(100)
    states[side == "values"][1, 1, 20] = value
    # The mean of keys is finite, but huge because of one: so are the others without it.
    where = "head 1, token" if (side, value) == ("keys", 1e9) else "head 1, token 20, row 1"
    cache = VQCache(config, window=8)
    with pytest.warns(RuntimeWarning, match=f"{side} of layer 0 .*{says}.*{where}"):
        feed(cache, states, 0, 10 if single else 60)
        for at in range(10, 100) if single else ():
            feed(cache, states, at, at + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(cache, tokens(30), 0, 30)


def test_a_row_that_is_not_finite_spares_the_others(
    config: LlamaConfig, tokens: Tokens, feed: Feed, tmp_path: Path
) -> None:
    """Not even the mean of its head's keys is lost; what a mask hides does no harm."""
    keys, values = tokens(60)
    clean = VQCache(config, window=8)
    feed(clean, (keys, values), 0, 60)
    hostile = keys.clone()
    hostile[0, 0, 6, 3], hostile[1, 1, 7] = torch.inf, torch.nan
    cache = VQCache(config, window=8)
    with pytest.warns(RuntimeWarning, match="head 0, token 6, row 0"):
        feed(cache, (hostile, values), 0, 60)
    scales = cache.layers[0].k.codes.scales()[..., 0]
    lost = (~scales.isfinite()).nonzero().tolist()
    assert lost == [[0, 0, 6], [1, 1, 7]]
    k, v = feed(cache, (hostile, values), 59, 60)
    mask = torch.ones(2, 1, 1, 61, dtype=torch.bool)
    mask[..., 6:8] = False
    query = torch.randn(2, 2, 1, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, k, v, attn_mask=mask)
    assert out.isfinite().all()
    with pytest.raises(VQCacheError, match=r"layers.0.k_scale holds NaN.* head 0 at 6 of row 0"):
        cache.save(tmp_path / "c")
