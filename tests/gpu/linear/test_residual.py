"""Two passes on a GPU: the kernel that looks up both nested codes, passes one by one, and second
passes that are copied while layers run."""

import itertools
import random

import pytest
import torch
from torch import nn

from benchmarks.random_llama import llama_config, random_llama
from hf_vq import dispatch, ops
from hf_vq.backends.cuda.linear import dequantize as cuda_linear
from hf_vq.backends.cuda.linear import fused
from hf_vq.backends.cuda.linear.dequantize import DTYPES
from hf_vq.codegen.families.dequantize_rotated import restorable
from hf_vq.codegen.families.linear import LinearProblem, best
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.errors import VQBackendError, VQFormatError
from hf_vq.formats import weight_scheme
from hf_vq.formats.stored_weight import StoredWeight, rotation_of
from hf_vq.nn import residual_offload
from hf_vq.nn.replace import vq_modules
from hf_vq.ops.library import linear_problem
from hf_vq.ops.reference import codes as reference
from tests.fixtures.cuda_layers import poison, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NESTED = [f"turboquant-{sizes}" for sizes in ("4+4", "4+2", "3+1", "1+4", "2+2", "3+3")]
ODD = [
    ("vq1x4r2-universal-g0-random_hadamard128-nested", 7, 640),
    ("vq1x4+2r2-universal-g64-hadamard64-nested", 33, 1088),
    ("vq1x4r2-universal-g256-random_hadamard32-nested", 300, 768),
    ("vq1x2+4r2-universal-g128-none-nested", 5, 1152),
    ("vq1x4+2r2-universal-g128-scaled_hadamard128-nested", 130, 1152),
    ("vq1x4r2-universal-g128-scaled_hadamard128-nested", 300, 1024),
    ("vq1x4+1r2-universal-g0-random_hadamard0-nested", 130, 1024),
]
CASES = [(weight_scheme(name).spec(), 130, 1152) for name in NESTED] + ODD


def double_weight(tensors, scheme, columns):
    """The weight of nested stages, still rotated, in float64."""
    ones = torch.ones_like(tensors["scale"])
    given = (tensors["codes"], tensors["codes_2"], tensors["codebook_2"], ones)
    rows = reference.decode_nested(*given, scheme, columns).double()
    grouped = rows.unflatten(-1, (ones.shape[-1], -1))
    return (grouped * tensors["scale"].double()[..., None]).flatten(-2)


def check(y, x, tensors, bias, scheme):
    """The error is at most twice that of the same product of rounded numbers in PyTorch."""
    columns, dtype, rotation = x.shape[-1], x.dtype, rotation_of(tensors)
    weight = double_weight(tensors, scheme, columns)
    exact = reference.rotate(x.double(), rotation, scheme, False) @ weight.T
    exact += 0 if bias is None else bias.double()
    rounded = reference.rotate(x.float(), rotation, scheme, False).to(dtype)
    same = nn.functional.linear(rounded, weight.to(dtype), bias)
    eps = torch.finfo(dtype).eps * exact.norm()
    assert (y.double() - exact).norm() <= 2 * (same.double() - exact).norm() + eps
    assert (y.double() - exact).abs().max() <= 4 * (same.double() - exact).abs().max() + eps


def runs(x, scheme, rows):
    return dispatch.select(linear_problem("linear", x, scheme.spec(), rows)).name


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        (1, torch.float16),
        *((tokens, torch.bfloat16) for tokens in (1, 5, 64, 90)),
    ],
)
@pytest.mark.parametrize(("spec", "rows", "columns"), CASES)
def test_nested_passes(spec, rows, columns, tokens, dtype):
    scheme, tensors = stored(spec, rows, columns)
    x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
    bias = torch.randn(rows, device="cuda", dtype=dtype)
    others = ("two_passes.linear", "triton.linear")  # the second where Triton is installed
    decoded = others if restorable(scheme, columns, DTYPES[dtype]) else ("cuda.linear",)
    assert runs(x, scheme, rows) in (("cuda.fused_linear",) if tokens <= 64 else decoded)
    poison()
    check(ops.linear(x, tensors, bias, scheme), x, tensors, bias, scheme)


def test_nested_rows_that_are_decoded_in_parts(monkeypatch):
    """Parts begin at other codes of both passes."""
    monkeypatch.setattr(cuda_linear, "DECODED_BYTES", 256 * 2 * 1152)
    for name in NESTED:
        scheme, tensors = stored(weight_scheme(name).spec(), 1130, 1152)
        x = torch.randn(70, 1152, device="cuda", dtype=torch.float16)
        assert runs(x, scheme, 1130) == "cuda.linear"
        poison()
        check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


