"""Layers whose keys turn with the position: their codes hold what changes, and nothing else."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig

from hf_vq import dispatch
from hf_vq.cache import KVCodebooks, VQCache, attend, key_means, rotary
from hf_vq.cache.key_means import Calibrated
from hf_vq.errors import VQBackendError, VQCacheError, VQFormatError
from hf_vq.formats import digests
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.ops import kv_append
from hf_vq.ops.rotary_mean import rotated
from tests.fixtures.kv.turning import BIAS, DIM, HEADS, INV_FREQ, turning_config, turning_tokens

SMALL = 0.15
"""Mean error of a number of a key: 4 bits of a noise of 1, and floats of the window. With one mean
the codes of a bias of 30 give three times as much, and more."""


def held(cache: VQCache) -> Tensor:
    """All keys as the next query sees them."""
    keys: Tensor = cache.layers[0].keys + 0
    return keys


def feed(cache: VQCache, states: tuple[Tensor, ...], *ends: int) -> Any:
    result = None
    for begin, end in pairwise((int(cache.get_seq_length()), *ends)):
        result = cache.update(*(x[:, :, begin:end] for x in states[:2]), 0)
    return result


def error(found: Tensor, keys: Tensor) -> float:
    return float((found - keys).abs().mean())


@pytest.mark.parametrize("sizes", [(100,), (60, 61, 62, 100), tuple(range(1, 101)), (20, 100)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_codes_of_a_strong_bias(sizes: tuple[int, ...], interleaved: bool) -> None:
    states = turning_tokens(100, interleaved=interleaved)
    cache = VQCache(turning_config(), window=40 if sizes[0] == 20 else 32)
    feed(cache, states, *sizes)
    layer = cache.layers[0]
    assert layer.k.rotary_mean is not None and layer._rotary.interleaved == interleaved
    assert error(held(cache), states[0]) < SMALL
    standing = VQCache(turning_config(no_rope_layers=[0]), window=32)
    feed(standing, states, *sizes)
    assert standing.layers[0].k.rotary_mean is None and error(held(standing), states[0]) > 3 * SMALL


def test_keys_that_stand_still_have_no_rotary_mean() -> None:
    """A static cache on a CPU keeps zeros, for what was compiled for keys that turn."""
    keys = 3 * torch.randn(2, HEADS, 1, DIM) + torch.randn(2, HEADS, 300, DIM)
    growing, static = (
        VQCache(turning_config(), max_cache_len=400, static=static) for static in (False, True)
    )
    for cache in (growing, static):
        cache.update(keys, keys, 0)
    assert growing.layers[0].k.rotary_mean is None
    kept = static.layers[0].static.key_rotary_mean
    assert kept is static.layers[0].k.rotary_mean and not kept.any()


def test_left_padding_turns_each_row_in_its_own_frame() -> None:
    start = torch.tensor([0, 7])
    keys, values, mean = turning_tokens(120, start=start)
    mask = (torch.arange(80) >= start[:, None]).long()
    cache = VQCache(turning_config(), window=16)
    cache.expect_prompt(mask)
    feed(cache, (keys, values), 80, 120)
    assert error(held(cache)[:, :, 7:], keys[:, :, 7:]) < SMALL
    alone = VQCache(turning_config(), window=16)
    row = tuple(x[1:, :, 7:] for x in (keys, values))
    feed(alone, row, 73, 113)
    turned = rotated(alone.layers[0].k.rotary_mean, INV_FREQ, False, torch.tensor([-7]))
    torch.testing.assert_close(cache.layers[0].k.rotary_mean[1:], turned, atol=1e-3, rtol=1e-4)
    calibrated = VQCache(
        turning_config(), window=16, key_means=[Calibrated(0 * mean[0, :, 0], mean[0, :, 0])]
    )
    calibrated.expect_prompt(mask)
    feed(calibrated, (keys, values), 80, 120)
    assert error(held(calibrated)[:, :, 7:], keys[:, :, 7:]) < SMALL


def test_calibrated_means_do_not_depend_on_chunks() -> None:
    *states, mean = turning_tokens(100)
    means = [Calibrated(torch.randn(HEADS, DIM), mean[0, :, 0])]
    codes = []
    for sizes in ((100,), (3, 90, 100), tuple(range(1, 101))):
        cache = VQCache(turning_config(), window=8, key_means=means)
        feed(cache, tuple(states), *sizes)
        codes.append((cache.layers[0].k.codes.rows(), cache.layers[0].k.codes.scales()))
    for rows, scales in codes[1:]:
        assert torch.equal(rows, codes[0][0]) and torch.equal(scales, codes[0][1])


def test_sliding_layers_count_positions_from_the_first_token() -> None:
    sizes = {"full_attention": 1e6, "sliding_attention": 1e4}
    config = Gemma3TextConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=HEADS, head_dim=DIM, sliding_window=30,
        layer_types=["sliding_attention"],
        rope_parameters={k: {"rope_type": "default", "rope_theta": v} for k, v in sizes.items()},
    )  # fmt: skip
    states = turning_tokens(150)
    cache = VQCache(config, window=8, quantize_sliding=True)
    feed(cache, states, 70)
    for end in range(71, 151):
        feed(cache, states, end)
    layer = cache.layers[0]
    assert layer.k.rotary_mean is not None and layer.first_code > 100
    assert error(held(cache), states[0][:, :, layer.first_code :]) < SMALL


def test_rows_and_ends() -> None:
    """Crop, beams, repeats, selection, a move to another place and back, a copy."""
    states = turning_tokens(100, batch=3)
    cache = VQCache(turning_config(), window=8)
    feed(cache, states, 90)
    before = held(cache)
    cache.crop(-20)
    feed(cache, states, 90)
    torch.testing.assert_close(held(cache)[:, :, :62], before[:, :, :62], atol=0, rtol=0)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    feed(cache, tuple(x[order] for x in states[:2]), 100)
    assert error(held(cache), states[0][order]) < SMALL
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert error(held(cache), states[0][torch.tensor([2, 0])]) < SMALL
    cache.reset()
    assert not cache.layers[0].is_initialized


@pytest.mark.parametrize("start", [None, [0, 5]])
@pytest.mark.parametrize("prompt", [20, 60])
def test_static_is_growing(prompt: int, start: list[int] | None) -> None:
    """Eager prompts, then the ops that compiled steps run; a second prompt in the same memory."""
    caches = [
        VQCache(turning_config(), window=16, max_cache_len=140, static=static)
        for static in (False, True)
    ]
    for _ in range(2):
        first = None if start is None else torch.tensor(start)
        keys, values, _ = turning_tokens(120, start=first)
        if start is not None:
            mask = (torch.arange(prompt) >= torch.tensor(start)[:, None]).long()
            for cache in caches:
                cache.expect_prompt(mask)
        for cache in caches:
            feed(cache, (keys, values), prompt)
        grown, static = (cache.layers[0] for cache in caches)
        for at in range(prompt, 120):
            token = keys[:, :, at : at + 1], values[:, :, at : at + 1]
            grown.update(*token)
            kv_append(*token, static.static)
            static.stale = True
        assert int(static.static.cache_seqlens) == 120 and static.length == 120
        assert grown.k.rotary_mean is not None
        assert torch.equal(grown.k.rotary_mean, static.k.rotary_mean)
        assert torch.equal(grown.k.codes.rows(), static.k.codes.rows()[:, :, :104])
        begin = max(start or [0])
        assert error(held(caches[0])[:, :, begin:], keys[:, :, begin:]) < SMALL
        last = [cache.update(keys[:, :, -1:], values[:, :, -1:], 0) for cache in caches]
        query = torch.randn(2, 4, 1, DIM)
        mask = None
        if start is not None:
            mask = (torch.arange(121) >= torch.tensor(start)[:, None])[:, None, None]
        wide = None if mask is None else torch.nn.functional.pad(mask, (0, 19))
        one = attend(query, *last[0], mask=mask)
        other = attend(query, *last[1], mask=wide)
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        for cache in caches:
            cache.reset()


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU decides as a GPU does whether keys turn."""
    monkeypatch.setitem(rotary.LEAST, "cpu", rotary.LEAST["cuda"])


