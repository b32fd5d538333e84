"""Codes in pages on a GPU (attention.cu and append.cu with tables) against their specification.

Pages lie in any order, requests have lengths of their own, and what no request has is poison:
scales full of NaN, and page numbers that no memory has.
"""

import pytest
import torch

from hf_vq.cache.codebooks import universal
from hf_vq.cache.key_means import Calibrated
from hf_vq.errors import VQBackendError, VQFormatError
from hf_vq.formats import KV_SCHEMES
from hf_vq.ops import decode_kv, encode_kv, kv_attention
from hf_vq.ops.kv_ops import through_tables
from hf_vq.ops.library import parse
from hf_vq.ops.reference import kv_attention as attention_reference
from hf_vq.serving.batch import Batch, Table
from hf_vq.serving.pages import LayerPages, PageFormat
from hf_vq.serving.prefill import flash, is_flash
from tests.fixtures.cuda_layers import poison
from tests.fixtures.kv.views import append_kv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCHEMES = [
    name
    for name, scheme in KV_SCHEMES.items()
    if scheme.key.has_scale and scheme.value.has_scale
    and scheme.key.mode == scheme.value.mode == "unbiased"
]  # fmt: skip
NOWHERE = 1 << 30  # the number of a page that would be read far beyond all memory
DEVICE = torch.device("cuda", 0)


def layer_of(name, page, pages, heads=2, dim=128, dtype=torch.bfloat16, mean=True, beside=48):
    """A layer of random codes among others; its scales are no numbers."""
    scheme = KV_SCHEMES[name]
    like = torch.empty(1, 1, 1, dim, dtype=dtype, device=DEVICE)
    found = PageFormat.of(scheme, heads, dim, page, like)
    assert found.tables
    shape = pages, found.nbytes + 2 * beside
    memory = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    books = universal(scheme.key, DEVICE), universal(scheme.value, DEVICE)
    centre = torch.randn(heads, dim, device=DEVICE) if mean else None
    layer = LayerPages(
        memory[:, beside:-beside], found, books, centre if centre is None else Calibrated(centre)
    )
    layer.k.scale.fill_(torch.nan)
    layer.v.scale.fill_(torch.nan)
    return layer


