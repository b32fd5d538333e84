"""The entry `cpu.vptq_linear`, and large codebooks of `cpu.linear`, on every instruction set."""

import numpy
import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cpu import library
from hf_vq.backends.cpu import vptq as cpu_vptq
from hf_vq.env import CPU_ISA
from hf_vq.errors import VQFormatError
from hf_vq.fit import fixed_tensors
from hf_vq.formats import VQScheme
from hf_vq.formats.published import VptqLayout
from hf_vq.formats.tensors import tensor_specs
from hf_vq.ops.library import linear_problem
from hf_vq.ops.published import PublishedWeight

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

EPS = torch.finfo(torch.float32).eps
BOTH = {"norm": True, "perm": True}
LAYOUTS = {
    "v8-k65536-256": VptqLayout(8, 65536, 256, 1, 530, **BOTH),
    "v8-k65536-0": VptqLayout(8, 65536, 0, 1, 96, **BOTH, dtype="bfloat16"),
    "v16-k4096-4096": VptqLayout(16, 4096, 4096, 2, 41, perm=True),
    "v12-k65536-4096": VptqLayout(12, 65536, 4096, 1, 64, 5, 4, 300, **BOTH),
    "v6-k4096-0": VptqLayout(6, 4096, 0, 1, 259),
    "v4-k256-0": VptqLayout(4, 256, 0, 1, 77, norm=True),
    "v5-k100-7": VptqLayout(5, 100, 7, 3, 33, **BOTH),
}
ROWS = 45


@pytest.fixture(params=library.isas())
def isa(request):
    library.use_isa(request.param)
    yield request.param
    library.use_isa(CPU_ISA.get())


def layer(layout):
    """Random stored tensors, and the number of columns."""
    columns, found = layout.outliers + layout.groups * layout.group_size, {}
    for key, spec in layout.own(ROWS, columns).items():
        if key == "perm":
            found[key] = torch.randperm(columns).to(spec.dtype)
        elif key == "outlier_indices":
            found[key] = torch.randint(0, layout.outlier_centroids, spec.shape).to(spec.dtype)
        elif spec.dtype.is_floating_point:
            found[key] = torch.randn(spec.shape).to(spec.dtype)
        else:
            found[key] = packed(layout, spec.shape)
    return found, columns


def packed(layout, shape):
    """Random codes of a layout, bit by bit."""
    main, rest = layout.bits
    size = (*shape[:2], layout.group_size)
    codes = numpy.random.randint(0, layout.centroids, size)
    codes |= numpy.random.randint(0, max(layout.residual, 1), size) << main
    bits = (codes[..., None] >> numpy.arange(main + rest) & 1).astype(numpy.uint8)
    bits = numpy.pad(bits.reshape(*shape[:2], -1), ((0, 0), (0, 0), (0, 64)))[..., : 32 * shape[2]]
    words = numpy.packbits(bits, axis=-1, bitorder="little")
    return torch.from_numpy(words.view(numpy.int32))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear(isa, name, dtype):
    layout = LAYOUTS[name]
    tensors, columns = layer(layout)
    weight = ops.decode_published(tensors, layout, ROWS, columns).double()
    plain = {**tensors}
    if layout.norm:  # what a column is multiplied with has a sign of its own
        plain["weight_scale"] = tensors["weight_scale"].abs()
        plain["weight_bias"] = torch.zeros_like(tensors["weight_bias"])
    most = ops.decode_published(plain, layout, ROWS, columns).double().abs()
    if layout.norm:
        most += tensors["weight_bias"].double().abs()
    for tokens in (1, 2, 3, 7):
        x, bias = torch.randn(2, tokens, columns).to(dtype), torch.randn(ROWS).to(dtype)
        bias = bias if tokens % 2 else None
        asked = linear_problem("published_linear", x, layout.spec(), ROWS)
        assert dispatch.select(asked).name == "cpu.vptq_linear"
        y = ops.published_linear(x, tensors, bias, layout.spec(), ROWS)
        assert y.dtype == dtype and not y._is_view()
        exact = x.double() @ weight.T + (0 if bias is None else bias.double())
        bound = EPS * (columns + 8) * (x.double().abs() @ most.T + 3)  # one sum after another
        bound += torch.finfo(dtype).eps * exact.abs()
        assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_token_does_not_depend_on_its_batch(isa, name):
    layout = LAYOUTS[name]
    tensors, columns = layer(layout)
    x = torch.randn(9, columns)

    def product(x):
        return ops.published_linear(x, tensors, None, layout.spec(), ROWS)

    alone = torch.cat([product(one[None].clone()) for one in x])
    for tokens in (2, 3, 4, 9):
        assert torch.equal(product(x[:tokens].clone()), alone[:tokens])


