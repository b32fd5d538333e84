"""`cpu.vq_append` and `cpu.vq_attention`: a static layer on the CPU's kernels after any steps
has the codes, and gives the results, of the layer that grows on the same kernels."""

import pytest
import torch

from hf_vq import dispatch
from hf_vq.backends.cpu import library
from hf_vq.cache import attend
from hf_vq.cache.layer import SLACK, LayerOptions, VQCacheLayer
from hf_vq.cache.prompt import Prompt
from hf_vq.cache.static_layer import VQStaticLayer
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import kv_append, kv_attention

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

HEADS, DIM, LIMIT = 2, 32, 300


def layers(scheme, sinks, window, start):
    both, books = KV_SCHEMES[scheme], (None, None)
    if both.key.codebook != "universal":
        books = torch.randn(kv_codebook_spec(both.key, HEADS, DIM).shape).half(), None
    options = LayerOptions(both, sinks, window, LIMIT)
    prompt = Prompt()
    prompt.start = start
    return [kind(options, prompt, 0, None, books) for kind in (VQCacheLayer, VQStaticLayer)]


def chosen(layer, query):
    """The entries of the table that run a step of the static layer."""
    static, kind = layer.static, str(query.dtype)[6:]
    specs, layouts = (static.key.scheme, static.value.scheme), (static.key.layout, "planes")
    asked = "cpu", kind, *specs, 1
    problems = (
        dispatch.KVAppendProblem(*asked, DIM, DIM, *layouts, "static"),
        dispatch.KVAttentionProblem(*asked, 512, DIM, DIM, *layouts, "static"),
    )
    return [dispatch.select(problem).name for problem in problems]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [None, [0, 7]])
@pytest.mark.parametrize(
    ("scheme", "sinks", "window"), [("u4", 4, 64), ("u3", 0, 8), ("nomad-u4", 4, 0), ("u2", 2, 1)]
)
def test_a_static_layer_is_the_growing_one_after_any_steps(scheme, sinks, window, start, dtype):
    grown, static = layers(scheme, sinks, window, start)
    states = [torch.randn(2, HEADS, 290, DIM).to(dtype) for _ in range(2)]
    for layer in (grown, static):
        layer.update(*(x[:, :, :3] for x in states))
    end = 3
    for new in (1, 1, 2, 30, 1, 32, *[1] * 5, 32, 32, 17, *[1] * 4, 32, 32, 32, 1, 32, 1):
        begin, end = end, end + new
        fresh = [x[:, :, begin:end] for x in states]
        query = torch.randn(2, 2 * HEADS, new, DIM).to(dtype)
        columns = torch.arange(LIMIT)
        mask = columns <= torch.arange(begin, end)[:, None]
        mask = mask & (columns >= torch.tensor(start or [0, 0])[:, None, None])
        wanted = attend(query, *grown.update(*fresh), mask=mask[:, None, :, :end])
        kv_append(*fresh, static.static)
        static.stale = True
        found = kv_attention(query, static.static, softmax_scale=DIM**-0.5, mask=mask[:, None])
        assert wanted is not None and found.dtype == dtype
        # The same numbers, added in another order where another token is the tail's first.
        largest = [x.float().norm(dim=-1).max() for x in (query, *states)]
        allowed = 2 * torch.finfo(torch.float32).eps * torch.stack(largest).prod()
        allowed += torch.finfo(dtype).eps * wanted.abs().max()
        assert (found - wanted).abs().max() <= allowed
    assert end == 290 and static.length == grown.length == 290
    assert chosen(static, query) == ["cpu.vq_append", "cpu.vq_attention"]
    for a, b in ((grown.k, static.k), (grown.v, static.v)):
        coded = 290 - window
        assert torch.equal(a.codes.rows()[:, :, :coded], b.codes.rows()[:, :, :coded])
        assert torch.equal(a.codes.scales()[:, :, :coded], b.codes.scales()[:, :, :coded])
        assert torch.equal(a.sinks, b.sinks)
        assert a.mean is None or torch.equal(a.mean, b.mean)
    assert window + SLACK == static.static.key.recent.shape[2]


def test_tokens_beyond_the_end_are_lost_and_nothing_else():
    _, static = layers("u4", 4, 0, None)
    states = [torch.randn(1, HEADS, LIMIT + 5, DIM) for _ in range(2)]
    static.update(*(x[:, :, :LIMIT] for x in states))
    static.update(*(x[:, :, :0] for x in states))
    before = static.k.codes.rows().clone(), static.v.codes.scales().clone()
    kv_append(*(x[:, :, LIMIT:] for x in states), static.static)
    query = torch.randn(1, HEADS, 5, DIM)
    assert kv_attention(query, static.static, softmax_scale=1.0).isfinite().all()
    assert torch.equal(static.k.codes.rows(), before[0])
    assert torch.equal(static.v.codes.scales(), before[1])
