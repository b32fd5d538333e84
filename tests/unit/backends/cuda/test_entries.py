"""The CUDA entries of the dispatch table, as far as they can be asked without a GPU."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from hf_vq import dispatch
from hf_vq.backends.cpu import boxed_ops
from hf_vq.backends.cuda import devices, weight_supports
from hf_vq.backends.cuda.bound_weight import bound_weight
from hf_vq.backends.cuda.linear import bound as cuda_bound_linear
from hf_vq.backends.cuda.linear import dequantize as cuda_linear
from hf_vq.backends.cuda.linear import fused as cuda_fused
from hf_vq.codegen.jit import compiler, device
from hf_vq.errors import VQFormatError
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme
from hf_vq.formats.stored_weight import Pass, StoredWeight, rotation_of
from tests.fixtures.random_weights import random_tensors

ADDED = "vq1x4r2-universal-g128-random_hadamard128"


@pytest.fixture(autouse=True)
def ask_anew():
    devices.available.cache_clear()
    yield
    devices.available.cache_clear()


@pytest.mark.parametrize("op", ["linear", "decode"])
def test_they_come_first(op):
    of_linear = ["cuda.tile_linear", "cuda.int8_linear", "cuda.wide_linear", "cuda.fused_linear",
                 "cuda.linear"]  # fmt: skip
    names = of_linear if op == "linear" else ["cuda.decode_integers", "cuda.decode"]
    found = [entry.name for entry in dispatch.entries(op) if entry.devices != ("cpu",)]
    assert found[: len(names)] == names


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_they_say_so():
    problem = dispatch.LinearProblem("cuda", "float16", WEIGHT_SCHEMES["vq-4"].spec(), 1, 64, 256)
    reasons = {verdict.entry.name: verdict.reason for verdict in dispatch.explain(problem)}
    assert reasons["cuda.linear"] == "no CUDA device"


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU, as far as `available` looks."""

    def make(capability, targets=(80, 90), reason=""):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda ordinal: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda ordinal: "GPU")
        monkeypatch.setattr(compiler, "why_not", lambda: reason)
        monkeypatch.setattr(compiler, "version", lambda: (12, 8))
        monkeypatch.setattr(compiler, "known_targets", lambda: frozenset(targets))
        return devices.available()

    return make


def test_what_a_machine_needs(gpu):
    assert gpu((9, 0)) is None


def test_an_old_gpu(gpu):
    assert gpu((7, 5)) == "GPU has compute capability 7.5, less than 8.0"


def test_an_old_compiler(gpu):
    assert gpu((12, 1)) == "NVRTC 12.8 does not compile for GPU: install a newer one"


def test_no_compiler(gpu):
    assert gpu((9, 0), reason="NVRTC is missing") == "NVRTC is missing"


@pytest.mark.parametrize(
    ("scheme", "dtype", "reason"),
    [
        (WEIGHT_SCHEMES["vq-4"], "float16", None),
        (WEIGHT_SCHEMES["vq-4"], "float64", "inputs are float64"),
        (VQScheme.parse(f"{ADDED}-shared"), "float16", "shared stages have a second pass"),
        (VQScheme(2, 8, rotation="qr"), "float16", "a QR rotation is a matrix product"),
        (
            VQScheme(2, 8, rotation_block=0),
            "float16",
            "a rotation block has 2048 weights, more than 1024",
        ),
    ],
)
def test_what_they_support(scheme, dtype, reason):
    linear = dispatch.LinearProblem("cuda", dtype, scheme.spec(), 1, 64, 2048)
    assert weight_supports.linear(linear) == reason
    if dtype == "float16":
        assert weight_supports.decode(rows_of(scheme.spec())) == reason


def rows_of(spec):
    return dispatch.DecodeProblem("cuda", spec, 64, 2048)


def test_nested_passes_are_decoded_for_16_bit_inputs():
    """For products of many tokens; nothing else is done with their rows here."""
    spec = WEIGHT_SCHEMES["turboquant-4+4"].spec()
    linear = dispatch.LinearProblem("cuda", "bfloat16", spec, 4096, 64, 2048)
    assert weight_supports.linear(linear) is None
    assert "float32" in weight_supports.linear(linear._replace(dtype="float32"))
    assert "second pass" in weight_supports.decode(rows_of(spec))
    small = VQScheme.parse("vq1x4r2-universal-g64-random_hadamard64-nested").spec()
    assert "one scale" in weight_supports.linear(linear._replace(dtype="float16", scheme=small))


