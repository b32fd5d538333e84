"""`hf_vq::linear`, `decode`, `encode`, `rotate`: schemas, gradients, and the reference itself."""

import weakref

import pytest
import torch

from hf_vq import ops
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.formats import KV_SCHEMES, WEIGHT_SCHEMES, VQScheme, weight_scheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.stored_weight import StoredWeight, flat
from hf_vq.ops.reference import codes as reference
from hf_vq.transforms import rotate

pytestmark = pytest.mark.usefixtures("reference_kernels")


def stored(name, out_features=24, in_features=256):
    scheme = weight_scheme(name)
    fitted = fit_weight(torch.randn(out_features, in_features), scheme)
    return scheme, {**fixed_tensors(scheme, in_features, 0), **fitted.tensors}


@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
def test_linear_is_the_product_with_the_decoded_weight(name):
    scheme, tensors = stored(name)
    weight = ops.decode_weight(tensors, scheme, 256).double()
    x, bias = torch.randn(3, 5, 256), torch.randn(24)
    exact = x.double() @ weight.T + bias
    y = ops.linear(x, tensors, bias, scheme)
    same = (x @ weight.float().T + bias).double()
    eps = torch.finfo(torch.float32).eps * x.norm() * weight.norm()
    assert (y - exact).norm() <= 2 * (same - exact).norm() + eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256,), (0, 256), (2, 1, 256)])
def test_shapes_and_dtypes(dtype, shape):
    scheme, tensors = stored("vq-4")
    y = ops.linear(torch.randn(shape).to(dtype), tensors, None, scheme)
    assert y.shape == (*shape[:-1], 24)
    assert y.dtype == dtype


@pytest.mark.parametrize("name", ["vq-4", "vq-3", "turboquant-4+4", "aqlm-2-int7", "gptvq-2"])
def test_opcheck(name):
    scheme, tensors = stored(name)
    x = torch.randn(3, 256, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)
    arguments = (x, *flat(tensors), bias, scheme.spec())
    torch.library.opcheck(torch.ops.hf_vq.linear.default, arguments)
    grad = torch.randn(3, 24, requires_grad=True)
    gradient = (grad, *flat(tensors), scheme.spec(), 256)
    torch.library.opcheck(torch.ops.hf_vq.input_gradient.default, gradient)
    decode = (*flat(tensors), scheme.spec(), 256)
    torch.library.opcheck(torch.ops.hf_vq.decode.default, decode)
    rotation = (x.detach(), tensors.get("signs"), scheme.spec(), True)
    torch.library.opcheck(torch.ops.hf_vq.rotate.default, rotation)


def test_opcheck_encode():
    scheme = KV_SCHEMES["u3"].key
    arguments = (torch.randn(2, 3, 80), universal_tensor(scheme), None, scheme.spec())
    torch.library.opcheck(torch.ops.hf_vq.encode.default, arguments)


def test_gradients_are_those_of_the_dense_layer():
    scheme, tensors = stored("vq-4")
    weight = ops.decode_weight(tensors, scheme, 256)
    grads = []
    for forward in (
        lambda x, b: ops.linear(x, tensors, b, scheme),
        lambda x, b: torch.nn.functional.linear(x, weight, b),
    ):
        x = torch.linspace(-1, 1, 2 * 3 * 256).reshape(2, 3, 256).requires_grad_()
        bias = torch.zeros(24, requires_grad=True)
        forward(x, bias).square().sum().backward()
        grads.append((x.grad, bias.grad))
    for ours, dense in zip(*grads, strict=True):
        assert (ours - dense).norm() <= 1e-5 * dense.norm()


def test_gradients_of_second_order_are_those_of_the_dense_layer():
    scheme, tensors = stored("vq-4")
    scale = tensors["scale"].float()
    found = []
    for dense in (False, True):
        moved = scale.clone().requires_grad_()
        x = torch.linspace(-1, 1, 3 * 256).reshape(3, 256).requires_grad_()
        trained = {**tensors, "scale": moved}
        if dense:
            weight = reference.decode(StoredWeight.of(trained, scheme, 256))
            y = x @ weight.T
        else:
            y = ops.linear(x, trained, None, scheme)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, moved)))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize("name", ["vq-4", "vq-2", "turboquant-4+4", "gptvq-2"])