def test_strides_other_dtypes_and_gradients():
    layout = LAYOUTS["v8-k65536-256"]
    tensors, columns = layer(layout)
    x, spec = torch.randn(4, 2 * columns), layout.spec()
    y = ops.published_linear(x[:, ::2], tensors, torch.ones(ROWS).double(), spec, ROWS)
    again = ops.published_linear(x[:, ::2].clone(), tensors, torch.ones(ROWS), spec, ROWS)
    assert torch.equal(y, again)
    moved = {key: tensor.clone() for key, tensor in tensors.items()}
    assert torch.equal(ops.published_linear(x[:, ::2], moved, torch.ones(ROWS), spec, ROWS), y)
    double = x[:, ::2].double()
    asked = linear_problem("published_linear", double, spec, ROWS)
    assert dispatch.select(asked).name == "reference"
    assert ops.published_linear(x[:0, ::2], tensors, None, spec, ROWS).shape == (0, ROWS)
    leaf = x[:, ::2].clone().requires_grad_()
    ops.published_linear(leaf, tensors, None, spec, ROWS).sum().backward()
    weight = ops.decode_published(tensors, layout, ROWS, columns)
    torch.testing.assert_close(leaf.grad, weight.sum(0).expand(4, -1), rtol=1e-4, atol=1e-4)


def test_what_the_library_leaves_to_the_reference():
    for layout in (
        VptqLayout(8, 256, 0, 1, 64, dtype="float32"),
        VptqLayout(128, 256, 0, 1, 64),
    ):
        x = torch.randn(1, 64)
        assert (
            dispatch.select(linear_problem("published_linear", x, layout.spec(), 24)).name
            == "reference"
        )
    layout = LAYOUTS["v8-k65536-256"]
    tensors, columns = layer(layout)
    tensors["codes"] = tensors["codes"][:, :-1]
    with pytest.raises(VQFormatError, match=r"codes of a \[45, 530\] layer"):
        cpu_vptq.linear(
            torch.randn(1, columns), PublishedWeight(tensors, layout, ROWS, columns), None
        )
    tensors, _ = layer(layout)
    away = {**tensors, "perm": tensors["perm"].to("meta")}
    with pytest.raises(VQFormatError, match="perm of the layer on meta"):
        cpu_vptq.linear(torch.randn(1, columns), PublishedWeight(away, layout, ROWS, columns), None)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("vq8x16r1-tensor-g0-none", 200),
        ("vq8x16r2-tensor-g0-hadamard128", 1280),
        ("vq16x9r3-tensor-g0-none", 4112),
        ("vq8x10r1-tensor-g0-none", 72),
        ("vq16x8r1-tensor-g0-none", 144),
        ("vq8x4r1-tensor-g0-none", 40),
    ],
)
def test_large_codebooks_with_vectors_along_the_row(isa, spec, size):
    """AQLM 1x16 and its like: nothing is rounded but by sums, and a token stands alone."""
    scheme = VQScheme.parse(spec)
    tensors = fixed_tensors(scheme, size, 0)
    for key, stored in tensor_specs(scheme, ROWS, size).items():
        if key == "codes":
            tensors[key] = torch.randint(0, 256, stored.shape).to(torch.uint8)
        elif stored.shared_name is None:
            tensors[key] = torch.rand(stored.shape).add(0.5).to(stored.dtype)
    tensors["codebook"] = torch.randn(tensors["codebook"].shape).half()
    x, bias = torch.randn(7, size), torch.randn(ROWS)
    y = ops.linear(x, tensors, bias, scheme)
    weight = ops.decode_weight(tensors, scheme, size, torch.float32).double()
    exact = x.double() @ weight.T + bias.double()
    # Sums of an eighth of the columns; a Hadamard transform adds a few more for every number.
    bound = EPS * (size / 8 + 40) * (x.norm(dim=-1)[:, None] * weight.norm(dim=-1).float() + 3)
    assert ((y.double() - exact).abs() <= bound).all()
    for tokens in (1, 2, 3):
        assert torch.equal(ops.linear(x[:tokens].clone(), tensors, bias, scheme), y[:tokens])
