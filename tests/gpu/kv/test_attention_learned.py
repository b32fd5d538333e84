"""Attention over codes with learned codebooks on a GPU against its specification in float32.

A codebook for each kv head and channel group, full of random numbers; what is the same for all
codebooks (masks, windows, sinks) is tested in test_cuda_attention.py. Half a minute on a GPU.
"""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_vq.backends.cuda.kv import codebooks as cuda_codebooks
from hf_vq.codegen.families.kv_attention import misfit
from hf_vq.codegen.jit.device import device_arch
from hf_vq.formats import KV_SCHEMES
from hf_vq.ops import kv_attention
from tests.fixtures.kv.cuda_caches import BOTH, cache, check, exact, queries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LEARNED = ["cq-4", "cq-2", "nomad-4", "nomad-2"]


def needs_memory_for(name, dim, value_dim=None):
    """Skip where the tables are larger than the shared memory of a block."""
    scheme = KV_SCHEMES[name]
    reason = misfit(scheme.key, scheme.value, dim, value_dim or dim, device_arch(0))
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Kernels of this file are compiled side by side when they are first needed."""
    cases = [(name, 128, columns) for name in LEARNED for columns in (1, 2, 4, 8)]
    cases += [(name, dim, 2) for name in ("cq-4", "cq-2") for dim in (64, 80, 96, 192)]

    def compile_(case):
        name, dim, columns = case
        cached = cache(name, dim=dim, tokens=100, heads=1)
        kv_attention(queries(cached, columns), cached, softmax_scale=1.0)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(compile_, cases))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", LEARNED)
def test_schemes(name, dtype):
    needs_memory_for(name, 128)
    for tokens in (1, 65, 333, 5000):
        cached = cache(name, dtype, tokens=tokens, batch=2, heads=3, mean=tokens == 333)
        check(queries(cached), cached)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("name", ["cq-4", "cq-2"])
def test_heads_and_queries(name, groups, count):
    """One query has eight columns of a tile of its own, eight have one each."""
    needs_memory_for(name, 128)
    cached = cache(name, tokens=500, fresh=count, batch=2, slack=7)
    check(queries(cached, groups, count), cached)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 192])
@pytest.mark.parametrize("name", ["cq-4", "cq-2"])
def test_head_dims(name, dim, groups):
    needs_memory_for(name, dim)
    cached = cache(name, dim=dim, tokens=300, first=(1, 3))
    check(queries(cached, groups), cached)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 96), (192, 128), (48, 32)])
def test_different_head_dims(dim, value_dim):
    needs_memory_for("cq-4", dim, value_dim)
    cached = cache("cq-4", dim=dim, value_dim=value_dim, tokens=200)
    check(queries(cached, 2), cached)


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("name", LEARNED)
def test_extreme_codes(name, byte):
    needs_memory_for(name, 128)
    cached = cache(name, byte=byte, tokens=500)
    check(queries(cached, 1), cached)


def test_softcap_sink_logits_and_padding():
    needs_memory_for("cq-4", 128)
    cached = cache("cq-4", tokens=300, batch=2, start=[0, 37])
    query = queries(cached, 2)
    mask = torch.ones(2, 1, 1, 300, dtype=torch.bool, device="cuda")
    mask[1, :, :, :37] = False
    check(query, cached, mask=mask, softcap=5.0, sink_logits=torch.randn(4, device="cuda"))


def test_tables_are_made_once_and_die_with_their_codebook():
    needs_memory_for("cq-2", 128)
    cached = cache("cq-2", tokens=200)
    query, before = queries(cached), len(cuda_codebooks._tables)
    right = exact(query, cached)
    for _ in range(3):
        kv_attention(query, cached, softmax_scale=128**-0.5)
    assert len(cuda_codebooks._tables) == before + 2
    graph = torch.cuda.CUDAGraph()
    other = cache("cq-2", tokens=200)  # seen for the first time while a graph is captured
    with torch.cuda.graph(graph):
        found = kv_attention(
            query, other.replace(key_codebook=other.key.codebook.clone()), softmax_scale=0.1
        )
        same = kv_attention(query, cached, softmax_scale=128**-0.5)
    graph.replay()
    assert found.isfinite().all()
    assert (same.float() - right).norm() <= 2**-6 * right.norm()
    del cached, other
    gc.collect()
    assert len(cuda_codebooks._tables) == before
