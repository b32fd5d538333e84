"""`hf_vq::cuda_linear`, the C op that launches linear.cu.

Functions of CUDA only tell what they were called with, and memory of the CPU is that of the GPU.
"""

import ctypes
import pickle
import re
from types import SimpleNamespace

import pytest
import torch

from hf_vq.backends.cpu import boxed_ops, library
from hf_vq.backends.cuda.bound_weight import bind_weight
from hf_vq.backends.cuda.linear import bound as cuda_bound_linear
from hf_vq.backends.cuda.linear import fused as cuda_fused
from hf_vq.backends.cuda.linear.arguments import LinearArguments
from hf_vq.backends.cuda.linear.dequantize import RotateArguments
from hf_vq.formats import weight_scheme
from hf_vq.formats.stored_weight import rotation_of
from hf_vq.ops.library import linear_problem
from tests.fixtures import ROOT
from tests.fixtures.random_weights import random_tensors

pytestmark = [
    pytest.mark.skipif(library.load() is None, reason=library.why_not()),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the op has real functions here"),
]
API = (ROOT / "kernels" / "cpu" / "api.h").read_text("utf-8")
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int32
TO_NUMBER = ctypes.CFUNCTYPE(NUMBER, POINTER, ctypes.POINTER(NUMBER))
STREAM = ctypes.CFUNCTYPE(NUMBER, NUMBER, ctypes.POINTER(POINTER))
LAUNCH = ctypes.CFUNCTYPE(
    NUMBER, POINTER, *[ctypes.c_uint32] * 7, POINTER, ctypes.POINTER(POINTER), POINTER
)
LINEAR, BEFORE = 1234, 567  # addresses of kernels


def declared(name):
    """Names of the fields of a struct of api.h, in their order."""
    body = API.partition(f"typedef struct {name} {{")[2].partition(f"}} {name};")[0]
    body = re.sub(r"//.*", "", body)
    functions = re.findall(r"\(\*(\w+)\)", body)
    return functions or re.findall(r"(\w+)[,;]", body)


def test_fields_are_those_of_the_header():
    assert declared("hf_vq_cuda_launch") == list(cuda_bound_linear.FIELDS)
    names = [name for name, kind in boxed_ops._Cuda._fields_ if kind is POINTER]
    known = {"aoti_torch_get_current_cuda_stream": "get_current_cuda_stream",
             "cuLaunchKernel": "launch", "cuStreamIsCapturing": "is_capturing"}  # fmt: skip
    assert declared("hf_vq_cuda") == [known.get(name, name) for name in names]


@pytest.mark.parametrize("arguments", [LinearArguments, RotateArguments])
def test_arguments_of_kernels_are_those_of_the_launcher(arguments, root):
    """Names and types, in their order; tests/codegen/test_plan.py compares them with linear.cu."""
    (path,) = (root / "kernels" / "cpu").rglob("cuda_launch.cpp")
    source = path.read_text("utf-8")
    body = source.partition(f"struct {arguments.__name__} {{")[2].partition("};")[0]
    found = []
    for line in re.sub(r"//.*", "", body).split(";")[:-1]:
        kind = POINTER if "*" in line else ctypes.c_uint32 if "uint32_t" in line else NUMBER
        names = re.sub(r"\b(const|void|u?int32_t)\b|\*", "", line).split(",")
        found += [(name.strip(), kind) for name in names]
    assert found == [(name, kind) for name, kind, *_ in arguments._fields_]


