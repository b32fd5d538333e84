"""VPTQ's kernels on a GPU, against float64: fresh random layers, outputs in memory full of NaN."""

import functools
import itertools

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cuda import vptq as cuda_vptq
from hf_vq.codegen.families.vptq import VptqProblem, best
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.errors import VQFormatError
from hf_vq.formats.published import VptqLayout
from hf_vq.ops.library import linear_problem
from hf_vq.ops.published import PublishedWeight
from tests.fixtures.cuda_layers import poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOTH = {"norm": True, "perm": True}
CASES = [  # rows, layout
    (1024, VptqLayout(8, 65536, 256, 1, 2048, **BOTH)),
    (333, VptqLayout(8, 65536, 0, 1, 1152, **BOTH, dtype="bfloat16")),
    (65, VptqLayout(16, 65536, 65536, 1, 520, **BOTH)),
    (130, VptqLayout(12, 65536, 4096, 1, 264, 5, 4, 300, **BOTH)),
    (61, VptqLayout(6, 4096, 0, 1, 514)),
    (7, VptqLayout(4, 256, 0, 1, 77, perm=True)),
    (50, VptqLayout(10, 100, 7, 3, 90, 2, 6, 999, norm=True, dtype="bfloat16")),
    (40, VptqLayout(32, 300, 0, 1, 96, norm=True)),
]
WHOLE = [
    *CASES,
    (30, VptqLayout(5, 33, 0, 1, 65)),
    (30, VptqLayout(8, 64, 0, 1, 66, dtype="float32")),
]


def packed_codes(layout, groups, vectors, words):
    """Random codes as int32 words: streams of bits, a code's lowest bit first."""
    size = groups, vectors, layout.group_size
    main, rest = layout.bits
    codes = torch.randint(0, layout.centroids, size)
    codes |= torch.randint(0, max(layout.residual, 1), size) << main
    bits = (codes[..., None] >> torch.arange(main + rest)) & 1
    bits = torch.nn.functional.pad(bits.flatten(2), (0, 32 * words - bits[0, 0].numel()))
    numbers = (bits.unflatten(2, (words, 32)) << torch.arange(32)).sum(-1)
    return torch.where(numbers >= 1 << 31, numbers - (1 << 32), numbers).int()


def layer(layout, rows):
    """Random stored tensors of a layer on the GPU."""
    columns, found = layout.outliers + layout.groups * layout.group_size, {}
    for key, spec in layout.own(rows, columns).items():
        if key == "perm":
            order = torch.randperm(columns)
            found[key] = torch.where(order >= 1 << 15, order - (1 << 16), order).short()
        elif key == "outlier_indices":
            found[key] = torch.randint(0, layout.outlier_centroids, spec.shape).short()
        elif spec.dtype.is_floating_point:
            found[key] = (torch.randn(spec.shape) / 8).to(spec.dtype)
        else:
            found[key] = packed_codes(layout, *spec.shape)
    return {key: tensor.cuda() for key, tensor in found.items()}, columns


def exact_weight(tensors, layout, rows, columns):
    return ops.decode_published(tensors, layout, rows, columns)


