"""A rotary mean in CUDA kernels against float64: what attention adds to logits, and what is
subtracted from keys before they are coded.

Fresh random numbers, results in memory full of NaN, each call twice with the same bits. Means hold
up to 200 in a pair of channels, beside queries and codes of unit variance; positions go up to
100,000 and more. For the whole file a GPU needs about a minute, most of it compiling. Every kernel
of append, and of a step of a static cache, is run by tests/gpu/test_buckets.py.
"""

import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig

from hf_vq import dispatch
from hf_vq.backends.cuda.kv.attention import attention
from hf_vq.backends.cuda.kv.rotary_mean import FARTHEST
from hf_vq.cache import VQCache, attend
from hf_vq.codegen.attention_plan import Mask
from hf_vq.codegen.families.kv_attention import best
from hf_vq.codegen.jit.compiler import cubin
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.formats import KV_SCHEMES
from hf_vq.ops import KVCacheView, KVSide, kv_append, kv_attention
from hf_vq.ops.kv import arguments_of, flatten
from hf_vq.ops.layout import ROWS
from hf_vq.ops.library import append_problem, attention_problem, static_append_problem
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.reference import kv_static as static_reference
from hf_vq.ops.rotary_mean import rotated, rotated_key_mean
from tests.buckets import caches
from tests.buckets.attention import SCHEMES, AttentionCase, has_kernel
from tests.buckets.case import kv_codebook, run_twice, twice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("u4", "u3", "u2", "k4v2", "nomad-u4", "qserve-kv4", "cq-4", "cq-2")
KINDS = {"growing": (False, 0), "static": (True, 0), "paged": (False, 64)}


def of(name, dim, share, kind="growing", tokens=1000, rows=2, **fields):
    static, page = KINDS[kind]
    given = {"dtype": "bfloat16", "mask": Mask.NONE, "softcapped": False, **fields}
    queries = given.pop("queries", 1)
    return AttentionCase(
        name, (dim, dim), rows, 2, share, queries, 4 * tokens if page else tokens, static, page,
        given["dtype"], given["mask"], given["softcapped"], True,
    )  # fmt: skip


