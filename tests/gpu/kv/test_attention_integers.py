"""Attention over integers with a scale and a zero on a GPU (attention_integers.cuh), against its
specification in float32. Scales and zeros beyond the tokens that count are NaN."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from hf_vq.backends.cuda.kv import attention as cuda_attention
from hf_vq.codegen.attention_plan import Mask
from hf_vq.codegen.families.kv_attention import SHORT, AttentionProblem, best, feasible
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import KV_SCHEMES
from hf_vq.formats.catalog import KVScheme
from hf_vq.ops import kv_attention
from tests.fixtures.kv import cuda_caches
from tests.fixtures.kv.cuda_caches import BOTH, cache, check, exact, queries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KV4 = "qserve-kv4"
DIMS = (64, 80, 96, 128, 192, 256)
ROTATED = replace(KV_SCHEMES[KV4].key, rotation="hadamard", rotation_block=0)
MIXED = {
    "integers, u2": KVScheme(KV_SCHEMES[KV4].key, KV_SCHEMES["u2"].value, centre_keys=False),
    "u3, integers": KVScheme(KV_SCHEMES["u3"].key, KV_SCHEMES[KV4].value, centre_keys=True),
    "nomad-u4, integers": KVScheme(KV_SCHEMES["nomad-u4"].key, KV_SCHEMES[KV4].value),
    "rotated integers": KVScheme(ROTATED, ROTATED),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Kernels of this file are compiled side by side when they are first needed."""
    cases = [{"dtype": dtype, "tokens": n} for dtype, n in itertools.product(BOTH, (100, 5000))]
    cases += [{"dim": dim} for dim in DIMS]
    cases += [{"columns": columns} for columns in (1, 8, 16, 32)]

    def compile_(case):
        given = {"tokens": 100, **case}
        columns = given.pop("columns", 4)
        cached = cache(KV4, heads=1, **given)
        kv_attention(queries(cached, columns), cached, softmax_scale=1.0)

    device_arch(0)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(compile_, cases))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("mean", [False, True])
def test_lengths_and_rows(dtype, mean):
    for tokens, batch in ((1000, 2), (333, 3), (5000, 1)):
        cached = cache(KV4, dtype, tokens=tokens, batch=batch, mean=mean)
        check(queries(cached), cached)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(dim, groups):
    cached = cache(KV4, dim=dim, tokens=300, first=(1, 3))
    check(queries(cached, groups), cached)


@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (64, 96), (32, 48), (16, 16)])
def test_different_head_dims(dim, value_dim):
    cached = cache(KV4, dim=dim, value_dim=value_dim, tokens=200)
    check(queries(cached, 2), cached)
    check(queries(cached, 8), cached)