@pytest.mark.parametrize("prompt", [8, 24, 70])
@pytest.mark.parametrize("biases", [(3.0, 3.0), (3.0, BIAS, 3.0, BIAS), (BIAS, 3.0)])
@pytest.mark.usefixtures("as_a_gpu")
def test_on_a_gpu_a_strong_bias_decides(prompt: int, biases: tuple[float, ...]) -> None:
    """Also for the next prompt in the same memory. A static layer that turned keeps its mean, which
    is 0 then, so that nothing is compiled again."""
    caches = [
        VQCache(turning_config(), window=32, max_cache_len=120, static=static)
        for static in (False, True)
    ]
    for number, bias in enumerate(biases):
        states = turning_tokens(100, bias=bias)
        for cache in caches:
            feed(cache, states, prompt, *range(prompt + 1, 101))
        grown, static = (cache.layers[0] for cache in caches)
        for layer in (grown, static):
            turns = layer.k.rotary_mean is not None and bool(layer.k.rotary_mean.any())
            assert turns == (bias == BIAS)
        assert (static.static.key_rotary_mean is not None) == (BIAS in biases[: number + 1])
        assert torch.equal(grown.k.codes.rows(), static.k.codes.rows()[:, :, :68])
        assert error(held(caches[0]), states[0]) < (SMALL if bias == BIAS else 4 * SMALL)
        for cache in caches:
            cache.reset()


@pytest.mark.parametrize("prompt", [7, 8])
@pytest.mark.usefixtures("as_a_gpu")
def test_on_a_gpu_a_static_layer_may_turn_if_a_prompt_does_not_tell(prompt: int) -> None:
    """4 sinks, then 4 tokens that tell; compiled steps cannot ask for memory later."""
    keys, values, _ = turning_tokens(60, bias=3.0)
    cache = VQCache(turning_config(), window=32, max_cache_len=120, static=True)
    feed(cache, (keys, values), prompt)
    assert (cache.layers[0].static.key_rotary_mean is None) == (prompt == 8)