MATRIX = [
    of(name, dim, share, kind)
    for name, dim, share, kind in itertools.product(NAMES, (64, 128, 256), (1, 4, 8), KINDS)
    if kind != "paged" or (SCHEMES[name].key.has_scale and dim != 256)
]
OTHERS = [
    of("u4", 128, 4, tokens=100_000, rows=1),
    of("u2", 64, 7, "static", tokens=20_000),
    of("u4", 128, 4, queries=3, dtype="float16"),
    of("u4", 64, 8, queries=4),
    of("u4", 80, 2),
    of("u4", 128, 4, softcapped=True),
    of("u3", 128, 8, mask=Mask.BOOL),
    of("u4", 256, 2, mask=Mask.FLOAT32, softcapped=True),
    of("u4", 128, 1, "paged", rows=9),
    # Swizzled columns of several blocks: there is no room for all queries of a kv head.
    of("cq-2", 160, 8),
    of("cq-2", 192, 2, queries=4),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Kernels of attention of this file, compiled side by side."""
    arch = device_arch(torch.cuda.current_device())
    plans = {plan for case in (*MATRIX, *OTHERS) if able(case, arch) for plan in case.plans(arch)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda plan: cubin(plan, arch.name, default_store()), plans))


def able(case, arch):
    return has_kernel(SCHEMES[case.scheme], case.dims, arch, rotary=True)


@pytest.mark.parametrize("case", [*MATRIX, *OTHERS], ids=lambda case: case.name)
def test_attention(case):
    if not able(case, device_arch(torch.cuda.current_device())):
        pytest.skip("tables and codebooks do not fit into shared memory of this GPU")
    for seed in range(2):  # layouts of pairs and positions are random, too
        torch.manual_seed(seed)
        query, cached, _ = case.inputs(torch.device("cuda"))
        paged = cached.page_size > 0
        asked = attention_problem(
            query.device, query.dtype, cached.key.scheme, cached.value.scheme, *case.dims,
            0 if paged else case.queries, 0, ROWS, ROWS, cached.memory, cached.page_size, True,
        )  # fmt: skip
        assert dispatch.select(asked).name == "cuda.vq_attention"
        run_twice(case, torch.device("cuda"))


@pytest.mark.parametrize("kind", ["growing", "paged"])
@pytest.mark.parametrize("name", ["u4", "u2"])
def test_layouts_of_centres(name, kind):
    """Of paired queries, the second column of a query has the next pair of steps (`rotary` 2) or
    the second tile of a step (`step_tiles` 2 and `rotary` 1), or is not used. One block has all
    tokens of a head, so that every warp finds logits more than once, in the longest row at least.
    """
    torch.manual_seed(7)
    case = of(name, 128, 4, kind, tokens=3000)
    plans = {}
    for plan in best(case.problem(device_arch(torch.cuda.current_device()))):
        plans.setdefault((plan.step_tiles, plan.rotary), plan)
    assert {(1, 1), (1, 2), (2, 1)} <= set(plans)
    query, cached, mask = inputs = case.inputs(torch.device("cuda"))
    for plan in plans.values():
        assert 2 * 16 * plan.step_tiles * plan.rotary * 2 * plan.threads // 32 < 2900
        run = functools.partial(attention, query, cached, mask, None, 128**-0.5, 0.0, plan, 1)
        case.check(inputs, twice(lambda run=run: (run(),)))


@pytest.mark.parametrize(
    ("largest", "start"),
    [(1.0, 90_001), (200.0, 90_001), (20_000.0, 90_001), (200.0, -40), (200.0, FARTHEST),
     (200.0, -FARTHEST)],
)  # fmt: skip
def test_logits_of_a_mean(largest, start):
    """What attention adds to a logit is right to 2^-18 of the sum of all pairs. Queries see two
    tokens, and a mask takes off the difference of their logits: weights tell what is left of it."""
    torch.manual_seed(int(largest))
    dim, tokens = 128, 70
    case = AttentionCase(
        "u4", (dim, dim), 1, 2, 4, 1, tokens, False, 0, "float16", Mask.NONE, False, True
    )
    query, cached, _ = case.inputs(torch.device("cuda"))
    mean = largest * torch.randn(1, 2, 1, dim, device="cuda")
    inv_freq = 1e6 ** -(torch.arange(dim // 2, device="cuda") / (dim // 2))
    cached = cached._replace(
        key_rotary_mean=mean, rotary_inv_freq=inv_freq, rotary_interleaved=False, rotary_start=start
    )
    # Codes give nothing but to values: logits are those of the mean alone.
    cached.key.scale.fill_(0)
    if cached.key.mean is not None:
        cached.key.mean.zero_()
    hypot = (query.reshape(2, 4, 2, -1).norm(dim=2) * mean.reshape(2, 1, 2, -1).norm(dim=2)).sum(-1)
    scale, one, other = 1000 / float(hypot.max()), 9, 61
    turned = rotated(mean, inv_freq, False, torch.tensor([start + one, start + other]).cuda())
    logits = (query.double().reshape(1, 2, 4, dim) @ turned.double().mT)[0]  # [H, share, 2]
    apart = scale * (logits[..., 0] - logits[..., 1])
    assert float(apart.abs().max()) > 20
    mask = torch.full((1, 8, 1, cached.max_seqlen), -torch.inf, device="cuda")
    mask[..., one], mask[..., other] = 0, apart.reshape(1, 8, 1)
    (found,) = twice(lambda: (kv_attention(query, cached, mask=mask, softmax_scale=scale),))
    values = torch.stack(
        [caches._decoded(
            cached.value.codes[:, :, cached.value.first + at, None],
            cached.value.scale[:, :, cached.value.first + at, None],
            cached.value.codebook, cached.value.parsed, dim,
        )[0, :, 0] for at in (one, other)], 1,
    )  # fmt: skip
    # o = w v_1 + (1 - w) v_2, so w is a projection.
    between = (values[:, 0] - values[:, 1])[:, None]
    weight = ((found.double().reshape(2, 4, dim) - values[:, 1, None]) * between).sum(-1)
    weight = weight / between.square().sum(-1)
    error = (torch.log(weight) - torch.log1p(-weight)).abs()
    # Of two logits; weights and results are fp16: 2^-11 of each, over w (1 - w) = 1/4.
    bound = scale * hypot * 2.0**-18 * 2 + 4 * 2.0**-10
    assert bool((error <= bound).all()), f"{error.max()} of {bound.min()}"


def test_a_mean_of_zeros_changes_nothing():
    """The same logits as without, and attention without is another kernel with the same result."""
    torch.manual_seed(5)
    query, cached, _ = of("u4", 128, 4).inputs(torch.device("cuda"))
    zeros = cached._replace(key_rotary_mean=torch.zeros_like(cached.key_rotary_mean))
    none = cached._replace(key_rotary_mean=None, rotary_inv_freq=None)
    one, other = twice(
        lambda: [kv_attention(query, view, softmax_scale=0.1) for view in (zeros, none)]
    )
    torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-9)


def keys_of(rows, heads, tokens, dim, bias, inv_freq, interleaved, start, dtype):
    mean = bias * torch.randn(rows, heads, 1, dim, device="cuda")
    mean[..., 2 * len(inv_freq) :] = 0
    noise = torch.randn(rows, heads, tokens, dim, device="cuda")
    at = start + torch.arange(tokens, device="cuda")
    return rotated(mean + noise, inv_freq, interleaved, at).to(dtype), mean


def frequencies(pairs):
    return 10_000.0 ** -(torch.arange(pairs, device="cuda") / pairs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 900])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["u4", "u2", "cq-4", "qserve-kv4"])
def test_append(name, dim, tokens, interleaved):
    """Codes are the nearest of what is left of the keys, in float64 up to what angles are wrong."""
    scheme, heads, start = KV_SCHEMES[name].key, 3, 90_000
    torch.manual_seed(tokens + dim)
    inv_freq = frequencies(dim // 2 if tokens == 5 else dim // 4)
    x, m = keys_of(2, heads, tokens, dim, 30.0, inv_freq, interleaved, start, torch.bfloat16)
    mean = 0.1 * torch.randn(2, heads, 1, dim, device="cuda")
    book = kv_codebook(scheme, heads, dim, torch.device("cuda"))
    before = 7  # tokens that have codes already
    width = dim // scheme.vector_size * scheme.entry_bits // 8
    shape = (2, heads, before + tokens + 3)
    codes = torch.randint(256, (*shape, width), dtype=torch.uint8, device="cuda")
    scale = torch.full((*shape, scheme.row_numbers), torch.nan, device="cuda").half()
    none = x[:, :, :0]
    key = KVSide(codes, scale, book, mean, none, x, 0, scheme.spec(), ROWS)
    value = KVSide(codes[:, :, :0], scale[:, :, :0], book, None, none, none, 0, scheme.spec(), ROWS)
    view = KVCacheView(
        key, value, None, None, None, None, before + tokens, 0, 0, before + tokens, m, inv_freq,
        interleaved, start - before,
    )  # fmt: skip
    asked = append_problem(x.device, x.dtype, scheme.spec(), tokens, dim, ROWS, rotary=True)
    assert dispatch.select(asked).name == "cuda.vq_append"

    def appended():
        new = key._replace(codes=codes.clone(), scale=scale.clone())
        kv_append(x, none, view._replace(key=new))
        return new.codes, new.scale

    rest = codes
    codes, scale = twice(appended)
    for other in (slice(0, before), slice(before + tokens, None)):
        assert torch.equal(codes[:, :, other], rest[:, :, other]), "others were written"
    new = slice(before, before + tokens)
    left = x.float() - mean - rotated_key_mean(view, before + torch.arange(tokens, device="cuda"))
    # What is subtracted is wrong by 2^-20 of m: a code may be another, but as near.
    found = reference.decode_rows(codes[:, :, new], book, scale[:, :, new], scheme, dim)
    wanted_codes, wanted_scale = reference.encode(left, book, None, scheme)
    wanted = reference.decode_rows(wanted_codes, book, wanted_scale, scheme, dim)
    errors = [(rows - left).square().sum(-1) for rows in (found, wanted)]
    assert bool((errors[0] <= errors[1] * 1.02 + 1e-4 * left.square().sum(-1)).all())
    same = (codes[:, :, new] == wanted_codes).float().mean()
    assert same > 0.98, f"{1 - same:.3%} of the codes are others"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("interleaved", "partly"), [(False, False), (True, True)])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["u4", "u2", "nomad-u4", "qserve-kv4"])
def test_store_measures_and_subtracts(name, dim, interleaved, partly, dtype):
    """Means are those of the specification, and so is what is decoded; codes are those of the
    kernel that appends to a growing cache, bit for bit."""
    scheme, rows, heads, window, sinks, capacity = KV_SCHEMES[name], 2, 3, 32, 2, 96
    torch.manual_seed(dim)
    start, leftpad = 50_000, torch.tensor([0, 3], device="cuda")
    inv_freq = frequencies(dim // 4 if partly else dim // 2)
    keys, _ = keys_of(rows, heads, 80, dim, 20.0, inv_freq, interleaved, start, dtype)
    keys[:, -1] = torch.randn_like(keys[:, -1])  # a head without a constant part
    values = torch.randn_like(keys)

    def side(part, mean):
        width = dim // part.vector_size * part.entry_bits // 8
        shape = (rows, heads, capacity)
        codes = torch.randint(256, (*shape, width), dtype=torch.uint8, device="cuda")
        scale = torch.randn(*shape, part.row_numbers, device="cuda").half()
        floats = (torch.zeros(rows, heads, n, dim, device="cuda", dtype=dtype) for n in (sinks, 40))
        book = kv_codebook(part, heads, dim, torch.device("cuda"))
        return KVSide(codes, scale, book, mean, *floats, 0, part.spec(), ROWS)

    def empty():
        return torch.full((rows, heads, 1, dim), torch.nan, device="cuda")

    view = KVCacheView(
        side(scheme.key, empty()), side(scheme.value, None), leftpad,
        torch.zeros((), dtype=torch.int64, device="cuda"), None,
        torch.zeros(rows, heads, dtype=torch.bool, device="cuda"), capacity, window, 0, 0,
        empty(), inv_freq, interleaved, start,
    )  # fmt: skip
    books = {"key_codebook": view.key.codebook, "value_codebook": view.value.codebook}
    wanted = view.map(torch.Tensor.clone).replace(**books)
    asked = static_append_problem(
        keys.device, dtype, (view.key.scheme, view.value.scheme), 1, (dim, dim), (ROWS, ROWS), True
    )
    assert dispatch.select(asked).name == "cuda.vq_store"
    empty_view, counts = view, (1, 7, 8, 8, 8, 1, 1, 8, 8, 8, 8, 8, 1, 1)

    def stored():
        own, begin = empty_view.map(torch.Tensor.clone).replace(**books), 0
        for count in counts:
            some = slice(begin, begin + count)
            kv_append(keys[:, :, some], values[:, :, some], own)
            begin += count
        return tuple(part for part in flatten(own) if isinstance(part, torch.Tensor))

    names = [name for name, part in arguments_of(view).items() if isinstance(part, torch.Tensor)]
    view, begin = view.replace(**dict(zip(names, twice(stored), strict=True))), 0
    for count in counts:
        some = slice(begin, begin + count)
        static_reference.kv_append(keys[:, :, some], values[:, :, some], wanted)
        begin += count
    assert bool(view.key_mean_known.all()) and bool(wanted.key_mean_known.all())
    # A pair at the threshold may go either way: hardly any does.
    moved = [(one.key_rotary_mean != 0).flatten(2) for one in (view, wanted)]
    assert (moved[0] != moved[1]).float().mean() < 0.02
    same = (moved[0] == moved[1]).view_as(view.key.mean)
    for one, other in (
        (view.key_rotary_mean, wanted.key_rotary_mean), (view.key.mean, wanted.key.mean)
    ):  # fmt: skip
        torch.testing.assert_close(one[same], other[same], rtol=1e-4, atol=1e-3)
    assert moved[1][:, :-1].float().mean() > 0.5 * 2 * len(inv_freq) / dim
    coded = begin - window
    tape = view.map(torch.Tensor.clone).replace(**books)
    tape = tape._replace(cache_seqlens=None, cache_leftpad=None, key_mean_known=None,
                         max_seqlen=coded, num_coded=coded)  # fmt: skip
    kv_append(keys[:, :, :coded].contiguous(), values[:, :, :coded].contiguous(), tape)
    # The mean is known before the first token behind the sinks leaves the window.
    behind = slice(int(leftpad.max()) + sinks, coded)
    for one, other in ((view.key, tape.key), (view.value, tape.value)):
        assert torch.equal(one.codes[:, :, behind], other.codes[:, :, behind])
        assert torch.equal(one.scale[:, :, behind], other.scale[:, :, behind])
    assert int(view.cache_seqlens) == int(wanted.cache_seqlens) == begin


@pytest.mark.parametrize("prompt", [20, 200])
@pytest.mark.parametrize("bias", [3.0, 30.0])
def test_a_layer_turns_where_the_bias_of_its_keys_is_strong(bias, prompt):
    """Caches that grow, and static ones, decide alike; attention reads what they hold."""
    torch.manual_seed(int(bias))
    rows, heads, dim, tokens = 2, 2, 64, 250
    config = LlamaConfig(
        hidden_size=4 * dim, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=heads,
        head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2, device="cuda") / dim)
    states = bias * torch.randn(1, heads, 1, dim, device="cuda")
    states = states + torch.randn(rows, heads, tokens, dim, device="cuda")
    keys = rotated(states, inv_freq, False, torch.arange(tokens, device="cuda")).half()
    values = torch.randn(rows, heads, tokens, dim, device="cuda").half()
    found = []
    query = 0.1 * torch.randn(rows, 4, 1, dim, device="cuda").half()
    for static in (False, True):
        cache = VQCache(config, window=32, max_cache_len=300, static=static, strict=True)
        for begin, end in itertools.pairwise((0, *range(prompt, tokens + 1))):
            last = cache.update(keys[:, :, begin:end], values[:, :, begin:end], 0)
        layer = cache.layers[0]
        assert (layer.k.rotary_mean is not None) == (bias == 30)
        found.append((attend(query, *last), layer.k.codes.rows()[:, :, : tokens - 32]))
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][0], found[1][0], atol=2e-3, rtol=2e-3)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), enable_gqa=True
    )
    assert (found[0][0] - exact).norm() < 0.1 * exact.norm()