class Fake:
    """CUDA as the op sees it."""

    def __init__(self):
        self.launches, self.status, self.device, self.capturing = [], 0, 0, 0
        shim = boxed_ops._share()
        cpu = shim.aoti_torch_device_type_cpu()
        int8, int64 = (shim.aoti_torch_dtype_int8(), shim.aoti_torch_dtype_int64())

        def index(tensor, to):
            to[0] = self.device
            return 0

        def stream(device, to):
            to[0] = 77
            return 0

        def capturing(stream, to):
            assert stream == 77
            to[0] = self.capturing
            return 0

        def launch(function, x, y, z, threads, y_threads, z_threads, shared, stream, given, more):
            assert (y, z, y_threads, z_threads, stream, more) == (1, 1, 1, 1, 77, None)
            kind = {LINEAR: LinearArguments, BEFORE: RotateArguments}[function]
            arguments = kind.from_buffer_copy(ctypes.string_at(given[0], ctypes.sizeof(kind)))
            values = {name: getattr(arguments, name) for name, *_ in kind._fields_}
            self.launches.append((function, x, threads, shared, values))
            return self.status

        self.functions = (
            ctypes.cast(shim.aoti_torch_get_device_type, POINTER), TO_NUMBER(index), STREAM(stream),
            LAUNCH(launch), TO_NUMBER(capturing),
        )  # fmt: skip
        addresses = (ctypes.cast(function, POINTER) for function in self.functions)
        library.load().hf_vq_use_cuda(ctypes.byref(boxed_ops._Cuda(*addresses, cpu, int8, int64)))
        self.op = _op()


OPS = []


def _op():
    if not OPS:
        schema, kernel = boxed_ops._SCHEMA.format("launch"), library.load().hf_vq_torch_cuda_linear
        OPS.append(boxed_ops._op(boxed_ops._share(), b"CPU", "cuda_linear_here", schema, kernel))
    return OPS[0]


@pytest.fixture
def cuda():
    return Fake()


def layer(rows=64, columns=256, tokens=9, name="vq-4", before=True):
    """Tensors, and a launch of them for so many tokens."""
    scheme = weight_scheme(name)
    tensors = random_tensors(scheme, rows, columns)
    kernel, rotation = (
        SimpleNamespace(function=address, shared=shared, plan=SimpleNamespace(threads=threads))
        for address, shared, threads in ((LINEAR, 4096, 128), (BEFORE, 0, 256))
    )
    launch = cuda_fused.Launch(
        kernel, 2, (3,), rotation if before else None, 16, 128, 16 * columns if before else 0, False
    )
    return scheme, tensors, launch


@pytest.fixture
def prepared(monkeypatch):
    def prepare(scheme, rows, columns, tokens, launch):
        monkeypatch.setattr(cuda_fused, "prepared", lambda *asked: launch)
        return cuda_bound_linear.prepared(scheme, rows, columns, tokens, torch.float16, 0)

    return prepare