@pytest.mark.parametrize(
    "tokens", [1, 2, 63, 64, 65, 66, 79, 80, 81, 100, 1000, 4097, 20000, 131072]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_contexts(tokens, batch):
    cached = cache(KV4, tokens=tokens, batch=batch, sinks=4 if tokens % 2 else 0)
    check(queries(cached), cached)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_heads_and_queries(groups, count):
    for window in (64, 3):
        cached = cache(KV4, tokens=500, fresh=count, window=window, batch=2, slack=7)
        check(queries(cached, groups, count), cached)


@pytest.mark.parametrize("window", [0, 1, 64, 1000])
@pytest.mark.parametrize("sinks", [0, 1, 33])
def test_windows(window, sinks):
    """QServe's own cache has neither sinks nor a window."""
    cached = cache(KV4, window=window, sinks=sinks, fresh=3, slack=0, tokens=200)
    check(queries(cached, 4, 3), cached)


def test_many_blocks_and_many_heads():
    cached = cache(KV4, tokens=30000, heads=1)
    check(queries(cached, 1), cached)
    cached = cache(KV4, tokens=700, heads=40, batch=4)
    check(queries(cached, 1), cached)


@pytest.mark.parametrize("name", MIXED)
def test_other_rows_on_the_other_side(name, monkeypatch):
    monkeypatch.setattr(cuda_caches, "scheme_of", MIXED.__getitem__)
    for tokens, groups in ((333, 4), (1000, 8)):
        cached = cache(name, tokens=tokens, batch=2)
        check(queries(cached, groups), cached)


@pytest.mark.parametrize("dtype", BOTH)
def test_softcap_and_sink_logits(dtype):
    cached = cache(KV4, dtype, tokens=400, fresh=2)
    query = queries(cached, 4, 2)
    check(query, cached, softcap=5.0, softmax_scale=0.01)
    check(query, cached, sink_logits=torch.randn(8, device="cuda"))
    check(query, cached, sink_logits=-100 * torch.ones(8, device="cuda", dtype=dtype))


@pytest.mark.parametrize("dtype", [*BOTH, torch.float32])
def test_masks_and_left_padding(dtype):
    tokens, start = 300, [0, 37, 250]
    for groups, count in ((4, 1), (2, 3)):
        cached = cache(KV4, tokens=tokens, batch=3, start=start, fresh=count, sinks=4)
        query = queries(cached, groups, count)
        causal = torch.ones(count, tokens, dtype=torch.bool, device="cuda").tril(tokens - count)
        mask = causal.expand(3, 1, count, tokens).clone()
        for row, begin in enumerate(start):
            mask[row, :, :, :begin] = False
        check(query, cached, mask=mask)
        additive = torch.zeros(mask.shape, device="cuda", dtype=dtype)
        check(query, cached, mask=additive.masked_fill(~mask, torch.finfo(dtype).min))
        mask[0] = False  # a row that sees nothing
        assert not kv_attention(query, cached, softmax_scale=0.1, mask=mask)[0].any()


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0])
def test_extreme_codes(byte):
    for groups in (1, 8):
        cached = cache(KV4, byte=byte, tokens=500)
        check(queries(cached, groups), cached)


def test_extreme_scales_and_zeros():
    cached = cache(KV4, tokens=500, dtype=torch.float16)
    some = cached.value.scale[:, :, :400, :1]
    some *= torch.exp2(torch.randint(-16, 8, some.shape, device="cuda"))
    cached.value.scale[:, :, 7] = 0
    cached.key.scale[:, :, 9] = 0
    check(queries(cached), cached)
    cached.key.scale[:, :, :400, :1] *= 8
    check(queries(cached), cached)
    check(0 * queries(cached), cached)


def test_rows_far_from_zero():
    """A zero of 1024 is the largest: sums of weights and zeros cancel those of codes."""
    cached = cache(KV4, tokens=700, dtype=torch.float16)
    for scale in (cached.key.scale, cached.value.scale):
        scale[:, :, ::3, 1] = -1024
        scale[:, :, 1::3, 1] = 1024
        scale[:, :, :, 0] /= 64
    check(queries(cached), cached)
    check(queries(cached, 8), cached)


def test_a_graph():
    cached = cache(KV4, tokens=9000)
    query = queries(cached)
    right = exact(query, cached)
    kv_attention(query, cached, softmax_scale=128**-0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kv_attention(query, cached, softmax_scale=128**-0.5)
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert (found.float() - right).norm() <= 2**-7 * right.norm()


@pytest.mark.parametrize("first", [(0, 0), (1, 2)])
@pytest.mark.parametrize("name", ["u4", KV4])
def test_copies_by_every_lane(name, first):
    """As GPUs before compute capability 9.0 copy codes, scales and zeros."""
    cached, scheme = cache(name, tokens=1000, batch=2, first=first), KV_SCHEMES[name]
    query, arch = queries(cached), device_arch(0)
    asked = AttentionProblem(
        scheme.key, scheme.value, 128, 128, 4, Dtype.BFLOAT16, Mask.NONE, False, SHORT, arch
    )
    plans = (replace(plan, bulk=False) for plan in best(asked))
    found = cuda_attention.attention(
        query, cached, None, None, 128**-0.5, 0.0,
        plan=next(plan for plan in plans if feasible(plan, asked) is None),
    )  # fmt: skip
    right = exact(query, cached)
    assert (found.float() - right).norm() <= (2**-8 + 2**-10) * right.norm()


def test_the_same_twice():
    cached = cache(KV4, tokens=5000)
    query = queries(cached)
    one, two = (kv_attention(query, cached, softmax_scale=0.1) for _ in range(2))
    assert torch.equal(one, two)