def test_the_short_way_of_a_frozen_weight_is_the_op(name):
    """The same bits: forward, backward, of second order; and x is not kept."""
    scheme, tensors = stored(name)
    kept, counts, found = [], [], []
    for op in (False, True):
        x = torch.linspace(-1, 1, 2 * 3 * 256).reshape(2, 3, 256).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            if op:
                y = torch.ops.hf_vq.linear(x, *flat(tensors), None, scheme.spec())
            else:
                y = ops.linear(x, tensors, None, scheme)
                assert type(y.grad_fn).__name__ == "OfFrozenWeightBackward"
        assert all(tensor is not x for tensor in kept)
        counts.append(len(kept))
        kept.clear()
        loss = y.pow(3).sum()
        (plain,) = torch.autograd.grad(loss, x, retain_graph=True)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append((y, plain, first, second))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert counts[0] == counts[1] > 0


def test_a_frozen_weight_is_kept_as_autograd_keeps_it():
    """Checkpoints free copies until the backward pass, changes in between are errors, a mode in
    the forward pass alone is none, and what was kept is gone afterwards."""
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode

    scheme, tensors = stored("vq-4")
    copies = []

    def forward(x):
        own = {key: tensor.clone() for key, tensor in tensors.items()}
        copies.append(weakref.ref(own["codes"]))
        return ops.linear(x, own, None, scheme)

    x = torch.randn(3, 256, requires_grad=True)
    with FlopCounterMode(display=False):
        y = checkpoint(forward, x, use_reentrant=False)
    assert copies[0]() is None
    y.sum().backward()
    assert copies[1]() is None
    y = ops.linear(x, tensors, None, scheme)
    tensors["scale"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = ops.linear(x, tensors, None, scheme).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def test_whoever_looks_on_sees_the_op():
    """Modes, and weights that train."""
    from torch.utils._python_dispatch import TorchDispatchMode

    scheme, tensors = stored("vq-4")
    x = torch.randn(3, 256, requires_grad=True)
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        ops.linear(x, tensors, None, scheme).sum().backward()
    assert {torch.ops.hf_vq.linear.default, torch.ops.hf_vq.input_gradient.default} <= set(seen)
    bias = torch.zeros(24, requires_grad=True)
    for trained in ({"bias": bias}, {"scale": tensors["scale"].float().requires_grad_()}):
        moved = {**tensors, **{k: v for k, v in trained.items() if k != "bias"}}
        y = ops.linear(x, moved, trained.get("bias"), scheme)
        assert type(y.grad_fn).__name__ != "OfFrozenWeightBackward"
        y.sum().backward()
        assert all(tensor.grad is not None for tensor in trained.values())


def test_autocast_does_not_reach_gradients_of_a_frozen_weight():
    scheme, tensors = stored("vq-4")
    grads = []
    for on in (False, True):
        x = torch.linspace(-1, 1, 200 * 256).reshape(200, 256).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            y = ops.linear(x, tensors, None, scheme)
            y.backward(torch.ones_like(y))
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("shape", [(256,), (0, 256)])
def test_gradients_of_one_row_and_of_none(shape):
    scheme, tensors = stored("vq-4")
    x, bias = torch.ones(shape, requires_grad=True), torch.zeros(24, requires_grad=True)
    ops.linear(x, tensors, bias, scheme).sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(bias.grad, torch.full((24,), float(x[..., 0].numel())))


def test_compiles_without_graph_breaks():
    scheme, tensors = stored("vq-4")

    def forward(x):
        return ops.linear(x, tensors, None, scheme) + 1

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 256)
    assert torch.equal(compiled(x), forward(x))


