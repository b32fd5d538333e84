"""`hf_vq::cpu_append` and `hf_vq::cpu_attention`: rows of the CPU without Python, and what they do
not take."""

import pytest
import torch
from transformers import LlamaConfig

from hf_vq import VQCache, dispatch
from hf_vq.backends.cpu import boxed_ops, library
from hf_vq.backends.cpu import kv as cpu_attention
from hf_vq.cache.codebooks import learned
from hf_vq.formats.catalog import kv_scheme
from hf_vq.ops import kv_attention
from tests.fixtures.kv.views import append_kv

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
DIM = 32


def filled(tokens, *, scheme="u4", dtype=torch.bfloat16, batch=1, heads=2, crop=0):
    """The first layer of a cache, and what its attention of one token reads."""
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=DIM * 4, num_attention_heads=4,
        num_key_value_heads=heads, head_dim=DIM,
    )  # fmt: skip
    cache = VQCache(config, scheme, window=8, sinks=2)
    cache.update(*torch.randn(2, batch, heads, tokens, DIM).to(dtype), 0)
    if crop:
        cache.crop(-crop)
    cache.update(*torch.randn(2, batch, heads, 1, DIM).to(dtype), 0)
    return cache.layers[0].keys.update.view._replace(num_new=1)


@pytest.fixture
def without(monkeypatch):
    """Call a function with the rows in Python only."""

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(boxed_ops, "cpu_append", lambda: None)
            patch.setattr(boxed_ops, "cpu_attention", lambda: None)
            dispatch.invalidate()
            found = function(*arguments, **options)
        dispatch.invalidate()
        return found

    return call


def directly(query, cached, softmax_scale=0.2, softcap=0.0):
    c = cached
    asked = dispatch.KVAttentionProblem(
        "cpu", str(query.dtype)[6:], c.key.scheme, c.value.scheme,
        1, 1, c.key.dim, c.value.dim, c.key.layout, c.value.layout,
    )  # fmt: skip
    return dispatch.bind(asked)(query, cached, softmax_scale, softcap)


@pytest.mark.parametrize("scheme", ["u4", "u3", "u2", "k4v2"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "crop"), [(1, 0), (9, 0), (300, 0), (700, 20)])
def test_attention_is_that_of_the_row(scheme, dtype, tokens, crop, without):
    cached = filled(tokens, scheme=scheme, dtype=dtype, batch=2, crop=crop)
    for queries in (torch.randn(2, 4, 1, DIM), torch.randn(2, 1, 4, DIM).transpose(1, 2)):
        query = queries.to(dtype)
        out = directly(query, cached)
        if out is None:  # the row does not run this scheme
            assert scheme == "u3"
            continue
        assert torch.equal(kv_attention(query, cached, softmax_scale=0.2), out)
        row = without(kv_attention, query, cached, softmax_scale=0.2)
        assert torch.equal(out, row) and out.stride() == row.stride() and out.dtype == row.dtype
        capped = without(kv_attention, query, cached, softmax_scale=0.2, softcap=5.0)
        assert torch.equal(directly(query, cached, softcap=5.0), capped)


@pytest.mark.parametrize("scheme", ["u4", "u2"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mean", [False, True])
def test_append_is_that_of_the_row(scheme, dtype, mean, without):
    cached = filled(300, scheme=scheme)
    x = torch.randn(1, 2, 7, DIM).to(dtype)
    for side in (cached.key, cached.value):
        middle = torch.randn(1, 2, 1, DIM) if mean else None
        made = []
        for call in (lambda f, *a: f(*a), without):
            codes, scale = side.codes.clone(), side.scale.clone()
            call(append_kv, x, middle, side.codebook, codes, scale, 250, side.scheme, side.layout)
            made.append((codes, scale))
        assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])
        assert not torch.equal(made[0][0], side.codes)


def test_learned_codebooks_lie_per_head(without):
    scheme = kv_scheme("cq-4")
    assert learned(scheme.key)
    part = scheme.key
    heads, layout = 2, cpu_attention.key_layout(part)
    book = torch.randn(heads, DIM // part.vector_size, 1 << part.entry_bits, part.vector_size)
    x = torch.randn(1, heads, 3, DIM)
    made = []
    for call in (lambda f, *a: f(*a), without):
        tape = torch.zeros(1, heads, 1, DIM // part.vector_size * 32 * part.entry_bits)
        codes, scale = tape.byte(), torch.zeros(1, heads, 256, 0).half()
        call(append_kv, x, None, book.half(), codes, scale, 5, part.spec(), layout)
        made.append(codes)
    assert torch.equal(*made) and made[0].any()


def test_the_ops_refuse_what_does_not_belong_together():
    cached, query = filled(300), torch.randn(1, 4, 1, DIM).bfloat16()
    assert directly(query, cached) is not None
    wrong = {
        "num_coded": cached.key.codes.shape[2] * 256 + 1, "key_first": -1, "max_seqlen": 1,
        "key_codes": cached.key.codes[:, :, :1], "value_codes": cached.value.codes[:, :1],
        "key_scale": cached.key.scale[:, :, :100], "value_scale": cached.value.scale.float(),
        "key_codebook": cached.key.codebook[:, :100].contiguous(),
        "value_sinks": cached.value.sinks[:, :, :1],
        "value_codebook": cached.value.codebook.float(), "key_recent": cached.key.recent[..., :16],
        "value_recent": cached.value.recent.double(), "key_mean": torch.zeros(1, 1, 1, DIM),
        "key_smoothing": torch.ones(1, 1, 1, DIM),
    }  # fmt: skip
    for name, value in wrong.items():
        assert directly(query, cached.replace(**{name: value})) is None, name
    for other in (query[..., :16], query[:, :3], query.repeat(2, 1, 1, 1), query[:, :, :0]):
        assert directly(other, cached) is None
    tape = cached.key.codes, cached.key.scale
    shape = cpu_attention._shape_tensor(cached.key.scheme, DIM, cached.key.layout)
    x, none = torch.randn(1, 2, 3, DIM), torch.empty(0)
    op, held = boxed_ops.cpu_append(), cached.key.codes.shape[2] * 256
    assert op(x, none, none, cached.key.codebook, *tape, shape, none, none, held - 3, 0) is not None
    for at in (-1, held - 2):
        assert op(x, none, none, cached.key.codebook, *tape, shape, none, none, at, 0) is None
    assert op(x, none, none, cached.key.codebook, *tape, shape.long(), none, none, 0, 0) is None
    assert op(x[..., :16], none, none, cached.key.codebook, *tape, shape, none, none, 0, 0) is None
    for factor in (torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, DIM).double()):
        assert (
            op(x, none, factor, cached.key.codebook, *tape, shape, none, none, held - 3, 0) is None
        )
    assert op(*[none] * 9, 0, 0) is None
