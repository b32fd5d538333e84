"""`hf_vq::cpu_linear`: the entry `cpu.linear` without Python, and when it is not taken."""

import ctypes
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from hf_vq import dispatch, ops
from hf_vq.backends.cpu import boxed_ops, library
from hf_vq.backends.cpu import linear as cpu_linear
from hf_vq.backends.cpu.matrices import numbers_of
from hf_vq.errors import VQBackendError
from hf_vq.fit import fixed_tensors
from hf_vq.formats import weight_scheme
from hf_vq.formats.stored_weight import StoredWeight, flat, rotation_of
from hf_vq.formats.tensors import tensor_specs
from hf_vq.nn import VQLinear
from hf_vq.ops.library import is_plain_eager, linear_problem
from hf_vq.ops.reference import codes as reference
from tests.fixtures import ROOT

PACKAGE = Path(ops.__file__).parents[1]

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

SCHEMES = [
    "vq-4", "vq-3", "vq-2", "turboquant-4", "quip-sharp-2", "aqlm-2", "gptvq-2", "vq-4-scaled",
    "vq-2-scaled", "quip-sharp-2-scaled",
]  # fmt: skip
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def stored(name="vq-4", out_features=24, in_features=256):
    """A scheme and tensors with random codes."""
    scheme = weight_scheme(name)
    tensors = fixed_tensors(scheme, in_features, 0)
    for key, spec in tensor_specs(scheme, out_features, in_features).items():
        if key not in tensors:
            drawn = torch.rand(spec.shape) + 0.1
            whole = torch.randint(0, 256, spec.shape, dtype=torch.uint8)
            tensors[key] = whole if spec.dtype == torch.uint8 else drawn.to(spec.dtype)
    return scheme, tensors


def by_row(x, tensors, bias, scheme):
    """y as the Python of `cpu.linear` gives it."""
    return cpu_linear.linear(x, StoredWeight.of(tensors, scheme, x.shape[-1]), bias)


def directly(x, tensors, bias, scheme):
    """y without Python; None where there is no such way or it does not take these tensors."""
    run = dispatch.bind(linear_problem("linear", x, scheme.spec(), tensors["codes"].shape[0]))
    four = (tensors["codes"], tensors["codebook"], tensors["scale"], rotation_of(tensors))
    return None if run is None else run(x, *four, bias)


@pytest.fixture
def taken(monkeypatch):
    """Counts the calls of the op that gave a result."""
    op, calls = boxed_ops.cpu_linear(), []

    def count(*arguments):
        y = op(*arguments)
        calls.append(y is not None)
        return y

    monkeypatch.setattr(boxed_ops, "cpu_linear", lambda: count)
    dispatch.invalidate()
    yield lambda: sum(calls)
    dispatch.invalidate()


def test_registered_where_torch_can():
    shim = library.torch_shim()
    if shim is None or not hasattr(shim, "aoti_torch_library_impl"):
        pytest.skip("this torch has no C shim for ops")
    assert boxed_ops.cpu_linear() is torch.ops.hf_vq.cpu_linear.default
    assert torch._C._dispatch_has_kernel_for_dispatch_key("hf_vq::cpu_linear", "CPU")
    declared = (ROOT / "kernels" / "cpu" / "api.h").read_text("utf-8")
    declared = declared.partition("typedef struct hf_vq_torch")[2].partition("} hf_vq_torch")[0]
    order = [declared.index(f"(*{name})") for name in boxed_ops._FUNCTIONS]
    assert order == sorted(order) and declared.count("(*") == len(order)


def test_without_the_shim_the_row_runs(monkeypatch):
    class Older:
        aoti_torch_library_impl = None

    for shim in (None, Older()):
        monkeypatch.setattr(library, "torch_shim", lambda shim=shim: shim)
        assert boxed_ops._register.__wrapped__("linear", "() -> ()") is None
    monkeypatch.setattr(boxed_ops, "cpu_linear", lambda: None)
    dispatch.invalidate()
    scheme, tensors = stored()
    x = torch.randn(1, 256)
    assert directly(x, tensors, None, scheme) is None
    assert torch.equal(ops.linear(x, tensors, None, scheme), by_row(x, tensors, None, scheme))
    dispatch.invalidate()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 256), (16, 256)], ids=str)