@pytest.mark.usefixtures("as_a_gpu")
def test_on_a_gpu_a_short_row_does_not_decide() -> None:
    start = torch.tensor([0, 18])
    for bias in (3.0, BIAS):
        keys, values, _ = turning_tokens(60, start=start, bias=bias)
        cache = VQCache(turning_config(), window=32, max_cache_len=120, static=True)
        cache.expect_prompt((torch.arange(24) >= start[:, None]).long())
        feed(cache, (keys, values), 24)
        assert (cache.layers[0].static.key_rotary_mean is not None) == (bias == BIAS)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.usefixtures("as_a_gpu")
def test_no_key_turns_without_a_kernel_for_it(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(problem: Any) -> Any:
        if problem.rotary and raises:
            raise VQBackendError("HF_VQ_BACKEND")
        return SimpleNamespace(name="slow") if problem.rotary else dispatch.select(problem)

    monkeypatch.setattr(key_means, "select", refusing)
    cache = VQCache(turning_config(), window=32)
    feed(cache, turning_tokens(100), 100)
    assert cache.layers[0].k.rotary_mean is None


def test_other_devices_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "LEAST", {})
    cache = VQCache(turning_config(), window=32)
    feed(cache, turning_tokens(100), 100)
    assert cache.layers[0].k.rotary_mean is None and cache.layers[0]._rotary is None


@pytest.mark.parametrize("calibrated", [False, True])
def test_files(tmp_path: Path, calibrated: bool) -> None:
    *states, mean = turning_tokens(100)
    options: dict[str, Any] = {"window": 8}
    if calibrated:
        known = [0 * mean[0, :, 0]]
        options["codebooks"] = KVCodebooks(
            KV_SCHEMES["u4"], [None], [None], known, None, [mean[0, :, 0]]
        )
    cache = VQCache(turning_config(), **options)
    feed(cache, tuple(states), 60)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    loaded = VQCache.load(path, turning_config())
    for each in (cache, loaded):
        feed(each, tuple(states), 80, 100)
    assert torch.equal(held(cache), held(loaded)) and loaded.nbytes == cache.nbytes


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    cache = VQCache(turning_config(), window=8)
    feed(cache, turning_tokens(60), 60)
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    cache.save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    description = json.loads(metadata["hf_vq_cache"])
    assert description["format_version"] == 2
    tensors = load_file(path)
    mean, inv_freq = "layers.0.k_rotary_mean", "layers.0.k_inv_freq"
    changes: list[tuple[dict[str, Any], str]] = [
        ({inv_freq: torch.ones(DIM)}, "k_inv_freq"),
        ({inv_freq: torch.ones(0)}, "k_inv_freq"),
        ({inv_freq: torch.full((4,), torch.inf)}, "NaN or infinity"),
        ({inv_freq: None}, "k_inv_freq is missing"),
        ({mean: tensors[mean][:, :1].clone()}, "k_rotary_mean"),
        ({mean: None}, "unexpected tensors"),
        ({inv_freq: tensors[inv_freq][:-1].clone()}, "which do not turn"),
    ]
    for change, text in changes:
        parts = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        new = {**description, "digests": digests.ALGORITHM}
        save_file(
            parts, other,
            {"hf_vq_cache": json.dumps(new), "format": "pt", **digests.room(parts)},
        )  # fmt: skip
        digests.record([other])
        with pytest.raises(VQFormatError, match=text):
            VQCache.load(other, turning_config())
    state = {**description["layers"][0], "rotary_interleaved": 3}
    new = {**description, "layers": [state]}
    save_file(
        tensors, other, {"hf_vq_cache": json.dumps(new), "format": "pt", **digests.room(tensors)}
    )
    digests.record([other])
    with pytest.raises(VQFormatError, match="rotary_interleaved"):
        VQCache.load(other, turning_config())


def test_codebooks_in_a_file(tmp_path: Path) -> None:
    scheme, mean = KV_SCHEMES["u4"], torch.randn(HEADS, DIM)
    books = KVCodebooks(scheme, [None], [None], [mean], None, [2 * mean], True)
    books.save(tmp_path / "books")
    loaded = KVCodebooks.load(tmp_path / "books")
    known = loaded.means[0]
    assert known is not None and known.rotary_mean is not None and known.interleaved
    assert torch.equal(known.mean, mean) and torch.equal(known.rotary_mean, 2 * mean)
    for wrong in (mean[:1], mean.half(), mean / 0):
        with pytest.raises(VQFormatError, match="rotary mean"):
            KVCodebooks(scheme, [None], [None], [mean], None, [wrong])
    with pytest.raises(VQFormatError, match="must be none"):
        KVCodebooks(scheme, [None], [None], [None], None, [mean])
    half = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    for other in (turning_config(no_rope_layers=[0]), turning_config(rope_parameters=half)):
        cache = VQCache(other, codebooks=books)
        with pytest.raises(VQCacheError, match="another model"):
            feed(cache, turning_tokens(9), 9)
