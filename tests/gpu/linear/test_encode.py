"""The generated kernel that encodes weights, against float64: every scale, code and packed byte.

A weight's last scale is fitted to codes that were chosen under the scale before it, so the steps
are followed one by one: without refitting, what is stored shows the scale and its codes.
"""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_vq import dispatch
from hf_vq.backends.cuda import encode as cuda_encode
from hf_vq.codegen.families.encode import BEAM, encode_plan, round_plan
from hf_vq.codegen.jit.compiler import cubin
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.errors import VQFormatError
from hf_vq.fit import fit_weight
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme, unpack_bits, weight_scheme
from hf_vq.formats.lattice import e8p_decode, e8p_encode
from hf_vq.formats.shared import universal_tensor
from hf_vq.ops import round_weight
from hf_vq.ops.reference import encode_weight as reference
from hf_vq.ops.reference import round_weight as rounding_reference
from hf_vq.ops.reference.encode_weight import FACTORS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CATALOGUE = [name for name, scheme in WEIGHT_SCHEMES.items() if scheme.codebook == "universal"]
ODD = [  # spec, rows, in_features
    ("vq1x3r1-tensor-g16-none", 7, 48),
    ("vq1x9r1-tensor-g64-none", 5, 192),
    ("vq2x1r1-tensor-g32-none", 9, 160),
    ("vq2x8r1-universal-g0-random_hadamard0", 31, 1024),
    ("vq2x8r1-universal-g0-random_hadamard0", 16, 8192),
    ("vq4x8r1-universal-g32-random_hadamard32", 5, 96),
    ("vq4x6r1-tensor-g0-none", 16, 4480),
    ("vq8x8r1-tensor-g0-none", 9, 768),
    ("vq8x12r1-tensor-g128-none", 5, 256),
    ("vq16x5r1-tensor-g16-none", 9, 128),
    ("vq8x16r2-e8p-g16-none", 3, 48),
    ("vq8x16r1-e8p-g0-none", 9, 1280),
    (WEIGHT_SCHEMES["aqlm-2"].spec(), 9, 1280),
    ("vq4x5r2-tensor-g64-none", 7, 256),
    ("vq1x2r2-tensor-g16-none", 5, 96),
]
CASES = [(WEIGHT_SCHEMES[name].spec(), 37, 1152) for name in CATALOGUE] + ODD
EPS = torch.finfo(torch.float32).eps / 2
STEPS = 16  # of integer entries, in 1


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels of this file, by all cores."""
    plans: set = {
        round_plan(WEIGHT_SCHEMES[name], size)
        for name, size in itertools.product((*CATALOGUE, "aqlm-2"), (32, 128))
    }
    plans |= {
        encode_plan(VQScheme.parse(spec), columns, candidates, refit)
        for (spec, _, columns), candidates, refit in itertools.product(
            CASES, (1, len(FACTORS)), (False, True)
        )
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda plan: cubin(plan, device_arch(0).name, default_store()), plans))


def given(spec, rows, columns):
    """Scheme, rows with groups of very different sizes, codebook."""
    scheme = VQScheme.parse(spec)
    size = 10.0 ** torch.randint(-3, 3, (rows, columns // scheme.group(columns), 1), device="cuda")
    values = torch.randn(*size.shape[:2], scheme.group(columns), device="cuda") * size
    if scheme.codebook == "universal":
        book = universal_tensor(scheme)
    else:
        book = torch.randn(scheme.streams, scheme.entries, scheme.vector_size).half()
        book *= 0.4 ** torch.arange(scheme.streams)[:, None, None]
    if scheme.largest_entry:
        book = (book * STEPS).round().clamp(-63, 63).char()
    return scheme, values.reshape(rows, columns), book.cuda()


def encoded(rows, book, scheme, factors, refit):
    for size in (1 << 10, 1 << 16, 1 << 20):  # what the allocator gives next
        torch.full((size,), float("nan"), device="cuda")
    assert chosen_row(rows, scheme, factors) == "cuda.encode_weight"
    packed, scale = cuda_encode.encode_weight(rows, book, scheme, factors, refit)
    vectors = rows.shape[1] // scheme.vector_size
    streams = packed.unflatten(1, (scheme.streams, -1)).unbind(1)
    return [unpack_bits(s, scheme.entry_bits, vectors).long() for s in streams], scale


def chosen_row(rows, scheme, factors):
    return dispatch.select(problem_of(rows, scheme.spec(), len(factors))).name


def problem_of(rows, spec, factors):
    dtype = str(rows.dtype)[6:]
    return dispatch.EncodeWeightProblem(
        rows.device.type, dtype, spec, dispatch.bucket(len(rows)), rows.shape[-1], factors
    )


def entries_of(codes, book, scheme):
    """Float64 [n, vectors, x] of one stage."""
    decoded = e8p_decode(codes, book) if scheme.lattice else book.float()[codes]
    return decoded.double()


def distance(vectors, codes, book, scheme):
    """Squared, of vectors [n, x] from their entries."""
    return (vectors - entries_of(codes, book, scheme)).square().sum(1)


def nearest(vectors, book, scheme):
    if scheme.lattice:
        return e8p_encode(vectors, book)
    return torch.cat([torch.cdist(p, book.double()).argmin(1) for p in vectors.split(1 << 14)])


def rounding(vectors, book, scheme):
    """How much farther than the nearest entry one may be that float32 scores find."""
    if scheme.lattice:
        # Two scores, of sums of |y| times levels: |y| to 2^-20, then about 24 roundings.
        largest = e8p_decode(torch.arange(65536, device="cuda"), book).abs().max()
        size = largest * (vectors.abs().sum(1) + 8 * largest)
        return 4 * (3 * 2.0**-20 + 24 * EPS) * size
    norm = book.double().square().sum(1).max()
    return 4 * (scheme.vector_size + 3) * EPS * (vectors.norm(dim=1) * norm.sqrt() + norm / 2)


def check_nearest(rows, scale, codes, book, scheme, but=None):
    """All codes are those of the nearest entries under a scale [n, groups], stage by stage; `but`
    for those of some groups."""
    groups = rows.double().unflatten(1, (scale.shape[1], -1))
    rest = (groups / scale.double()[..., None]).reshape(-1, scheme.vector_size)
    skipped = torch.zeros_like(scale, dtype=torch.bool) if but is None else but
    skipped = skipped.flatten().repeat_interleave(len(rest) // scale.numel())
    if followed_by_a_beam(scheme):
        return check_beam(rest, [index.flatten() for index in codes], book, skipped, scheme)
    for stage, index in zip(book, codes, strict=True):
        found = distance(rest, index.flatten(), stage, scheme)
        best = distance(rest, nearest(rest, stage, scheme), stage, scheme)
        assert ((found <= best + rounding(rest, stage, scheme)) | skipped).all()
        rest = rest - entries_of(index.flatten(), stage, scheme)


def followed_by_a_beam(scheme):
    return scheme.streams > 1 and not scheme.lattice


def check_beam(vectors, codes, book, skipped, scheme):
    """At least as near as the best of a beam that is one narrower: a tie decides who is last."""
    found = vectors - sum(entries_of(c, b, scheme) for c, b in zip(codes, book, strict=True))
    found = found.square().sum(1)
    size = rounding(vectors, book[0], scheme) + rounding(vectors, book[1], scheme)
    best = [torch.full_like(found, torch.inf) for _ in range(2)]
    first = torch.cdist(vectors, book[0].double()).topk(min(BEAM, len(book[0])), 1, largest=False)
    for place, index in enumerate(first.indices.unbind(1)):
        rest = vectors - entries_of(index, book[0], scheme)
        error = distance(rest, nearest(rest, book[1], scheme), book[1], scheme)
        for width in range(2):
            if place < BEAM - 1 + width:
                best[width] = torch.minimum(best[width], error)
    assert ((found <= best[0] + 2 * size) | skipped).all()
    assert ((found <= best[1] + 2 * size) | skipped).float().mean() > 0.999


def decoded(codes, book, scheme):
    return sum(entries_of(c, b, scheme) for c, b in zip(codes, book, strict=True)).flatten(1)


def fitted_scale(rows, codes, book, scheme, scale):
    """The least-squares scale as fp16, and where float32 sums may round to its neighbour."""
    v = rows.double().unflatten(1, (scale.shape[1], -1))
    e = decoded(codes, book, scheme).unflatten(1, (scale.shape[1], -1))
    exact = (v * e).sum(-1) / e.square().sum(-1)
    # Every lane adds its own, then lanes add up in a tree; the same for the energy.
    terms = v.shape[-1] / min(v.shape[-1] // scheme.vector_size, 32) + 6
    error = 2 * terms * EPS * ((v * e).abs().sum(-1) / (v * e).sum(-1).abs() + 1)
    low, high = (exact * (1 - error)).half(), (exact * (1 + error)).half()
    positive = exact > 0
    return torch.where(positive, exact.half(), scale), positive & (low != high)


@pytest.mark.parametrize("factor", [1.0, 0.75])
@pytest.mark.parametrize(("spec", "count", "columns"), CASES)
def test_nearest_entries_under_the_norm(spec, count, columns, factor):
    scheme, rows, book = given(spec, count, columns)
    codes, scale = encoded(rows, book, scheme, (factor,), False)
    groups = rows.double().unflatten(1, (scale.shape[1], -1))
    exact = groups.square().mean(-1).sqrt() * factor
    assert ((scale.double() - exact).abs() <= exact * 2.0**-10.9 + 2.0**-24).all()
    check_nearest(rows, scale, codes, book, scheme)


@pytest.mark.parametrize(("spec", "count", "columns"), CASES)
def test_the_scale_of_least_error_among_candidates(spec, count, columns):
    scheme, rows, book = given(spec, count, columns)
    codes, scale = encoded(rows, book, scheme, FACTORS, False)
    check_nearest(rows, scale, codes, book, scheme)
    groups = rows.double().unflatten(1, (scale.shape[1], -1))
    rms = groups.square().mean(-1).sqrt()
    factor = torch.tensor(FACTORS, device="cuda", dtype=torch.float64)
    taken = (scale.double() / rms)[..., None] - factor
    assert (taken.abs().amin(-1) < 1e-3).all()
    errors, slack = [], 0
    for one in FACTORS:
        size = (rms * one).square()
        rest = (groups / (rms * one)[..., None]).reshape(-1, scheme.vector_size)
        # Sums of float32 products, and what a code may be off by.
        slack = slack + rounding(rest, book[0], scheme).reshape(*size.shape, -1).sum(-1) * size
        slack = slack + 8 * groups.shape[-1] * EPS * groups.square().sum(-1)
        for stage in book[:1] if followed_by_a_beam(scheme) else book:
            rest = rest - entries_of(nearest(rest, stage, scheme), stage, scheme)
        errors.append(rest.square().sum(1).reshape(*size.shape, -1).sum(-1) * size)
    errors = torch.stack(errors, -1)
    chosen = errors.gather(-1, taken.abs().argmin(-1, keepdim=True))[..., 0]
    least = chosen <= errors.amin(-1) + slack
    # Of E8P's stages, a tie in the first decides what is left for the next.
    assert least.float().mean() > 0.99 if scheme.lattice and scheme.streams > 1 else least.all()


@pytest.mark.parametrize("factors", [(1.0,), FACTORS])
@pytest.mark.parametrize(("spec", "count", "columns"), CASES)
def test_refitted_scales(spec, count, columns, factors):
    scheme, rows, book = given(spec, count, columns)
    codes, scale = encoded(rows, book, scheme, factors, False)
    before, unsure = fitted_scale(rows, codes, book, scheme, scale)
    codes, scale = encoded(rows, book, scheme, factors, True)
    check_nearest(rows, before, codes, book, scheme, but=unsure)
    after, near = fitted_scale(rows, codes, book, scheme, before)
    assert ((scale == after) | near | unsure).all()
    assert (~unsure).float().mean() > 0.3


@pytest.mark.parametrize("name", [*CATALOGUE, "aqlm-2", "aqlm-2-int7"])
def test_as_good_as_the_specification(name):
    """What the steps above add up to: the error of a weight, and most of its codes."""
    scheme, _, book = given(weight_scheme(name).spec(), 1, 2048)
    factors = tuple(one / STEPS for one in FACTORS) if scheme.largest_entry else FACTORS
    rows = torch.randn(256, 2048, device="cuda")
    packed, scale = cuda_encode.encode_weight(rows, book, scheme, factors, True)
    expected, expected_scale = reference.encode_weight(rows, book, scheme, factors, True)
    assert packed.shape == expected.shape and packed.dtype == expected.dtype
    assert scale.shape == expected_scale.shape
    same = (scale == expected_scale).float().mean()
    assert same > 0.97 and (packed == expected).float().mean() > 0.98
    errors = []
    for codes, sizes in ((packed, scale), (expected, expected_scale)):
        streams = codes.unflatten(1, (scheme.streams, -1)).unbind(1)
        index = [unpack_bits(s, scheme.entry_bits, 2048 // scheme.vector_size).long()
                 for s in streams]  # fmt: skip
        values = decoded(index, book, scheme).unflatten(1, (sizes.shape[1], -1))
        values = (values * sizes.double()[..., None]).flatten(1)
        errors.append(float((rows - values).square().mean()))
    assert errors[0] == pytest.approx(errors[1], rel=2e-4)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("name", [*CATALOGUE, "aqlm-2"])
def test_errors_are_passed_on_inside_of_blocks(name, size):
    """Most codes are the specification's; tests/gpu/test_buckets.py compares with float64."""
    scheme, _, book = given(weight_scheme(name).spec(), 1, 1152)
    rows = torch.randn(131, 1152, device="cuda")
    scale = (0.5 + torch.rand(131, 9, device="cuda")).half()
    vector = torch.arange(size, device="cuda") // scheme.vector_size
    feedback = 0.05 * torch.randn(1152 // size, size, size, device="cuda")
    feedback *= vector[:, None] > vector
    given_problem = dispatch.RoundWeightProblem("cuda", "float32", scheme.spec(), 256, 1152, size)
    assert dispatch.select(given_problem).name == "cuda.round_weight"
    found = round_weight(rows, scale, book, scheme, feedback)
    expected = rounding_reference.round_weight(rows, scale, book, scheme, feedback)
    assert found.shape == expected.shape
    same = (found == expected).all(-1).float().mean()
    assert same > 0.998  # after a tie, rows differ


def test_codes_under_a_scale_of_zero_or_of_no_number_are_of_entries():
    scheme, rows, book = given(WEIGHT_SCHEMES["vq-3"].spec(), 4, 128)
    scale = torch.tensor([0.0, torch.inf, torch.nan, 1.0], device="cuda").half()[:, None]
    codes = round_weight(rows, scale, book, scheme, torch.zeros(4, 32, 32, device="cuda"))
    assert int(codes.min()) >= 0 and int(codes.max()) < book.shape[1]


def test_no_rows():
    scheme, rows, book = given(WEIGHT_SCHEMES["vq-4"].spec(), 1, 256)
    none, feedback = rows[:0], torch.zeros(2, 128, 128, device="cuda")
    codes = round_weight(none, torch.ones(0, 2, device="cuda"), book, scheme, feedback)
    assert codes.shape == (0, 128, 1)
    packed, scale = cuda_encode.encode_weight(none, book, scheme, FACTORS, True)
    assert (packed.shape, scale.shape) == ((0, 128), (0, 2))


def test_scales_and_feedback_of_other_blocks_are_refused():
    scheme, rows, book = given(WEIGHT_SCHEMES["vq-4"].spec(), 4, 256)
    for groups, shape in (
        (4, (2, 128, 128)),
        (2, (1, 128, 128)),
        (2, (2, 96, 96)),
        (3, (2, 128, 128)),
    ):
        scale, feedback = torch.ones(4, groups, device="cuda"), torch.zeros(shape, device="cuda")
        with pytest.raises(VQFormatError, match="whole blocks"):
            cuda_encode.round_weight(rows, scale, book, scheme, feedback)


def test_groups_that_are_zero_huge_or_no_numbers():
    scheme, rows, book = given(WEIGHT_SCHEMES["vq-4"].spec(), 4, 640)
    rows[0] = 0
    rows[1] = 1e9
    rows[2, 3] = float("nan")
    rows[3, 200] = float("inf")
    _, scale = encoded(rows, book, scheme, FACTORS, True)
    assert (scale[0] == 0).all() and scale[1].isinf().all()
    assert scale[2].isfinite().tolist() == [False, True, True, True, True]
    assert scale[3].isfinite().tolist() == [True, False, True, True, True]


def test_rows_at_odd_places():
    scheme, rows, book = given(WEIGHT_SCHEMES["vq-2"].spec(), 9, 512)
    place = torch.empty(rows.numel() + 3, device="cuda")[3:].view(9, 512).copy_(rows)
    expected = cuda_encode.encode_weight(rows, book, scheme, FACTORS, True)
    found = cuda_encode.encode_weight(place, book, scheme, FACTORS, True)
    columns = cuda_encode.encode_weight(rows.T.contiguous().T, book, scheme, FACTORS, True)
    for other in (found, columns):
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("aqlm-3", "shared memory"), ("gptvq-2", "per tile"), ("vq2x4r3-tensor-g0-none", "3 stages"),
     ("vq8x16r1-tensor-g0-none", "shared memory"), ("vq2x5r1-tensor-g0-none", "whole bytes")],
)  # fmt: skip
def test_what_it_does_not_take_goes_to_the_specification(name, reason):
    columns = 8 if "2x5" in name else 4096
    rows = torch.empty(1, columns, device="cuda")
    asked = problem_of(rows, weight_scheme(name).spec(), 8)
    verdicts = {verdict.entry.name: verdict for verdict in dispatch.explain(asked)}
    assert reason in verdicts["cuda.encode_weight"].reason and verdicts["reference"].chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*CATALOGUE, "aqlm-2", "gptvq-2"])
def test_fitted_weights(name, dtype):
    """Rows of several chunks, and of several bands of tiles."""
    weight = (torch.randn(700, 4096, device="cuda") * 0.02).to(dtype)
    found = fit_weight(weight, weight_scheme(name))
    scheme = weight_scheme(name)
    bits = (scheme.streams * scheme.entry_bits + scheme.second_bits) / scheme.vector_size
    assert found.relative_error < 3 * 4**-bits