def test_it_gives_what_the_row_gives(name, dtype, shape):
    scheme, tensors = stored(name)
    x = torch.randn(shape).to(dtype)
    for bias in (None, *(torch.randn(24).to(kind) for kind in FLOATS)):
        y, row = directly(x, tensors, bias, scheme), by_row(x, tensors, bias, scheme)
        assert torch.equal(y, row)
        assert (y.dtype, y.device, y.stride()) == (row.dtype, row.device, row.stride())
        assert not y._is_view() and not y.requires_grad


def test_ops_linear_and_the_layer_take_it(taken):
    scheme, tensors = stored()
    x, bias = torch.randn(1, 256), torch.randn(24)
    y = ops.linear(x, tensors, bias, scheme)
    assert taken() == 1
    public = torch.ops.hf_vq.linear(x, *flat(tensors), bias, scheme.spec())
    assert torch.equal(public, y)
    assert taken() == 2
    layer = VQLinear(256, 24, True, scheme)
    for key, tensor in tensors.items():
        getattr(layer, layer.attributes[key]).data = tensor.clone()
    layer.bias.data = bias
    with torch.no_grad():
        assert torch.equal(layer(x), y)
        del layer._parameters["vq_scale"]  # as tools do that shard or parametrize
        layer.__dict__["vq_scale"] = 2 * tensors["scale"]
        torch.testing.assert_close(layer(x), 2 * (y - bias) + bias)
    assert taken() == 4


@pytest.mark.parametrize(("tokens", "most"), [(1, 8), (500, 14)])
def test_a_layer_finds_its_kernel_once(tokens, most):
    """Python calls inside the package: what a token pays before and after the kernel."""
    scheme, tensors = stored()
    layer = VQLinear(256, 24, False, scheme)
    for key, tensor in tensors.items():
        getattr(layer, layer.attributes[key]).data = tensor.clone()
    x, called = torch.randn(tokens, 256), []

    def count(frame, event, argument):
        if event == "call" and str(PACKAGE) in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    with torch.no_grad():
        layer(x)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            layer(x)
        finally:
            sys.setprofile(before)
    assert called[0] == "forward" and len(called) <= most, called


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        *(("vq-4", moved) for moved in ("vq_signs", "vq_scale", "vq_codebook", "bias")),
        ("vq-4-scaled", "vq_diagonal"),
    ],
)
def test_the_layer_finds_tensors_wherever_they_are(name, moved):
    scheme, tensors = stored(name)
    layer = VQLinear(256, 24, True, scheme)
    for key, tensor in tensors.items():
        getattr(layer, layer.attributes[key]).data = tensor.clone()
    layer.bias.data = torch.randn(24)
    x = torch.randn(1, 256)
    with torch.no_grad():
        y = layer(x)
        held = layer._parameters if moved in layer._parameters else layer._buffers
        layer.__dict__[moved] = held.pop(moved)
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, t: (x.repeat(2, 2)[:, ::2].contiguous().T.contiguous().T, t),
        lambda x, t: (x, {**t, "codes": torch.stack([t["codes"]] * 2, -1)[..., 0]}),
        lambda x, t: (x, {**t, "scale": torch.stack([t["scale"]] * 2, -1)[..., 0]}),
        lambda x, t: (x, {**t, "scale": t["scale"].float()}),
        lambda x, t: (x, {**t, "codebook": t["codebook"].double()}),
        lambda x, t: (x.repeat(17, 1), t),
        lambda x, t: (x[:0], t),
        lambda x, t: (x.double(), t),
        lambda x, t: (x[(None,) * 7], t),
    ],
    ids=["x", "codes", "scale", "wide scale", "wide codebook", "many", "none", "float64", "9-d"],
)
def test_what_it_does_not_take_goes_to_the_table(change):
    scheme, tensors = stored()
    x, tensors = change(torch.randn(1, 256), tensors)
    assert directly(x, tensors, None, scheme) is None
    y = ops.linear(x, tensors, None, scheme)
    assert y.shape == (*x.shape[:-1], 24) and y.dtype == x.dtype
    by = reference.linear if x.dtype == torch.float64 else cpu_linear.linear
    assert torch.equal(y, by(x, StoredWeight.of(tensors, scheme, x.shape[-1]), None))


