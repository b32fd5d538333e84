"""Smoothed keys in CUDA kernels: codes bit for bit, and attention against float64.

Fresh random numbers, results in memory full of NaN, each call twice with the same bits. Factors are
between about 1/10 and 10. For the whole file a GPU needs about a minute, most of it compiling.
"""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig

from hf_vq import dispatch
from hf_vq.cache import VQCache, attend, see_queries
from hf_vq.codegen.attention_plan import Mask
from hf_vq.codegen.jit.compiler import cubin
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.errors import VQFormatError
from hf_vq.formats import KV_SCHEMES
from hf_vq.ops import KVCacheView, KVSide, kv_append, kv_attention
from hf_vq.ops.kv import arguments_of, flatten
from hf_vq.ops.kv_ops import _attention_problem
from hf_vq.ops.layout import ROWS
from hf_vq.ops.library import append_problem, attention_problem, static_append_problem
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.reference import kv_static as static_reference
from hf_vq.ops.rotary_mean import rotated, rotated_key_mean
from tests.buckets import caches
from tests.buckets.attention import SCHEMES, AttentionCase, has_kernel
from tests.buckets.case import kv_codebook, run_twice, same_bits, twice
from tests.fixtures.kv.attention_float64 import factors, make, written_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("u4", "u3", "u2", "k4v2", "nomad-u4")
START = 90_000


def on_gpu(batch, heads, dim):
    return factors(batch, heads, dim).cuda()


class SmoothedCase(AttentionCase):
    """The same problem, of keys that are smoothed: no plan knows."""

    def inputs(self, device):
        query, cached, mask = super().inputs(device)
        rows, heads, _, dim = cached.key.recent.shape
        assert cached.key.mean is not None
        return query, cached.replace(key_smoothing=factors(rows, heads, dim).to(device)), mask


def of(name, dim, share, static=False, tokens=1000, rows=2, rotary=False, **fields):
    given = {"dtype": "bfloat16", "mask": Mask.NONE, "softcapped": False, **fields}
    queries = given.pop("queries", 1)
    return SmoothedCase(
        name, (dim, dim), rows, 2, share, queries, tokens, static, 0, given["dtype"],
        given["mask"], given["softcapped"], rotary,
    )  # fmt: skip


