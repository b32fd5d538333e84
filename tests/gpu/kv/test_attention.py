"""Attention over coded caches on a GPU (attention.cu) against its specification in float32.

Fresh random codes, scales and queries; results lie in memory full of NaN, and so do scales beyond
the tokens that count. For the whole file a GPU needs about a minute, most of it compiling.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_vq.codegen.attention_plan import Mask
from hf_vq.codegen.families.kv_attention import BUCKETS, AttentionProblem, choose
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.codegen.plan import Dtype
from hf_vq.ops import kv_attention
from tests.fixtures.kv.cuda_caches import BOTH, cache, check, exact, queries, scheme_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNIVERSAL = ["u4", "u3", "u2", "k4v2", "nomad-u4"]


def problems():
    """What the tests of this file ask for, most of it."""
    arch = device_arch(torch.cuda.current_device())

    def problem(name="u4", dim=128, columns=4, dtype="bfloat16", mask="none", cap=False, to=None):
        scheme = scheme_of(name)
        return [
            AttentionProblem(
                scheme.key, scheme.value, dim, to or dim, columns, Dtype(dtype), Mask(mask), cap,
                tokens, arch,
            )
            for tokens in BUCKETS
        ]  # fmt: skip

    for name, dtype in itertools.product([*UNIVERSAL, "4", "3", "2"], ("float16", "bfloat16")):
        yield from problem(name, dtype=dtype)
    for name, dim in itertools.product(("u4", "u3", "u2"), (64, 80, 96, 192, 256)):
        yield problem(name, dim)[0]
    for columns in (16, 32):
        yield problem(columns=columns)[0]
    for mask in ("bool", "bfloat16", "float16", "float32"):
        yield problem(mask=mask)[0]
    for dim, to in ((192, 128), (64, 96), (32, 48)):
        yield problem(dim=dim, to=to)[0]
    for dtype in ("float16", "bfloat16"):
        yield problem(cap=True, dtype=dtype)[0]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Kernels of this file, compiled side by side."""
    plans = list(dict.fromkeys(filter(None, map(choose, problems()))))
    name = device_arch(torch.cuda.current_device()).name
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda plan: compiler.cubin(plan, name, default_store()), plans))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", [*UNIVERSAL, "4", "3", "2"])
def test_schemes(name, dtype):
    for tokens in (1000, 333):
        cached = cache(name, dtype, tokens=tokens, batch=2)
        check(queries(cached), cached)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["u4", "u3", "u2"])
def test_head_dims(name, dim):
    cached = cache(name, dim=dim, tokens=300, first=(1, 3))
    check(queries(cached), cached)


@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (64, 96), (32, 48)])
def test_different_head_dims(dim, value_dim):
    cached = cache(dim=dim, value_dim=value_dim, tokens=200)
    check(queries(cached, 2), cached)