@pytest.mark.parametrize("name", ["vq4x5r1-tensor-g0-none", "turboquant-4+4"])
def test_codes_without_a_shorter_way(name):
    scheme, tensors = stored(name)
    x = torch.randn(1, 256)
    assert dispatch.bind(linear_problem("linear", x, scheme.spec(), 24)) is None
    assert ops.linear(x, tensors, None, scheme).isfinite().all()


@pytest.mark.parametrize("name", ["vq-4", "vq-4-scaled"])
def test_the_op_is_given_something_else(name):
    """Whatever it gets it gives y or None: the kernel itself refuses what it does not know."""
    op, (scheme, tensors) = boxed_ops.cpu_linear(), stored(name)
    x, none = torch.randn(1, 256), torch.empty(0)
    four = [tensors["codes"], tensors["codebook"], tensors["scale"], rotation_of(tensors)]
    numbers = torch.tensor(numbers_of(scheme, 256), dtype=torch.int32)
    assert torch.equal(op(x, *four, none, numbers), by_row(x, tensors, None, scheme))
    unknown = numbers.clone()
    unknown[1] = 5
    for wrong in (unknown, numbers.long(), numbers[:7], none):
        assert op(x, *four, none, wrong) is None
    assert op(none, none, none, none, none, none, none) is None
    assert op(torch.tensor(1.0), *four, none, numbers) is None
    assert op(torch.randn(1, 512), *four, none, numbers) is None
    assert op(x, *four, torch.zeros(23), numbers) is None
    assert op(x, *four[:3], torch.ones(256), none, numbers) is None
    for i, part in enumerate(four):
        shorter = [*four[:i], part[..., :-1].contiguous(), *four[i + 1 :]]
        assert op(x, *shorter, none, numbers) is None


def test_a_bias_of_another_size():
    scheme, tensors = stored()
    x = torch.randn(2, 256)
    one = ops.linear(x, tensors, torch.ones(1), scheme)
    assert torch.equal(one, ops.linear(x, tensors, torch.ones(24), scheme))
    with pytest.raises(RuntimeError, match="expand"):
        ops.linear(x, tensors, torch.ones(23), scheme)


def test_the_environment_and_new_rows_are_seen(monkeypatch):
    scheme, tensors = stored()
    x = torch.randn(1, 256)
    fast = ops.linear(x, tensors, None, scheme)
    slow = reference.linear(x, StoredWeight.of(tensors, scheme, x.shape[-1]), None)
    assert not torch.equal(fast, slow)
    for backend, wanted in (("reference", slow), ("cpu.linear", fast), ("reference", slow)):
        monkeypatch.setenv("HF_VQ_BACKEND", backend)
        assert torch.equal(ops.linear(x, tensors, None, scheme), wanted)
    monkeypatch.setenv("HF_VQ_BACKEND", "cuda")
    with pytest.raises(VQBackendError, match="Unset HF_VQ_BACKEND=cuda"):
        ops.linear(x, tensors, None, scheme)
    monkeypatch.delenv("HF_VQ_BACKEND")
    ours = torch.randn(1, 24)
    entry = dispatch.Entry("ours", "linear", dispatch.Implementation(lambda *given: ours.clone()))
    with dispatch.preferred(entry):
        assert torch.equal(ops.linear(x, tensors, None, scheme), ours)
    assert torch.equal(ops.linear(x, tensors, None, scheme), fast)


def test_an_error_of_the_kernel_is_that_of_the_row(monkeypatch):
    """What the op refuses the row runs again, and the row raises."""
    scheme, tensors = stored()

    def no_memory(*arguments):
        return library.NO_MEMORY

    monkeypatch.setattr(boxed_ops, "cpu_linear", lambda: lambda *arguments: None)
    monkeypatch.setattr(library.load(), "hf_vq_linear", no_memory)
    dispatch.invalidate()
    with pytest.raises(MemoryError, match="linear"):
        ops.linear(torch.randn(1, 256), tensors, None, scheme)
    dispatch.invalidate()


