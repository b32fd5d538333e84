"""The entries `cpu.linear` and `cpu.decode` on every instruction set of this machine.

The kernels round inputs and codebook entries to 8 bits, those of single weights of more than 4 bits
to 16, and are exact from there on. So they are compared with the float64 product of the rounded
operands, up to the rounding of float32 sums, and with the reference, up to the error that rounding
the operands may make: both bounds are derived.
"""

import ctypes
import mmap
import sys
from dataclasses import replace

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cpu import library
from hf_vq.backends.cpu import linear as cpu_linear
from hf_vq.backends.cpu.matrices import matrix
from hf_vq.env import CPU_ISA
from hf_vq.fit import fixed_tensors
from hf_vq.formats import weight_scheme
from hf_vq.formats.catalog import WEIGHT_SCHEMES
from hf_vq.formats.stored_weight import StoredWeight
from hf_vq.formats.tensors import tensor_specs
from hf_vq.ops.library import linear_problem
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import with_diagonal

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

EPS = torch.finfo(torch.float32).eps
SCHEMES = [
    "vq-4", "vq-3", "vq-2", "turboquant-3", "turboquant-4", "turboquant-5", "turboquant-8",
    "turboquant-1+2", "turboquant-2+3", "turboquant-4+4", "quip-sharp-4", "quip-sharp-2",
    "aqlm-3", "aqlm-2", "gptvq-2", "vq-4-scaled", "quip-sharp-2-scaled",
]  # fmt: skip
OTHERS = [
    "vq2x8r1-universal-g16-hadamard64",
    "vq2x4r1-universal-g128-hadamard128",
    "vq2x4r2-tensor-g64-scaled_hadamard16",
    "vq4x8r1-universal-g512-random_hadamard0",
    "vq4x8r2-tensor-g32-none",
    "vq2x8r1-tile8x128-g0-none",
    "vq8x8r1-tile100x512-g64-random_hadamard32",
    "vq1x4r3-tensor-g64-none",
    "vq8x12r1-tensor-g64-hadamard128",
    "vq4x8r1-universal-g512-scaled_hadamard0",
    "vq8x8r1-tile100x512-g64-scaled_hadamard32",
    "vq1x4r3-tensor-g64-scaled_hadamard16",
    "vq8x8r1-tensor-g0-scaled_hadamard16",
    "vq1x8r1-universal-g16-hadamard64",
    "vq1x6r2-tensor-g0-scaled_hadamard16",
    "vq1x8r1-tile100x128-g32-none",
    "vq1x4+3r2-universal-g64-scaled_hadamard16-nested",
    "vq1x1+4r2-universal-g0-none-nested",
]
SCALAR = [name for name in WEIGHT_SCHEMES if name.startswith("turboquant-")]
FINE = 256 * 127  # steps of half a range, where entries and inputs have 16 bits
SHAPES = [(1, 48), (3, 80), (5, 288), (100, 896), (300, 1024), (3, 11008)]
CASES = [(name, shape) for name in SCHEMES for shape in SHAPES]
CASES += [(name, shape) for name in OTHERS for shape in ((3, 80), (101, 1024))]
CASES += [(name, (33, 288)) for name in SCALAR if name not in SCHEMES]


@pytest.fixture(params=library.isas())
def isa(request):
    library.use_isa(request.param)
    yield request.param
    library.use_isa(CPU_ISA.get())


def stored(name, out_features, in_features):
    """A scheme and tensors with random codes; skips what the kernel leaves to the reference."""
    scheme = weight_scheme(name)
    if scheme.group(in_features) < min(4 * scheme.vector_size, in_features):
        pytest.skip("four codes have more than one scale")
    tensors = fixed_tensors(scheme, in_features, 0)
    for key, spec in tensor_specs(scheme, out_features, in_features).items():
        if key in tensors:
            continue
        if spec.dtype == torch.uint8:
            tensors[key] = torch.randint(0, 256, spec.shape, dtype=torch.uint8)
        elif spec.largest:
            tensors[key] = torch.randint(-63, 64, spec.shape, dtype=spec.dtype)
        elif key == "scale":
            tensors[key] = (0.5 + torch.rand(spec.shape)).half()
        else:
            tensors[key] = torch.randn(spec.shape).half()
    return scheme, tensors


def description(scheme, tensors, in_features):
    return matrix(StoredWeight.of(tensors, scheme, in_features))


