"""Pages of codes hold what a tape holds, wherever a request's pages lie."""

import pytest
import torch

from hf_vq.cache.codebooks import universal
from hf_vq.cache.key_means import Calibrated, Rotary
from hf_vq.cache.lazy_kv import decoded
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.ops import decode_kv, encode_kv, kv_attention
from hf_vq.ops.layout import BLOCK, ROWS
from hf_vq.ops.rotary_mean import rotated
from hf_vq.serving.batch import Batch, Prompts
from hf_vq.serving.pages import LayerPages, PageFormat

HEADS, DIM, PAGES = 2, 32, 9


def pages_of(name, tokens, mean=None, dtype=torch.float32):
    scheme = KV_SCHEMES[name]
    page = PageFormat.of(scheme, HEADS, DIM, tokens, torch.empty(1, 1, 1, DIM, dtype=dtype))
    memory = torch.randint(0, 256, (PAGES, page.nbytes + 48), dtype=torch.uint8)
    books = universal(scheme.key, memory.device), universal(scheme.value, memory.device)
    factors = torch.exp(torch.randn(HEADS, DIM) / 2)
    known = None if mean is None else Calibrated(mean, smoothing=factors)
    return LayerPages(memory[:, 16:-32], page, books, known), page, scheme


def coded(x, scheme, layer=None):
    """What the codes of x [1, H, n, D] say: of keys, if a layer is given."""
    book = universal(scheme, x.device)
    mean, factors = 0.0, 1.0
    if layer is not None and layer.mean is not None:
        mean = layer.mean
        assert layer.smoothing is not None
        factors = layer.smoothing
    codes, scale = encode_kv((x - mean) * factors, book, scheme)
    return decode_kv(codes, scale, book, scheme, x.shape[-1]) / factors + mean


def feed(layer, tokens, steps):
    """Requests that grow: each step [(request, new tokens)]; returns their keys and values, and the
    last batch."""
    tables, held, batch = {}, {}, None
    free = torch.randperm(PAGES).tolist()
    for step in steps:
        batch, keys, values = Batch(tokens, torch.device("cpu")), [], []
        for request, new in step:
            table, (k, v) = tables.setdefault(request, []), held.get(request, (None, None))
            past = 0 if k is None else k.shape[2]
            while len(table) * tokens < past + new:
                table.append(free.pop())
            fresh = 2 + torch.randn(1, HEADS, new, DIM), torch.randn(1, HEADS, new, DIM)
            keys.append(fresh[0])
            values.append(fresh[1])
            both = (
                fresh if k is None else (torch.cat([k, fresh[0]], 2), torch.cat([v, fresh[1]], 2))
            )
            held[request] = both
            batch.add(past, new, table)
        layer.write(torch.cat(keys, 2), torch.cat(values, 2), batch)
    return held, batch


@pytest.mark.parametrize("name", ["u4", "u2", "u3", "nomad-u4", "qserve-kv4"])
@pytest.mark.parametrize("tokens", [8, BLOCK])
def test_a_group_reads_what_its_requests_wrote(name, tokens, layouts):
    mean = torch.randn(HEADS, DIM) if KV_SCHEMES[name].centre_keys else None
    layer, page, scheme = pages_of(name, tokens, mean)
    assert (page.keys.layout == ROWS) == (layouts == "rows" or tokens % BLOCK > 0)
    held, batch = feed(layer, tokens, [
        [("a", 7)], [("b", 3), ("a", 1)], [("a", 1), ("c", 2)], [("a", 1), ("b", 1), ("c", 9)],
    ])  # fmt: skip
    names = {request.first: name for request, name in zip(batch.requests, "abc", strict=True)}
    seen = 0
    for group in layer.groups(batch):
        cached = layer.read(group, torch.empty(1, dtype=torch.float32))
        for row, request in enumerate(group.requests):
            k, v = held[names[request.first]]
            wanted = coded(k, scheme.key, layer), coded(v, scheme.value)
            for which, expected in zip(("key", "value"), wanted, strict=True):
                found = decoded(cached, which)[row : row + 1, :, group.length - request.length :]
                assert found.shape == expected.shape
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            seen += request.new
    assert seen == 11


@pytest.mark.parametrize("tokens", [4, BLOCK])
def test_attention_of_a_group_is_that_of_each_request(tokens):
    layer, _, scheme = pages_of("u4", tokens, torch.randn(HEADS, DIM))
    steps = [[("a", 6), ("b", 5), ("c", 4)], [("a", 1), ("b", 1), ("c", 3)]]
    held, batch = feed(layer, tokens, steps)
    query = torch.randn(1, 2 * HEADS, 5, DIM)
    groups = layer.groups(batch)
    rows = layer.k.side.layout == ROWS
    assert [len(group.requests) for group in groups] == ([2, 1] if rows else [1, 1, 1])
    for group in groups:
        cached = layer.read(group, query)
        asked = query[0][:, group.rows].transpose(0, 1)
        out = kv_attention(asked, cached, softmax_scale=0.2, mask=group.mask)
        for row, request in enumerate(group.requests):
            k, v = held["abc"[batch.requests.index(request)]]
            k = coded(k, scheme.key, layer).repeat_interleave(2, 1)
            v = coded(v, scheme.value).repeat_interleave(2, 1)
            seen = torch.ones(request.new, request.length, dtype=torch.bool).tril(request.past)
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, request.rows], k, v, attn_mask=seen, scale=0.2
            )
            torch.testing.assert_close(out[row : row + 1], expected, rtol=1e-4, atol=1e-5)