@pytest.mark.filterwarnings("ignore:.* spills .* bytes per thread")  # nobody chose them
@pytest.mark.parametrize("name", ["turboquant-4+4", "turboquant-4+2", "turboquant-3+1"])
@pytest.mark.parametrize(("tokens", "rows"), list(itertools.product((1, 8, 32), (49, 2240))))
def test_every_kind_of_plan(name, tokens, rows):
    columns = 1152
    scheme, tensors = stored(weight_scheme(name).spec(), rows, columns)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    plans = best(LinearProblem(scheme, tokens, rows, columns, Dtype.BFLOAT16, device_arch(0)))
    for plan in random.Random(0).sample(plans, min(3, len(plans))):
        launch = fused.prepare(plan, scheme, (rows,), columns, x.dtype, 0)
        y = torch.full((tokens + 1, rows), float("nan"), device="cuda", dtype=torch.bfloat16)
        poison()
        weight = StoredWeight.of(tensors, scheme, columns)
        fused.run(x, (weight,), (None,), (y[:tokens],), 0, launch)
        check(y[:tokens], x, tensors, None, scheme)
        assert y[tokens:].isnan().all()


@pytest.mark.parametrize(
    ("rows", "columns"), [(4096, 4096), (14336, 4096), (4096, 14336), (11008, 4096)]
)
def test_measured_plans(rows, columns):
    """They may need more registers than the model of plans leaves them."""
    for name, tokens in itertools.product(("turboquant-4+4", "turboquant-4+2"), (1, 16)):
        scheme, tensors = stored(weight_scheme(name).spec(), rows, columns)
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        poison()
        check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80])
def test_extreme_codes(byte):
    scheme, tensors = stored(weight_scheme("turboquant-4+4").spec(), 130, 1152)
    tensors["codes"].fill_(byte)
    tensors["codes_2"].fill_(255 - byte)
    for tokens in (1, 7):
        x = torch.randn(tokens, 1152, device="cuda", dtype=torch.float16)
        check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


def test_second_codes_that_lie_elsewhere_at_every_call():
    """A kernel begins before the one before it has ended, and must not read other codes."""
    scheme, tensors = stored(weight_scheme("turboquant-4+4").spec(), 4096, 4096)
    others = [torch.randint_like(tensors["codes_2"], 256) for _ in range(4)]
    x = torch.randn(1, 4096, device="cuda", dtype=torch.float16)
    exact = [ops.linear(x, {**tensors, "codes_2": one}, None, scheme) for one in others]
    same = torch.empty_like(others[0])
    for turn in range(40):
        same.copy_(others[turn % 4])
        for one in (same, others[turn % 4], same):
            y = ops.linear(x, {**tensors, "codes_2": one}, None, scheme)
            assert torch.equal(y, exact[turn % 4])


def test_second_codes_that_do_not_fit():
    scheme, tensors = stored(weight_scheme("turboquant-4+4").spec(), 64, 256)
    x = torch.randn(1, 256, device="cuda", dtype=torch.float16)
    for wrong in (tensors["codes_2"].cpu(), tensors["codes_2"][:, :-1]):
        with pytest.raises(VQFormatError, match=r"codes .* of a second pass on cuda:0"):
            ops.linear(x, {**tensors, "codes_2": wrong}, None, scheme)


@pytest.mark.parametrize("tokens", [1, 7, 200])
@pytest.mark.parametrize("stages", ["shared", "rerotated"])
def test_passes_that_add_up(stages, tokens):
    scheme, tensors = stored(f"vq1x4+2r2-universal-g128-random_hadamard128-{stages}", 130, 1152)
    x = torch.randn(tokens, 1152, device="cuda", dtype=torch.float16)
    assert runs(x, scheme, 130) == "two_passes.linear"
    y = ops.linear(x, tensors, None, scheme)
    exact = x.double() @ reference.decode(StoredWeight.of(tensors, scheme, 1152)).double().T
    # Each pass rounds x, its weight and its sums.
    assert (y - exact).norm() <= 8 * torch.finfo(torch.float16).eps * exact.norm()


