"""The entries `cpu.encode_weight` and `cpu.round_weight` on every instruction set, against float64
and against their specifications."""

from dataclasses import replace

import pytest
import torch

from hf_vq import dispatch
from hf_vq.backends.cpu import encode, library
from hf_vq.dispatch import EncodeWeightProblem
from hf_vq.env import CPU_ISA
from hf_vq.formats import WEIGHT_SCHEMES, weight_scheme
from hf_vq.formats.packing import unpack_bits
from hf_vq.formats.shared import universal_tensor
from hf_vq.ops.reference import encode_weight as specification
from hf_vq.ops.reference.encode_weight import FACTORS, SCALAR_FACTORS, Assigner
from hf_vq.ops.reference.round_weight import round_weight
from tests.fixtures.random_weights import left_by_errors

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())


def verdicts(scheme, in_features=128):
    problem = EncodeWeightProblem("cpu", "float32", scheme.spec(), 16, in_features, 1)
    return {verdict.entry.name: verdict for verdict in dispatch.explain(problem)}


ONE_PASS = [name for name, one in WEIGHT_SCHEMES.items() if one.streams == 1 and not one.two_passes]
SCHEMES = [n for n in ONE_PASS if verdicts(weight_scheme(n))["cpu.encode_weight"].chosen]
SHAPES = [(1, 128), (63, 96), (65, 384)]


@pytest.fixture(params=library.isas())
def isa(request):
    library.use_isa(request.param)
    encode._cells.cache_clear()
    yield request.param
    library.use_isa(CPU_ISA.get())


def is_nearest(vectors, codes, book):
    """Whether entries [n] are the nearest to `vectors` [n, x] float64, up to float32."""
    distance = (vectors[:, None] - book).square().sum(2)
    found = distance.gather(1, codes[:, None].long())[:, 0]
    return bool((found <= distance.amin(1) + 1e-5 * (1 + vectors.square().sum(1))).all())


def test_the_schemes_that_it_is_for():
    rotated = {"vq-4", "vq-3", "vq-2", *(f"turboquant-{bits}" for bits in range(1, 9))}
    assert set(SCHEMES) == rotated
    for name, reason in (("quip-sharp-2", "no lattice"), ("gptvq-2", "one universal codebook")):
        assert reason in verdicts(weight_scheme(name))["cpu.encode_weight"].reason


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_are_of_the_nearest_entries(name, shape, isa):
    scheme, rows = weight_scheme(name), torch.randn(shape) * torch.rand(shape[0], 1)
    book, group = universal_tensor(scheme), scheme.group(shape[1])
    packed, scale = encode.encode_weight(rows, book, scheme, (1.0,), False)
    count = shape[1] // scheme.vector_size
    codes = unpack_bits(packed, scheme.entry_bits, count)
    unit = scale.double().repeat_interleave(group, 1)
    vectors = (rows.double() / unit).reshape(-1, scheme.vector_size)
    assert is_nearest(vectors, codes.flatten(), book[0].double())
    exact = rows.double().unflatten(1, (-1, group)).square().mean(2).sqrt()
    torch.testing.assert_close(scale.double(), exact, rtol=2.0**-10, atol=0)


def odd_rows():
    """Rows of usual weights, of outliers, of a grid, and of what has no scale."""
    rows = torch.randn(5, 33, 256)
    rows[1] *= torch.exp(2 * torch.randn(33, 256))
    rows[2] = (rows[2] * 4).round() / 4
    rows[3] = rows[3].sign() * torch.rand(33, 256)
    rows[4, 0], rows[4, 1, :64], rows[4, 2, 7] = 0, torch.nan, torch.inf
    rows[4, 3] *= 1e-30
    rows[4, 4] *= 1e30
    return rows.flatten(0, 1)


@pytest.mark.parametrize("factors", [FACTORS, SCALAR_FACTORS, (1.0,), (0.1, 0.2), (0.9,) * 17])
@pytest.mark.parametrize("name", [n for n in SCHEMES if weight_scheme(n).vector_size <= 2])
def test_entries_of_a_cell_are_as_good_as_all(name, factors, isa, monkeypatch):
    scheme, rows = weight_scheme(name), odd_rows()
    book = universal_tensor(scheme)
    one = replace(scheme, scale_group=64)
    feedback = torch.randn(4, 64, 64).tril(-1) * 0.02
    unit = torch.rand(len(rows), 4) + 0.5

    def found():
        return [
            *encode.encode_weight(rows, book, scheme, factors, True),
            encode.round_weight(rows, unit, book, one, feedback),
        ]

    near = found()
    for tried in (factors, ()):
        cells = encode._cells(book.numpy().tobytes(), scheme.vector_size, tried)
        assert (cells is None) == (len(tried) > 16)
    monkeypatch.setattr(encode, "_look_near", lambda *_: None)
    for one_of_near, one_of_all in zip(near, found(), strict=True):
        assert torch.equal(one_of_near.view(torch.uint8), one_of_all.view(torch.uint8))


