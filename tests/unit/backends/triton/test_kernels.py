"""The Triton kernels on CPU tensors, under Triton's interpreter.

Fresh random codes, scales and inputs; outputs and scratch lie in memory full of NaN.
"""

import importlib.util
import sys

import numpy
import pytest
import torch

from hf_vq.backends.triton import supports as row
from hf_vq.errors import VQFormatError
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme, weight_scheme
from hf_vq.formats.stored_weight import StoredWeight, rotation_of
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import random_tensors

pytestmark = pytest.mark.slow  # an interpreter runs the kernels

# Older interpreters do not run loops with NumPy 2.4, and leave Triton changed behind them.
pytest.importorskip("triton", "3.7", reason="needs Triton 3.7 or later: hf-vq[triton]")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CATALOGUE = ("vq-4", "vq-2", "turboquant-4", "turboquant-4+4", "vq-4-scaled")
ODD = [  # spec, out_features, in_features
    (WEIGHT_SCHEMES["vq-3"].spec(), 37, 128),
    (WEIGHT_SCHEMES["turboquant-2"].spec(), 2, 384),
    (WEIGHT_SCHEMES["turboquant-8"].spec(), 35, 128),
    (WEIGHT_SCHEMES["turboquant-1"].spec(), 3, 384),
    ("vq1x4+2r2-universal-g128-random_hadamard128-nested", 34, 384),
    ("vq1x1+4r2-universal-g0-none-nested", 9, 154),
    ("vq1x3+1r2-universal-g32-hadamard32-nested", 33, 160),
    ("vq1x2r2-universal-g16-random_hadamard16-nested", 3, 96),
    ("vq1x3r1-tensor-g0-none", 7, 77),
    ("vq1x4r1-universal-g16-hadamard0", 33, 176),
    ("vq1x4r1-universal-g0-hadamard0", 1, 52),
    ("vq1x5r1-universal-g32-random_hadamard64", 31, 192),
    ("vq1x6r1-universal-g128-hadamard0", 5, 128),
    ("vq2x8r1-universal-g16-random_hadamard16", 6, 80),
    ("vq4x2r1-tensor-g32-none", 7, 96),
    ("vq1x16r1-tensor-g256-none", 3, 512),
    ("vq2x11r1-tensor-g0-none", 32, 130),
    ("vq2x8r1-universal-g0-random_hadamard0", 5, 256),
    ("vq4x13r1-tensor-g64-none", 40, 192),
    ("vq4x8r1-universal-g128-random_hadamard32", 65, 384),
    ("vq4x8r1-universal-g128-scaled_hadamard32", 65, 384),
    ("vq1x3+1r2-universal-g32-scaled_hadamard32-nested", 33, 160),
    ("vq2x8r1-universal-g0-scaled_hadamard0", 5, 256),
]
CASES = [(weight_scheme(name).spec(), 37, 256, d) for name in CATALOGUE for d in DTYPES]
CASES += [(*case, DTYPES[i % 3]) for i, case in enumerate(ODD)]