def check(y, x, weight, bias):
    """The error is at most twice that of the same product in PyTorch, of the rounded weight."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    same = torch.nn.functional.linear(x, weight.to(x.dtype), bias)
    eps = torch.finfo(x.dtype).eps * exact.norm()
    assert (y.double() - exact).norm() <= 2 * (same.double() - exact).norm() + eps
    assert (y.double() - exact).abs().max() <= 4 * (same.double() - exact).abs().max() + eps


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_few_tokens(case, tokens):
    rows, layout = CASES[case]
    tensors, columns = layer(layout, rows)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(tokens, columns, device="cuda").to(dtype)
        bias = torch.randn(rows, device="cuda").to(dtype) if tokens % 2 else None
        asked = linear_problem("published_linear", x, layout.spec(), rows)
        bfloat16 = layout.dtype == "bfloat16" and dtype is torch.float16
        chosen = dispatch.select(asked).name
        assert chosen == ("cuda.vptq_decoded" if bfloat16 else "cuda.vptq_linear")
        poison()
        y = ops.published_linear(x, tensors, bias, layout.spec(), rows)
        check(y, x, exact_weight(tensors, layout, rows, columns), bias)


@pytest.mark.parametrize("case", range(len(WHOLE)))
def test_many_tokens_and_decoded_rows(case, monkeypatch):
    rows, layout = WHOLE[case]
    tensors, columns = layer(layout, rows)
    weight = exact_weight(tensors, layout, rows, columns)
    given = PublishedWeight(tensors, layout, rows, columns)
    stored = cuda_vptq.DeviceWeight(given, None, tensors["codes"].device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.full((rows, columns), float("nan"), device="cuda", dtype=dtype)
        cuda_vptq.decode_rows(stored, cuda_vptq.places(stored), 0, out)
        assert torch.equal(out, weight.to(dtype))  # all bits
    monkeypatch.setattr(cuda_vptq, "DECODED_BYTES", 3 * 2 * layout.vector * columns)
    for tokens in (17, 100):
        x = torch.randn(2, tokens, columns, device="cuda").half()
        poison()
        y = ops.published_linear(x, tensors, None, layout.spec(), rows)
        check(y, x, weight, None)


# Plans that are chosen must not spill (tests/unit/codegen/families/test_vptq.py), others may.
@pytest.mark.filterwarnings("ignore:.*spills .* bytes per thread:RuntimeWarning")
@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("case", [0, 3])
def test_every_plan(case, tokens):
    rows, layout = CASES[case]
    tensors, columns = layer(layout, rows)
    weight = exact_weight(tensors, layout, rows, columns)
    asked = VptqProblem(layout, tokens, rows, Dtype.FLOAT16, device_arch(0))
    given = PublishedWeight(tensors, layout, rows, columns)
    stored = cuda_vptq.DeviceWeight(given, None, tensors["codes"].device)
    for plan in best(asked):
        x = torch.randn(tokens - 1, columns, device="cuda").half()
        y = torch.full((tokens, rows), float("nan"), device="cuda").half()
        poison()
        found = cuda_vptq.prepare(plan, layout, 0)
        cuda_vptq.run(found, x, stored, None, y[:-1], tokens - 1)
        assert y[-1].isnan().all()
        check(y[:-1], x, weight, None)


def test_large_and_small_numbers():
    """x times the scale of a column leaves the range of float16, and comes back."""
    rows, layout = CASES[0]
    tensors, columns = layer(layout, rows)
    for factor, size in itertools.product((1e-4, 1.0, 200.0), (1e-3, 1.0, 100.0)):
        scaled = {**tensors, "weight_scale": (tensors["weight_scale"] * factor).half()}
        scaled["weight_bias"] = (tensors["weight_bias"] * factor).half()
        x = (torch.randn(3, columns, device="cuda") * size).half()
        weight = exact_weight(scaled, layout, rows, columns)
        exact = x.double() @ weight.double().T
        y = ops.published_linear(x, scaled, None, layout.spec(), rows).double()
        small = exact.abs() < 6e4
        step = 2.0**-24  # between the smallest numbers of y's dtype
        assert ((y - exact)[small].abs() <= 2e-3 * exact.abs().max() + step).all()


def test_graphs_and_streams():
    """Captured once, replayed with other inputs; each layer's inputs lie in memory of its own."""
    layout = CASES[0][1]
    layers = [layer(layout, layout.group_size) for _ in range(3)]
    weights = [exact_weight(t, layout, layout.group_size, c) for t, c in layers]
    x = torch.randn(2, layout.group_size, device="cuda").half()

    def forward(x, product):
        for i in range(3):
            x = product(x, i)
            x = x / x.abs().amax(-1, keepdim=True)
        return x

    def ours(x, i):
        return ops.published_linear(x, layers[i][0], None, layout.spec(), layout.group_size)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward(x, ours)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = forward(x, ours)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        dense = forward(x.double(), lambda x, i: x @ weights[i].double().T)
        assert (y.double() - dense).norm() <= 0.01 * dense.norm()


def test_inputs_that_are_no_rows_of_memory():
    rows, layout = CASES[0]
    tensors, columns = layer(layout, rows)
    weight = exact_weight(tensors, layout, rows, columns)
    product = functools.partial(
        ops.published_linear, tensors=tensors, bias=None, layout=layout.spec(), rows=rows
    )
    wide = torch.randn(4, 2 * columns, device="cuda").half()
    for x in (wide[:, 1::2], wide[:, 1 : columns + 1], wide[1:3, None, :columns]):
        check(product(x), x, weight, None)
    assert product(wide[:0, :columns]).shape == (0, rows)
    with pytest.raises(VQFormatError, match="bias of the layer on cpu"):
        product(wide[:, :columns], bias=torch.zeros(rows))
    x = wide[:, :columns].clone().requires_grad_()
    product(x).sum().backward()
    exact = weight.double().sum(0).expand(4, -1)
    assert (x.grad.double() - exact).norm() <= 2e-3 * exact.norm()
