"""What a layer keeps, and that it keeps it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_vq.cache import LazyKV, VQCache, attend
from hf_vq.errors import VQCacheError, VQSchemeError
from hf_vq.formats.catalog import KV_SCHEMES, KVScheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.ops import decode_kv, encode_kv

RESIDUAL = KVScheme(*[VQScheme(1, 4, 2, scale_group=0)] * 2)
Tokens = Callable[..., tuple[Tensor, Tensor]]
Feed = Callable[..., Any]


def held(cache: VQCache) -> list[Tensor]:
    """Everything the first layer holds."""
    layer = cache.layers[0]
    stores = [layer.k, layer.v]
    tapes = [x.clone() for s in stores for x in (s.codes.rows(), s.codes.scales(), s.tail.view())]
    return [*tapes, layer.k.sinks.clone(), layer.k.mean.clone(), layer.v.sinks.clone()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_what_is_kept(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    cache = VQCache(config, window=8, sinks=3)
    keys, values = tokens(70)
    first = feed(cache, (keys, values), 0, 40)
    assert first[0].data_ptr() == keys.data_ptr()  # the first chunk attends to its own floats
    key, value = feed(cache, (keys, values), 40, 70)
    assert isinstance(key, LazyKV) and key.shape == keys.shape and key.dtype == keys.dtype
    assert isinstance(value, LazyKV) and value.device == values.device

    layer = cache.layers[0]
    assert (layer.length, layer.coded) == (70, 62) and layer.tail_start <= layer.coded
    mean = keys[:, :, 3:40].mean(2, keepdim=True)
    assert torch.allclose(layer.k.mean, mean, atol=1e-6)
    scheme = KV_SCHEMES["u4"]
    codes, scale = encode_kv(
        keys[:, :, :62] - layer.k.mean, universal_tensor(scheme.key), scheme.key
    )
    assert torch.equal(layer.k.codes.rows(), codes) and torch.equal(layer.k.codes.scales(), scale)
    assert torch.equal(layer.k.sinks, keys[:, :, :3])
    assert torch.equal(layer.k.tail.view(), keys[:, :, layer.tail_start :])

    dense = decode_kv(codes, scale, universal_tensor(scheme.key), scheme.key, 16) + layer.k.mean
    dense = torch.cat([keys[:, :, :3], dense[:, :, 3:33], keys[:, :, 33:]], 2)
    assert torch.equal(key + 0, dense)  # window of the first of the 30 fresh tokens: 33..40
    assert cache.fallbacks == {0: 0, 1: 1}


@pytest.mark.parametrize("sizes", [[1] * 100, [40, 1, 1, 30, 28], [3, 90, 7]])
def test_codes_do_not_depend_on_chunks(
    config: LlamaConfig, tokens: Tokens, feed: Feed, sizes: list[int]
) -> None:
    states = tokens(100)
    means = [states[0][0, :, :20].mean(1)] * 2
    parts = VQCache(config, window=8, key_means=means)
    before: list[Tensor] = []
    position = 0
    for size in sizes:
        feed(parts, states, position, position + size)
        position += size
        now = parts.layers[0].k.codes.rows()
        if before:
            assert torch.equal(now[:, :, : before[-1].shape[2]], before[-1])  # never rewritten
        before.append(now.clone())
    centred = states[0] - means[0][None, :, None], states[1]
    scheme = KV_SCHEMES["u4"].key
    for x, store in zip(centred, (parts.layers[0].k, parts.layers[0].v), strict=True):
        codes, scale = encode_kv(x[:, :, :92], universal_tensor(scheme), scheme)
        assert torch.equal(store.codes.rows(), codes) and torch.equal(store.codes.scales(), scale)
    assert torch.equal(parts.layers[0].v.sinks, states[1][:, :, :4])
    assert torch.equal(parts.layers[0].v.tail.view(), states[1][:, :, 60:])


def test_mean_of_a_short_prompt(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    keys, values = tokens(40)
    cache = VQCache(config, window=8, sinks=3)
    feed(cache, (keys, values), 0, 11)
    assert cache.layers[0].coded == 3 and cache.layers[0].k.mean.abs().max() == 0  # only sinks
    feed(cache, (keys, values), 11, 12)
    mean = keys[:, :, 3:7].mean(2, keepdim=True)
    assert torch.allclose(cache.layers[0].k.mean, mean, atol=1e-6)
    feed(cache, (keys, values), 12, 40)
    assert torch.allclose(cache.layers[0].k.mean, mean, atol=1e-6)


def test_candidates_do_not_enter_the_mean(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    keys, values = tokens(40)
    plain = VQCache(config, window=4)
    feed(plain, (keys, values), 0, 30)
    assisted = VQCache(config, window=4)
    assisted.expect_prompt(length=30)
    assisted.activate_past_recording()
    feed(assisted, (keys, values), 0, 40)
    assisted.crop(-10)
    a, b = held(plain), held(assisted)
    assert same([x[:, :, :26] for x in b[:2]], a[:2]) and same(a[2:3], b[2:3])
    assert same([x[:, :, :26] for x in b[3:5]], a[3:5]) and same(a[5:], b[5:])


def test_left_padding_shifts_a_row(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    keys, values = tokens(40)
    padding = [0, 17]
    for first in (34, 20, 5):  # both rows longer than a window, one of them, none
        cache = VQCache(config, window=8)
        mask = torch.ones(2, first)
        mask[1, : padding[1]] = 0
        cache.expect_prompt(mask)
        bounds = [0, first, *range(first + 1, 41)]
        for begin, end in pairwise(bounds):
            feed(cache, (keys, values), begin, end)
        for row, pad in enumerate(padding):
            if first <= pad:
                continue
            alone = VQCache(config, window=8)
            states = keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:]
            bounds = [0, first - pad, *range(first + 1 - pad, 41 - pad)]
            for begin, end in pairwise(bounds):
                feed(alone, states, begin, end)
            skip = pad + alone.layers[0].sinks  # codes of sinks are never read
            a, b = cache.layers[0], alone.layers[0]
            assert torch.equal(a.k.sinks[row], b.k.sinks[0])
            assert torch.allclose(a.k.mean[row], b.k.mean[0], atol=1e-6)
            assert torch.equal(
                a.v.codes.rows()[row, :, skip:], b.v.codes.rows()[0, :, skip - pad :]
            )
            assert torch.equal(
                a.k.codes.rows()[row, :, skip:], b.k.codes.rows()[0, :, skip - pad :]
            )


@pytest.mark.parametrize("remove", [1, 9, 32, 33, 75])
@pytest.mark.parametrize("record", [False, True])
def test_crop_is_as_if_never_added(
    config: LlamaConfig, tokens: Tokens, feed: Feed, remove: int, record: bool
) -> None:
    states = tokens(120)
    cropped, plain = VQCache(config, window=8), VQCache(config, window=8)
    feed(plain, states, 0, 20)
    feed(cropped, states, 0, 20)
    if record:
        cropped.activate_past_recording()
    wrong = tuple(x.flip(2) for x in states)
    feed(plain, states, 20, 25)
    feed(cropped, states, 20, 25)
    feed(cropped, wrong, 25, 25 + remove)
    cropped.crop(-remove)
    assert cropped.get_seq_length() == 25
    feed(plain, states, 25, 60)
    feed(cropped, states, 25, 60)
    a, b = held(plain), held(cropped)
    assert same([a[0], a[1], a[3], a[4], *a[6:]], [b[0], b[1], b[3], b[4], *b[6:]])


def test_deep_crop_reads_codes(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    states = tokens(120)
    cache = VQCache(config, window=8)
    feed(cache, states, 0, 120)
    cache.crop(-60)
    assert cache.get_seq_length() == 60 and cache.layers[0].coded == 60
    key, _ = feed(cache, states, 60, 61)
    error = (key + 0 - states[0][:, :, :61]).square().sum() / states[0].var() / key.numel()
    assert 0 < error < 0.05
    cache.crop(-61)
    assert cache.get_seq_length() == 0 and not cache.layers[0].is_initialized
    feed(cache, states, 0, 3)
    cache.crop(torch.tensor(2))  # the length to keep, counted as before Transformers 5.20
    assert cache.get_seq_length() == 2 and type(cache.get_seq_length()) is int


def test_a_handle_does_not_outlive_its_tokens(
    config: LlamaConfig, tokens: Tokens, feed: Feed
) -> None:
    states = tokens(60)
    cache = VQCache(config, window=8)
    feed(cache, states, 0, 40)
    key, _ = feed(cache, states, 40, 50)
    older = cache.layers[1].keys
    feed(cache, states, 50, 60)
    assert (key + 0).shape[2] == 50  # a later update leaves it whole
    cache.crop(-20)
    with pytest.raises(VQCacheError, match=r"crop\(\) or reset\(\)"):
        older + 0


def test_batch_elements_are_reordered_repeated_and_selected(
    config: LlamaConfig, tokens: Tokens, feed: Feed
) -> None:
    keys, values = tokens(60, batch=3)
    for padded in (False, True):
        cache = VQCache(config, window=8)
        if padded:
            mask = torch.ones(3, 50)
            mask[1, :10] = 0
            mask[2, :48] = 0
            cache.expect_prompt(mask)
        feed(cache, (keys, values), 0, 50)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 5]))
        rows = torch.tensor([2, 0])
        wanted = VQCache(config, window=8)
        if padded:
            wanted.expect_prompt(mask[rows])
        feed(wanted, (keys[rows], values[rows]), 0, 50)
        for begin in range(50, 60):
            states = keys[rows], values[rows]
            a, b = feed(cache, states, begin, begin + 1), feed(wanted, states, begin, begin + 1)
            assert torch.equal(a[0] + 0, b[0] + 0) and torch.equal(a[1] + 0, b[1] + 0)
        assert same(held(cache), held(wanted))


def test_bytes(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    cache = VQCache(config, window=8, sinks=4)
    assert cache.nbytes == 0 and cache.bits_per_element == 0.0
    feed(cache, tokens(100), 0, 100)
    rows = 2 * 2  # batch x heads
    codes, scales = 92 * 8, 92 * 2  # bytes of one row's codes and scales
    floats = (40 + 4) * 16 * 4  # tail (window + slack) and sinks
    means = 16 * 4
    layer = rows * (2 * (codes + scales + floats) + means)
    assert cache.nbytes == 2 * layer
    assert cache.bits_per_element == (8 * 8 + 16) / 16
    assert cache.overall_bits_per_element == 8 * layer / (rows * 100 * 16 * 2)
    assert cache.allocated_nbytes >= cache.nbytes
    assert "100 tokens" in repr(cache) and "u4" in repr(cache)


@pytest.mark.parametrize(
    ("scheme", "bits"), [("u4", 4.125), ("u3", 3.125), ("u2", 2.125), ("k4v2", 3.125)]
)
def test_nominal_bits(config: LlamaConfig, feed: Feed, scheme: str, bits: float) -> None:
    cache = VQCache(config, scheme)
    states = torch.randn(2, 1, 2, 10, 128).unbind(0)
    feed(cache, states, 0, 10)
    assert cache.bits_per_element == bits


def test_growing_is_amortised(config: LlamaConfig, tokens: Tokens, layouts: str) -> None:
    cache = VQCache(config, window=0)
    states = tokens(100, batch=1)
    moves, address = 0, 0
    for position in range(100):
        cache.update(*(x[:, :, position : position + 1] for x in states), 0)
        now = cache.layers[0].k.codes.data.data_ptr()
        moves, address = moves + (now != address), now
    assert moves < 14
    room = 1.5 * 100 if layouts == "rows" else 256
    assert cache.layers[0].k.codes.scale.shape[2] <= room


def test_max_cache_len(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    cache = VQCache(config, max_cache_len=50, window=4)
    states = tokens(51)
    feed(cache, states, 0, 10)
    address = cache.layers[0].k.codes.data.data_ptr()
    feed(cache, states, 10, 50)
    assert cache.layers[0].k.codes.data.data_ptr() == address and cache.get_max_length() == 50
    with pytest.raises(VQCacheError, match="max_cache_len=50"):
        feed(cache, states, 50, 51)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "mse"), [("u4", 0.0077), ("u3", 0.0297), ("u2", 0.0973)])
def test_error_is_that_of_the_theory(scheme: str, mse: float) -> None:
    """Relative error of Gaussian rows. With e the MSE of the codebook at its optimal scale, the
    unbiased scale 1 / (1 - e) makes it e / (1 - e). Rows have a fixed norm, which lowers it by
    O(1 / D): D is large here. A table is within 1 % of its e; N rows have a standard error."""
    part, dim, count = KV_SCHEMES[scheme].key, 4096, 128
    x = torch.randn(count, dim)
    codes, scale = encode_kv(x, universal_tensor(part), part)
    decoded = decode_kv(codes, scale, universal_tensor(part), part, dim)
    error = (decoded - x).square().sum(1) / x.square().sum(1)
    allowed = 4 * error.std() / count**0.5 + 0.01 * mse / (1 - mse) ** 2
    assert abs(error.mean() - mse / (1 - mse)) < allowed
    along = (decoded * x).sum(1) / x.square().sum(1)
    assert (along - 1).abs().max() < 2**-10  # unbiased: <x, decoded> = |x|^2 up to the fp16 scale


def test_sliding_layers(feed: Feed) -> None:
    config = Gemma3TextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    assert type(VQCache(config).layers[0]) is DynamicSlidingWindowLayer
    cache = VQCache(config, window=4, quantize_sliding=True)
    layer, plain = cache.layers[0], DynamicSlidingWindowLayer(sliding_window=12)
    assert cache.is_sliding == [True, False]
    states = torch.randn(2, 1, 2, 60, 16).unbind(0)
    position = 0
    for size in (5, 1, 6, 1, 1, 20, 1, 3):
        assert layer.get_mask_sizes(size) == plain.get_mask_sizes(size)
        part = [x[:, :, position : position + size] for x in states]
        got, wanted = layer.update(*part), plain.update(*part)
        position += size
        assert got[0].shape == wanted[0].shape and layer.get_seq_length() == position
        error = (got[0] - wanted[0]).norm(dim=-1) / wanted[0].norm(dim=-1)
        assert error.max() < 0.4
        exact = min(4 - 1 + size, position)
        assert error[..., -exact:].max() == 0
        assert layer.held <= 11
    with pytest.raises(VQCacheError, match="activate_past_recording"):
        layer.crop(-1)
    layer.activate_past_recording()
    plain.activate_past_recording()
    for each in (layer, plain):
        each.update(*(x[:, :, position : position + 4] for x in states))
        each.crop(-3)
    assert layer.get_mask_sizes(1) == plain.get_mask_sizes(1) and layer.held <= 11
    part = [x[:, :, position + 1 : position + 2] for x in states]
    got, wanted = layer.update(*part), plain.update(*part)
    assert ((got[0] - wanted[0]).norm(dim=-1) / wanted[0].norm(dim=-1)).max() < 0.4


def test_offload(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    cache = VQCache(config, window=4, offloading=True)
    cache.expect_prompt(torch.tensor([[0] + [1] * 49, [1] * 50]))
    feed(cache, tokens(60), 0, 50)
    layer = cache.layers[0]
    layer.device = torch.device("meta")  # stands for a GPU
    layer.prefetch()
    assert {x.device.type for x in held(cache)} == {"meta"}
    assert layer._start_tensor.device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):  # it does try to copy to the CPU
        layer.offload()


def test_a_copy_goes_its_own_way(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    states = tokens(80)
    cache = VQCache(config, window=4)
    feed(cache, states, 0, 50)
    before = held(cache)
    copied = copy.deepcopy(cache)
    feed(copied, tuple(x.flip(2) for x in states), 50, 80)
    assert same(held(cache), before) and copied.get_seq_length() == 80
    feed(cache, states, 50, 80)
    assert cache.fallbacks == {0: 0, 1: 0}


def test_reset(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    cache = VQCache(config)
    cache.expect_prompt(torch.tensor([[0, 1], [1, 1]]))
    feed(cache, tokens(2), 0, 2)
    assert cache.layers[0]._start == [1, 0]
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    feed(cache, tokens(5, batch=3), 0, 5)
    assert cache.layers[0]._start is None and cache.get_seq_length() == 5


def test_handle_follows_repeat_kv(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    states = tokens(40)
    cache = VQCache(config, window=4)
    feed(cache, states, 0, 30)
    key, value = feed(cache, states, 30, 40)
    expanded = [
        x[:, :, None, :, :].expand(2, 2, 3, 40, 16).reshape(2, 6, 40, 16) for x in (key, value)
    ]
    assert all(isinstance(x, LazyKV) for x in expanded) and cache.fallbacks == {0: 0, 1: 0}
    query = torch.randn(2, 6, 10, 16)
    mask = torch.ones(10, 40, dtype=torch.bool).tril(30)[None, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = sdpa(query, *expanded, attn_mask=mask)
    assert torch.equal(out, attend(query, key, value))
    assert torch.equal(sdpa(query, key, value, attn_mask=mask, enable_gqa=True), out)
    assert cache.fallbacks == {0: 0, 1: 0}
    dense = [x.decode() for x in expanded]
    assert torch.equal(dense[0], (key + 0).repeat_interleave(3, 1)) and cache.fallbacks[1] == 2
    # without a mask PyTorch looks ahead, with is_causal it aligns to the start: both decode
    for options in ({}, {"is_causal": True}):
        wanted = sdpa(query, *dense, **options)
        assert torch.equal(sdpa(query, *expanded, **options), wanted)


def test_gradients_reach_the_query(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    states = tokens(30)
    cache = VQCache(config, window=4)
    feed(cache, states, 0, 29)
    key, value = feed(cache, states, 29, 30)
    query = torch.randn(2, 2, 1, 16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    assert query.grad is not None and cache.fallbacks[1] == 2


def test_strict(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    states = tokens(30)
    cache = VQCache(config, strict=True)
    feed(cache, states, 0, 29)
    key, _ = feed(cache, states, 29, 30)
    with pytest.raises(VQCacheError, match="layer 1 of the cache would be decoded"):
        key @ torch.randn(16, 1)
    assert "LazyKV" in repr(key)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scheme": "u5"}, VQSchemeError, "Known: u4, u3, u2, k4v2"),
        ({"scheme": 4}, VQSchemeError, "unknown KV cache scheme 4"),
        ({"scheme": "cq-4"}, VQCacheError, "learned codebooks.*hf-vq calibrate --kv cq-4"),
        ({"scheme": "nomad-2"}, VQCacheError, "VQCache.from_pretrained"),
        ({"scheme": RESIDUAL}, VQCacheError, "residual stages.*Use u4"),
        ({"codebooks": {}}, VQCacheError, "must be KVCodebooks; got dict"),
        ({"window": -1}, VQCacheError, "window"),
        ({"window": 1.5}, VQCacheError, "window"),
        ({"sinks": -1}, VQCacheError, "sinks"),
        ({"sinks": True}, VQCacheError, "sinks"),
        ({"max_cache_len": 0}, VQCacheError, "max_cache_len"),
        ({"max_cache_len": "9"}, VQCacheError, "max_cache_len"),
        ({"strict": 1}, VQCacheError, "strict"),
        ({"key_means": [None]}, VQCacheError, "2 layers"),
        ({"key_means": [1, 2]}, VQCacheError, "key_means"),
    ],
)
def test_bad_arguments(
    config: LlamaConfig, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        VQCache(config, **options)


def test_bad_updates(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    with pytest.raises(VQCacheError, match="model's config"):
        VQCache("u4")  # type: ignore[arg-type]
    cache = VQCache(config)
    keys, values = tokens(10)
    feed(cache, (keys, values), 0, 10)
    for bad, message in (
        ((keys[:1], values[:1]), "another batch"),
        ((keys[:, :1], values[:, :1]), "another batch"),
        ((keys[..., :8], values), "another batch"),
        ((keys, values[:, :, :5]), "agree in the first three"),
        ((keys[0], values[0]), r"must be \[batch"),
        ((keys.half(), values.half()), "torch.float16 on cpu after torch.float32"),
        ((keys, values.half()), "values torch.float16 on cpu after torch.float32"),
        ((keys, values.int()), "values torch.int32"),
        ((keys.to("meta"), values.to("meta")), "meta after"),
    ):
        with pytest.raises(VQCacheError, match=message):
            cache.update(*bad, 0)
    with pytest.raises(VQCacheError, match="has 2 layers, the model has a layer 2"):
        cache.update(keys, values, 2)
    other = VQCache(config)
    other.expect_prompt(torch.tensor([[0, 1], [1, 1], [1, 1]]))
    with pytest.raises(VQCacheError, match=r"3 rows .* brings 2"):
        other.update(keys, values, 0)
    assert cache.get_seq_length() == 10
    with pytest.raises(VQCacheError, match="head_dim divisible by 4"):
        VQCache(config, "u2").update(torch.randn(1, 1, 3, 6), torch.randn(1, 1, 3, 6), 0)
    with pytest.raises(VQCacheError, match="key_means of layer 0"):
        VQCache(config, key_means=[torch.zeros(2, 8)] * 2).update(keys, values, 0)
    with pytest.raises(VQCacheError, match="attention mask"):
        VQCache(config).expect_prompt(torch.ones(2, 1, 3, 3))


def test_transformers_keeps_its_own_layers(config: LlamaConfig) -> None:
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

    VQCache(config)
    assert DYNAMIC_LAYER_TYPE_MAPPING["full_attention"] is DynamicLayer