@pytest.mark.parametrize("name", [n for n, s in WEIGHT_SCHEMES.items() if not s.two_passes])
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (77, 256), (300, 1152)])
def test_sizes_are_checked(name, rows, columns):
    scheme = WEIGHT_SCHEMES[name]
    tensors = random_tensors(scheme, rows, columns)
    parts = [tensors[key] for key in ("codes", "codebook", "scale")]
    stored = cuda_linear.DeviceWeight(*parts, scheme, columns)
    assert stored.codes.numel() % 4 == 0
    assert torch.equal(stored.codes.flatten()[: parts[0].numel()], parts[0].flatten())
    at_a_time = stored.rows_at_a_time(torch.float16)
    assert at_a_time % (256 if scheme.codebook == "tile" else cuda_linear.LARGEST_PANEL) == 0
    for i in range(3):
        cut = [part.flatten()[:-1] if i == j else part for j, part in enumerate(parts)]
        cut[0] = cut[0].reshape(rows, -1) if i else parts[0][:, :-1]
        with pytest.raises(VQFormatError, match=f"{rows} rows of {columns} weights"):
            cuda_linear.DeviceWeight(*cut, scheme, columns)


def test_a_tensor_made_ready():
    half = torch.randn(4, 33).half()
    assert cuda_linear._ready(half, torch.float16) is half
    moved = torch.empty(133, dtype=torch.float16)[1:].view(4, 33).copy_(half)
    for tensor in (moved, half.T.contiguous().T, half.float()):
        ready = cuda_linear._ready(tensor, torch.float16)
        assert torch.equal(ready, half) and ready.is_contiguous()
        assert ready.data_ptr() % 16 == 0


def test_targets_of_devices():
    assert [device.target(*c) for c in ((8, 0), (9, 0), (10, 0), (12, 1))] == [
        "sm_80", "sm_90a", "sm_100", "sm_121",
    ]  # fmt: skip


def layer_of(x, weight):
    return cuda_fused._layer(x, weight, cuda_fused.read(weight))[0]


def test_layers_are_remembered_as_long_as_their_codes_live():
    scheme = WEIGHT_SCHEMES["vq-4"]
    tensors = random_tensors(scheme, 64, 256)
    x = torch.empty(1, 256)

    def layer(codes, scale=tensors["scale"], signs=tensors["signs"]):
        first = Pass(codes, tensors["codebook"], scale, signs)
        return layer_of(x, StoredWeight(first, None, scheme, 256))

    codes = tensors["codes"].clone()
    first = layer(codes)
    assert layer(codes) is first and len(bound_weight(codes).layers) == 1
    assert layer(codes.view(64, -1)) is first  # a view of the same codes
    assert layer(codes, tensors["scale"].clone()) is not first
    assert layer(codes.clone()) is not first
    # Another tensor where one of it has been: who knows what wrote it.
    scale = tensors["scale"].clone()
    of_scale, address = layer(codes, scale), scale.data_ptr()
    assert layer(codes, scale) is of_scale
    storage = scale.untyped_storage()
    other = torch.empty(0, dtype=scale.dtype).set_(storage, 0, scale.shape)
    assert other.data_ptr() == address and layer(codes, other) is not of_scale
    # From the same address on, but not the same rows.
    assert layer(codes[:32], tensors["scale"][:32]).rows == 32
    assert layer(codes[::2], tensors["scale"][::2]).rows == 32
    assert layer(codes) is first and first.rows == 64
    # A copy, since its rows do not lie side by side: nothing is remembered.
    part = torch.zeros(64, 200, dtype=torch.uint8)[:, :128]
    assert layer(part) is not layer(part)
    alive = weakref.ref(first), weakref.ref(codes)
    del codes, first, part, of_scale
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_experts_share_one_tensor_and_have_a_layer_each():
    scheme = WEIGHT_SCHEMES["vq-4"]
    tensors = random_tensors(scheme, 64, 256)
    codes = torch.stack([tensors["codes"]] * 3)
    scale = torch.stack([tensors["scale"]] * 3)
    x = torch.empty(1, 256)

    def layer(i):
        first = Pass(codes[i], tensors["codebook"], scale[i], tensors["signs"])
        return layer_of(x, StoredWeight(first, None, scheme, 256))

    layers = [layer(i) for i in range(3)]
    assert len(set(map(id, layers))) == 3
    assert [layer(i) for i in range(3)] == layers


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("signs", lambda t: t[:-1], "a sign for each"),
        ("diagonal", lambda t: t[:-1], "a number for each"),
        ("diagonal", lambda t: t.to("meta"), "the diagonal of the weight on meta"),
        ("codes", lambda t: t[:, :-1], "64 rows of 256 weights"),
        ("codes", lambda t: t.to("meta"), "the codes of the weight on meta"),
        ("scale", lambda t: t.to("meta"), "the scale of the weight on meta"),
    ],
)
def test_tensors_that_do_not_belong_together(key, change, message):
    scheme = WEIGHT_SCHEMES["vq-4"]
    scheme = scheme.scaled() if key == "diagonal" else scheme
    tensors = random_tensors(scheme, 64, 256)
    tensors[key] = change(tensors[key])
    weight = StoredWeight.of(tensors, scheme, 256)
    with pytest.raises(VQFormatError, match=message):
        layer_of(torch.empty(1, 256), weight)


