"""`cuda.vq_append` against float64: nearest entries, unbiased scales, bytes of a tape."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from hf_vq import dispatch
from hf_vq.backends.cuda.kv import append as cuda_append
from hf_vq.codegen.families.kv_append import append_plan, appendable
from hf_vq.codegen.jit.compiler import cubin
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.codegen.plan import Dtype
from hf_vq.errors import VQBackendError, VQFormatError
from hf_vq.formats import KV_SCHEMES, VQScheme, unpack_bits
from hf_vq.formats.packing import packed_size
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops.library import append_problem
from hf_vq.ops.reference import codes as reference
from hf_vq.transforms import rotate
from tests.fixtures.kv.views import append_kv, one_side

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Keys that are those of u4, what no kernel has (vectors of 8), and integers: they have their own
# tests.
OTHERS = ("k4v2", "cq-1", "qserve-kv4")
KEYS = {name: scheme.key for name, scheme in KV_SCHEMES.items() if name not in OTHERS}
KEYS["u2-plain"] = VQScheme(4, 8, scale_group=0, rotation="none")
KEYS["turboquant-3"] = VQScheme(1, 3, scale_group=0, rotation="hadamard", rotation_block=0)
KEYS["turboquant-2"] = VQScheme(1, 2, scale_group=0, rotation="hadamard", rotation_block=0)
KEYS["learned-6"] = VQScheme(2, 6, codebook="channel_group", scale_group=0, rotation="none")
UNIVERSAL = [name for name, scheme in KEYS.items() if scheme.has_scale]
INTEGERS = {
    bits: VQScheme(1, bits, codebook="integers", scale_group=0, rotation="none")
    for bits in (2, 4, 8)
}
LEARNED = [name for name, scheme in KEYS.items() if not scheme.has_scale]
DIMS = (64, 80, 96, 128, 192, 256)
EPS = torch.finfo(torch.float32).eps
MANY = 1100  # tokens, of a head: more than are few


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Most kernels of this file, by all cores."""
    plans = set()
    for scheme, dim, few, grid in itertools.product(
        KEYS.values(), DIMS, (False, True), (False, True)
    ):
        if appendable(scheme, dim) is None:
            chosen = {"few": few, "grid": grid, "aligned": True, "centred": scheme.has_scale}
            plans.add(append_plan(scheme, dim, Dtype.BFLOAT16, **chosen))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda plan: cubin(plan, device_arch(0).name, default_store()), plans))


def codebook_of(scheme, heads, dim):
    if scheme.has_scale:
        return universal_tensor(scheme).cuda()
    return torch.randn(kv_codebook_spec(scheme, heads, dim).shape, device="cuda").half()