def two_passes(layers=3):
    config = llama_config(4, 512, layers=layers)
    model = random_llama(config, torch.bfloat16, "turboquant-4+4", "cuda").eval()
    for module in vq_modules(model).values():
        module.vq_codes_2.random_(0, 256)  # no two layers alike
    return model


def place(model, policy):
    modules = list(vq_modules(model).values())
    residual_offload.place(modules, [policy] * len(modules))


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 32000, (1, count), generator=generator).cuda()


@torch.no_grad()
def test_offloaded_is_resident():
    model = two_passes()
    asked = [tokens(count, seed) for seed, count in enumerate((1, 7, 1, 200, 33, 1))]
    resident = [model(one).logits for one in asked]
    before = torch.cuda.memory_allocated()
    place(model, "offload")
    modules = vq_modules(model).values()
    seconds = [module.vq_codes_2.nbytes for module in modules]
    assert before - torch.cuda.memory_allocated() >= sum(seconds)
    for _ in range(2):
        for one, expected in zip(asked, resident, strict=True):
            assert torch.equal(model(one).logits, expected)
    pool = residual_offload.pool_of(torch.device("cuda", 0))
    assert pool.nbytes == 2 * max(seconds)
    assert all(module.vq_codes_2.is_pinned() for module in modules)
    assert pool.misses <= 1 + len(seconds)
    place(model, "resident")
    assert torch.equal(model(asked[0]).logits, resident[0])
    place(model, "prefill_only")
    assert torch.equal(model(asked[3]).logits, resident[3])
    assert not torch.equal(model(asked[0]).logits, resident[0])


@torch.no_grad()
def test_layers_in_any_order_on_any_stream():
    """Random layers, on two streams, some on another thread's turn: each as it is resident."""
    model = two_passes()
    layers = list(vq_modules(model).values())
    given = [
        torch.randn((1, 3, 40)[i % 3], layer.in_features, device="cuda").bfloat16()
        for i, layer in enumerate(layers)
    ]
    expected = [layer(x) for layer, x in zip(layers, given, strict=True)]
    place(model, "offload")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    choose, found = random.Random(0), []
    for _ in range(300):
        i = choose.randrange(len(layers))
        with torch.cuda.stream(choose.choice(streams)):
            if choose.random() < 0.1:
                torch.cuda._sleep(200_000)  # the copy for another layer must wait for this one
            found.append((i, layers[i](given[i])))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[i]) for i, y in found)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@torch.no_grad()
def test_graphs_refuse_offloaded_layers():
    model = two_passes(1)
    place(model, "offload")
    layer, x = model.model.layers[0].mlp.up_proj, torch.randn(1, 2048, device="cuda").bfloat16()
    layer(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.clone()  # an empty graph is a warning
        with pytest.raises(VQBackendError, match="CUDA graph"):
            layer(x)
    place(model, "resident")
    layer(x)


@torch.no_grad()
def test_second_passes_stay_behind_when_a_model_moves():
    model = two_passes(1)
    expected = model(tokens(5)).logits
    place(model, "offload")
    model.cpu().cuda()
    assert {m.vq_codes_2.device.type for m in vq_modules(model).values()} == {"cpu"}
    assert {m.weight.device.type for m in vq_modules(model).values()} == {"cuda"}
    assert torch.equal(model(tokens(5)).logits, expected)


@torch.no_grad()
def test_loading_waits_for_copies():
    """What is loaded after a call is not what the call computes with."""
    model = two_passes(1)
    place(model, "offload")
    layer, x = model.model.layers[0].mlp.up_proj, torch.randn(1, 2048, device="cuda").bfloat16()
    expected = layer(x)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["vq_codes_2"] = torch.zeros_like(state["vq_codes_2"])
    for other in vq_modules(model).values():
        other(torch.randn(1, other.in_features, device="cuda").bfloat16())  # over its place
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the copy waits for it
    for other in list(vq_modules(model).values())[:-1]:
        if other is not layer:
            other(torch.randn(1, other.in_features, device="cuda").bfloat16())
    y = layer(x)
    layer.load_state_dict(state)
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
    assert not torch.equal(layer(x), expected)


@torch.no_grad()
def test_offloaded_layers_are_decoded():
    """For `dequantize` and `merge_passes`."""
    model = two_passes(1)
    layer = model.model.layers[0].mlp.down_proj
    expected = layer.decoded()
    place(model, "offload")
    assert torch.equal(layer.decoded(), expected)
    assert layer.restored(torch.bfloat16).weight.is_cuda