class Recorder:
    """Stands for a kernel: remembers what it is launched with."""

    def __init__(self):
        self.calls = []

    def prepare(self, blocks, /, **values):
        arguments = SimpleNamespace(**values)

        def start(stream, dependent):
            self.calls.append((blocks, stream, dict(vars(arguments)), dependent))

        return SimpleNamespace(arguments=arguments, lock=threading.Lock(), start=start)


@pytest.fixture
def launched(monkeypatch):
    """(kernel, stream): what the fused layer launches, and the stream on which it does."""
    kernel, before, stream = Recorder(), Recorder(), [7]
    launch = cuda_fused.Launch(kernel, 2, (3,), before, 16, 128, 2 * 8 * 256, False)
    monkeypatch.setattr(cuda_fused, "prepared", lambda *asked: launch)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda ordinal: stream[0], raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream[0] == 9)
    return kernel, before, stream


@pytest.mark.parametrize(
    "scheme", [WEIGHT_SCHEMES["vq-4"], WEIGHT_SCHEMES["vq-4"].scaled()], ids=str
)
def test_what_is_launched(launched, scheme):
    kernel, before, stream = launched
    tensors = random_tensors(scheme, 64, 256)
    x, y = torch.randn(9, 256).half(), torch.empty(9, 64).half()
    given = [*(tensors[key] for key in ("codes", "codebook", "scale")), rotation_of(tensors)]
    weight = StoredWeight.of(tensors, scheme, 256)

    def dependent(overlap=True):
        cuda_fused.run(x, (weight,), (None,), (y,), 0, overlap=overlap)
        return kernel.calls[-1][-1]

    assert not dependent()  # who knows what wrote these codes just before
    blocks, at, values, _ = kernel.calls[0]
    assert (blocks, at) == (3, 7)
    names = ("codes", "codebook", "scale", "diagonal")
    rotated = before.calls[0][2]
    assert values == {
        **{name: tensor.data_ptr() for name, tensor in zip(names, given, strict=True)},
        "x": rotated["y"], "bias": None, "y": y.data_ptr(), "rows": 64, "columns": 256, "tokens": 9,
        "blocks": 3,
    }  # fmt: skip
    assert rotated["x"] == x.data_ptr() and rotated["diagonal"] == given[3].data_ptr()
    assert (rotated["blocks"], rotated["across"], rotated["token_tiles"]) == (9 * 256 // 128, 2, 2)
    assert before.calls[0][0] == 2
    assert dependent() and not dependent(overlap=False) and dependent()
    for tensor in given[:3]:  # a write, and the launch after it
        tensor.add_(0)
        assert not dependent() and dependent()
    stream[0] = 8  # another stream does not know what was written on the first
    assert not dependent() and dependent()
    stream[0] = 9  # one that is captured knows its own writes
    assert dependent()
    tensors["codes"].add_(0)
    assert not dependent() and dependent()
    for bias in (torch.zeros(1), torch.zeros(65), torch.zeros(64, device="meta")):
        with pytest.raises(VQFormatError, match="does not suit 64 outputs"):
            cuda_fused.run(x, (weight,), (bias,), (y,), 0)


def test_what_is_launched_of_two_passes(launched):
    """Codes of both, and the one table of both; writes to either are seen."""
    kernel, _, _ = launched
    scheme = WEIGHT_SCHEMES["turboquant-4+4"]
    # Those of a file are not aligned: kernels read a copy, and nothing is remembered.
    tensors = {key: value.clone() for key, value in random_tensors(scheme, 64, 256).items()}
    x, y = torch.randn(9, 256).half(), torch.empty(9, 64).half()
    weight = StoredWeight.of(tensors, scheme, 256)

    def dependent():
        cuda_fused.run(x, (weight,), (None,), (y,), 0)
        return kernel.calls[-1][-1]

    assert not dependent() and dependent()
    values = kernel.calls[0][2]
    keys = {"codes": "codes", "second": "codes_2", "codebook": "codebook_2", "scale": "scale"}
    for name, key in keys.items():
        assert values[name] == tensors[key].data_ptr(), name
    for key in keys.values():
        tensors[key].add_(0)
        assert not dependent() and dependent(), key
    elsewhere = weight._replace(residual=weight.residual._replace(codes=tensors["codes_2"].clone()))
    cuda_fused.run(x, (elsewhere,), (None,), (y,), 0)
    assert not kernel.calls[-1][-1]


@pytest.mark.parametrize("key", ["signs", "diagonal"])
def test_several_matrices_are_one_launch(launched, monkeypatch, key):
    """Arguments of the second one are `x_1`, ..; an input is rotated once for those that share
    their signs or diagonal; one that was written is enough to wait."""
    kernel, before, _ = launched
    scheme = WEIGHT_SCHEMES["vq-4"]
    scheme = scheme if key == "signs" else scheme.scaled()
    launch = cuda_fused.Launch(kernel, 2, (3, 4, 5), before, 16, 128, 2 * 8 * 256, False)
    monkeypatch.setattr(cuda_fused, "prepared", lambda *asked: launch)
    each = [random_tensors(scheme, 64, 256) for _ in range(3)]
    each[1][key] = each[0][key]
    weights = [StoredWeight.of(tensors, scheme, 256) for tensors in each]
    x, biases = torch.randn(9, 256).half(), [None, torch.randn(64).half(), None]
    outputs = [torch.empty(9, 64).half() for _ in each]
    for _ in range(2):
        cuda_fused.run(x, weights, biases, outputs, 0)
    (blocks, _, values, early), (*_, again) = kernel.calls
    assert (blocks, early, again) == (12, False, True)
    assert len(before.calls) == 2 * 2
    inputs = [values[name] for name in ("x", "x_1", "x_2")]
    assert inputs[0] == inputs[1] != inputs[2]
    assert [values[name] for name in ("y", "y_1", "y_2")] == [y.data_ptr() for y in outputs]
    assert [values[name] for name in ("bias", "bias_1", "bias_2")] == [
        None, biases[1].data_ptr(), None,
    ]  # fmt: skip
    for i, tensors in enumerate(each):
        given = {**tensors, "diagonal": tensors[key]}
        for field in ("codes", "codebook", "scale", "diagonal"):
            name = f"{field}_{i}" if i else field
            assert values[name] == given[field].data_ptr()
    each[2]["scale"].add_(0)
    cuda_fused.run(x, weights, biases, outputs, 0)
    assert not kernel.calls[-1][-1]


def test_the_bound_op_is_for_one_pass(monkeypatch):
    monkeypatch.setattr(boxed_ops, "cuda_linear", lambda: print)
    spec = WEIGHT_SCHEMES["vq-4"].spec()
    problem = dispatch.LinearProblem("cuda", "float16", spec, 1, 64, 256)
    assert cuda_bound_linear.bind(problem) is not None
    nested = problem._replace(scheme=WEIGHT_SCHEMES["turboquant-4+4"].spec())
    assert cuda_bound_linear.bind(nested) is None


def test_tensors_that_do_not_count_writes_never_overlap(launched):
    kernel, _, _ = launched
    scheme = WEIGHT_SCHEMES["vq-4"]
    with torch.inference_mode():
        tensors = {key: value.clone() for key, value in random_tensors(scheme, 64, 256).items()}
        weight = StoredWeight.of(tensors, scheme, 256)
        x, y = torch.randn(9, 256).half(), torch.empty(9, 64).half()
        for _ in range(3):
            cuda_fused.run(x, (weight,), (None,), (y,), 0)
    assert not any(call[-1] for call in kernel.calls)