def book_of(scheme):
    """The key of the codebook that products read."""
    return "codebook_2" if scheme.two_passes else "codebook"


def rows_of(scheme, tensors, codebook, length):
    """The rows that are stored, rotated, with other entries: float64."""
    codes, scale = tensors["codes"], tensors["scale"]
    if scheme.two_passes:
        found = reference.decode_nested(codes, tensors["codes_2"], codebook, scale, scheme, length)
    else:
        found = reference.decode_rotated(codes, codebook, scale, scheme, length)
    return found.double()


def multiply(scheme, tensors, x, bias=None):
    """hf_vq_linear into poisoned memory."""
    y = torch.full((len(x), len(tensors["codes"])), torch.nan, dtype=x.dtype)
    status = library.load().hf_vq_linear(
        ctypes.byref(description(scheme, tensors, x.shape[-1])),
        x.data_ptr(),
        library.DTYPES[x.dtype],
        len(x),
        None if bias is None else bias.data_ptr(),
        0 if bias is None else library.DTYPES[bias.dtype],
        y.data_ptr(),
    )
    assert status == library.OK
    return y


def rotated(scheme, tensors, x):
    """hf_vq_rotate: the float32 numbers that hf_vq_linear rounds."""
    u = torch.full(x.shape, torch.nan, dtype=torch.float32)
    status = library.load().hf_vq_rotate(
        ctypes.byref(description(scheme, tensors, x.shape[-1])),
        x.data_ptr(),
        library.DTYPES[x.dtype],
        len(x),
        u.data_ptr(),
        library.DTYPES[torch.float32],
    )
    assert status == library.OK
    return u


def steps_of(scheme):
    """Integers that the largest entry and the largest input become."""
    fine = scheme.vector_size == 1 and scheme.entry_bits + scheme.second_bits > 4
    return FINE if fine else 127


def in_two_bytes(numbers, round_high=torch.round):
    """Integers as 256 high + low with both in [-127, 127]: 1 off where low would be +-128."""
    high = round_high(numbers / 256)
    return 256 * high + (numbers - 256 * high).clamp(-127, 127)


def rounded_inputs(u, scheme):
    """u rounded per scale group, at most 128 columns: float64, and the unit of each."""
    numbers, units, steps = [], [], steps_of(scheme)
    for part in u.split(min(scheme.group(u.shape[-1]), 128), dim=-1):
        most = part.abs().amax(-1, keepdim=True)
        inverse = torch.where(most > 1e-30, steps / most, 0)
        unit = (most / steps).double()
        whole = (part * inverse).round().double()
        numbers.append((in_two_bytes(whole) if steps == FINE else whole) * unit)
        units.append(unit.expand_as(part))
    return torch.cat(numbers, -1), torch.cat(units, -1)


def units_of_ties(u, scheme):
    """Units of inputs that lie halfway between two integers, within float32's precision, else 0.

    A factor that is rounded otherwise takes such an input to the other integer."""
    units, count = [], steps_of(scheme)
    for part in u.split(min(scheme.group(u.shape[-1]), 128), dim=-1):
        most = part.abs().amax(-1, keepdim=True).double().clamp_min(1e-30)
        steps = part.double() * count / most
        tie = ((steps - steps.floor()) - 0.5).abs() <= 2 * EPS * steps.abs()
        units.append(tie * most / count)
    return torch.cat(units, -1)


def away_from_zero(numbers):
    """The nearest integers, ties away from zero."""
    return (numbers + numbers.sign() / 2).trunc()


def rounded_codebook(codebook, scheme):
    """Entries rounded to 8 or 16 bits, with one unit per stage or tile; E8P to multiples of the
    shift."""
    book = codebook.float()
    if scheme.lattice:
        unit = book[:, 256:, :1]
        return (book / unit).round() * unit, torch.zeros(())
    dims = (-2, -1)
    unit = book.abs().amax(dims, keepdim=True) / 127
    if steps_of(scheme) == FINE:
        unit = unit * (127 / torch.tensor(float(FINE)))
        found = book * (1 / unit)
        whole = away_from_zero(found).clamp(-FINE, FINE)
        return in_two_bytes(whole, away_from_zero) * unit, 3 * unit.amax()  # half a step, and 1
    return (book * (1 / unit)).round() * unit, unit.amax()