@pytest.mark.parametrize(
    "tokens", [1, 2, 63, 64, 65, 66, 79, 80, 81, 100, 1000, 4097, 20000, 131072]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_contexts(tokens, batch):
    cached = cache(tokens=tokens, batch=batch, sinks=4 if tokens % 2 else 0)
    check(queries(cached), cached)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_heads_and_queries(groups, count):
    for window in (64, 3):
        cached = cache(tokens=500, fresh=count, window=window, batch=2, slack=7)
        check(queries(cached, groups, count), cached)


@pytest.mark.parametrize("window", [0, 1, 3, 64, 1000])
@pytest.mark.parametrize("sinks", [0, 1, 4, 33])
def test_windows(window, sinks):
    cached = cache(window=window, sinks=sinks, fresh=3, slack=0, tokens=200)
    check(queries(cached, 4, 3), cached)


def test_fewer_fresh_tokens_than_queries():
    cached = cache(tokens=200, window=5, fresh=0, slack=40)
    check(queries(cached, 2, 4), cached)


def test_many_blocks_and_many_heads():
    cached = cache(tokens=30000, heads=1)
    check(queries(cached, 1), cached)
    cached = cache(tokens=700, heads=40, batch=4)
    check(queries(cached, 1), cached)


@pytest.mark.parametrize("dtype", BOTH)
def test_softcap_sink_logits_and_no_mean(dtype):
    cached = cache(dtype=dtype, tokens=400, fresh=2)
    query = 3 * queries(cached, 4, 2)
    check(query, cached, softcap=5.0, softmax_scale=0.1)
    check(query, cached, sink_logits=torch.randn(8, device="cuda"))
    check(query, cached, sink_logits=100 * torch.ones(8, device="cuda", dtype=dtype))
    check(query, cached, sink_logits=-100 * torch.ones(8, device="cuda", dtype=dtype))
    cached = cache(dtype=dtype, tokens=400, mean=False)
    check(queries(cached), cached)


@pytest.mark.parametrize("dtype", [*BOTH, torch.float32])
def test_masks_and_left_padding(dtype):
    tokens, start = 300, [0, 37, 250]
    for groups, count in ((4, 1), (2, 3)):
        cached = cache(tokens=tokens, batch=3, start=start, fresh=count, sinks=4)
        query = queries(cached, groups, count)
        causal = torch.ones(count, tokens, dtype=torch.bool, device="cuda").tril(tokens - count)
        mask = causal.expand(3, 1, count, tokens).clone()
        for row, begin in enumerate(start):
            mask[row, :, :, :begin] = False
        check(query, cached, mask=mask)
        longer = torch.nn.functional.pad(mask, (0, 50), value=True)
        check(query, cached, mask=longer)
        additive = torch.zeros(mask.shape, device="cuda", dtype=dtype)
        check(query, cached, mask=additive.masked_fill(~mask, torch.finfo(dtype).min))
        bias = torch.randn(1, 2 * groups, count, tokens, device="cuda").to(dtype)
        check(query, cached, mask=bias)
        mask[0] = False  # a row that sees nothing
        assert not kv_attention(query, cached, softmax_scale=0.1, mask=mask)[0].any()
        check(query, cached._replace(cache_leftpad=None), mask=mask)


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("name", UNIVERSAL)
def test_extreme_codes(name, byte):
    cached = cache(name, byte=byte, tokens=500)
    check(queries(cached), cached)


def test_extreme_scales_and_logits():
    cached = cache(tokens=500, dtype=torch.float16)
    some = cached.value.scale[:, :, :400]
    some *= torch.exp2(torch.randint(-20, 14, some.shape, device="cuda"))
    cached.value.scale[:, :, 7] = 0
    check(queries(cached), cached)
    cached.key.scale[:, :, :400] *= 30
    check(queries(cached), cached)
    check(0 * queries(cached), cached)


def test_a_graph_and_streams():
    """A captured launch may be replayed while others run; scratch memory is not shared."""
    cached = [cache(tokens=9000, heads=2) for _ in range(4)]
    query = [queries(one) for one in cached]
    right = [exact(*pair) for pair in zip(query, cached, strict=True)]
    kv_attention(query[0], cached[0], softmax_scale=128**-0.5)
    torch.cuda.synchronize()
    graphs, found = [], []
    for one, of in zip(query, cached, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            found.append(kv_attention(one, of, softmax_scale=128**-0.5))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for stream, graph in itertools.zip_longest(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[0]):
            eager = kv_attention(query[1], cached[1], softmax_scale=128**-0.5)
    torch.cuda.synchronize()
    for out, expected in zip([*found, eager], [*right, right[1]], strict=True):
        assert (out.float() - expected).norm() <= 2**-6 * expected.norm()


def test_the_same_twice():
    """Sums have an order: a result does not depend on timing."""
    cached = cache(tokens=5000)
    query = queries(cached)
    one, two = (kv_attention(query, cached, softmax_scale=0.1) for _ in range(2))
    assert torch.equal(one, two)
