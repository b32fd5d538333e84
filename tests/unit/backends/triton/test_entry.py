"""The entry `triton.linear` without a GPU: what it supports, and that its kernels compile."""

import sys

import pytest

import hf_vq  # noqa: F401  registers the backends
from hf_vq import dispatch
from hf_vq.backends.triton import supports as triton_entry
from hf_vq.errors import VQBackendError
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme

triton = pytest.importorskip("triton", reason="Triton is not installed: hf-vq[triton]")


def linear(scheme, device="cuda", dtype="float16", k=2048):
    return dispatch.LinearProblem(device, dtype, scheme.spec(), 1, 64, k)


def refusal(problem):
    """Why the table does not take Triton for a problem; None if it may."""
    (entry,) = (each for each in dispatch.ENTRIES if each.name == "triton.linear")
    return entry.refusal(problem)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("backend", "arch", "warp"), [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]
)
def test_kernels_compile(backend, arch, warp, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_vq.backends.triton import linear as triton_linear

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = ("tokens", "rows", "in_features", "width", "second_width", "group", "steps")
    numbers = dict.fromkeys(names, "i32")
    tensors = {"x": "*bf16", "out": "*bf16", "bias": "*bf16", "scale": "*fp16", "diagonal": "*u8"}
    signature = numbers | tensors | {"codes": "*u8", "codebook": "*i32", "norm": "fp32"}
    rotation = {"BLOCK": 128, "TILE": 32, "PART": 128, "STEP": 128, "BLOCK_TOKENS": 16,
                "SCALED": False}  # fmt: skip
    product = {"CODES": 2, "VECTOR": 2, "BITS": 12, "SECOND_BITS": 0, "TABLE": False, "STEP": 128,
               "WHOLE": False, "BLOCK_TOKENS": 16}  # fmt: skip
    product["second"] = None
    nested = product | {"CODES": 8, "VECTOR": 1, "BITS": 4, "SECOND_BITS": 4, "TABLE": True}
    nested["WHOLE"] = True
    early = {"EARLY": (backend, arch) == ("cuda", 90)}
    del nested["second"]
    words = {"codes": "*i32", "second": "*i32", "codebook": "*i16"}
    config = triton_linear._configs()[0]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    for kernel, constants, more in (
        (triton_linear._rotate, rotation, {}),
        (triton_linear._rotate, rotation | {"SCALED": True}, {"diagonal": "*fp16"}),
        (triton_linear._multiply, product | config.kwargs, {}),
        (triton_linear._multiply, nested | config.kwargs, words),
        (triton_linear._add, {"BLOCK": 512}, {"numel": "i32", "splits": "i32", "parts": "*fp32"}),
    ):
        names = kernel.arg_names
        source = ASTSource(
            fn=kernel,
            signature={name: (signature | more).get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in (constants | early).items()},
        )
        compiled = triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)
        assert compiled.metadata.shared <= 64 << 10  # of the smallest of these GPUs


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU Triton can use, as far as `available` looks."""

    class Driver:
        class active:
            target = triton.backends.compiler.GPUTarget("hip", "gfx942", 64)

            @classmethod
            def get_current_target(cls):
                return cls.target

    monkeypatch.setattr("triton.runtime.driver", Driver)
    triton_entry.available.cache_clear()
    yield Driver.active
    triton_entry.available.cache_clear()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        *(
            (WEIGHT_SCHEMES[name].spec(), None)
            for name in ("vq-4", "vq-3", "turboquant-5", "turboquant-4+4")
        ),
        ("vq2x12r1-tensor-g0-none", None),
        ("vq2x8r1-universal-g32-random_hadamard0", None),
        ("vq2x8r1-universal-g16-random_hadamard128", None),
        ("vq2x8r1-universal-g8-random_hadamard128", "8 weights share a scale, fewer than 16"),
        ("vq2x8r2-universal-g128-hadamard128", "it has 2 stages"),
        ("vq1x4r2-universal-g128-hadamard128-shared", "its passes are shared, not nested"),
        (WEIGHT_SCHEMES["quip-sharp-2"].spec(), "its codebook is e8p"),
        (WEIGHT_SCHEMES["gptvq-2"].spec(), "its codebook is tile"),
        ("vq8x8r1-tensor-g0-none", "vectors have 8 weights, not one of (1, 2, 4)"),
        ("vq2x8r1-universal-g128-qr128", "a QR rotation is a matrix product"),
    ],
)
def test_what_it_supports(gpu, spec, reason):
    assert refusal(linear(VQScheme.parse(spec))) == reason


def test_which_tensors_it_takes(gpu):
    scheme = WEIGHT_SCHEMES["vq-4"]
    assert refusal(linear(scheme, "xpu")) is None
    assert refusal(linear(scheme, dtype="float64")) == "inputs are float64"
    gpu.target = None  # nobody asks for a tensor that is elsewhere
    triton_entry.available.cache_clear()
    assert refusal(linear(scheme, "cpu")) == "tensor is on cpu"


def test_what_it_needs(gpu, monkeypatch):
    assert triton_entry.available() is None
    for arch, reason in (
        (90, None), (75, "the GPU has compute capability 7.5, less than 8.0"),
    ):  # fmt: skip
        gpu.target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
        triton_entry.available.cache_clear()
        assert triton_entry.available() == reason

    def fails():
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(gpu, "get_current_target", fails)
    triton_entry.available.cache_clear()
    assert triton_entry.available() == "Triton finds no GPU that it can use: 0 active drivers"
    monkeypatch.setattr(triton, "__version__", "3.1.0")
    triton_entry.available.cache_clear()
    assert triton_entry.available() == "Triton 3.1.0 is older than 3.2"
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_entry.available.cache_clear()
    assert triton_entry.available() == "Triton is not installed: pip install hf-vq[triton]"


def test_where_it_stands(gpu, monkeypatch):
    """Below the CUDA entries, above the reference."""
    names = [entry.name for entry in dispatch.entries("linear")]
    assert names.index("cuda.linear") < names.index("triton.linear") < names.index("reference")
    verdicts = {v.entry.name: v for v in dispatch.explain(linear(WEIGHT_SCHEMES["vq-4"], "xpu"))}
    assert verdicts["triton.linear"].chosen
    assert verdicts["cuda.linear"].reason == "tensor is on xpu"
    monkeypatch.setenv("HF_VQ_BACKEND", "triton")
    with pytest.raises(VQBackendError, match=r"triton.linear: its codebook is tile"):
        dispatch.select(linear(WEIGHT_SCHEMES["gptvq-2"]))