@pytest.mark.parametrize("name", ["vq-4", "vq-4-scaled"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_what_is_launched(cuda, prepared, before, with_bias, name):
    scheme, tensors, launch = layer(before=before, name=name)
    x, none = torch.randn(3, 3, 256).half(), torch.empty(0)
    bias = torch.randn(64).half() if with_bias else none
    four = [*(tensors[key] for key in ("codes", "codebook", "scale")), rotation_of(tensors)]
    y = cuda.op(x, *four, bias, prepared(scheme, 64, 256, 9, launch))
    assert (y.shape, y.dtype, y.is_contiguous()) == ((3, 3, 64), torch.float16, True)
    *rotation, (function, blocks, threads, shared, values) = cuda.launches
    assert (function, blocks, threads, shared) == (LINEAR, 3, 128, 4096)
    given = x.data_ptr()
    if before:
        ((function, blocks, threads, shared, turned),) = rotation
        count = 9 * 256 // 128
        assert (function, blocks, threads, shared) == (BEFORE, -(-count // 16), 256, 0)
        assert turned == {
            "x": x.data_ptr(), "diagonal": four[3].data_ptr(), "y": turned["y"],
            "blocks": count, "across": 2, "token_tiles": 2,
        }  # fmt: skip
        given = turned["y"]
        assert given not in (x.data_ptr(), y.data_ptr(), None)
    else:
        assert not rotation
    assert values == {
        **{key: tensor.data_ptr() for key, tensor in
           zip(("codes", "codebook", "scale", "diagonal"), four, strict=True)},
        "x": given, "bias": bias.data_ptr() if with_bias else None, "y": y.data_ptr(),
        "rows": 64, "columns": 256, "tokens": 9, "blocks": 3,
    }  # fmt: skip


def test_a_lattice_and_integers(cuda, prepared):
    for name in ("quip-sharp-2", "aqlm-2-int7"):
        scheme, tensors, launch = layer(name=name)
        x, none = torch.randn(9, 256).half(), torch.empty(0)
        four = [tensors.get(key, none) for key in ("codes", "codebook", "scale", "signs")]
        assert cuda.op(x, *four, none, prepared(scheme, 64, 256, 9, launch)) is not None


def test_a_diagonal_that_python_has_to_convert(cuda, prepared):
    scheme, tensors, launch = layer(name="vq-4-scaled")
    x, none, ready = (
        torch.randn(9, 256).half(),
        torch.empty(0),
        prepared(scheme, 64, 256, 9, launch),
    )
    three, diagonal = [tensors[key] for key in ("codes", "codebook", "scale")], tensors["diagonal"]
    assert cuda.op(x, *three, diagonal, none, ready) is not None
    odd = torch.empty(257).half()[1:].copy_(diagonal)
    for wrong in (none, diagonal[:-1], diagonal.float(), odd, torch.zeros(32, dtype=torch.uint8)):
        assert cuda.op(x, *three, wrong, none, ready) is None


def test_what_python_has_to_do(cuda, prepared):
    scheme, tensors, launch = layer()
    ready, none = prepared(scheme, 64, 256, 9, launch), torch.empty(0)
    good = {
        "x": torch.randn(9, 256).half(),
        **{key: tensors[key] for key in ("codes", "codebook", "scale", "signs")},
        "bias": torch.zeros(64).half(), "launch": ready,
    }  # fmt: skip
    odd = torch.randn(9 * 256 + 1).half()[1:].view(9, 256)
    bad = {
        "x": [good["x"].float(), good["x"][:8], good["x"].T, good["x"].view(-1), odd],
        "codes": [good["codes"][:63], good["codes"].view(torch.int8), good["codes"].flatten()],
        "codebook": [good["codebook"].float(), good["codebook"][:, :8]],
        "scale": [good["scale"].float(), good["scale"][:, :1], good["scale"].T],
        "signs": [none, good["signs"][:-1], good["signs"].view(torch.int8)],
        "bias": [torch.zeros(63).half(), torch.zeros(64)],
        "launch": [none, ready[:-1], ready.int()],
    }
    assert cuda.op(*good.values()) is not None
    done = len(cuda.launches)
    for name, tensors in bad.items():
        for tensor in tensors:
            assert cuda.op(*{**good, name: tensor}.values()) is None, (name, tensor.shape)
    for name, value in (("capturing", 1), ("device", 1)):
        setattr(cuda, name, value)
        assert cuda.op(*good.values()) is None, name
        setattr(cuda, name, 0)
    assert len(cuda.launches) == done
    cuda.status = 201  # no context
    assert cuda.op(*good.values()) is None
    assert len(cuda.launches) == done + 1
    cuda.status = 0
    assert cuda.op(*good.values()) is not None


def test_rows_that_are_filled_up_are_not_launched(cuda, prepared):
    scheme, _, launch = layer()
    launch.ragged = True
    assert not prepared(scheme, 64, 256, 9, launch).numel()


def test_python_goes_on_where_the_op_refuses(monkeypatch):
    scheme, given, answers = weight_scheme("vq-4"), [], [None, "y"]
    asked = linear_problem("linear", torch.empty(9, 256).half(), scheme.spec(), 64)
    monkeypatch.setattr(boxed_ops, "cuda_linear", lambda: lambda *tensors: answers.pop(0))
    monkeypatch.setattr(
        cuda_bound_linear, "prepared", lambda *asked: given.append(asked) or "launch"
    )
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    run = cuda_bound_linear.bind(asked)
    x = SimpleNamespace(get_device=lambda: 0, numel=lambda: 9 * 256, dtype=torch.float16)
    codes = torch.empty(64, 128)
    assert run(x, codes, *[None] * 4) is None and not given  # Python launches first
    bind_weight(codes)
    loaded = pickle.loads(pickle.dumps(codes))  # nobody launched these
    assert run(x, loaded, *[None] * 4) is None and not given
    assert [run(x, codes, *[None] * 4) for _ in range(2)] == [None, "y"]
    assert given == [(scheme, 64, 256, 9, torch.float16, 0)]
    elsewhere = SimpleNamespace(**{**vars(x), "get_device": lambda: 1})
    assert run(elsewhere, codes, *[None] * 4) is None


def test_nothing_is_registered_without_cuda():
    assert boxed_ops.cuda_linear() is None
