"""Caches with the schemes of TurboQuant's paper, with scales that no kernel computes."""

import pytest
import torch

from hf_vq.cache import VQCache, attend


@pytest.mark.parametrize("limit", [None, 60])
@pytest.mark.parametrize("name", ["turboquant-4", "turboquant-3-nc", "turboquant-3-prod"])
def test_a_cache_attends_to_them(config, tokens, feed, tmp_path, name, limit):
    """Attention over the codes is that over what they stand for; a saved cache reads the same."""
    states = tokens(50)
    cache = VQCache(config, scheme=name, sinks=2, window=8, max_cache_len=limit)
    feed(cache, states, 0, 30)
    key, value = feed(cache, states, 30, 31)
    query = torch.randn(2, 4, 1, 16)
    keys, values = (side.decode().repeat_interleave(2, 1) for side in (key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    assert torch.allclose(attend(query, key, value), wanted, atol=1e-5)
    coded = slice(2, 22)
    assert (key.decode()[:, :, coded] - states[0][:, :, coded]).abs().max() > 1e-3
    cache.save(tmp_path / "cache")
    loaded = VQCache.load(tmp_path / "cache", config)
    again = feed(loaded, states, 31, 32)
    for one, other in zip(feed(cache, states, 31, 32), again, strict=True):
        assert torch.equal(one.decode(), other.decode())