@pytest.fixture(autouse=True)
def poisoned():
    """PyTorch fills new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def kernels():
    """`triton_linear`, loaded once more: Triton reads the variable when it meets a kernel."""
    found = importlib.util.find_spec("hf_vq.backends.triton.linear")
    spec = importlib.util.spec_from_file_location("hf_vq.backends.triton.interpreted", found.origin)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def dot_of_floats(monkeypatch):
    """The interpreter holds bfloat16 as integers, and its `dot` would multiply those."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)
        return TensorHandle(data, tl.float32)

    def dot_of_floats(self, a, b, *rest):
        return dot(self, wide(a), wide(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_of_floats)


def within_nan(tensor):
    """A copy with NaN before and after it."""
    place = torch.full((tensor.numel() + 32,), float("nan"), dtype=tensor.dtype)
    return place[16:-16].view(tensor.shape).copy_(tensor)


def stored(spec, out_features, in_features):
    scheme = VQScheme.parse(spec)
    assert row.runnable(scheme, in_features) is None
    tensors = random_tensors(scheme, out_features, in_features)
    return scheme, {
        key: within_nan(tensor) if tensor.is_floating_point() else tensor
        for key, tensor in tensors.items()
    }


@pytest.fixture
def run(kernels):
    def linear(x, tensors, bias, scheme):
        return kernels.linear(x, StoredWeight.of(tensors, scheme, x.shape[-1]), bias)

    return linear


def rotated_weight(tensors, scheme, columns):
    """W R^T, of one pass or of two nested ones."""
    if scheme.two_passes:
        given = (tensors[key] for key in ("codes", "codes_2", "codebook_2", "scale"))
        return reference.decode_nested(*given, scheme, columns)
    given = (tensors[key] for key in ("codes", "codebook", "scale"))
    return reference.decode_rotated(*given, scheme, columns)


def check(y, x, tensors, bias, scheme):
    """As far from float64 as the same maths in torch at that dtype, at most twice; where terms
    cancel, float32 may lose more in one order of adding them up than in another."""
    rotation = rotation_of(tensors)
    weight = rotated_weight(tensors, scheme, x.shape[-1])
    inputs = reference.rotate(x.double(), rotation, scheme, False)
    exact = inputs @ weight.double().T + (0 if bias is None else bias.double())
    rounded = reference.rotate(x.float(), rotation, scheme, False).to(x.dtype)
    same = torch.nn.functional.linear(rounded, weight.to(x.dtype), bias)
    eps = torch.finfo(x.dtype).eps * exact.norm()
    terms = inputs.abs() @ weight.double().abs().T
    eps += torch.finfo(torch.float32).eps * terms.norm()
    assert y.dtype == x.dtype and y.shape == exact.shape
    assert (y.double() - exact).norm() <= 2 * (same.double() - exact).norm() + eps


@pytest.mark.parametrize(("spec", "rows", "columns", "dtype"), CASES)
def test_linear(spec, rows, columns, dtype, run):
    scheme, tensors = stored(spec, rows, columns)
    x, bias = within_nan(torch.randn(3, columns).to(dtype)), torch.randn(rows).to(dtype)
    check(run(x, tensors, bias, scheme), x, tensors, bias, scheme)


@pytest.mark.parametrize("tokens", [1, 16, 17, 130])
def test_tokens(tokens, run):
    scheme, tensors = stored(WEIGHT_SCHEMES["vq-4"].spec(), 33, 128)
    x = within_nan(torch.randn(tokens, 128).half())
    check(run(x, tensors, None, scheme), x, tensors, None, scheme)


@pytest.mark.parametrize("steps", [1, 2])
def test_split_rows(steps, run, kernels, monkeypatch):
    """Also where the last part is shorter, and where the bias must be added once."""
    monkeypatch.setattr(kernels, "_STEPS", steps)
    scheme, tensors = stored(WEIGHT_SCHEMES["vq-2"].spec(), 9, 5 * 128)
    assert kernels._steps(1, 5) == (1, 3)[steps - 1]
    x, bias = torch.randn(5, 5 * 128), torch.randn(9)
    check(run(x, tensors, bias, scheme), x, tensors, bias, scheme)


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("spec", ["vq1x3r1-tensor-g0-none", "vq2x11r1-tensor-g0-none"])
def test_extreme_codes(spec, byte, run):
    scheme, tensors = stored(spec, 3, 78)
    tensors["codes"].fill_(byte)
    x = torch.randn(2, 78)
    check(run(x, tensors, None, scheme), x, tensors, None, scheme)


def test_tensors_at_odd_places(run):
    """Not contiguous, not aligned, scales and bias in another dtype, no token at all."""
    scheme, tensors = stored(WEIGHT_SCHEMES["vq-4"].spec(), 5, 128)
    wide, bias = torch.randn(4, 300).half(), torch.randn(10)[::2]
    codebook = torch.empty(513, dtype=torch.float16)[1:].view(1, 256, 2)
    moved = {**tensors, "codebook": codebook.copy_(tensors["codebook"])}
    moved["scale"] = tensors["scale"].float()
    odd = torch.empty(tensors["codes"].numel() + 1, dtype=torch.uint8)[1:]
    moved["codes"] = odd.view(5, -1).copy_(tensors["codes"])
    for x in (wide[:, 1:129], wide[:, 2:258:2], wide[::2, 3:131]):
        check(run(x, moved, bias, scheme), x, tensors, bias.half(), scheme)
    assert run(wide[:0, :128], tensors, None, scheme).shape == (0, 5)
    assert run(wide[0, :128], tensors, None, scheme).shape == (5,)
    assert run(wide[None, :, :128], tensors, None, scheme).shape == (1, 4, 5)


def test_second_codes_of_another_size(run):
    scheme, tensors = stored(WEIGHT_SCHEMES["turboquant-4+2"].spec(), 64, 256)
    for wrong in (tensors["codes_2"][:, :-1], tensors["codes"]):
        with pytest.raises(VQFormatError, match="64 rows of 256 weights"):
            run(torch.randn(1, 256), {**tensors, "codes_2": wrong}, None, scheme)


def test_sizes_that_do_not_belong_together(run):
    scheme, tensors = stored(WEIGHT_SCHEMES["vq-4"].spec(), 64, 256)
    x = torch.randn(1, 256)
    for key, cut in (
        ("codes", lambda t: t[:, :-1]),
        ("codebook", lambda t: t[:, :-1]),
        ("scale", lambda t: t[1:]),
    ):
        with pytest.raises(VQFormatError, match="64 rows of 256 weights"):
            run(x, {**tensors, key: cut(tensors[key])}, None, scheme)
    with pytest.raises(VQFormatError, match="a sign for each"):
        run(x, {**tensors, "signs": tensors["signs"][:-1]}, None, scheme)
    with pytest.raises(VQFormatError, match="64 rows need as many biases"):
        run(x, tensors, torch.zeros(63), scheme)
