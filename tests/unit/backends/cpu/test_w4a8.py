"""The entry `cpu.w4a8_linear`: bit by bit what the reference says, on every instruction set."""

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cpu import library
from hf_vq.backends.cpu import w4a8 as cpu_w4a8
from hf_vq.env import CPU_ISA
from hf_vq.errors import VQFormatError
from hf_vq.formats import linear_scheme
from hf_vq.formats.qoq import encode
from hf_vq.formats.stored_weight import W4A8Weight
from hf_vq.ops import w4a8
from hf_vq.ops.library import linear_problem

SCHEMES = ["qoq-w4a8", *(f"qoq-w4a8-g{group}" for group in (32, 64, 128, 256))]
SIZES = [(1, 32), (3, 96), (37, 704), (18, 1280), (5, 2048 + 32)]
TOKENS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 66]
ODD = [(4, 1), (3, 33), (7, 101), (2, 4095)]


pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())


@pytest.fixture(params=library.isas())
def isa(request):
    library.use_isa(request.param)
    yield request.param
    library.use_isa(CPU_ISA.get())


def layer(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    return encode(weight, linear_scheme(name))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_reference_bit_by_bit(isa, name, dtype):
    for rows, columns in [*SIZES, *(ODD if name == "qoq-w4a8" else [])]:
        tensors, scheme = layer(name, rows, columns), linear_scheme(name)
        bias = torch.randn(rows).to(dtype)
        for tokens in TOKENS:
            x = torch.randn(tokens, columns).to(dtype)
            assert (
                dispatch.select(linear_problem("w4a8_linear", x, name, rows)).name
                == "cpu.w4a8_linear"
            )
            added = bias if tokens % 2 else None
            y = ops.w4a8_linear(x, tensors, added, name)
            assert y.dtype == dtype and not y._is_view()
            expected = w4a8.reference(x, W4A8Weight.of(tensors, scheme, x.shape[-1]), added)
            assert torch.equal(y, expected), (rows, columns, tokens)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_largest_sums(isa, name):
    """All codes 15 or 0, all inputs of one size: sums in lanes of 16 bits are the largest."""
    scheme, columns = linear_scheme(name), 4096
    for codes, step, zero in ((0xFF, 17, 127), (0xFF, 17, 128 - 1), (0x00, 1, 127), (0xFF, 1, 0)):
        tensors = encode(torch.ones(5, columns), scheme)
        tensors["codes"].fill_(codes)
        if "step" in tensors:  # 15 * 17 - 127 = 128 is one too many
            tensors["step"].fill_(step - (step == 17))
            tensors["zero"].fill_(zero)
        x = torch.ones(3, columns) * torch.tensor([1.0, -1.0, 3e4])[:, None]
        for tokens in (1, 3, 12):
            given = x.repeat(4, 1)[:tokens]
            y = ops.w4a8_linear(given, tensors, None, name)
            assert torch.equal(
                y, w4a8.reference(given, W4A8Weight.of(tensors, scheme, x.shape[-1]), None)
            )


@pytest.mark.parametrize("name", ["qoq-w4a8", "qoq-w4a8-g128"])
@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_hostile_tokens(isa, name, tokens):
    tensors, scheme = layer(name, 6, 704), linear_scheme(name)
    x = torch.randn(tokens, 704)
    for row, value in ((0, torch.nan), (tokens // 2, torch.inf), (tokens - 1, -torch.inf)):
        given = x.clone()
        given[row, 703] = value
        y = ops.w4a8_linear(given, tensors, None, name)
        assert bool(y[row].isnan().all())
        others = torch.arange(tokens) != row
        expected = w4a8.reference(x, W4A8Weight.of(tensors, scheme, x.shape[-1]), None)
        assert torch.equal(y[others], expected[others])
    for size in (0.0, 1e-45, 1e-38, 1e-30, 3e38):
        given = x.sign() * size
        expected = w4a8.reference(given, W4A8Weight.of(tensors, scheme, x.shape[-1]), None)
        assert torch.equal(ops.w4a8_linear(given, tensors, None, name), expected)


def test_strides_other_dtypes_and_empty_inputs():
    name, scheme = "qoq-w4a8-g64", linear_scheme("qoq-w4a8-g64")
    tensors = layer(name, 9, 192)
    x = torch.randn(4, 384)
    expected = w4a8.reference(
        x[:, ::2], W4A8Weight.of(tensors, scheme, x.shape[-1] // 2), torch.ones(9)
    )
    assert torch.equal(ops.w4a8_linear(x[:, ::2], tensors, torch.ones(9).double(), name), expected)
    moved = {key: tensor.clone() for key, tensor in tensors.items()}
    moved["codes"] = torch.cat([moved["codes"], moved["codes"]], 1)[:, :96]
    assert torch.equal(ops.w4a8_linear(x[:, ::2], moved, torch.ones(9), name), expected)
    assert ops.w4a8_linear(x[:0, ::2], tensors, None, name).shape == (0, 9)
    asked = linear_problem("w4a8_linear", x[:, ::2].double(), name, 9)
    assert dispatch.select(asked).name == "reference"
    assert torch.equal(
        ops.w4a8_linear(x[None, :, ::2], tensors, None, name)[0],
        ops.w4a8_linear(x[:, ::2], tensors, None, name),
    )


def test_what_the_library_leaves_to_the_reference():
    x = torch.randn(1, 1 << 17)
    assert "32 bits" in str(cpu_w4a8.supports(linear_problem("w4a8_linear", x, "qoq-w4a8-g128", 4)))
    assert "divisible by 32" in str(
        cpu_w4a8.supports(linear_problem("w4a8_linear", torch.randn(1, 100), "qoq-w4a8-g128", 4))
    )


def test_tensors_that_do_not_belong_together():
    scheme, tensors = linear_scheme("qoq-w4a8-g128"), layer("qoq-w4a8-g128", 4, 256)
    x = torch.randn(1, 256)
    for key in tensors:
        wrong = {**tensors, key: tensors[key][:, :-1] if key != "scale" else tensors[key][:3]}
        with pytest.raises(VQFormatError, match=rf"{key} of a \[4, 256\] layer|{key}.*expected"):
            cpu_w4a8.linear(x, W4A8Weight.of(wrong, scheme, x.shape[-1]), None)
    with pytest.raises(VQFormatError, match="has codes, scale, step, zero"):
        cpu_w4a8.linear(x, W4A8Weight.of({**tensors, "step": None}, scheme, x.shape[-1]), None)