def test_windows_are_what_each_request_may_see():
    batch, window = Batch(8, torch.device("cpu")), 4
    steps = [(0, 1), (2, 1), (9, 1), (0, 6), (2, 3), (9, 5)]
    for past, new in steps:
        batch.add(past, new, [])
    found, begin = batch.windows(window), 0
    for (past, new), (read, mask) in zip(steps, found, strict=True):
        kept = range(max(past - window + 1, 0), past + new)  # positions that lie in the ring
        assert read == slice(begin, begin + len(kept))
        wanted = [[at - window < key <= at for key in kept] for at in range(past, past + new)]
        assert (mask is None) == (new == 1)
        assert wanted == ([[True] * len(kept)] if mask is None else mask[0, 0].tolist())
        begin = read.stop
    assert batch.windows(window) is found


def test_writing_touches_its_own_tokens_only():
    layer, page, _ = pages_of("u4", 8, torch.zeros(HEADS, DIM))
    parts = layer.k.codes, layer.k.scale, layer.v.codes, layer.v.scale
    before = [part.clone() for part in parts]
    batch = Batch(8, torch.device("cpu"))
    batch.add(3, 2, [7])
    layer.write(torch.randn(1, HEADS, 2, DIM), torch.randn(1, HEADS, 2, DIM), batch)
    assert page.keys.layout == ROWS
    for now, was in zip(parts, before, strict=True):
        same = (now == was) | ((now != now) & (was != was))  # chance made some of them NaN
        assert (~same).any(3).any(1).nonzero().tolist() == [[7, 3], [7, 4]]


def test_a_page_has_the_nominal_bits():
    page = PageFormat.of(KV_SCHEMES["u4"], 8, 128, 256, torch.empty(1, dtype=torch.float32))
    assert page.nbytes * 8 == 2 * 8 * 128 * 256 * 4.125


def test_prompts_of_several_requests_are_decoded_at_once():
    layer, _, scheme = pages_of("k4v2", 4, torch.randn(HEADS, DIM))
    steps = [[("a", 6), ("b", 5), ("c", 4)], [("a", 1), ("b", 3), ("d", 5), ("c", 2)]]
    held, batch = feed(layer, 4, steps)
    prompts = batch.prompts
    assert prompts.rows.tolist() == list(range(1, 11))
    assert [x.tolist() for x in prompts.begins] == [[0, 3, 8, 10], [0, 8, 13, 19]]
    assert (prompts.longest_new, prompts.longest, prompts.total) == (5, 8, 19)
    found = layer.floats(prompts, torch.float32)
    for which, (part, of) in enumerate(((scheme.key, layer), (scheme.value, None))):
        wanted = [coded(held[name][which], part, of) for name in "bdc"]
        torch.testing.assert_close(found[which], torch.cat(wanted, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [8, BLOCK])
def test_keys_that_turn(tokens, layouts):
    """Requests of several lengths, in chunks, side by side: each turns from its own first token."""
    _, page, scheme = pages_of("u4", tokens)
    inv_freq = 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    mean = 30 * torch.randn(HEADS, DIM)
    memory = torch.zeros(PAGES, page.nbytes, dtype=torch.uint8)
    books = universal(scheme.key, memory.device), universal(scheme.value, memory.device)
    layer = LayerPages(memory, page, books, Calibrated(0 * mean, mean), Rotary(inv_freq))
    tables, held = {"a": [3, 1, 5], "b": [0, 7, 2]}, {"a": [], "b": []}
    for step in ([("a", 5), ("b", 9)], [("a", 6)], [("a", 1), ("b", 1)]):
        batch, keys = Batch(tokens, torch.device("cpu")), []
        for name, new in step:
            past = sum(x.shape[2] for x in held[name])
            states = mean[None, :, None] + torch.randn(1, HEADS, new, DIM)
            keys.append(rotated(states, inv_freq, False, torch.arange(past, past + new)))
            held[name].append(keys[-1])
            batch.add(past, new, tables[name])
        both = torch.cat(keys, 2)
        layer.write(both, torch.randn_like(both), batch)
    query = torch.randn(1, HEADS, 1, DIM)
    for group in layer.groups(batch):
        view = layer.read(group, query)
        found = decoded(view, "key")
        for row, request in enumerate(group.requests):
            wanted = torch.cat(held[{12: "a", 10: "b"}[request.length]], 2)
            assert (found[row, :, -request.length :] - wanted[0]).abs().mean() < 0.35
    if layer.k.side.layout != ROWS:  # which prompts read only where kernels go through tables
        return
    prompts = Prompts(batch.requests, tokens, torch.device("cpu"))
    found = layer.floats(prompts, torch.float32)[0][0]
    wanted = torch.cat([x for name in "ab" for x in held[name]], 2)[0]
    assert (found - wanted).abs().mean() < 0.35
