"""`cuda.vq_store`: a static cache after any steps is what its specification says, codes are those
of `append` bit for bit (tests/gpu/kv/test_append.py compares them with float64)."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_vq import dispatch
from hf_vq.codegen.families.kv_append import append_plan, store_plan
from hf_vq.codegen.jit.compiler import cubin
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.codegen.plan import Dtype
from hf_vq.errors import VQFormatError
from hf_vq.formats import KV_SCHEMES
from hf_vq.formats.packing import packed_size
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import KVCacheView, KVSide, kv_append
from hf_vq.ops.kv import arguments_of
from hf_vq.ops.reference import kv_static as static_reference
from tests.fixtures.kv.views import append_kv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("u4", "u3", "u2", "k4v2", "cq-4", "cq-2", "nomad-2", "nomad-u4", "qserve-kv4")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Most kernels of this file, by all cores."""
    plans = set()
    for name, dims, dtype in itertools.product(
        NAMES, ((64, 64), (128, 128), (192, 128)), (Dtype.BFLOAT16, Dtype.FLOAT32)
    ):
        scheme = KV_SCHEMES[name]
        sides = ((scheme.key, scheme.centre_keys), (scheme.value, False))
        plans.add(
            store_plan(
                *(
                    append_plan(part, dim, dtype, centred=mean, aligned=True, few=True)
                    for (part, mean), dim in zip(sides, dims, strict=True)
                )
            )
        )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda plan: cubin(plan, device_arch(0).name, default_store()), plans))


def codebook_of(scheme, heads, dim):
    if scheme.has_scale:
        return universal_tensor(scheme).cuda()
    return torch.randn(kv_codebook_spec(scheme, heads, dim).shape, device="cuda").half()


def cache(name, batch=2, heads=3, dims=(64, 64), *, capacity=40, sinks=2, window=5, slots=13,
          start=None, dtype=torch.bfloat16, mean="measured"):  # fmt: skip
    """An empty layer whose memory is full of what was there before."""
    scheme = KV_SCHEMES[name]

    def side(part, dim, mean):
        size = packed_size(dim // part.vector_size, part.entry_bits)
        codes = torch.randint(0, 256, (batch, heads, capacity, size), device="cuda").byte()
        scale = torch.randn(batch, heads, capacity, part.row_numbers, device="cuda").half()
        sink = torch.randn(batch, heads, sinks, dim, device="cuda").to(dtype)
        ring = torch.randn(batch, heads, slots, dim, device="cuda").to(dtype)
        book = codebook_of(part, heads, dim)
        return KVSide(codes, scale, book, mean, sink, ring, 0, part.spec(), "rows")

    centred = scheme.centre_keys or mean == "given"
    k_mean = torch.randn(batch, heads, 1, dims[0], device="cuda") if centred else None
    measured = centred and mean == "measured"
    return KVCacheView(
        side(scheme.key, dims[0], k_mean), side(scheme.value, dims[1], None),
        None if start is None else torch.tensor(start, device="cuda"),
        torch.zeros((), dtype=torch.int64, device="cuda"), None,
        torch.zeros(batch, heads, dtype=torch.bool, device="cuda") if measured else None,
        capacity, window, 0, 0,
    )  # fmt: skip


def copy_of(layer):
    return layer.map(torch.Tensor.clone)


def who(layer, dtype="bfloat16"):
    specs, sizes = (layer.key.scheme, layer.value.scheme), (1, layer.key.dim, layer.value.dim)
    return dispatch.select(
        dispatch.KVAppendProblem("cuda", dtype, *specs, *sizes, "rows", "rows", "static")
    ).name


def states(layer, tokens):
    return tuple(
        (2 * torch.randn(*t.shape[:2], tokens, t.shape[3], device="cuda") + 1).to(t.dtype)
        for t in (layer.key.recent, layer.value.recent)
    )


def step_by_specification(layer, keys, values):
    """Its floats, mean and length; codes as `append` finds them under the given mean."""
    wanted = copy_of(layer)
    static_reference.kv_append(keys, values, wanted)
    return wanted


def check_codes(layer, before, wanted, length, tokens):
    """What was written, at the positions that left the window, and nothing else."""
    capacity = layer.key.codes.shape[2]
    slots = layer.key.recent.shape[2]
    for which, mean in (("key", layer.key.mean), ("value", None)):
        side, was, of = (getattr(view, which) for view in (layer, before, wanted))
        expected = was.codes.clone(), was.scale.clone()
        for position in range(length - layer.window, length - layer.window + tokens):
            if 0 <= position < capacity:
                row = of.recent[:, :, position % slots : position % slots + 1].contiguous()
                append_kv(row, mean, side.codebook, *expected, position, side.scheme, "rows")
        assert torch.equal(side.codes, expected[0])
        assert torch.equal(side.scale, expected[1])


def run(layer, steps):
    length = 0
    for tokens in steps:
        keys, values = states(layer, tokens)
        before, wanted = copy_of(layer), step_by_specification(layer, keys, values)
        kv_append(keys, values, layer)
        floats = ("key_sinks", "value_sinks", "key_recent", "value_recent")
        for field in (*floats, "cache_seqlens", "key_mean_known"):
            found, expected = (arguments_of(view)[field] for view in (layer, wanted))
            assert (found is None and expected is None) or torch.equal(found, expected), field
        if layer.key.mean is not None:
            torch.testing.assert_close(layer.key.mean, wanted.key.mean, rtol=1e-5, atol=1e-5)
        check_codes(layer, before, wanted, length, tokens)
        length += tokens
    assert int(layer.cache_seqlens) == length


@pytest.mark.parametrize("start", [None, [0, 4]])
@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name, start):
    layer = cache(name, start=start)
    assert who(layer) == "cuda.vq_store"
    run(layer, [1] * 50)  # beyond the capacity


