"""A cache in a file: what comes back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig

from hf_vq.cache import VQCache
from hf_vq.errors import VQCacheError, VQFormatError
from hf_vq.formats import digests

Tokens = Callable[..., tuple[Tensor, Tensor]]
Feed = Callable[..., Any]


@pytest.fixture
def saved(config: LlamaConfig, tokens: Tokens, feed: Feed, tmp_path: Path) -> Path:
    cache = VQCache(config, window=8)
    feed(cache, tokens(60), 0, 60)
    cache.save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


@pytest.mark.parametrize("length", [0, 3, 60])
@pytest.mark.parametrize("padded", [False, True])
def test_goes_on_as_if_not_saved(
    config: LlamaConfig, tokens: Tokens, feed: Feed, tmp_path: Path, length: int, padded: bool
) -> None:
    states = tokens(80)
    cache = VQCache(config, "k4v2", sinks=2, window=8, max_cache_len=100)
    if padded and length:
        mask = torch.ones(2, length)
        mask[1, :1] = 0
        cache.expect_prompt(mask)
    if length:
        feed(cache, states, 0, length)
    cache.save(tmp_path / "c.safetensors")
    loaded = VQCache.load(tmp_path / "c.safetensors", config)
    assert repr(loaded) == repr(cache) and loaded.nbytes == cache.nbytes
    for begin, end in pairwise([length, length + 1, length + 2, (length + 80) // 2, 80]):
        a, b = feed(cache, states, begin, end), feed(loaded, states, begin, end)
        assert torch.equal(a[0] + 0, b[0] + 0) and torch.equal(a[1] + 0, b[1] + 0)
    with pytest.raises(VQCacheError, match="max_cache_len=100"):
        feed(loaded, tokens(30), 0, 30)


@pytest.mark.parametrize("quantize_sliding", [False, True])
def test_hybrid(feed: Feed, tmp_path: Path, quantize_sliding: bool) -> None:
    config = Gemma3TextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    states = torch.randn(2, 1, 2, 60, 16).unbind(0)
    cache = VQCache(config, window=4, quantize_sliding=quantize_sliding)
    feed(cache, states, 0, 50)
    cache.save(tmp_path / "c.safetensors")
    loaded = VQCache.load(tmp_path / "c.safetensors", config)
    for index in (0, 1):
        new = [x[:, :, 50:51] for x in states]
        a, b = cache.update(*new, index), loaded.update(*new, index)
        assert torch.equal(a[0] + 0, b[0] + 0) and torch.equal(a[1] + 0, b[1] + 0)
        assert cache.layers[index].get_mask_sizes(3) == loaded.layers[index].get_mask_sizes(3)
    if quantize_sliding:
        shift = lambda d, t: d["layers"][0].update(first_code=40)  # noqa: E731
        rewrite(tmp_path / "c.safetensors", shift)
        with pytest.raises(VQFormatError, match="first_code is 40, expected at most 39"):
            VQCache.load(tmp_path / "c.safetensors", config)
    config.sliding_window = 16
    with pytest.raises(VQFormatError, match="sliding_window is 12, the model has 16"):
        VQCache.load(tmp_path / "c.safetensors", config)
    with pytest.raises(VQFormatError, match="layers"):
        VQCache.load(tmp_path / "c.safetensors", LlamaConfig(num_hidden_layers=2))


def test_an_interrupted_save_leaves_the_old_file(
    config: LlamaConfig, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        VQCache(config).save(saved)
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


def test_a_saved_file_is_like_any_other(config: LlamaConfig, saved: Path) -> None:
    other = saved.with_name("other")
    other.write_text("")
    assert saved.stat().st_mode == other.stat().st_mode
    with pytest.raises(VQCacheError, match=r"absent.*The folder must exist"):
        VQCache(config).save(saved.parent / "absent" / "c")
    other.unlink()
    assert list(saved.parent.iterdir()) == [saved]


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    """Change a file, with digests that are right: what is in it must be looked at too."""
    with safe_open(path, "pt") as file:
        description = json.loads(file.metadata()["hf_vq_cache"])
    tensors = load_file(path)
    change(description, tensors)
    save_file(tensors, path, {"hf_vq_cache": json.dumps(description)})
    digests.record([path])


def cut(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][:, :, :-1].clone()


DAMAGE: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "newer": (lambda d, t: d.update(format_version=4), "upgrade hf_vq"),
    "version text": (lambda d, t: d.update(format_version="1"), "format_version '1'"),
    "unknown scheme": (lambda d, t: d.update(key_scheme="vq9"), "'vq9' is not a scheme"),
    "learned scheme": (
        lambda d, t: d.update(key_scheme="vq2x8r1-channel_group-g0-none"), "learned codebooks"
    ),
    "window text": (lambda d, t: d.update(window="8"), "window is '8'"),
    "window negative": (lambda d, t: d.update(window=-8), "window"),
    "no sinks": (lambda d, t: d.pop("sinks"), "damaged"),
    "sinks huge": (lambda d, t: d.update(sinks=1 << 39), "sinks is 549755813888"),
    "sinks many": (lambda d, t: d.update(sinks=1 << 15), "_sinks is"),
    "capacity beyond int64": (lambda d, t: d.update(max_cache_len=1 << 70), "max_cache_len is"),
    "capacity text": (lambda d, t: d.update(max_cache_len="9"), "max_cache_len is '9'"),
    "capacity none at all": (lambda d, t: d.update(max_cache_len=0), "max_cache_len"),
    "layers number": (lambda d, t: d.update(layers=7), "layers is 7"),
    "layer removed": (lambda d, t: d["layers"].pop(), "1 x vq"),
    "length huge": (lambda d, t: d["layers"][0].update(length=1 << 60), "length is"),
    "length wrong": (lambda d, t: d["layers"][0].update(length=90), "codes cover"),
    "length text": (lambda d, t: d["layers"][0].update(length="60"), "length is '60'"),
    "first code": (lambda d, t: d["layers"][0].update(first_code=5), "first_code is 5"),
    "tail of values": (lambda d, t: t.update({"layers.0.v_tail": t["layers.0.v_tail"].int()}),
                       "v_tail"),
    "frozen wrong": (lambda d, t: d["layers"][0].update(frozen=[1]), "frozen"),
    "start wrong": (lambda d, t: d["layers"][0].update(start=[0]), "start"),
    "codes missing": (lambda d, t: t.pop("layers.1.k_codes"), r"layers.1.k_codes is missing"),
    "codes short": (lambda d, t: cut(t, "layers.0.v_codes"), "layers.0.v_codes"),
    "scale short": (lambda d, t: cut(t, "layers.0.k_scale"), "layers.0.k_scale"),
    "scale NaN": (lambda d, t: t["layers.0.k_scale"].fill_(torch.nan), "NaN"),
    "mean infinite": (lambda d, t: t["layers.0.k_mean"].fill_(torch.inf), "infinity"),
    "tail integer": (
        lambda d, t: t.update({"layers.0.k_tail": t["layers.0.k_tail"].int()}), "_tail"
    ),
    "extra": (lambda d, t: t.update(extra=torch.zeros(1)), "unexpected tensors"),
    "codebook": (lambda d, t: t["codebook.key"].add_(1), "universal codebook"),
    "no codebook": (lambda d, t: t.pop("codebook.value"), "universal codebook"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(config: LlamaConfig, saved: Path, damage: str) -> None:
    change, message = DAMAGE[damage]
    rewrite(saved, change)
    with pytest.raises(VQFormatError, match=message) as caught:
        VQCache.load(saved, config)
    assert str(saved) in str(caught.value)


@pytest.mark.parametrize("length", [0, 60])
def test_a_number_in_a_file_allocates_nothing(
    config: LlamaConfig, tokens: Tokens, feed: Feed, tmp_path: Path, length: int
) -> None:
    """max_cache_len is a limit of a loaded cache; what is held decides about memory."""
    cache, path = VQCache(config, window=8, max_cache_len=80), tmp_path / "c"
    states = tokens(80)
    if length:
        feed(cache, states, 0, length)
    cache.save(path)
    rewrite(path, lambda d, t: d.update(max_cache_len=1 << 36))
    loaded = VQCache.load(path, config)
    feed(loaded, states, length, 80)
    assert all(layer.k.codes.scale.shape[2] <= 512 for layer in loaded.layers)
    if length:
        feed(cache, states, length, 80)
        assert torch.equal(loaded.layers[0].k.codes.rows(), cache.layers[0].k.codes.rows())


def test_hostile_headers(config: LlamaConfig, tmp_path: Path) -> None:
    path = tmp_path / "c"
    for shape in ([0, 1 << 63], [0, 1 << 70], [0, 1 << 61, 1 << 61], [1 << 62, 4]):
        header = {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(VQFormatError, match=str(path)):
            VQCache.load(path, config)
    for text in ("[" * 100_000, '{"format_version": 1' + "0" * 5000 + "}", '{"a": NaN'):
        save_file({"a": torch.zeros(1)}, path, {"hf_vq_cache": text})
        with pytest.raises(VQFormatError, match=str(path)):
            VQCache.load(path, config)


def test_other_files(config: LlamaConfig, saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    for name, data in (("cut", content[: len(content) // 2]), ("text", b"hello"), ("none", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(VQFormatError, match="cannot be read"):
            VQCache.load(tmp_path / name, config)
    with pytest.raises(VQFormatError, match="cannot be read"):
        VQCache.load(tmp_path / "absent", config)
    save_file({"a": torch.zeros(1)}, tmp_path / "plain")
    with pytest.raises(VQFormatError, match="not written by"):
        VQCache.load(tmp_path / "plain", config)


def test_layers_that_cannot_be_saved(tmp_path: Path) -> None:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    with pytest.raises(VQCacheError, match=r"layers.0 is a LinearAttentionLayer"):
        VQCache(config).save(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