MATRIX = [
    of(name, dim, share, static, rotary=rotary)
    for name, dim, share, static, rotary in itertools.product(
        NAMES, (64, 128, 256), (1, 4, 8), (False, True), (False, True)
    )
]
OTHERS = [
    of("u4", 128, 4, tokens=100_000, rows=1),
    of("u2", 64, 7, True, tokens=20_000),
    of("u4", 128, 4, queries=3, dtype="float16"),
    of("u4", 64, 8, queries=4),
    of("u4", 16, 2),
    of("u4", 48, 2, rotary=True),
    of("u4", 80, 2),
    of("u3", 96, 5, rotary=True),
    of("u4", 128, 4, softcapped=True),
    of("u3", 128, 8, mask=Mask.BOOL),
    of("u4", 256, 2, mask=Mask.FLOAT32, softcapped=True),
    of("u4", 128, 1, rows=9),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Kernels of attention of this file, compiled side by side."""
    arch = device_arch(torch.cuda.current_device())
    plans = {plan for case in (*MATRIX, *OTHERS) if able(case, arch) for plan in case.plans(arch)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda plan: cubin(plan, arch.name, default_store()), plans))


def able(case, arch):
    return has_kernel(SCHEMES[case.scheme], case.dims, arch, rotary=case.rotary)


@pytest.mark.parametrize("case", [*MATRIX, *OTHERS], ids=lambda case: case.name)
def test_attention(case):
    if not able(case, device_arch(torch.cuda.current_device())):
        pytest.skip("tables and codebooks do not fit into shared memory of this GPU")
    query, cached, _ = case.inputs(torch.device("cuda"))
    asked = attention_problem(
        query.device, query.dtype, cached.key.scheme, cached.value.scheme, *case.dims,
        case.queries, 0, ROWS, ROWS, cached.memory, 0, case.rotary,
    )  # fmt: skip
    assert dispatch.select(asked).name == "cuda.vq_attention"
    run_twice(case, torch.device("cuda"))


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("share", [1, 4])
def test_attention_with_ones(share, static, rotary):
    """The same bits as without; other factors give others."""
    query, cached, _ = of("u4", 128, share, static, rotary=rotary).inputs(torch.device("cuda"))
    ones = cached.replace(key_smoothing=torch.ones_like(cached.key.smoothing))
    none = cached.replace(key_smoothing=None)
    one, other, smoothed = twice(
        lambda: [kv_attention(query, view, softmax_scale=0.1) for view in (ones, none, cached)]
    )
    assert torch.equal(one, other) and not torch.equal(one, smoothed)


@pytest.mark.parametrize("share", [1, 4])
def test_strides(share):
    """Means and factors that lie differently are copied; without a mean nothing is smoothed."""
    query, cached, _ = of("u4", 128, share).inputs(torch.device("cuda"))
    wanted = kv_attention(query, cached, softmax_scale=0.1)
    wide = torch.full((2, 4, 1, 136), torch.nan, device="cuda")
    views = {}
    for name, x in (("key_mean", cached.key.mean), ("key_smoothing", cached.key.smoothing)):
        held = wide.clone()[:, 1:3, :, 3:131]
        views[name] = held.copy_(x)
    for names in (("key_mean",), ("key_smoothing",), tuple(views)):
        other = cached.replace(**{name: views[name] for name in names})
        assert torch.equal(kv_attention(query, other, softmax_scale=0.1), wanted)
    with pytest.raises(VQFormatError, match="rows whose mean is None"):
        kv_attention(query, cached.replace(key_mean=None), softmax_scale=0.1)


def appended(scheme, x, view):
    """New codes and scales of all tokens of a view with a key side alone."""

    def call():
        new = view.key._replace(codes=view.key.codes.clone(), scale=view.key.scale.clone())
        kv_append(x, x[:, :, :0], view._replace(key=new))
        return new.codes, new.scale

    asked = append_problem(
        x.device, x.dtype, scheme.spec(), x.shape[2], x.shape[3], ROWS,
        rotary=view.key_rotary_mean is not None,
    )  # fmt: skip
    assert dispatch.select(asked).name == "cuda.vq_append"
    return twice(call)


def key_view(scheme, x, mean, smoothing, before, **options):
    """A tape of random codes, `before` of them older than `x`."""
    rows, heads, tokens, dim = x.shape
    book = kv_codebook(scheme, heads, dim, torch.device("cuda"))
    width = dim // scheme.vector_size * scheme.entry_bits // 8
    shape = (rows, heads, before + tokens + 3)
    codes = torch.randint(256, (*shape, width), dtype=torch.uint8, device="cuda")
    scale = torch.full((*shape, scheme.row_numbers), torch.nan, device="cuda").half()
    none, spec = x[:, :, :0], scheme.spec()
    key = KVSide(codes, scale, book, mean, none, x, 0, spec, ROWS, smoothing)
    value = KVSide(codes[:, :, :0], scale[:, :, :0], book, None, none, none, 0, spec, ROWS)
    count = before + tokens
    view = KVCacheView(key, value, None, None, None, None, count, 0, 0, count)
    return view._replace(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 900])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_append(name, dim, tokens, dtype):
    """Codes are, bit for bit, those of s (x - mean) in float32, and nearly always those of the
    reference; factors of 1 are none."""
    scheme, heads, before = KV_SCHEMES[name].key, 3, 7
    mean, smoothing = torch.randn(2, heads, 1, dim, device="cuda"), on_gpu(2, heads, dim)
    x = (mean + torch.randn(2, heads, tokens, dim, device="cuda") / smoothing).to(dtype)
    view = key_view(scheme, x, mean, smoothing, before)
    codes, scale = appended(scheme, x, view)
    for other in (slice(0, before), slice(before + tokens, None)):
        assert torch.equal(codes[:, :, other], view.key.codes[:, :, other]), "others were written"
    rows, new = (x.float() - mean) * smoothing, slice(before, before + tokens)
    plain = view.replace(key_mean=torch.zeros_like(mean), key_smoothing=None)
    wanted, wanted_scale = appended(scheme, rows, plain)
    assert torch.equal(codes[:, :, new], wanted[:, :, new])
    assert torch.equal(scale[:, :, new], wanted_scale[:, :, new])
    of_reference, _ = reference.encode(rows, view.key.codebook, None, scheme)
    same = (codes[:, :, new] == of_reference).float().mean()
    assert same > 0.995, f"{1 - same:.3%} of the codes are others"
    ones = view.replace(key_smoothing=torch.ones_like(smoothing))
    assert same_bits(*(appended(scheme, x, each) for each in (
        ones, view.replace(key_smoothing=None))))  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 900])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_append_with_a_rotary_mean(name, dim, tokens, interleaved):
    """Codes are as near as the nearest of what is left, times the factors."""
    scheme, heads, before = KV_SCHEMES[name].key, 3, 7
    inv_freq = 10_000.0 ** -(torch.arange(dim // 4, device="cuda") / (dim // 4))
    turning = 30 * torch.randn(2, heads, 1, dim, device="cuda")
    turning[..., dim // 2 :] = 0
    mean, smoothing = torch.randn(2, heads, 1, dim, device="cuda"), on_gpu(2, heads, dim)
    at = START + torch.arange(tokens, device="cuda")
    x = mean + torch.randn(2, heads, tokens, dim, device="cuda") / smoothing
    x = x + rotated(turning, inv_freq, interleaved, at)
    view = key_view(
        scheme, x, mean, smoothing, before, key_rotary_mean=turning, rotary_inv_freq=inv_freq,
        rotary_interleaved=interleaved, rotary_start=START - before,
    )  # fmt: skip
    codes, scale = appended(scheme, x, view)
    turned = rotated_key_mean(view, before + torch.arange(tokens, device="cuda"))
    left, new = (x.float() - mean - turned) * smoothing, slice(before, before + tokens)
    found = reference.decode_rows(
        codes[:, :, new], view.key.codebook, scale[:, :, new], scheme, dim
    )
    wanted_codes, wanted_scale = reference.encode(left, view.key.codebook, None, scheme)
    wanted = reference.decode_rows(wanted_codes, view.key.codebook, wanted_scale, scheme, dim)
    # Of two entries as near, either may be taken, and the scale is then another one.
    errors = [(rows - left).square().sum(-1) for rows in (found, wanted)]
    assert errors[0].mean() <= 1.001 * errors[1].mean()
    assert bool((errors[0] <= 1.5 * errors[1] + 1e-4 * left.square().sum(-1)).all())
    same = (codes[:, :, new] == wanted_codes).float().mean()
    assert same > 0.98, f"{1 - same:.3%} of the codes are others"
    ones = view.replace(key_smoothing=torch.ones_like(smoothing))
    assert same_bits(*(appended(scheme, x, each) for each in (
        ones, view.replace(key_smoothing=None))))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_store(name, dim, rotary, dtype):
    """Codes of a static cache are those of the kernel that appends to a growing one, bit for bit,
    with its means; those means are the specification's, which no factor changes."""
    scheme, rows, heads, window, sinks, capacity = KV_SCHEMES[name], 2, 3, 32, 2, 96
    inv_freq = 10_000.0 ** -(torch.arange(dim // 2, device="cuda") / (dim // 2))
    turning = (20.0 if rotary else 0.0) * torch.randn(rows, heads, 1, dim, device="cuda")
    states = turning + torch.randn(rows, heads, 80, dim, device="cuda")
    at = START + torch.arange(80, device="cuda")
    keys = rotated(states, inv_freq, False, at).to(dtype)
    values = torch.randn_like(keys)

    def side(part, mean, smoothing=None):
        width = dim // part.vector_size * part.entry_bits // 8
        shape = (rows, heads, capacity)
        codes = torch.randint(256, (*shape, width), dtype=torch.uint8, device="cuda")
        scale = torch.randn(*shape, part.row_numbers, device="cuda").half()
        floats = (torch.zeros(rows, heads, n, dim, device="cuda", dtype=dtype) for n in (sinks, 40))
        book = kv_codebook(part, heads, dim, torch.device("cuda"))
        return KVSide(codes, scale, book, mean, *floats, 0, part.spec(), ROWS, smoothing)

    def empty():
        return torch.full((rows, heads, 1, dim), torch.nan, device="cuda")

    view = KVCacheView(
        side(scheme.key, empty(), on_gpu(rows, heads, dim)), side(scheme.value, None),
        torch.tensor([0, 3], device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda"),
        None, torch.zeros(rows, heads, dtype=torch.bool, device="cuda"), capacity, window, 0, 0,
    )  # fmt: skip
    if rotary:
        view = view._replace(key_rotary_mean=empty(), rotary_inv_freq=inv_freq, rotary_start=START)
    books = {"key_codebook": view.key.codebook, "value_codebook": view.value.codebook}
    layouts = (ROWS, ROWS)
    asked = static_append_problem(
        keys.device, dtype, (view.key.scheme, view.value.scheme), 1, (dim, dim), layouts, rotary
    )
    assert dispatch.select(asked).name == "cuda.vq_store"
    counts = (1, 7, 8, 8, 8, 1, 1, 8, 8, 8, 8, 8, 1, 1)

    def filled(start, store):
        own, begin = start.map(torch.Tensor.clone).replace(**books), 0
        for count in counts:
            some = slice(begin, begin + count)
            store(keys[:, :, some], values[:, :, some], own)
            begin += count
        return tuple(part for part in flatten(own) if isinstance(part, torch.Tensor))

    names = [name for name, part in arguments_of(view).items() if isinstance(part, torch.Tensor)]

    def stored(start, store=kv_append):
        return start.replace(**dict(zip(names, twice(lambda: filled(start, store)), strict=True)))

    found, wanted = stored(view), stored(view, static_reference.kv_append)
    assert torch.equal(found.key.smoothing, view.key.smoothing)
    if not rotary:
        torch.testing.assert_close(found.key.mean, wanted.key.mean, rtol=1e-4, atol=1e-3)
    coded = sum(counts) - window
    tape = found.map(torch.Tensor.clone).replace(**books)
    tape = tape._replace(cache_seqlens=None, cache_leftpad=None, key_mean_known=None,
                         max_seqlen=coded, num_coded=coded)  # fmt: skip
    kv_append(keys[:, :, :coded].contiguous(), values[:, :, :coded].contiguous(), tape)
    behind = slice(3 + sinks, coded)  # means are known before the first of these leaves the window
    for one, other in ((found.key, tape.key), (found.value, tape.value)):
        assert torch.equal(one.codes[:, :, behind], other.codes[:, :, behind])
        assert torch.equal(one.scale[:, :, behind], other.scale[:, :, behind])
    ones = stored(view.replace(key_smoothing=torch.ones_like(view.key.smoothing)))
    names.remove("key_smoothing")
    none = stored(view.replace(key_smoothing=None))
    for one, other in ((ones.key, none.key), (ones.value, none.value)):
        assert same_bits((one.codes, one.scale), (other.codes, other.scale))
    assert not torch.equal(ones.key.codes[:, :, behind], found.key.codes[:, :, behind])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [None, [0, 11]])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("name", NAMES)
def test_prefill(name, dim, start, dtype):
    """Many queries, as tests/gpu/kv/test_prefill.py bounds them; logits are twice as large."""
    names = ("cuda.attention_prefill", "torch.attention")  # the latter makes caches on the CPU
    kept = [e for e in dispatch.ENTRIES if e.op != "kv_attention" or e.name in names]
    with dispatch.using(kept):
        cached = make(name, dtype, dim=dim, length=150, window=8, fresh=33, start=start,
                      smoothed=True)  # fmt: skip
        query, scale, mask = torch.randn(2, 4, 33, dim).to(dtype), dim**-0.5, None
        if start is not None:
            mask = torch.ones(33, 150, dtype=torch.bool).tril(150 - 33)
            mask = mask & (torch.arange(150) >= torch.tensor(start)[:, None, None, None])
        exact, plain = (
            written_out(query, cached, kind, softmax_scale=scale, mask=mask)
            for kind in (torch.float64, dtype)
        )
        view = cached.map(torch.Tensor.cuda)
        shown = None if mask is None else mask.cuda()
        problem = _attention_problem(query.cuda(), view)
        assert dispatch.select(problem).name == "cuda.attention_prefill"
        out = kv_attention(query.cuda(), view, softmax_scale=scale, mask=shown)
        ones = view.replace(key_smoothing=torch.ones_like(view.key.smoothing))
        one, other = (
            kv_attention(query.cuda(), each, softmax_scale=scale, mask=shown)
            for each in (ones, view.replace(key_smoothing=None))
        )
    assert torch.equal(one, other) and not torch.equal(one, out)
    eps, parts = torch.finfo(dtype).eps, (query, cached.key.recent, cached.value.recent)
    sizes = [float(x.float().norm(dim=-1).max()) for x in parts]
    allowed = 2 * (plain.double() - exact).abs().max() + eps * exact.abs().max()
    allowed += 4 * eps * scale * sizes[0] * sizes[1] * sizes[2] / dim**0.5
    assert (out.double().cpu() - exact).abs().max() <= allowed


@pytest.mark.parametrize("prompt", [20, 200])
def test_layers(prompt):
    """Caches that grow, and static ones, decide alike; attention reads what they hold."""
    rows, heads, dim, tokens = 2, 2, 64, 250
    config = LlamaConfig(
        hidden_size=4 * dim, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=heads,
        head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    sizes = (torch.randn(1, heads, 1, dim // 2, device="cuda")).exp()
    sizes = torch.cat([sizes, sizes], -1)
    keys = (torch.randn(rows, heads, tokens, dim, device="cuda") * sizes).half()
    query = torch.randn(rows, 4, tokens, dim, device="cuda") / sizes.repeat_interleave(2, 1)
    query, values = query.half(), torch.randn(rows, heads, tokens, dim, device="cuda").half()
    exact = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, -1:].double(), keys.double(), values.double(), enable_gqa=True
    )
    found, errors = [], []
    for static, sees in itertools.product((False, True), (True, False)):
        cache = VQCache(config, window=32, max_cache_len=300, static=static, strict=True)
        for begin, end in itertools.pairwise((0, *range(prompt, tokens + 1))):
            last = cache.update(keys[:, :, begin:end], values[:, :, begin:end], 0)
            if begin == 0 and sees:
                see_queries(query[:, :, :end], last[0])
        layer, out = cache.layers[0], attend(query[:, :, -1:], *last)
        assert out is not None
        factor = layer.k.smoothing
        assert (factor is not None and bool((factor != 1).any())) == sees
        if sees:
            found.append((out, factor, layer.k.codes.rows()[:, :, : tokens - 32]))
        errors.append(float((out - exact).norm() / exact.norm()))
    for one, other in zip(*found, strict=True):
        if one.dtype == torch.uint8:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
    assert max(errors[0], errors[2]) < min(errors[1], errors[3]), errors


def test_exact_is_smoothed():
    """What these tests compare with divides: else they would say nothing."""
    query, cached, mask = of("u4", 64, 4).inputs(torch.device("cuda"))
    given = {"softmax_scale": 0.125, "softcap": 0.0}
    one, other = (
        caches.exact(query, each, mask, **given)
        for each in (cached, cached.replace(key_smoothing=None))
    )
    assert (one - other).norm() > 0.1 * one.norm()