@pytest.mark.parametrize("name", ["u4", "u3", "cq-4", "nomad-2"])
def test_several_tokens(name):
    run(cache(name, start=[3, 0]), [1, 8, 3, 1, 2, 8, 8, 5])


@pytest.mark.parametrize(("window", "slots"), [(0, 8), (1, 12), (8, 9), (64, 96)])
def test_windows(window, slots):
    steps = [1, 7, 3, 1, 1, 4] if slots - window > 7 else [1] * 20
    run(cache("u4", window=window, slots=slots), [*steps, *[1] * window])


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("name", ["u4", "u2", "cq-4"])
def test_head_dims(name, dims):
    run(cache(name, dims=dims), [1] * 9)


def test_other_dtypes_and_a_given_mean():
    run(cache("u4", dtype=torch.float32), [1] * 9)
    run(cache("u4", dtype=torch.float16, mean="given"), [1] * 9)
    run(cache("cq-4", mean="given"), [1] * 9)
    run(cache("u4", sinks=0), [2] * 9)


def test_strides_of_new_tokens():
    layer = cache("u4")
    other = copy_of(layer)
    for _ in range(9):
        keys, values = states(layer, 2)
        kv_append(keys, values, other)
        wide = torch.cat([keys, values, keys], 3).transpose(1, 2).contiguous().transpose(1, 2)
        kv_append(wide[..., :64], wide[..., 64:128], layer)
    for a, b in zip(layer, other, strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


@pytest.mark.parametrize("name", ["u4", "cq-4"])
def test_one_graph_for_all_steps(name):
    layer = cache(name, capacity=200, window=16, slots=48)
    keys, values = states(layer, 1)
    kv_append(keys, values, layer)
    wanted = copy_of(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_append(keys, values, layer)
    for _ in range(150):
        for fresh, tensor in zip(states(layer, 1), (keys, values), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        kv_append(keys, values, wanted)
    assert int(layer.cache_seqlens) == 151
    for a, b in zip(layer, wanted, strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


def test_many_blocks():
    run(cache("u4", batch=40, heads=8), [1] * 8)
    run(cache("cq-4", batch=20, heads=8), [1] * 8)


def test_what_does_not_fit_is_refused():
    layer = cache("u4")
    keys, values = states(layer, 1)
    with pytest.raises(VQFormatError, match="dense, aligned codes"):
        kv_append(keys, values, layer.replace(key_codes=layer.key.codes[..., :-1]))
    with pytest.raises(VQFormatError, match="ring"):
        kv_append(keys, values[:, :1], layer)


@pytest.mark.parametrize("name", ["u4", "u2", "nomad-u4"])
def test_what_is_not_finite_spares_the_mean(name):
    """And so does what is too large for a mean: a token of its own is lost, not its head."""
    layer = cache(name, dtype=torch.float32)
    hostile = {2: torch.nan, 3: -torch.inf, 4: 3e38}  # the mean is of tokens 2 and 3
    for at in range(9):
        keys, values = states(layer, 1)
        keys[0, 1, 0, 5] = keys[1, 0, 0, 7] = hostile.get(at, 0.0)
        wanted = step_by_specification(layer, keys, values)
        kv_append(keys, values, layer)
        torch.testing.assert_close(layer.key.mean, wanted.key.mean, rtol=1e-5, atol=1e-5)
    assert bool(layer.key_mean_known.all()) and bool(layer.key.mean.isfinite().all())
    coded = layer.key.scale[:, :, : 9 - layer.window]
    lost = (~coded.isfinite()).nonzero()[:, :3].tolist()
    assert lost == [[0, 1, 2], [0, 1, 3], [1, 0, 2], [1, 0, 3]]