def tape(scheme, batch, heads, tokens, dim):
    """Codes and scales full of what was there before."""
    size = packed_size(dim // scheme.vector_size, scheme.entry_bits)
    codes = torch.randint(0, 256, (batch, heads, tokens, size), dtype=torch.uint8, device="cuda")
    scale = torch.randn(batch, heads, tokens, scheme.row_numbers, device="cuda").half()
    return codes, scale


def who(x, scheme):
    asked = append_problem(x.device, x.dtype, scheme.spec(), x.shape[2], x.shape[3], "rows")
    return dispatch.select(asked).name


def append(x, mean, codebook, codes, scale, at, scheme):
    assert who(x, scheme) == "cuda.vq_append"
    append_kv(x, mean, codebook, codes, scale, at, scheme.spec(), "rows")


def distances(x, codebook, scheme):
    """Squared distances [B, H, n, S, entries] in float64, and what float32 may be wrong by.

    A search compares sums of x + 1 terms, each at most (|u| + |b|)^2 and rounded once; of both.
    """
    rows = rotate(x.double(), scheme)
    if scheme.has_scale:
        rows = rows / (rows.square().mean(-1, keepdim=True)).sqrt().clamp_min(1e-30)
        books = codebook[0].double()
    else:
        books = codebook.double()[:, None]
    vectors = rows.unflatten(-1, (-1, scheme.vector_size))[..., None, :]
    size = vectors.norm(dim=-1) + books.norm(dim=-1)
    # The rotation's own rounding: log2(D) additions of numbers up to the row's norm; the factor's.
    rotated = 12 * rows.norm(dim=-1)[..., None, None] * size * (scheme.rotation != "none")
    slack = EPS * ((2 * scheme.vector_size + 2) * size.square() + rotated)
    return (vectors - books).square().sum(-1), slack.amax(-1)


def check(x, mean, scheme, at, codebook=None):
    """Append, then: nearest codes, their unbiased scales, and nothing else touched."""
    batch, heads, count, dim = x.shape
    codebook = codebook_of(scheme, heads, dim) if codebook is None else codebook
    codes, scale = tape(scheme, batch, heads, at + count + 3, dim)
    before = codes.clone(), scale.clone()
    append(x, mean, codebook, codes, scale, at, scheme)
    new = slice(at, at + count)
    for old, now in zip(before, (codes, scale), strict=True):
        assert torch.equal(now[:, :, :at], old[:, :, :at])
        assert torch.equal(now[:, :, at + count :], old[:, :, at + count :])
    index = unpack_bits(codes[:, :, new], scheme.entry_bits, dim // scheme.vector_size).long()
    centred = x.float() if mean is None else x.float() - mean
    for part in range(0, count, 256):
        some = slice(part, part + 256)
        distance, slack = distances(centred[:, :, some], codebook, scheme)
        chosen = distance.gather(-1, index[:, :, some, :, None])[..., 0]
        assert (chosen <= distance.amin(-1) + slack).all()
    if scheme.has_scale:
        rotated = rotate(centred.double(), scheme)
        entries = codebook[0].double()[index].flatten(-2)
        energy = rotated.square().sum(-1)
        exact = torch.where(energy == 0, 0, energy / (rotated * entries).sum(-1))
        error = (scale[:, :, new, 0].double() - exact).abs()
        # Half a unit in the last place of fp16, and float32 sums of D terms.
        assert (error <= exact.abs() * (2.0**-11 + dim * 2.0**-24) + 2.0**-25).all()
    return codes[:, :, new], scale[:, :, new]


def rows_of(batch, heads, count, dim, dtype=torch.bfloat16):
    x = 3 * torch.randn(batch, heads, count, dim, device="cuda") + 1
    x[:, :, ::5] *= 100
    x[0, 0, 0] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_codes(name, dim):
    scheme = KEYS[name]
    if appendable(scheme, dim):
        pytest.skip(appendable(scheme, dim))
    mean = torch.randn(1, 3, 1, dim, device="cuda")
    for at, count in ((0, 1), (5, 3), (0, MANY)):
        check(rows_of(1, 3, count, dim), mean, scheme, at)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_codes(name, dim):
    for at, count in ((0, 1), (250, 7), (3, 333)):
        check(rows_of(2, 2, count, dim), None, KEYS[name], at)


@pytest.mark.parametrize("count", [2, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["nomad-u4", "u4", "u2", "cq-2"])
def test_dtypes_strides_and_places(name, dtype, count):
    scheme = KEYS[name]
    tokens_first = rows_of(2, 4, count, 64, dtype).transpose(1, 2).contiguous().transpose(1, 2)
    check(tokens_first[:, 1:3], None, scheme, 3)
    padded = rows_of(1, 2, count, 67, dtype)
    check(padded[..., 1:65], torch.randn(1, 2, 1, 64, device="cuda"), scheme, 3)
    check(padded.transpose(2, 3).contiguous().transpose(2, 3)[..., :64], None, scheme, 0)
    check(rows_of(1, 2, 1, 64, dtype).expand(2, 2, count, 64), None, scheme, 0)


@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize(
    "name", ["u4", "u3", "u2", "nomad-u4", "cq-4", "cq-2", "nomad-4", "integers-4"]
)
def test_a_token_has_its_codes_whatever_comes_with_it(name, dim):
    scheme, heads = INTEGERS[4] if name == "integers-4" else KEYS[name], 2
    codebook = codebook_of(scheme, heads, dim)
    x = rows_of(1, heads, MANY, dim)
    # Many rows that lie on the border of two entries.
    x[:, :, 500:] = (x[:, :, 500:] / 100).round() * 100
    mean = torch.randn(1, heads, 1, dim, device="cuda") if scheme.has_scale else None
    tapes = []
    for step in (MANY, 1, 17):
        codes, scale = tape(scheme, 1, heads, MANY, dim)
        for first in range(0, MANY, step):
            some = x[:, :, first : first + step]
            append(some, mean, codebook, codes, scale, first, scheme)
        tapes.append((codes, scale))
    for other in tapes[1:]:
        assert torch.equal(other[0], tapes[0][0]) and torch.equal(other[1], tapes[0][1])


@pytest.mark.parametrize("name", ["u4", "u3", "u2", "nomad-u4", "cq-4"])
def test_the_reference_finds_the_same_codes(name):
    scheme = KEYS[name]
    codebook = codebook_of(scheme, 2, 128)
    x = rows_of(1, 2, MANY, 128)
    found = tape(scheme, 1, 2, MANY, 128)
    wanted = tape(scheme, 1, 2, MANY, 128)
    append(x, None, codebook, *found, 0, scheme)
    view = one_side(x, None, codebook, *wanted, 0, scheme.spec(), "rows")
    reference.kv_append(x, None, view, None)
    assert (found[0] == wanted[0]).float().mean() > 0.9995
    if scheme.has_scale:
        assert (found[1] == wanted[1]).float().mean() > 0.99


@pytest.mark.parametrize("name", ["u4", "u3"])
def test_numbers_far_outside_of_the_codebook(name):
    x = torch.randn(1, 2, MANY, 128, device="cuda")
    x[..., 3] = 30
    plain = VQScheme(2, KEYS[name].entry_bits, scale_group=0, rotation="none")
    check(x, None, plain, 0)


@pytest.mark.parametrize("name", ["u4", "nomad-u4"])
def test_another_order_of_entries(name):
    scheme = KEYS[name]
    book = universal_tensor(scheme)[:, torch.randperm(scheme.entries)].cuda()
    check(rows_of(1, 2, MANY, 64), None, scheme, 0, book)
    # As many candidates in a cell as there are.
    close = torch.randn(book.shape, device="cuda").half()
    close[:, : scheme.entries // 2] *= 0.01
    check(rows_of(1, 2, MANY, 64), None, scheme, 0, close)


@pytest.mark.parametrize("count", [5, MANY])
@pytest.mark.parametrize("name", UNIVERSAL)
def test_rows_without_a_finite_scale(name, count):
    scheme = KEYS[name]
    x = torch.randn(1, 1, count, 64, device="cuda")
    x[0, 0, 0, 3], x[0, 0, 1, 5], x[0, 0, 2, 7] = torch.nan, torch.inf, -torch.inf
    codes, scale = tape(scheme, 1, 1, count, 64)
    append(x, None, universal_tensor(scheme).cuda(), codes, scale, 0, scheme)
    assert not scale[0, 0, :3].isfinite().any()
    assert scale[0, 0, 3:].isfinite().all()


@pytest.mark.parametrize("count", [1, 5, MANY])
@pytest.mark.parametrize("name", UNIVERSAL)
def test_scales_beyond_fp16_saturate(name, count):
    """Codes are those of the row in any unit; rows beside it are what they are without it."""
    scheme = KEYS[name]
    book = universal_tensor(scheme).cuda()
    x = torch.randn(1, 2, count, 64, device="cuda").clamp(-4, 4)

    def coded(x, mean=None):
        codes, scale = tape(scheme, 1, 2, count, 64)
        append(x, mean, book, codes, scale, 0, scheme)
        return codes, scale

    codes, scale = coded(x)
    for power in (20, 40, 60, 70, 125):
        huge = x.clone()
        huge[:, 1] *= 2.0**power
        found, numbers = coded(huge)
        assert torch.equal(found[:, 0], codes[:, 0]) and torch.equal(numbers[:, 0], scale[:, 0])
        # rsqrt.approx may differ in its last bit between octaves, and a near tie with it.
        assert (found[:, 1] == codes[:, 1]).float().mean() > 0.99
        assert (numbers[:, 1] == 65504).all()
        mean = torch.zeros(1, 2, 1, 64, device="cuda")
        mean[:, 1] = 2.0 ** min(power, 100)
        assert coded(huge, mean)[1].isfinite().all()


def check_integers(x, mean, scheme, at):
    """Append, then: codes, scales and zeros of the specification, bit by bit, and nothing else."""
    batch, heads, count, dim = x.shape
    codes, scale = tape(scheme, batch, heads, at + count + 3, dim)
    wanted = codes.cpu(), scale.cpu()
    centred = x.cpu() if mean is None else x.cpu().float() - mean.cpu()
    for right, part in zip(wanted, reference.encode_integers(centred, None, scheme), strict=True):
        right[:, :, at : at + count] = part
    append(x, mean, universal_tensor(scheme).cuda(), codes, scale, at, scheme)
    assert torch.equal(codes.cpu(), wanted[0])
    torch.testing.assert_close(scale.cpu(), wanted[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", INTEGERS)
def test_integers(bits, dim):
    for at, count in ((0, 1), (5, 3), (0, MANY)):
        x = rows_of(2, 3, count, dim)
        x[:, :, 1::7] += 1000  # zeros at their limit
        x[:, 1] = x[:, 1, :, :1]  # rows of one number
        check_integers(x, torch.randn(2, 3, 1, dim, device="cuda"), INTEGERS[bits], at)


@pytest.mark.parametrize("count", [2, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_integers_of_any_dtype_and_strides(dtype, count):
    scheme = INTEGERS[4]
    tokens_first = rows_of(2, 4, count, 64, dtype).transpose(1, 2).contiguous().transpose(1, 2)
    check_integers(tokens_first[:, 1:3], None, scheme, 3)
    check_integers(rows_of(1, 2, count, 67, dtype)[..., 1:65], None, scheme, 3)
    rows = rows_of(1, 2, count, 64, dtype)
    rows[:, :, :2] = 6e-5  # of the least steps that fp16 has
    rows[0, 0, 0, 3], rows[0, 1, 1, 5] = torch.inf, -torch.inf
    check_integers(rows, None, scheme, 0)


def test_rotated_integers():
    """Rotations add in another order than the specification: codes may differ by one."""
    scheme = replace(INTEGERS[8], rotation="hadamard", rotation_block=0)
    x = rows_of(1, 2, MANY, 128)
    codes, scale = tape(scheme, 1, 2, MANY, 128)
    append(x, None, universal_tensor(scheme).cuda(), codes, scale, 0, scheme)
    right, numbers = reference.encode_integers(x.cpu(), None, scheme)
    assert (codes.cpu().int() - right.int()).abs().max() <= 1
    assert (codes.cpu() == right).float().mean() > 0.99
    torch.testing.assert_close(scale.cpu(), numbers, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("count", [5, MANY])
def test_integers_without_a_finite_scale(count):
    x = torch.randn(1, 1, count, 64, device="cuda")
    x[0, 0, 0, 3], x[0, 0, 1, 5], x[0, 0, 2, 7] = torch.nan, torch.inf, -torch.inf
    codes, scale = tape(INTEGERS[4], 1, 1, count, 64)
    append(x, None, universal_tensor(INTEGERS[4]).cuda(), codes, scale, 0, INTEGERS[4])
    assert not scale[0, 0, :3, 0].isfinite().any()
    assert scale[0, 0, 3:].isfinite().all()


@pytest.mark.parametrize("count", [1, 5, MANY])
@pytest.mark.parametrize("bits", INTEGERS)
def test_steps_beyond_fp16_saturate(bits, count):
    """Bit by bit as the specification, beside rows that are as ever."""
    top = (1 << bits) - 1
    for unit in (65504.0 * top, 65519.0 * top, 1e6, 1e9, 1e17, 1e20, 1e30, 3e37):
        x = rows_of(2, 3, count, 64, torch.float32)
        x[0] = x[0].clamp(-4, 4) * unit
        x[0, 1] = x[0, 1].abs()
        x[0, 2, :, 0] = 3.4e38
        check_integers(x, None, INTEGERS[bits], 0)


@pytest.mark.parametrize("count", [2, 200])
def test_rows_that_are_no_numbers_have_codes_of_channel_groups(count):
    scheme = KEYS["nomad-2"]
    x = torch.randn(1, 1, count, 64, device="cuda")
    x[0, 0, 0, 3], x[0, 0, 1, 5] = torch.nan, torch.inf
    codes, scale = tape(scheme, 1, 1, count, 64)
    append(x, None, codebook_of(scheme, 1, 64), codes, scale, 0, scheme)


def test_nothing_to_append():
    scheme = KEYS["u4"]
    codes, scale = tape(scheme, 1, 2, 256, 64)
    before = codes.clone()
    x = torch.randn(1, 2, 0, 64, device="cuda")
    append_kv(x, None, universal_tensor(scheme).cuda(), codes, scale, 256, scheme.spec(), "rows")
    assert torch.equal(codes, before)


@pytest.mark.parametrize("count", [1, MANY])
def test_in_a_graph(count):
    """The first call on a codebook is captured: it must not read it."""
    scheme = KEYS["u4"]
    codebook, x = codebook_of(scheme, 2, 128), rows_of(1, 2, count, 128)
    found, wanted = tape(scheme, 1, 2, count, 128), tape(scheme, 1, 2, count, 128)
    append(x, None, universal_tensor(scheme).cuda(), *wanted, 0, scheme)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(x, None, codebook, *found, 0, scheme)
    graph.replay()
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_what_does_not_fit_is_refused():
    scheme = KEYS["u4"]
    book, x = universal_tensor(scheme).cuda(), torch.randn(1, 1, 4, 64, device="cuda")
    codes, scale = tape(scheme, 1, 1, 16, 64)
    with pytest.raises(VQBackendError, match="one after another"):
        append(x, None, book, codes[:, :, ::2], scale[:, :, ::2], 0, scheme)
    for at, a_book in ((13, book), (-1, book), (0, book[:, :64])):
        with pytest.raises(VQFormatError, match="do not go"):
            append(x, None, a_book, codes, scale, at, scheme)


def test_who_appends_and_why_not():
    def reason(spec, dim=128, dtype="bfloat16", layout="rows"):
        problem = dispatch.KVAppendProblem("cuda", dtype, spec, "", 1, dim, 0, layout, "")
        return cuda_append.APPEND.supports(problem) or ""

    u4 = KEYS["u4"].spec()
    assert reason(u4) == ""
    assert "quads" in reason(u4, layout="quads")
    assert "head_dim 72" in reason(u4, 72)
    assert "float64" in reason(u4, dtype="float64")
    assert "rotation" in reason(u4.replace("hadamard0", "qr0"))
    assert "no kernel" in reason(VQScheme(8, 8, scale_group=0, rotation="none").spec())