def paged(layer, lengths, slack=3):
    """Requests of these lengths in pages of any order, which have scales where they have tokens."""
    page, pages = layer.k.side.tokens, len(layer.k.codes)
    free = torch.randperm(pages).tolist()
    width = max(-(-length // page) for length in lengths) + slack
    table = torch.full((len(lengths), width), NOWHERE, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for i in range(-(-length // page)):
            table[row, i] = number = free.pop()
            count = min(page, length - i * page)
            for part in (layer.k.scale, layer.v.scale):
                some = torch.rand(part[number, :, :count].shape) + 0.5
                if some.shape[-1] > 1:  # a scale and a zero, as of rows around zero
                    some *= torch.tensor([0.25, 8.0])
                part[number, :, :count] = some
    requests = Table(table.to(DEVICE), torch.tensor(lengths, device=DEVICE), max(lengths))
    return layer.through(requests, torch.empty(0, device=DEVICE))


def check(cached, groups=4, count=1, scale=0.1, softcap=0.0, sink_logits=None,
          dtype=torch.bfloat16):  # fmt: skip
    """As in test_cuda_attention: weights are rounded to fp16, and so is the result."""
    heads, dim = cached.key.heads, cached.key.dim
    rows = len(cached.page_table)
    query = torch.randn(rows, heads * groups, count, dim, device=DEVICE).to(dtype)
    known = cached._replace(page_table=cached.page_table.clamp_max(len(cached.key.codes) - 1))
    right = attention_reference.attention_paged(
        query.float(), known, None, sink_logits, scale, softcap
    )
    poison()
    options = {"softmax_scale": scale, "softcap": softcap, "sink_logits": sink_logits}
    found = kv_attention(query, cached, **options).float()
    assert found.isfinite().all()
    bound = torch.finfo(dtype).eps + 2**-10
    norms = right.flatten(1).norm(dim=1)
    assert ((found - right).flatten(1).norm(dim=1) <= bound * norms).all()  # each request
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [64, 256])
@pytest.mark.parametrize("name", SCHEMES)
def test_requests_of_all_lengths(name, page, dtype):
    layer = layer_of(name, page, 120 if page == 64 else 40, dtype=dtype)
    cached = paged(layer, [1, 700, 0, 63, 64, 65, 255, 256, 257, 1500, 33, 1])
    found = check(cached, dtype=dtype)
    assert not found[2].any()


@pytest.mark.parametrize("dim", [64, 80, 96, 192, 256])
def test_head_dims(dim):
    check(paged(layer_of("u4", 64, 40, dim=dim), [500, 1, 129]))
    check(paged(layer_of("u2", 192, 40, dim=dim), [500, 1, 129]))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_heads_and_queries(groups, count):
    check(paged(layer_of("u4", 64, 60), [700, 300, 8, 1000]), groups, count)


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_splits(rows):
    """Few requests are split among blocks, of which short ones need fewer; many are not."""
    lengths = torch.randint(1, 900, (rows,)).tolist()
    lengths[0] = 5000
    check(paged(layer_of("u4", 256, 20 + 5 * rows, heads=4), lengths))
    check(paged(layer_of("u4", 64, 80 + 16 * rows, heads=1), lengths)._replace(max_seqlen=5100))


def test_softcap_sink_logits_and_no_mean():
    check(paged(layer_of("u4", 64, 30), [300, 77]), softcap=5.0)
    check(paged(layer_of("u4", 64, 30), [300, 77, 0]), sink_logits=torch.randn(8, device=DEVICE))
    check(paged(layer_of("u4", 64, 30, mean=False), [300, 77]))


def test_a_graph_is_replayed_for_other_requests():
    """Addresses are known when it is captured, lengths and pages are not."""
    layer = layer_of("u4", 64, 400)
    first, longest = [30, 1, 500], 2048
    cached = paged(layer, first, slack=32)._replace(max_seqlen=longest)
    query = torch.randn(3, 8, 1, 128, device=DEVICE).bfloat16()
    kv_attention(query, cached, softmax_scale=0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kv_attention(query, cached, softmax_scale=0.1)
    for lengths in ([900, 17, 0], [64, 2048, 63], first):
        now = paged(layer, lengths, slack=40)
        cached.page_table.copy_(now.page_table[:, : cached.page_table.shape[1]])
        cached.cache_seqlens.copy_(now.cache_seqlens)
        graph.replay()
        expected = kv_attention(query, now, softmax_scale=0.1)
        assert (out - expected).float().norm() <= 2**-7 * expected.float().norm()


@pytest.mark.parametrize("tokens", [1, 3, 40, 900])
@pytest.mark.parametrize("name", SCHEMES)
def test_tokens_go_to_their_slots(name, tokens):
    """The codes of a tape, and nothing else is touched; tokens of slots below 0 go nowhere."""
    heads, dim, page = 3, 128, 64
    layer = layer_of(name, page, 30, heads)
    layer.k.scale.fill_(7)
    layer.v.scale.fill_(7)
    slots = torch.randperm(30 * page)[:tokens].to(DEVICE)
    slots[2::3] = -1
    kept = slots >= 0
    whole = torch.randn(2, 1, tokens, heads, dim + 8, device=DEVICE).bfloat16()
    keys, values = whole.transpose(2, 3)[..., :dim].unbind()
    parts = layer.k.codes, layer.k.scale, layer.v.codes, layer.v.scale
    wanted = [part.clone() for part in parts]
    poison()
    layer.put(keys, values, slots)
    sides = (keys, layer.mean, layer.k, *wanted[:2]), (values, None, layer.v, *wanted[2:])
    for x, mean, side, codes, scale in sides:
        shape = 1, heads, tokens, codes.shape[3]
        flat = codes.new_empty(shape), scale.new_empty(*shape[:3], scale.shape[3])
        append_kv(x, mean, side.codebook, *flat, 0, side.spec, "rows")
        place = slots[kept] // page, slice(None), slots[kept] % page
        codes[place], scale[place] = (part[0].transpose(0, 1)[kept] for part in flat)
    for part, expected in zip(parts, wanted, strict=True):
        assert torch.equal(part, expected)


def test_what_was_written_is_attended_to():
    """Requests that come, grow and go, against floats of what the codes say."""
    page, heads = 64, 2
    layer = layer_of("u4", page, 60, heads)
    free, tables, held = torch.randperm(60).tolist(), {}, {}
    for step in ({0: 130, 1: 1, 2: 70}, {0: 1, 1: 1, 2: 1, 3: 64}, {0: 1, 2: 1, 3: 1, 4: 1}):
        batch, fresh = Batch(page, DEVICE), []
        for request, new in step.items():
            past = held[request].shape[3] if request in held else 0
            pages = tables.setdefault(request, [])
            while len(pages) * page < past + new:
                pages.append(free.pop())
            batch.add(past, new, pages)
            fresh.append(torch.randn(2, 1, heads, new, 128, device=DEVICE).bfloat16())
            old = held.get(request, fresh[-1][:, :, :, :0])
            held[request] = torch.cat([old, fresh[-1]], 3)
        page_of, place = batch.places
        layer.put(*torch.cat(fresh, 3), page_of * page + place)
        table = batch.table
        query = torch.randn(len(table.length), 4 * heads, 1, 128, device=DEVICE).bfloat16()
        found = kv_attention(query, layer.through(table, query), softmax_scale=0.1)
        ones = [request for request, new in step.items() if new == 1]
        for row, request in enumerate(ones):
            agrees(found[row], query[row : row + 1], layer, held[request])


def agrees(found, query, layer, tokens):
    """The attention of one query [1, Hq, 1, D] is that of floats of what the codes of keys and
    values `tokens` [2, 1, H, n, D] say."""
    sides = []
    for x, side, mean in zip(tokens, (layer.k, layer.v), (layer.mean, None), strict=True):
        scheme = parse(side.spec)
        rows = encode_kv(x.float() if mean is None else x - mean, side.codebook, scheme)
        rows = decode_kv(*rows, side.codebook, scheme, x.shape[-1])
        rows = rows if mean is None else rows + mean
        sides.append(rows.repeat_interleave(query.shape[1] // x.shape[1], 1))
    expected = torch.nn.functional.scaled_dot_product_attention(query.float(), *sides, scale=0.1)
    assert (found - expected[0]).norm() <= 2**-7 * expected.norm()


@pytest.mark.parametrize("rows", [4, 40])  # few are split among blocks
@pytest.mark.parametrize("name", ["u4", "u2", "qserve-kv4"])
def test_requests_that_share_pages(name, rows):
    """All begin with the same three pages, some of which are all of a request."""
    layer = layer_of(name, 64, 10 + 8 * rows)
    lengths = [192, 193, 500, 192 + 64, *torch.randint(192, 500, (rows - 4,)).tolist()]
    cached = paged(layer, lengths)
    cached.page_table[:, :3] = cached.page_table[0, :3]
    check(cached)
    check(cached, count=2)


@pytest.mark.parametrize("name", ["u4", "qserve-kv4"])
def test_pages_are_shared_and_then_those_of_others(name):
    """1 goes on behind two pages of 0, which goes and leaves its third page to 2. Then 0 comes back
    on other pages, as one that was evicted does."""
    page, heads, number = 64, 2, iter(torch.randperm(30).tolist())
    layer = layer_of(name, page, 30, heads)
    tables, held = {}, {}

    def step(news):
        """Every request gets so many new tokens, and the last of each asks."""
        for part in ({r: n for r, n in news.items() if n > 1}, dict.fromkeys(news, 1)):
            batch, fresh = Batch(page, DEVICE), []
            for request, new in part.items():
                new = new - 1 if part[request] > 1 else new
                past = held[request].shape[3] if request in held else 0
                while len(tables[request]) * page < past + new:
                    tables[request].append(next(number))
                batch.add(past, new, tables[request])
                fresh.append(torch.randn(2, 1, heads, new, 128, device=DEVICE).bfloat16())
                old = held.get(request, fresh[-1][:, :, :, :0])
                held[request] = torch.cat([old, fresh[-1]], 3)
            if fresh:
                page_of, place = batch.places
                layer.put(*torch.cat(fresh, 3), page_of * page + place)
        query = torch.randn(len(news), 4 * heads, 1, 128, device=DEVICE).bfloat16()
        found = kv_attention(query, layer.through(batch.table, query), softmax_scale=0.1)
        for row, request in enumerate(news):
            agrees(found[row], query[row : row + 1], layer, held[request])

    tables[0] = []
    step({0: 150})
    tables[1], held[1] = tables[0][:2], held[0][:, :, :, : 2 * page]
    step({0: 5, 1: 80})
    left, gone = tables.pop(0), held.pop(0)
    tables[2] = [left[2]]
    step({1: 1, 2: 100})
    tables[0], held[0] = left[:2], gone[:, :, :, : 2 * page]
    step({0: 40, 1: 1, 2: 1})
    assert left[2] in tables[2] and left[2] not in tables[0]
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]


@pytest.mark.parametrize(("name", "dim"), [("u4", 64), ("u4", 128), ("qserve-kv4", 128)])
def test_prompts_attend_to_their_own_tokens(name, dim):
    """Several prompts, also chunks of them, among requests with one new token."""
    page, heads = 64, 2
    layer = layer_of(name, page, 60, heads, dim)
    free, tables, past = torch.randperm(60).tolist(), {}, {}
    for step in ({0: 130, 1: 1, 2: 70}, {0: 1, 2: 300, 3: 64, 1: 5}):
        batch = Batch(page, DEVICE)
        for request, new in step.items():
            pages = tables.setdefault(request, [])
            while len(pages) * page < past.get(request, 0) + new:
                pages.append(free.pop())
            batch.add(past.get(request, 0), new, pages)
            past[request] = past.get(request, 0) + new
        count = sum(step.values())
        page_of, place = batch.places
        fresh = torch.randn(2, 1, heads, count, dim, device=DEVICE).bfloat16()
        layer.put(*fresh, page_of * page + place)
        query = torch.randn(1, 4 * heads, count + 7, dim, device=DEVICE).bfloat16()
        options = {"softcap": None, "s_aux": None}
        assert is_flash(query, heads, batch.prompts, options)
        assert not is_flash(query, heads, batch.prompts, {**options, "softcap": 5.0})
        assert not is_flash(query, 1 << 20, batch.prompts, options)
        found = flash(layer, batch.prompts, query, 0.1)
        begin = 0
        for request in batch.prompts.requests:
            alone = Batch(page, DEVICE)
            alone.add(request.past, request.new, request.pages)
            sides = layer.floats(alone.prompts, torch.float32)
            seen = torch.ones(request.new, request.length, dtype=torch.bool, device=DEVICE)
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, request.rows].float(), *(x.repeat_interleave(4, 1) for x in sides),
                attn_mask=seen.tril(request.past), scale=0.1,
            )  # fmt: skip
            part = found[:, :, begin : begin + request.new]
            assert (part - expected).norm() <= 2**-7 * expected.norm()
            begin += request.new
        assert begin == found.shape[2]


def test_others_are_left_to_copies_or_refused():
    like = torch.empty(1, 1, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    u4 = KV_SCHEMES["u4"].key
    assert through_tables(u4, u4, 128, 256, like)
    assert not through_tables(u4, u4, 128, 32, like)
    assert not through_tables(u4, u4, 128, 256, like.float())
    cached = paged(layer_of("u4", 64, 30), [300, 77])
    query = torch.randn(2, 8, 1, 128, device=DEVICE).bfloat16()
    with pytest.raises(VQBackendError, match="int32"):
        kv_attention(query, cached._replace(page_table=cached.page_table.long()), softmax_scale=1.0)
    with pytest.raises(VQBackendError, match="pages of 64"):
        apart = cached.key.scale.contiguous()
        kv_attention(query, cached.replace(key_scale=apart), softmax_scale=1.0)
    with pytest.raises(VQFormatError, match="slots"):
        append_kv(
            torch.randn(1, 2, 5, 128, device=DEVICE), None, cached.key.codebook, cached.key.codes,
            cached.key.scale, 0, cached.key.scheme, "rows", torch.arange(4, device=DEVICE),
        )  # fmt: skip