@pytest.mark.parametrize("name,shape", CASES, ids=str)
def test_linear_is_the_product_of_the_rounded_operands(isa, name, shape):
    if isa == "scalar" and shape[0] * shape[1] > 1 << 16:
        pytest.skip("slow")
    scheme, tensors = stored(name, *shape)
    tensors["codes"][0], tensors["codes"][-1] = 0, 255
    x = torch.randn(2, shape[1])
    x[1, :40] *= 50
    y = multiply(scheme, tensors, x).double()

    u = rotated(scheme, tensors, x)
    numbers, input_units = rounded_inputs(u, scheme)
    entries, scale = tensors[book_of(scheme)], tensors["scale"]
    codebook, unit = rounded_codebook(entries, scheme)
    levels = rows_of(scheme, tensors, codebook, shape[1])
    exact = numbers @ levels.T
    sizes = numbers.abs() @ levels.abs().T
    additions = shape[1] / 32 + 40  # of one lane, then of lanes and passes
    ties = units_of_ties(u, scheme) @ levels.abs().T
    per_weight = scale.double().repeat_interleave(shape[1] // scale.shape[-1], -1)
    left_out = torch.zeros(())  # products of two low bytes
    if steps_of(scheme) == FINE:
        left_out = 127**2 * scheme.streams * unit * (input_units @ per_weight.T)
    assert ((y - exact).abs() <= EPS * additions * sizes + ties + left_out).all()

    weight = rows_of(scheme, tensors, entries, shape[1])
    lost = unit * scheme.streams / 2 * per_weight  # of a weight, at most
    if scheme.lattice:
        lost = (weight - levels).abs()
    input_error = input_units * (1.5 if steps_of(scheme) == FINE else 0.5)
    bound = input_error @ (weight.abs() + lost).T + u.double().abs() @ lost.T
    bound += EPS * additions * (sizes + u.double().abs() @ weight.abs().T) + left_out
    truth = reference.linear(x, StoredWeight.of(tensors, scheme, x.shape[-1]), None).double()
    assert ((y - truth).abs() <= bound).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_a_token_does_not_depend_on_its_batch(isa, name):
    scheme, tensors = stored(name, 20, 512)
    x = torch.randn(64, 512)
    alone = torch.cat([multiply(scheme, tensors, x[i : i + 1].clone()) for i in range(64)])
    for tokens in (1, 2, 3, 4, 5, 16, 17, 64):
        assert torch.equal(multiply(scheme, tensors, x[:tokens].clone()), alone[:tokens])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_bias(isa, dtype, bias_dtype):
    scheme, tensors = stored("vq-4", 33, 256)
    x = torch.randn(3, 256).to(dtype)
    bias = None if bias_dtype is None else torch.randn(33).to(bias_dtype)
    expected = multiply(scheme, tensors, x.float(), None if bias is None else bias.float())
    assert torch.equal(multiply(scheme, tensors, x, bias), expected.to(dtype))


@pytest.mark.parametrize(
    "name", ["vq-4", "vq-2", "turboquant-8", "quip-sharp-2", "aqlm-3", "gptvq-2"]
)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_token_that_is_not_finite_gives_nan(isa, name, value):
    scheme, tensors = stored(name, 9, 512)
    x = torch.randn(3, 512)
    x[1, 300] = value
    y = multiply(scheme, tensors, x)
    assert y[1].isnan().all()
    assert y[::2].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e20])
def test_sizes_of_inputs(isa, size):
    scheme, tensors = stored("vq-4", 9, 512)
    x = torch.randn(1, 512)
    expected = multiply(scheme, tensors, x).double() * size
    y = multiply(scheme, tensors, x * size)
    # What is below the smallest magnitude counts as zero.
    floor = 1e-30 * 512 * 10
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=floor + 3e-3 * size)


