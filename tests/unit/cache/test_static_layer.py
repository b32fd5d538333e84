"""A static layer, and its two ops, against the layer that grows: its specification."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.cache_utils import StaticSlidingWindowLayer

from hf_vq.cache import KVCodebooks, VQCache, VQStaticLayer, attend
from hf_vq.cache.layer import SLACK
from hf_vq.errors import VQCacheError
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import KVCacheView, kv_append, kv_attention
from hf_vq.ops.kv import flatten
from hf_vq.ops.layout import to_rows

Tokens = Callable[..., tuple[Tensor, Tensor]]
Feed = Callable[..., Any]
CAPACITY = 90


def pair(config: LlamaConfig, scheme: str = "u4", **options: Any) -> list[VQCache]:
    """The same cache twice: one that grows, one that is static."""
    both = KV_SCHEMES[scheme]
    if both.key.codebook != "universal":
        books = [torch.randn(kv_codebook_spec(both.key, 2, 16).shape).half() for _ in range(4)]
        options["codebooks"] = KVCodebooks(both, books[:2], books[2:], [None, None])
    options.setdefault("window", 8)
    return [
        VQCache(config, scheme, max_cache_len=CAPACITY, static=static, **options)
        for static in (False, True)
    ]


def mask_for(start: list[int] | None, length: int, queries: int, columns: int) -> Tensor | None:
    """Causal, without the padding: bool [B, 1, queries, columns]."""
    if start is None:
        return None
    mask = torch.ones(queries, columns, dtype=torch.bool).tril(length - queries)
    return mask & (torch.arange(columns) >= torch.tensor(start)[:, None])[:, None, None]


def same_state(grown: VQCache, static: VQCache) -> None:
    """All codes, floats that will be read and means are equal, bit by bit."""
    for a, b in zip(grown.coded_layers, static.coded_layers, strict=True):
        assert isinstance(b, VQStaticLayer) and a.length == b.length == int(b.static.cache_seqlens)
        coded = max(a.length - a.window, 0)
        for x, y in ((a.k, b.k), (a.v, b.v)):
            assert torch.equal(x.codes.rows()[:, :, :coded], y.codes.rows()[:, :, :coded])
            assert torch.equal(x.codes.scales()[:, :, :coded], y.codes.scales()[:, :, :coded])
            near = min(a.window, a.length)
            assert torch.equal(x.tail.view()[:, :, -near:], y.tail.view()[:, :, -near:])
            assert torch.equal(x.sinks, y.sinks)
            assert x.mean is None or torch.equal(x.mean, y.mean)
        kept = b.static.key_mean_known
        assert kept is None or kept[:, 0].tolist() == [*a._frozen] * (len(kept) // len(a._frozen))


def poison(layer: VQStaticLayer) -> None:
    """Put into the memory what must not be read."""
    static = layer.static
    for tensor in (static.key.codes, static.value.codes):
        tensor.random_(256)
    for tensor in (static.key.scale, static.value.scale, static.key.recent, static.value.recent):
        tensor.fill_(torch.nan)


def rows_of(layer: VQStaticLayer, count: int) -> Tensor:
    """Codes of the first keys, as the ops see them."""
    static = layer.static
    return to_rows(static.key.codes, 0, count, layer.scheme.key.entry_bits, static.key.layout)


def compiled_steps(layer: VQStaticLayer, keys: Tensor, values: Tensor) -> KVCacheView:
    """What a compiled `update` does, without a compiler."""
    kv_append(keys, values, layer.static)
    layer.stale = True
    return layer.static


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, [0, 5]])
@pytest.mark.parametrize("prompt", [1, 3, 30])
@pytest.mark.parametrize(
    ("scheme", "sinks", "window"),
    [("u4", 4, 8), ("u2", 0, 8), ("k4v2", 4, 0), ("nomad-u4", 4, 8), ("cq-4", 4, 1)],
)
def test_ops_do_what_the_growing_layer_does(
    config: LlamaConfig,
    tokens: Tokens,
    scheme: str,
    sinks: int,
    window: int,
    prompt: int,
    start: list[int] | None,
) -> None:
    grown, static = pair(config, scheme, sinks=sinks, window=window)
    states = tokens(80)
    for cache in (grown, static):
        cache.prompt.start = start
    layer = static.layers[0]
    assert isinstance(layer, VQStaticLayer) and layer.groups == 2
    empty = [x[:, :, :0] for x in states]
    layer.lazy_initialization(*empty)
    layer._rehearse(*empty)  # what a GPU does: it leaves no trace
    poison(layer)
    for cache in (grown, static):
        first = cache.update(*(x[:, :, :prompt] for x in states), 0)
        assert first[0].data_ptr() == states[0].data_ptr()
    end = prompt
    for new in (1, 1, 1, 2, 1, 5, 1, 1, 8, 1, 1, SLACK - 7, 1):
        begin, end = end, end + new
        keys, values = (x[:, :, begin:end] for x in states)
        query = torch.randn(2, 4, new, 16)
        handles = grown.update(keys, values, 0)
        cached = compiled_steps(layer, keys, values)
        mask = mask_for(start, end, new, CAPACITY)
        wanted = attend(query, *handles, mask=mask)
        found = kv_attention(query, cached, softmax_scale=0.25, mask=mask)
        assert wanted is not None and found.dtype == query.dtype
        # Both are float32; each is off by roundings of logits of at most |q| |k| / 4.
        largest = [x.norm(dim=-1).max() for x in (query, states[0], states[1])]
        allowed = torch.finfo(torch.float32).eps * torch.stack(largest).prod()
        assert (found - wanted).abs().max() <= allowed
    coded, layer_of = end - window, grown.layers[0]
    assert torch.equal(layer_of.k.codes.rows()[:, :, :coded], rows_of(layer, coded))
    layers, static.layers, grown.layers = grown.layers, static.layers[:1], grown.layers[:1]
    same_state(grown, static)
    assert layers[1].length == 0


def test_softcap_sink_logits_and_additive_masks(config: LlamaConfig, tokens: Tokens) -> None:
    grown, static = pair(config)
    states = tokens(40)
    for cache in (grown, static):
        cache.update(*(x[:, :, :37] for x in states), 0)
    fresh = [x[:, :, 37:] for x in states]
    handles, cached = grown.update(*fresh, 0), compiled_steps(static.layers[0], *fresh)
    query = torch.randn(2, 4, 3, 16)
    bias = torch.randn(1, 4, 3, CAPACITY)
    for options in (
        {"softcap": 5.0}, {"sink_logits": torch.randn(4)}, {"mask": bias},
        {"mask": bias[:, :1, :1] > 0}, {"mask": torch.zeros(1, 1, 1, CAPACITY, dtype=torch.bool)},
    ):  # fmt: skip
        named = {"s_aux" if name == "sink_logits" else name: x for name, x in options.items()}
        wanted = attend(query, *handles, scaling=0.3, **named)  # type: ignore[arg-type]
        found = kv_attention(query, cached, softmax_scale=0.3, **options)  # type: ignore[arg-type]
        assert torch.allclose(found, wanted, atol=1e-5)
    with pytest.raises(VQCacheError, match="mask covers 89"):
        kv_attention(query, cached, softmax_scale=1.0, mask=bias[..., :-1])
    with pytest.raises(VQCacheError, match="heads"):
        kv_attention(query[:, :3], cached, softmax_scale=1.0)
    with pytest.raises(VQCacheError, match="at most 32"):
        kv_append(*(x[:, :, :33] for x in states), cached)


def test_beyond_the_end_nothing_is_written(config: LlamaConfig, tokens: Tokens) -> None:
    cache = VQCache(config, max_cache_len=20, static=True, window=0)
    states = tokens(24)
    cache.update(*(x[:, :, :19] for x in states), 0)
    layer = cache.layers[0]
    before = [rows_of(layer, 19).clone(), layer.static.value.scale[:, :, :19].clone()]
    compiled_steps(layer, *(x[:, :, 19:24] for x in states))
    for was, now in zip(
        before, (rows_of(layer, 19), layer.static.value.scale[:, :, :19]), strict=True
    ):
        assert torch.equal(was, now)
    for _ in range(2):
        with pytest.raises(VQCacheError, match=r"stored 24 tokens, max_cache_len=20"):
            cache.nbytes  # noqa: B018
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.slow
@pytest.mark.parametrize("learned", [False, True])
def test_opcheck(config: LlamaConfig, tokens: Tokens, learned: bool) -> None:
    static = pair(config, "cq-4" if learned else "u4")[1]
    states = tokens(30)
    static.prompt.start = None if learned else [0, 3]
    static.update(*(x[:, :, :10] for x in states), 0)
    cached = static.layers[0].static
    for part in (cached.key.scale, cached.value.scale):
        part.nan_to_num_()
    fresh = [x[:, :, 10:12].clone() for x in states]
    torch.library.opcheck(torch.ops.hf_vq.kv_append, (*fresh, *flatten(cached), None))
    mask = torch.rand(2, 1, 2, CAPACITY) > 0.3
    for extra in ([mask, torch.randn(4)], [None, None]):
        arguments = (torch.randn(2, 4, 2, 16), *flatten(cached), *extra, 0.25, 0.0)
        torch.library.opcheck(torch.ops.hf_vq.kv_attention, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, [0, 11]])
@pytest.mark.parametrize("sizes", [(25, 1, -3, 1, 12, 40, -1, 5), (3, -1, 1, 12, -1, -4, 9, 1)])
def test_eager_updates(
    config: LlamaConfig,
    tokens: Tokens,
    feed: Feed,
    sizes: tuple[int, ...],
    start: list[int] | None,
) -> None:
    """Prompts, later prompts, single tokens, before and after compiled steps."""
    grown, static = pair(config)
    states = tokens(CAPACITY)
    for cache in (grown, static):
        cache.prompt.start = start
    end = 0
    for new in sizes:
        begin, end = end, end + abs(new)
        handles = [feed(grown, states, begin, end)]
        if new > 0:
            handles.append(feed(static, states, begin, end))
        else:
            for layer in static.layers:
                compiled_steps(layer, *(x[:, :, begin:end] for x in states))
            assert isinstance(static.get_seq_length(), Tensor)
        if begin and new > 0:
            query = torch.randn(2, 4, new, 16)
            mask = mask_for(start, end, new, CAPACITY)
            a, b = (attend(query, *handle, mask=mask) for handle in handles)
            assert torch.equal(a, b)
        same_state(grown, static)
        assert static.get_seq_length() == end
        assert static.get_mask_sizes(1, 0) == (CAPACITY, 0)
    assert grown.nbytes == static.nbytes and str(grown) == str(static)
    assert static.allocated_nbytes == static.allocated_nbytes > static.nbytes


def test_what_does_not_fit_is_refused_before_anything_is_lost(
    config: LlamaConfig, tokens: Tokens, feed: Feed
) -> None:
    grown, static = pair(config)
    states = tokens(CAPACITY + 5)
    for cache in (grown, static):
        feed(cache, states, 0, CAPACITY - 2)
        with pytest.raises(VQCacheError, match="max_cache_len=90"):
            feed(cache, states, CAPACITY - 2, CAPACITY + 1)
        feed(cache, states, CAPACITY - 2, CAPACITY)
    same_state(grown, static)


def test_memory_never_moves(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    static = pair(config)[1]
    addresses = []
    for round in range(3):
        grown = pair(config)[0]
        for cache in (grown, static):
            cache.prompt.start = [0, 3] if round == 1 else None
            states = tokens(60) if cache is grown else states  # noqa: F821
            for begin, end in ((0, 3), (3, 40), (40, 41)):
                feed(cache, states, begin, end)
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.crop(-2)
            feed(cache, states, 41, 45)
        same_state(grown, static)
        layer = static.layers[0]
        own = (layer.k.codes.data, layer.k.codes.scale, layer.k.sinks, layer.k.mean)
        of = layer.static
        assert all(
            x.data_ptr() == y.data_ptr()
            for x, y in zip(
                own, (of.key.codes, of.key.scale, of.key.sinks, of.key.mean), strict=True
            )
        )
        addresses.append([x.data_ptr() for x in layer._tensors()])
        assert all(x._dynamo_static_input_type == "unguarded" for x in layer._tensors())
        static.reset()
        assert static.get_seq_length() == 0 and static.get_mask_sizes(5, 0) == (5, 0)
    assert addresses[0] == addresses[1] == addresses[2]
    feed(static, tokens(10, batch=3), 0, 10)  # another shape: other memory
    assert static.layers[0].static.key.codes.shape[0] == 3
    assert static.get_seq_length() == 10


def test_rows_move_together(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    grown, static = pair(config)
    states = tokens(40, batch=3)
    for cache in (grown, static):
        cache.prompt.start = [0, 9, 20]
        feed(cache, states, 0, 24)  # the last row is still all floats
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        feed(cache, states, 24, 25)
    same_state(grown, static)
    assert static.layers[0].static.cache_leftpad.tolist() == [20, 0, 20]
    for change in (
        lambda: static.batch_select_indices(torch.tensor([0])),
        lambda: static.batch_repeat_interleave(2),
    ):
        with pytest.raises(VQCacheError, match=r"3 rows.*static=False"):
            change()
    same_state(grown, static)


def test_crop(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    grown, static = pair(config)
    states = tokens(80)
    for cache in (grown, static):
        feed(cache, states, 0, 60)
        cache.crop(-20)
        feed(cache, states, 40, 42)
        cache.crop(60 - SLACK)  # a length
        cache.crop(0)
        feed(cache, states, 60 - SLACK, 63)
    same_state(grown, static)
    with pytest.raises(VQCacheError, match="last 33 tokens"):
        static.crop(-33)
    same_state(grown, static)
    with pytest.raises(VQCacheError, match="static=False"):
        static.activate_past_recording()
    static.crop(-63)
    assert static.get_seq_length() == 0


def test_saved_and_copied(config: LlamaConfig, tokens: Tokens, feed: Feed, tmp_path: Path) -> None:
    grown, static = pair(config)
    states = tokens(60)
    for cache in (grown, static):
        cache.prompt.start = [0, 2]
        feed(cache, states, 0, 30)
    for layer in static.layers:
        compiled_steps(layer, *(x[:, :, 30:31] for x in states))
    feed(grown, states, 30, 31)
    static.save(tmp_path / "c")
    loaded = VQCache.load(tmp_path / "c", config)
    copied = copy.deepcopy(static)
    assert not loaded.is_compileable and copied.is_compileable
    feed(grown, states, 31, 60)
    feed(copied, states, 31, 60)
    same_state(grown, copied)
    assert static.get_seq_length() == 31
    query = torch.randn(2, 4, 1, 16)
    out = []
    for cache in (grown, loaded):
        if cache is loaded:
            feed(cache, states, 31, 60)
        cache.crop(-1)
        out.append(attend(query, *feed(cache, states, 59, 60)))
    assert torch.equal(*out)


def test_dense_is_refused(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    static = pair(config)[1]
    states = tokens(30)
    feed(static, states, 0, 20)
    with pytest.raises(VQCacheError, match=r"would be decoded.*static=False"):
        feed(static, states, 20, 21)[0] + 0
    graded = [x[:, :, 21:22].clone().requires_grad_() for x in states]
    with pytest.raises(VQCacheError, match="would be decoded"):
        static.update(*graded, 0)
    assert static.get_seq_length() == 21  # nothing was stored


def test_which_caches_are_static(config: LlamaConfig) -> None:
    assert not VQCache(config).is_compileable
    asked = VQCache(config, max_cache_len=9)
    assert not asked.is_compileable  # it waits for a device
    asked.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    assert not asked.is_compileable and not asked._static
    waits = VQCache(config, max_cache_len=9)
    waits.decide(True)
    assert waits.is_compileable and waits.get_max_length() == 9
    assert VQCache(config, max_cache_len=9, static=True).is_compileable
    for options, message in (
        ({}, "needs max_cache_len"),
        ({"max_cache_len": 9, "quantize_sliding": True}, "no quantize_sliding"),
        ({"max_cache_len": 9, "static": "yes"}, "static=...\\) must be"),
    ):
        with pytest.raises(VQCacheError, match=message):
            VQCache(config, **{"static": True, **options})
    hybrid = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    kinds = [type(x) for x in VQCache(hybrid, max_cache_len=9, static=True).layers]
    assert kinds == [StaticSlidingWindowLayer, VQStaticLayer]


def test_layers_alike_are_of_one_kind(
    config: LlamaConfig, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU rehearses once: not codebooks of a layer's own, nor another backend."""

    def kind(scheme: str = "u4", capacity: int = CAPACITY, **options: Any) -> Any:
        cache = VQCache(config, scheme, max_cache_len=capacity, static=True, **options)
        cache.update(*tokens(20), 0)
        layer = cache.layers[0]
        assert isinstance(layer, VQStaticLayer)
        return layer._kind()

    first = kind()
    assert first is not None and kind() == first
    assert len({first, kind("u3"), kind(capacity=CAPACITY + 1), kind(window=8)}) == 4
    monkeypatch.setenv("HF_VQ_BACKEND", "reference")
    assert kind() not in (None, first)
    monkeypatch.delenv("HF_VQ_BACKEND")
    layer = VQCache(config, max_cache_len=CAPACITY, static=True)
    layer.update(*tokens(20), 0)
    layer.layers[0].k.codebook = layer.layers[0].k.codebook.clone()
    assert layer.layers[0]._kind() is None
