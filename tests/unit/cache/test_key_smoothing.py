"""Layers whose keys are smoothed: the queries of a prompt decide, once, whoever attends."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig

from hf_vq.cache import VQCache, VQCacheLayer, attend, key_means, see_queries
from hf_vq.cache.key_means import Calibrated
from hf_vq.cache.lazy_kv import decoded
from hf_vq.errors import VQCacheError, VQFormatError
from hf_vq.formats import digests
from hf_vq.formats.catalog import KV_SCHEMES, TURBOQUANT_KV_SCHEMES
from hf_vq.ops import kv_append
from hf_vq.ops.layout import to_rows
from hf_vq.transforms.key_smoothing import FEWEST, MOST, key_smoothing, squares
from hf_vq.transforms.smoothing import partners
from tests.fixtures.kv.turning import DIM, HEADS, turning_config

SINKS, WINDOW, SHARE = 4, 8, 2
SMOOTHED = ("u4", "u3", "u2", "k4v2", "nomad-u4")
Prompt = tuple[Tensor, Tensor, Tensor]


def unlike(spread: float = 1.0) -> Tensor:
    """Sizes of channels [1, HEADS, 1, D], alike in a pair."""
    half = (spread * torch.randn(1, HEADS, 1, DIM // 2)).exp()
    return torch.cat([half, half], -1)


def states(count: int, batch: int = 2, sizes: Tensor | None = None) -> Prompt:
    """Queries [B, SHARE HEADS, n, D], keys and values; keys are large where queries are small."""
    sizes = unlike() if sizes is None else sizes
    query = torch.randn(batch, SHARE * HEADS, count, DIM) / sizes.repeat_interleave(SHARE, 1)
    return (
        query,
        torch.randn(batch, HEADS, count, DIM) * sizes,
        torch.randn(batch, HEADS, count, DIM),
    )


def cache_of(config: LlamaConfig | None = None, scheme: str = "u4", **options: Any) -> VQCache:
    return VQCache(config or turning_config(), scheme, **{"window": WINDOW, **options})


def prompt(cache: VQCache, given: Prompt, end: int, sees: bool = True) -> Any:
    """Bring the tokens up to `end`, and show the queries, as attention does."""
    query, *parts = (x[:, :, int(cache.get_seq_length()) : end] for x in given)
    found = cache.update(*parts, 0)
    if sees:
        see_queries(query, found[0])
    return found


def smoothing(cache: VQCache) -> Tensor | None:
    factor: Tensor | None = cache.layers[0].k.smoothing
    return factor


def smoothed(cache: VQCache) -> bool:
    """Whether any head is; factors of 1 change nothing."""
    factor = smoothing(cache)
    return factor is not None and bool((factor != 1).any())


def check_codes(layer: VQCacheLayer, keys: Tensor) -> None:
    """The codes held are those of appending the keys with the layer's means and factors; those of
    sinks are never read."""
    first, coded = layer.first_code, layer.coded
    view = layer._view(layer.k.tail.view(), layer.v.tail.view(), first, 0)
    assert view.num_coded == coded - first > 0 and view.key.smoothing is layer.k.smoothing
    other = view.replace(
        key_codes=torch.zeros_like(view.key.codes), key_scale=torch.zeros_like(view.key.scale)
    )
    kv_append(keys[:, :, first:coded], keys[:, :, :0], other)
    skipped = max(layer.sinks - first, 0)
    live = slice(view.key.first + skipped, view.key.first + view.num_coded)
    assert torch.equal(other.key.scale[:, :, live], view.key.scale[:, :, live])
    bits, layout, count = layer.k.scheme.entry_bits, view.key.layout, view.num_coded - skipped
    held, made = (to_rows(x.key.codes, live.start, count, bits, layout) for x in (view, other))
    assert torch.equal(held, made)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("scheme", SMOOTHED)
def test_factors_and_codes_of_a_prompt(scheme: str, static: bool) -> None:
    """Factors are those of its tokens behind the sinks, and what is decoded is nearer to the
    keys where queries look."""
    given = states(90)
    cache, plain = (cache_of(scheme=scheme, static=static, max_cache_len=120) for _ in range(2))
    prompt(cache, given, 80)
    prompt(plain, given, 80, sees=False)
    layer = cache.layers[0]
    asked, held = (squares(x[:, :, SINKS:80], HEADS) for x in given[:2])
    means = layer.k.mean.square()
    means = means if layer.k.rotary_mean is None else means + layer.k.rotary_mean.square()
    wanted = key_smoothing(asked, held, means, partners(DIM, DIM, "half"))
    assert smoothed(cache) and torch.equal(layer.k.smoothing, wanted)
    assert not smoothed(plain)
    check_codes(layer, given[1])
    for each in (layer, plain.layers[0]):
        for at in range(80, 90):  # later tokens have the same factors
            each.update(*(x[:, :, at : at + 1] for x in given[1:]))
    assert torch.equal(layer.k.smoothing, wanted)
    check_codes(layer, given[1])
    errors = []
    for each in (layer, plain.layers[0]):
        view = each._view(each.k.tail.view(), each.v.tail.view(), 0, 0)
        if static:
            view = view.replace(key_recent=given[1][:, :, 82:], value_recent=given[2][:, :, 82:])
        apart = decoded(view, "key") - given[1]
        errors.append((given[0].unflatten(1, (HEADS, SHARE)) @ apart[:, :, None].mT).norm())
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("count", [SINKS, SINKS + FEWEST - 1, SINKS + FEWEST])
def test_few_tokens_do_not_tell(count: int, static: bool) -> None:
    cache = cache_of(static=static, max_cache_len=80)
    given = states(count)
    prompt(cache, given, count)
    assert smoothed(cache) == (count == SINKS + FEWEST)


def test_a_prompt_within_the_window() -> None:
    """Nothing has codes yet; those that come are smoothed."""
    given, cache = states(60), cache_of(window=40)
    prompt(cache, given, 40)
    factor = smoothing(cache)
    assert smoothed(cache) and cache.layers[0].coded == 0
    for end in range(41, 61):
        prompt(cache, given, end)
    assert smoothing(cache) is factor
    check_codes(cache.layers[0], given[1])


def test_only_the_first_update_decides() -> None:
    given, cache = states(100), cache_of()
    prompt(cache, given, 40)
    factor = smoothing(cache)
    prompt(cache, states(100), 80)
    prompt(cache, states(100), 81)
    assert smoothed(cache) and smoothing(cache) is factor
    late = cache_of()
    keys = prompt(late, given, 40, sees=False)[0]
    prompt(late, given, 70)
    see_queries(given[0][:, :, :40], keys)
    assert not smoothed(late)


ALL = KV_SCHEMES | TURBOQUANT_KV_SCHEMES
OTHERS = [n for n, s in ALL.items() if n not in SMOOTHED and s.key.codebook in
          ("universal", "integers")]  # fmt: skip


@pytest.mark.parametrize("scheme", OTHERS)
def test_schemes_that_are_not_smoothed(scheme: str) -> None:
    cache = VQCache(turning_config(), ALL[scheme], window=WINDOW)
    keys = prompt(cache, states(60), 60)[0]
    assert smoothing(cache) is None and cache.layers[0]._pairs is None
    assert keys not in key_means._asking


@pytest.mark.parametrize("options", [{"no_rope_layers": [0]}, {"qk_rope_head_dim": 8}])
@pytest.mark.parametrize("static", [False, True])
def test_models_that_do_not_say_how_keys_turn(options: dict[str, Any], static: bool) -> None:
    cache = cache_of(turning_config(**options), static=static, max_cache_len=70)
    prompt(cache, states(60), 60)
    assert smoothing(cache) is None


@pytest.mark.parametrize("static", [False, True])
def test_calibrated(static: bool) -> None:
    """The prompt decides nothing, so that chunks of it are coded like all of it at once."""
    given, mean = states(60), torch.randn(HEADS, DIM)
    factors = torch.exp(torch.randn(HEADS, DIM) / 2)
    options = {"static": static, "max_cache_len": 100}
    cache = cache_of(key_means=[Calibrated(mean, smoothing=factors)], **options)
    for _ in range(2 if static else 1):
        cache.reset()
        prompt(cache, given, 60)
        assert torch.equal(cache.layers[0].k.mean[0, :, 0], mean)
        assert torch.equal(cache.layers[0].k.smoothing[1, :, 0], factors)
        check_codes(cache.layers[0], given[1])
    without = cache_of(key_means=[Calibrated(mean)], **options)
    prompt(without, given, 60)
    assert smoothing(without) is None
    with pytest.raises(VQCacheError, match=r"key_smoothings of layer 0 .* \[2, 8\]"):
        wrong = cache_of(key_means=[Calibrated(mean, smoothing=torch.ones(2, 8))])
        prompt(wrong, given, 60)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("count", [20, 24, 60])
def test_static_is_growing(count: int, padded: bool) -> None:
    """Also a second prompt in the same memory; `reset` leaves ones, in the same tensor."""
    caches = [cache_of(static=static, max_cache_len=100) for static in (False, True)]
    memory = None
    for _ in range(2):
        given, start = states(100), torch.tensor([0, 9 if padded else 0])
        for cache in caches:
            if padded:
                cache.expect_prompt((torch.arange(count) >= start[:, None]).long())
            prompt(cache, given, count)
            for end in range(count + 1, 71):
                prompt(cache, given, end)
        grown, static = (cache.layers[0] for cache in caches)
        assert smoothed(caches[0]) and torch.equal(grown.k.smoothing, static.k.smoothing)
        assert torch.equal(grown.k.codes.rows(), static.k.codes.rows()[:, :, : grown.coded])
        assert static.static.key.smoothing is static.k.smoothing
        assert memory in (None, static.k.smoothing.data_ptr())
        memory = static.k.smoothing.data_ptr()
        query = torch.randn(2, SHARE * HEADS, 1, DIM)
        shown = (torch.arange(71) >= start[:, None])[:, None, None]
        last = [cache.update(*(x[:, :, 70:71] for x in given[1:]), 0) for cache in caches]
        one = attend(query, *last[0], mask=shown)
        other = attend(query, *last[1], mask=torch.nn.functional.pad(shown, (0, 29)))
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        fresh = cache_of()
        if padded:
            fresh.expect_prompt((torch.arange(count) >= start[:, None]).long())
        prompt(fresh, given, count)
        assert torch.equal(smoothing(fresh), static.k.smoothing)
        for cache in caches:
            cache.reset()
        assert static.k.smoothing.data_ptr() == memory
        assert torch.equal(static.k.smoothing, torch.ones_like(static.k.smoothing))


def test_rows_that_begin_later_decide_alone() -> None:
    """As they would in a batch of one; a row that is too short is left alone."""
    start, sizes = [0, 12, 50], [unlike() for _ in range(3)]
    each = [states(60, 1, size) for size in sizes]
    given = tuple(torch.cat(parts) for parts in zip(*each, strict=True))
    cache = cache_of()
    cache.expect_prompt((torch.arange(60) >= torch.tensor(start)[:, None]).long())
    prompt(cache, given, 60)
    found = smoothing(cache)
    assert found is not None and torch.equal(found[2], torch.ones_like(found[2]))
    for row, begin in enumerate(start[:2]):
        alone = cache_of()
        prompt(alone, tuple(x[row : row + 1, :, begin:] for x in given), 60 - begin)
        torch.testing.assert_close(found[row : row + 1], smoothing(alone), rtol=1e-3, atol=0)
    assert not torch.allclose(found[0], found[1], rtol=0.1)
    check_codes(cache.layers[0], given[1])


def test_rows_and_ends() -> None:
    """Beams, repeats, selection, a copy, a move, a crop."""
    given, cache = states(90, 3), cache_of()
    given = tuple(torch.cat([x[:1], states(90, 2)[i]]) for i, x in enumerate(given))
    prompt(cache, given, 70)
    before, layer = smoothing(cache), cache.layers[0]
    assert before is not None
    assert before.nbytes == cache.nbytes - _without(cache)
    cache.crop(-5)
    prompt(cache, given, 80)
    cache.reorder_cache(order := torch.tensor([2, 0, 0]))
    assert torch.equal(layer.k.smoothing, before[order])
    given = tuple(x[order] for x in given)
    prompt(cache, given, 90)
    check_codes(layer, given[1])
    copied = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    layer.offload()
    layer.prefetch()
    assert torch.equal(layer.k.smoothing, before[order][torch.tensor([0, 1])])
    check_codes(layer, given[1][torch.tensor([0, 1])])
    assert torch.equal(smoothing(copied), before[order])
    assert torch.equal(smoothing(pickle.loads(pickle.dumps(copied))), before[order])
    static = cache_of(static=True, max_cache_len=100)
    prompt(static, states(90, 3), 70)
    before = smoothing(static).clone()
    static.reorder_cache(order)
    assert torch.equal(smoothing(static), before[order])
    cache.reset()
    assert not cache.layers[0].is_initialized


def _without(cache: VQCache) -> int:
    other = copy.deepcopy(cache)
    other.layers[0].k.smoothing = None
    return other.nbytes


def test_sliding_layers() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = Gemma3TextConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=HEADS, head_dim=DIM, sliding_window=30,
        layer_types=["sliding_attention"],
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
    )  # fmt: skip
    given, cache = states(120), VQCache(config, window=WINDOW, quantize_sliding=True)
    prompt(cache, given, 70)
    assert smoothed(cache) and cache.layers[0].first_code > 30
    check_codes(cache.layers[0], given[1])
    for end in range(71, 121):
        prompt(cache, given, end)
    check_codes(cache.layers[0], given[1])


@pytest.mark.parametrize("sees", [True, False])
def test_files(tmp_path: Path, sees: bool) -> None:
    given, cache = states(100), cache_of()
    prompt(cache, given, 60, sees)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    with safe_open(path, "pt") as file:
        version = json.loads(file.metadata()["hf_vq_cache"])["format_version"]
    assert version == (3 if sees else 2 if cache.layers[0].k.rotary_mean is not None else 1)
    loaded = VQCache.load(path, turning_config())
    assert smoothed(loaded) == sees and loaded.nbytes == cache.nbytes
    for each in (cache, loaded):
        prompt(each, given, 80)
        prompt(each, given, 100)
    assert torch.equal(cache.layers[0].keys + 0, loaded.layers[0].keys + 0)
    check_codes(loaded.layers[0], given[1])


def test_the_version_of_other_files(tmp_path: Path) -> None:
    """Of keys that stand still, and of a static cache that nobody showed queries."""
    path = tmp_path / "cache.safetensors"
    for config, static in ((turning_config(no_rope_layers=[0]), False), (turning_config(), True)):
        cache = cache_of(config, static=static, max_cache_len=100)
        prompt(cache, states(60), 60, sees=not static)
        cache.save(path)
        with safe_open(path, "pt") as file:
            version = json.loads(file.metadata()["hf_vq_cache"])["format_version"]
        assert version < 3


def rewrite(path: Path, other: Path, change: dict[str, Tensor]) -> None:
    with safe_open(path, "pt") as file:
        description = json.loads(file.metadata()["hf_vq_cache"])
    parts = {**load_file(path), **change}
    kept = {"hf_vq_cache": json.dumps({**description, "digests": digests.ALGORITHM})}
    save_file(parts, other, {**kept, "format": "pt", **digests.room(parts)})
    digests.record([other])


@pytest.mark.parametrize("scheme", ["u4", "turboquant-4-prod", "qserve-kv4"])
def test_damaged_files_are_refused(tmp_path: Path, scheme: str) -> None:
    cache = VQCache(
        turning_config(), ALL[scheme], window=WINDOW, key_means=[torch.randn(HEADS, DIM)]
    )
    prompt(cache, states(60), 60)
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    cache.save(path)
    name, right = "layers.0.k_smoothing", torch.ones(2, HEADS, 1, DIM)
    wrong = [right[:1].clone(), right.half(), 0 * right, -right, right / 0, 1.1 * MOST * right]
    wrong += [right] * (scheme != "u4")  # codes of these are never of smoothed keys
    for tensor in wrong:
        rewrite(path, other, {name: tensor.contiguous()})
        with pytest.raises(VQFormatError, match="k_smoothing"):
            VQCache.load(other, turning_config())


def test_queries_of_an_earlier_prompt_decide_nothing() -> None:
    cache, first, second = cache_of(static=True, max_cache_len=100), states(60), states(60)
    keys = prompt(cache, first, 60, sees=False)[0]
    cache.reset()
    prompt(cache, second, 60, sees=False)
    codes = cache.layers[0].k.codes.data.clone()
    see_queries(first[0], keys)
    assert torch.equal(cache.layers[0].k.codes.data, codes) and not smoothed(cache)


def test_keys_of_a_prompt_can_be_saved(tmp_path: Path) -> None:
    """Before attention has seen them."""
    given, cache = states(60), cache_of()
    keys = prompt(cache, given, 60, sees=False)[0]
    torch.save(keys, tmp_path / "keys")
    assert torch.equal(torch.load(tmp_path / "keys"), pickle.loads(pickle.dumps(keys)))
    see_queries(given[0], keys)
    assert smoothed(cache) and keys not in key_means._asking


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    cache = cache_of()
    prompt(cache, states(60), 60)
    cache.save(tmp_path / "a.safetensors")
    empty = {
        name: part[:0] for name, part in load_file(tmp_path / "a.safetensors").items()
        if name.startswith("layers.0.") and part.ndim == 4
    }  # fmt: skip
    rewrite(tmp_path / "a.safetensors", tmp_path / "b.safetensors", empty)
    with contextlib.suppress(VQFormatError):
        VQCache.load(tmp_path / "b.safetensors", turning_config())


def test_keys_do_not_keep_the_layer() -> None:
    given, cache = states(60), cache_of()
    keys = prompt(cache, given, 60, sees=False)[0]
    layer = weakref.ref(cache.layers[0])
    del cache
    gc.collect()
    assert layer() is None
    see_queries(given[0], keys)
    assert keys not in key_means._asking


def test_other_queries_are_not_seen() -> None:
    given = states(60)
    for query in (given[0][:1], given[0][:, :, 1:], given[0][..., :16]):
        cache = cache_of()
        see_queries(query, prompt(cache, given, 60, sees=False)[0])
        assert not smoothed(cache)
    cache = cache_of()
    see_queries(given[0], prompt(cache, given, 60, sees=False)[0].clone())
    assert not smoothed(cache)


def test_keys_that_were_asked_for_before_are_refused() -> None:
    """Lazy keys read codes, which are made again."""
    given, cache = states(60), cache_of()
    keys = prompt(cache, given, 60, sees=False)[0]
    before = cache.layers[0].keys
    see_queries(given[0], keys)
    with pytest.raises(VQCacheError, match="before the prompt's attention"):
        before + 0
    assert (cache.layers[0].keys + 0).isfinite().all()


@pytest.mark.parametrize("mode", ["inference", "autocast", "gradients"])
@pytest.mark.parametrize("static", [False, True])
def test_modes_do_not_matter(mode: str, static: bool) -> None:
    given = states(70)
    cache, other = (cache_of(static=static, max_cache_len=100) for _ in range(2))
    prompt(cache, given, 60)
    modes: dict[str, Callable[[], Any]] = {
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "gradients": torch.enable_grad,
    }
    graded = tuple(x.clone().requires_grad_(mode == "gradients") for x in given)
    with modes[mode]():
        prompt(other, graded, 60)
    factor = smoothing(other)
    assert factor is not None and torch.equal(factor, smoothing(cache))
    assert not factor.requires_grad and not factor.is_inference()
    assert torch.equal(other.layers[0].k.codes.rows(), cache.layers[0].k.codes.rows())