def test_gradients_pass_through_the_differentiable_op(taken):
    scheme, tensors = stored()
    weight = ops.decode_weight(tensors, scheme, 256)
    x, bias = torch.randn(2, 256, requires_grad=True), torch.randn(24, requires_grad=True)
    for inputs in ((x, bias), (x.detach(), bias), (x, bias.detach())):
        y = ops.linear(inputs[0], tensors, inputs[1], scheme)
        assert y.requires_grad
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        for tensor, grad in zip(wanted, torch.autograd.grad(y.sum(), wanted), strict=True):
            exact = weight.sum(0).expand(2, -1) if tensor is x else torch.full((24,), 2.0)
            torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-4)
    before = taken()
    with torch.no_grad():
        assert not ops.linear(x, tensors, bias, scheme).requires_grad
    assert taken() == before + 1
    with torch.inference_mode():
        assert ops.linear(x, tensors, bias, scheme).is_inference()
    assert taken() == before + 2


def test_what_inference_mode_keeps_serves_every_mode(taken):
    scheme, tensors = stored()
    x = torch.randn(1, 256)
    with torch.inference_mode():
        y = ops.linear(x, tensors, None, scheme)
    with torch.no_grad():
        assert torch.equal(ops.linear(x, tensors, None, scheme), y)
    assert torch.equal(ops.linear(x, tensors, None, scheme), y)
    assert taken() == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_compilers_and_transforms_see_the_public_op():
    scheme, tensors = stored()
    x, bias = torch.randn(3, 256), torch.randn(24)

    def forward(x):
        return ops.linear(x, tensors, bias, scheme)

    y = forward(x)
    with torch.no_grad():
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), y)
        code = make_fx(forward)(x).code
        assert "hf_vq.linear.default" in code and "cpu_linear" not in code
        graph = str(torch.jit.trace(forward, (x,)).graph)
        assert "hf_vq::linear" in graph and "cpu_linear" not in graph
        for dim in (0, 1):
            mapped = torch.vmap(forward, in_dims=dim)(x if dim == 0 else x.T.contiguous())
            assert torch.equal(mapped, y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(forward(x), y)
        subclass = type("Tagged", (torch.Tensor,), {})
        assert type(forward(x.as_subclass(subclass))) is subclass
    torch._dynamo.reset()


def test_calls_from_several_threads_give_the_same():
    scheme, tensors = stored("gptvq-2", 300, 1024)
    inputs = [torch.randn(2, 1024) for _ in range(32)]
    alone = [by_row(x, tensors, None, scheme) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            results = pool.map(lambda x: ops.linear(x, tensors, None, scheme), inputs)
            assert all(map(torch.equal, results, alone))


def watched(tensor, dead):
    """A copy; its name comes into `dead` when nothing holds its memory any more."""
    size = tensor.numel() * tensor.element_size()
    array = (ctypes.c_uint8 * size)()
    weakref.finalize(array, dead.append, size)
    copy = torch.frombuffer(array, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


@pytest.mark.parametrize("takes", [True, False])
def test_inputs_are_given_back(takes):
    scheme, tensors = stored()
    dead = []
    tensors = {key: watched(tensor, dead) for key, tensor in tensors.items()}
    x, bias = watched(torch.randn(2, 256), dead), watched(torch.randn(24), dead)
    used = x if takes else x.T.contiguous().T
    for _ in range(3):
        assert (directly(used, tensors, bias, scheme) is not None) == takes
    assert dead == []
    count = len(tensors) + 2
    del x, bias, tensors, used
    gc.collect()
    assert len(dead) == count


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_ten_thousand_calls_leak_nothing():
    scheme, tensors = stored("vq-4", 1024, 128)
    inputs = torch.randn(8, 128), torch.randn(8, 256)[:, ::2]

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def call(count):
        for _ in range(count):
            for x in inputs:
                directly(x, tensors, None, scheme)

    def growth():
        before = resident()
        call(5000)
        return resident() - before

    call(100)
    # Pages that were taken away come back while a large process runs; what leaks does so each time.
    assert min(growth() for _ in range(4)) < 8 * 5000  # the smallest handle, lost at every second


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, of make_dual
def test_forward_mode_goes_through_torch():
    """Tangents are not lost without a word."""
    x = torch.randn(2, 3)
    assert is_plain_eager(x)
    with forward_ad.dual_level():
        assert not is_plain_eager(forward_ad.make_dual(x, x))
    assert is_plain_eager(x)