@pytest.mark.parametrize("name", ["u4", "u3", "u2", "k4v2"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_encode_is_unbiased_along_the_row(name, head_dim):
    """<decoded, x> = |x|^2, up to fp16 rounding of the scale: logits are not shrunk."""
    for scheme in (KV_SCHEMES[name].key, KV_SCHEMES[name].value):
        codebook = universal_tensor(scheme)
        x = torch.randn(6, 7, head_dim) * 20
        codes, scale = ops.encode_kv(x, codebook, scheme)
        y = ops.decode_kv(codes, scale, codebook, scheme, head_dim)
        assert codes.dtype == torch.uint8
        assert scale.shape == (6, 7, 1)
        along = (x * y).sum(-1) / x.square().sum(-1)
        assert (along - 1).abs().max() < 2**-10


@pytest.mark.parametrize(("name", "theory"), [("u4", 0.00774), ("u3", 0.02966), ("u2", 0.0973)])
def test_kv_error_is_that_of_the_codebook(name, theory):
    """tan^2 of the angle between row and code, theory / (1 - theory) for an unbiased scale. Long
    rows: knowing the norm exactly takes some 3 % off the error of 128 numbers."""
    scheme = KV_SCHEMES[name].key
    codebook = universal_tensor(scheme)
    x = torch.randn(128, 4096)
    y = ops.decode_kv(*ops.encode_kv(x, codebook, scheme), codebook, scheme, 4096)
    error = float((x - y).square().sum() / x.square().sum())
    assert error == pytest.approx(theory / (1 - theory), rel=0.01)


@pytest.mark.parametrize(("bits", "most"), [(1, 0.571), (2, 0.1315), (3, 0.0350), (4, 0.0093)])
def test_inner_products_of_scalar_codes(bits, most):
    """d E <y, x - decoded>^2 for unit rows x of d = 128 numbers and independent unit y, which is
    E |x - decoded|^2: below what TurboQuant's QJL stage has with a bit more (1.57, .56, .18, .047;
    arXiv 2504.19874, theorem 2), and without its bias."""
    scheme = VQScheme(1, bits, scale_group=0, rotation="hadamard", rotation_block=0)
    x, codebook = torch.nn.functional.normalize(torch.randn(40_000, 128)), universal_tensor(scheme)
    y = ops.decode_kv(*ops.encode_kv(x, codebook, scheme), codebook, scheme, 128)
    assert float((y - x).square().sum(-1).mean()) <= most
    assert (((y - x) * x).sum(-1)).abs().max() < 2**-10  # no bias, up to the fp16 scale


def test_encode_hard_rows():
    scheme = KV_SCHEMES["u4"].key
    codebook = universal_tensor(scheme)
    rows = torch.stack([torch.zeros(64), torch.full((64,), 1e-6), torch.eye(64)[3] * 1e4])
    y = ops.decode_kv(*ops.encode_kv(rows, codebook, scheme), codebook, scheme, 64)
    assert y.isfinite().all()
    assert torch.equal(y[0], rows[0])
    assert (y[2] - rows[2]).norm() < 0.2 * rows[2].norm()
    lost = torch.stack([torch.full((64,), float("nan")), torch.full((64,), 1e6)])
    y = ops.decode_kv(*ops.encode_kv(lost, codebook, scheme), codebook, scheme, 64)
    assert y[0].isnan().all()  # loud, not wrong
    assert y[1].isfinite().all()  # its scale is the largest that there is


def test_codes_depend_on_the_row_only():
    scheme = KV_SCHEMES["u4"].key
    codebook = universal_tensor(scheme)
    x = torch.randn(50, 64)
    codes, scale = ops.encode_kv(x, codebook, scheme)
    for i in (0, 17, 49):
        one, one_scale = ops.encode_kv(x[i : i + 1], codebook, scheme)
        assert torch.equal(one[0], codes[i])
        assert torch.equal(one_scale[0], scale[i])


def test_rotate_op_is_the_transform():
    scheme, tensors = stored("vq-4")
    x = torch.randn(3, 256)
    assert torch.equal(ops.rotate(x, tensors["signs"], scheme), rotate(x, scheme, tensors["signs"]))
    unrotated = weight_scheme("aqlm-2")
    same = ops.rotate(x, None, unrotated)
    assert torch.equal(same, x)
    assert same.data_ptr() != x.data_ptr()


def test_what_inference_mode_keeps_serves_gradients():
    """Tables made under inference_mode must not be inference tensors."""
    rotated = VQScheme(2, 8, rotation="hadamard", rotation_block=32, scale_group=32)
    plain = VQScheme(2, 7, scale_group=0, rotation="none")
    with torch.inference_mode():
        ops.rotate(torch.randn(2, 32), None, rotated)
        ops.encode_kv(torch.randn(2, 48), torch.randn(1, 128, 2).half(), plain)
    x = torch.randn(2, 32, requires_grad=True)
    rotate(x, rotated).sum().backward()
    assert x.grad is not None