@pytest.mark.parametrize("name", ["vq-4", "turboquant-8"])
def test_cells_are_on_the_cpu_and_of_float32(name, isa):
    scheme, rows = weight_scheme(name), torch.randn(8, 128)
    book = universal_tensor(scheme)
    wanted = encode.encode_weight(rows, book, scheme, FACTORS, True)
    before = torch.get_default_dtype()
    for device, dtype in (("meta", torch.float32), ("cpu", torch.bfloat16)):
        encode._cells.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                found = encode.encode_weight(rows, book, scheme, FACTORS, True)
        finally:
            torch.set_default_dtype(before)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", SCHEMES)
def test_searched_scales_are_as_good_as_those_of_the_specification(name, isa):
    scheme = weight_scheme(name)
    rows, book = torch.randn(65, 256), universal_tensor(scheme)
    rows[3], rows[5, :128] = 0, 1e-8  # and groups of nothing, or of what fp16 has no scale for
    errors = []
    for encoded in (encode.encode_weight, specification.encode_weight):
        packed, scale = encoded(rows, book, scheme, FACTORS, True)
        codes = unpack_bits(packed, scheme.entry_bits, 256 // scheme.vector_size).long()
        entries = book[0].double()[codes].flatten(1)
        stored = entries * scale.double().repeat_interleave(scheme.group(256), 1)
        errors.append(float((stored - rows).square().sum()))
    # <u, b> - |b|^2 / 2 is rounded to float32, which may turn almost equal distances around.
    assert abs(errors[0] - errors[1]) < torch.finfo(torch.float32).eps * float(rows.square().sum())


@pytest.mark.parametrize("name", SCHEMES)
def test_codes_under_a_scale_of_zero_are_of_entries(name, isa):
    """As of a group whose only number is the smallest of fp16."""
    scheme, rows = weight_scheme(name), torch.zeros(2, 128)
    rows[0, 5], rows[1, 7] = 2.0**-24, -(2.0**-24)
    book = universal_tensor(scheme)
    scale = torch.zeros(2, 128 // scheme.group(128), dtype=torch.half)
    codes = encode.round_weight(rows, scale, book, scheme, torch.zeros(4, 32, 32))
    assert int(codes.max()) < book.shape[1]


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e30])
def test_groups_that_are_not_finite_have_such_a_scale(value, isa):
    scheme, rows = weight_scheme("vq-4"), torch.randn(3, 256)
    rows[1, 130] = value
    _, scale = encode.encode_weight(rows, universal_tensor(scheme), scheme, FACTORS, True)
    assert scale.isfinite().tolist() == [[True, True], [True, False], [True, True]]


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("shape", [(1, 128), (65, 384)])
@pytest.mark.parametrize("name", SCHEMES)
def test_errors_are_passed_on_inside_of_blocks(name, shape, size, isa):
    """Each code is of the entry that is nearest to what the errors before it leave, in float64."""
    scheme, (n, length) = weight_scheme(name), shape
    rows, book, width = torch.randn(shape), universal_tensor(scheme), scheme.vector_size
    blocks = length // size
    vector = torch.arange(size) // width
    feedback = 0.1 * torch.randn(blocks, size, size) * (vector[:, None] > vector)
    scale = (0.5 + torch.rand(n, length // scheme.group(length))).half()
    codes = encode.round_weight(rows, scale, book, scheme, feedback)
    assert codes.shape == (n, length // width, 1)
    assigner = Assigner(book, scheme)
    left, unit = left_by_errors(rows, scale, assigner, feedback, codes)
    vectors = (left / unit).reshape(-1, width)
    assert is_nearest(vectors, codes.flatten(), book[0].double())
    same = round_weight(rows, scale, book, scheme, feedback)
    assert (same == codes).float().mean() > 0.99  # after a tie, rows differ