def at_the_end_of_memory(tensor, kept):
    """A copy of the tensor whose last byte is the last one that may be read."""
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.element_size()
    pages = (size + page - 1) // page + 1
    memory = mmap.mmap(-1, pages * page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    last = first + (pages - 1) * page
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(last), page, 0) == 0
    kept.append(memory)
    array = (ctypes.c_uint8 * size).from_address(last - size)
    copy = torch.frombuffer(array, dtype=tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
@pytest.mark.parametrize("name", [*SCHEMES, *OTHERS])
@pytest.mark.parametrize(("rows", "tokens"), [(3, 5), (9, 1)])  # (9, 1): rows of several places
@pytest.mark.parametrize("in_features", [48, 288])
def test_nothing_is_read_beyond_a_tensor(isa, name, in_features, rows, tokens):
    scheme, tensors = stored(name, rows, in_features)
    x = torch.randn(tokens, in_features)
    kept = []
    guarded = {key: at_the_end_of_memory(tensor, kept) for key, tensor in tensors.items()}
    x_guarded = at_the_end_of_memory(x, kept)
    y = multiply(scheme, guarded, x_guarded, at_the_end_of_memory(torch.zeros(rows), kept))
    assert torch.equal(y, multiply(scheme, tensors, x))
    decoded = cpu_linear.decode(StoredWeight.of(guarded, scheme, in_features))
    assert torch.equal(decoded, cpu_linear.decode(StoredWeight.of(tensors, scheme, in_features)))


def norms(rows, x):
    """Euclidean norms of the x-vectors of the last dimension."""
    return rows.double().unflatten(-1, (-1, x)).norm(dim=-1)


@pytest.mark.parametrize(
    "name", ["aqlm-2-int7", "gptvq-2-int7", "vq4x5r3-tensor-int7-g64-hadamard128"]
)
def test_integer_entries_are_numbers_like_others(name, isa):
    scheme, tensors = stored(name, 300, 512)
    same = replace(scheme, codebook_bits=16)
    halves = {**tensors, "codebook": tensors["codebook"].half()}
    decoded = reference.decode(StoredWeight.of(tensors, scheme, 512))
    assert (ops.decode_weight(tensors, scheme, 512) - decoded).norm() <= 1e-6 * decoded.norm()
    for tokens in (1, 5, 200):
        x = torch.randn(tokens, 512)
        assert dispatch.select(linear_problem("linear", x, scheme.spec(), 300)).name == "cpu.linear"
        y = ops.linear(x, tensors, None, scheme)
        assert torch.equal(y, ops.linear(x, halves, None, same))


# What linear_luts.h computes; kernels/cpu/tests does on any processor with AVX-512.
@pytest.mark.parametrize("out_features", [2048, 2311])
@pytest.mark.parametrize("in_features", [48, 288, 1216, 4608])
@pytest.mark.parametrize(
    "name", ["aqlm-2", "vq8x8r1-tensor-g0-hadamard16", "vq8x8r1-tensor-g0-scaled_hadamard16"]
)
@pytest.mark.parametrize("isa", ["zen4", "avx512"])
def test_one_token_by_tables_of_products(isa, name, in_features, out_features):
    if isa not in library.isas():
        pytest.skip("no tables of 256 entries in registers")
    library.use_isa(isa)
    scheme, tensors = stored(name, out_features, in_features)
    tensors["codes"][0], tensors["codes"][-1] = 0, 255
    x = torch.randn(1, in_features)
    x[0, :40] *= 20
    kept = []
    guarded = {key: at_the_end_of_memory(tensor, kept) for key, tensor in tensors.items()}
    bias = at_the_end_of_memory(torch.randn(out_features), kept)
    y = multiply(scheme, guarded, at_the_end_of_memory(x, kept), bias).double()
    truth = reference.linear(x, StoredWeight.of(tensors, scheme, x.shape[-1]), bias).double()
    error = (y - truth)[0]

    # Every product of a span is rounded to the same unit: 1/127 of what its norms allow.
    u, width = rotated(scheme, tensors, x)[0], scheme.vector_size
    spans = u.split(128)
    counts = torch.tensor([len(span) // width for span in spans])
    most = torch.stack([norms(span, width).amax() for span in spans])
    reach = norms(tensors["codebook"], width).flatten(1).amax(1)  # of a stage
    scale = tensors["scale"].double().expand(-1, len(spans))
    exact = EPS * 300 * scale.amax() * in_features * most.amax() * reach.sum()
    assert (error.abs() <= scale @ (most * counts) * reach.sum() / 254 * 1.001 + exact).all()
    variance = scale.square() @ (most.square() * counts) * reach.square().sum() / 127**2 / 12
    assert error.norm() <= 1.5 * variance.sum().sqrt() + exact

    x[0, in_features // 2] = torch.nan
    assert multiply(scheme, tensors, x).isnan().all()
    library.use_isa(CPU_ISA.get())


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("name", "columns"),
    [("gptvq-2", 1024), ("vq-4", 288), ("turboquant-3", 1056), ("turboquant-1+4", 1056)],
)
def test_threads_do_not_change_a_result(isa, name, columns, tokens):
    scheme, tensors = stored(name, 1999, columns)
    x = torch.randn(tokens, columns)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = multiply(scheme, tensors, x)
        torch.set_num_threads(3)
        assert torch.equal(multiply(scheme, tensors, x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["vq-4-scaled", "quip-sharp-2-scaled", "turboquant-8-scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_diagonal_of_signs_gives_the_same_bits_as_signs(isa, name, dtype):
    scheme, plain = weight_scheme(name), weight_scheme(name).unscaled()
    for tokens, columns in ((1, 288), (5, 512), (200, 512)):
        _, tensors = stored(plain.spec(), 100, columns)
        scaled = with_diagonal(tensors, columns)
        x = torch.randn(tokens, columns).to(dtype)
        by_signs = ops.linear(x, tensors, None, plain)
        assert torch.equal(ops.linear(x, scaled, None, scheme), by_signs)
        decoded = ops.decode_weight(scaled, scheme, columns)
        assert torch.equal(decoded, ops.decode_weight(tensors, plain, columns))


def test_a_diagonal_of_another_dtype_is_read_as_it_is_stored():
    scheme, tensors = stored("vq-4-scaled", 24, 256)
    for tokens in (1, 200):
        x = torch.randn(tokens, 256)
        expected = ops.linear(x, tensors, None, scheme)
        wide = {**tensors, "diagonal": tensors["diagonal"].float()}
        assert torch.equal(ops.linear(x, wide, None, scheme), expected)


def test_op_takes_any_strides_and_shapes():
    scheme, tensors = stored("vq-4", 24, 256)
    x = torch.randn(256, 3, 2).permute(2, 1, 0)
    y = ops.linear(x, tensors, None, scheme)
    assert y.shape == (2, 3, 24)
    assert torch.equal(y, ops.linear(x.contiguous(), tensors, None, scheme))
    strided = {key: torch.stack([t, t], -1)[..., 0] for key, t in tensors.items()}
    assert torch.equal(y, ops.linear(x, strided, None, scheme))
    assert ops.linear(x[:0], tensors, None, scheme).shape == (0, 3, 24)


@pytest.mark.parametrize("name", ["turboquant-4+4", "turboquant-2+1-scaled"])
def test_one_pass_of_two(isa, name):
    """Without its second codes a layer is the first pass."""
    scheme, tensors = stored(name, 64, 256)
    weight = StoredWeight.of(tensors, scheme, 256)._replace(residual=None)
    one = weight._replace(scheme=scheme.first_pass())
    for tokens in (1, 200):
        x = torch.randn(tokens, 256)
        assert torch.equal(cpu_linear.linear(x, weight, None), cpu_linear.linear(x, one, None))
    assert torch.equal(cpu_linear.decode(weight), cpu_linear.decode(one))


def test_tensors_that_move_or_change_are_seen():
    scheme, tensors = stored("vq-4", 24, 256)
    _, others = stored("vq-4", 24, 256)
    x = torch.randn(1, 256)
    old, new = (ops.linear(x, t, None, scheme) for t in (tensors, others))
    codes = torch.nn.Parameter(tensors["codes"].clone(), requires_grad=False)
    moving = {**tensors, "scale": others["scale"], "codes": codes}
    assert not torch.equal(ops.linear(x, moving, None, scheme), new)
    codes.data = others["codes"].clone()
    assert torch.equal(ops.linear(x, moving, None, scheme), new)
    codes.data.copy_(tensors["codes"])
    moving["scale"] = tensors["scale"]
    assert torch.equal(ops.linear(x, moving, None, scheme), old)


def test_table_says_why():
    def reason(name, dtype=torch.float32):
        asked = linear_problem(
            "linear", torch.empty(1, 256, dtype=dtype), weight_scheme(name).spec(), 8
        )
        return {verdict.entry.name: verdict.reason for verdict in dispatch.explain(asked)}[
            "cpu.linear"
        ]

    for name in SCHEMES:
        assert reason(name) == ""
    assert reason("vq-4", torch.float64) == "inputs are float64"
    assert reason("vq1x4+4r2-universal-g128-hadamard128-shared") == "shared passes are two products"
    assert reason("vq2x8r1-universal-g128-qr128") == "a QR rotation is a matrix product"
