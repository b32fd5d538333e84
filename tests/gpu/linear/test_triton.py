"""The Triton kernels on a GPU: NVIDIA (HF_VQ_BACKEND=triton), or any other that PyTorch calls cuda.

Fresh random codes, scales and inputs; outputs lie in memory full of NaN. Most of the time goes
into compiling; only where a test says so, tiles are measured.
"""

import contextlib
import shutil

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme
from hf_vq.formats.stored_weight import rotation_of
from hf_vq.ops.library import linear_problem
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import random_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
pytest.importorskip("triton", reason="Triton is not installed: hf-vq[triton]")

TOKENS = (1, 5, 16, 100)
SCHEMES = ("vq-4", "vq-3", "vq-2", "turboquant-4", "turboquant-2", "turboquant-8",
           "turboquant-4+4", "turboquant-4+2")  # fmt: skip
ODD = [  # spec, out_features, in_features
    ("vq1x3r1-tensor-g0-none", 7, 77),
    ("vq1x4r1-universal-g16-hadamard0", 127, 176),
    ("vq1x4r1-universal-g0-hadamard0", 1, 52),
    ("vq2x8r1-universal-g128-scaled_hadamard128", 33, 384),
    ("vq4x8r1-universal-g32-scaled_hadamard32", 65, 288),
    ("vq1x16r1-tensor-g256-none", 3, 512),
    ("vq2x11r1-tensor-g0-none", 33, 130),
    ("vq2x8r1-universal-g0-random_hadamard0", 31, 2048),
    ("vq4x13r1-tensor-g64-none", 300, 192),
    ("vq1x1+4r2-universal-g0-none-nested", 9, 154),
    ("vq1x3+1r2-universal-g32-hadamard32-nested", 33, 160),
]


@pytest.fixture(autouse=True)
def triton_rows_only(monkeypatch):
    monkeypatch.setenv("HF_VQ_BACKEND", "triton")


@pytest.fixture
def one_tile(monkeypatch):
    """Choose the n-th tile, of those that there are, instead of measuring all."""
    from hf_vq.backends.triton import linear as triton_linear

    tuned, tiles = triton_linear._tuned, triton_linear._configs()
    return lambda n: monkeypatch.setattr(tuned, "configs", [tiles[n % len(tiles)]])


@contextlib.contextmanager
def poisoned():
    """PyTorch fills new memory with NaN; not around all of a test, since cuBLAS then refuses."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def stored(spec, out_features, in_features):
    scheme = VQScheme.parse(spec)
    tensors = random_tensors(scheme, out_features, in_features)
    return scheme, {key: tensor.cuda() for key, tensor in tensors.items()}


def linear(x, tensors, bias, scheme):
    with poisoned():
        return ops.linear(x, tensors, bias, scheme)


def check(y, x, tensors, bias, scheme):
    """As far from float64 as the same maths in torch at that dtype, at most twice.

    And float32 sums, in whatever order: roundings of n additions add up like a random walk.
    """
    rotation = rotation_of(tensors)
    keys = ("codes", "codebook", "scale")
    decode = reference.decode_rotated
    if scheme.two_passes:
        keys, decode = ("codes", "codes_2", "codebook_2", "scale"), reference.decode_nested
    weight = decode(*(tensors[key] for key in keys), scheme, x.shape[-1])
    inputs = reference.rotate(x.double(), rotation, scheme, False)
    exact = inputs @ weight.double().T + (0 if bias is None else bias.double())
    rounded = reference.rotate(x.float(), rotation, scheme, False).to(x.dtype)
    same = torch.nn.functional.linear(rounded, weight.to(x.dtype), bias)
    eps = torch.finfo(x.dtype).eps + torch.finfo(torch.float32).eps * x.shape[-1] ** 0.5
    bound = 2 * (same.double() - exact).norm() + eps * exact.norm()
    assert y.dtype == x.dtype and y.shape == exact.shape
    assert (y.double() - exact).norm() <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", SCHEMES)
def test_linear(name, tokens, dtype, one_tile):
    one_tile(TOKENS.index(tokens) + SCHEMES.index(name))
    scheme, tensors = stored(WEIGHT_SCHEMES[name].spec(), 333, 1152)
    x = torch.randn(tokens, 1152, device="cuda").to(dtype)
    bias = torch.randn(333, device="cuda").to(dtype) if tokens > 1 else None
    assert dispatch.select(linear_problem("linear", x, scheme.spec(), 333)).name == "triton.linear"
    check(linear(x, tensors, bias, scheme), x, tensors, bias, scheme)


@pytest.mark.parametrize(("spec", "rows", "columns"), ODD)
def test_odd_sizes(spec, rows, columns, one_tile):
    one_tile(0)
    scheme, tensors = stored(spec, rows, columns)
    for dtype, tokens in ((torch.float16, 3), (torch.bfloat16, 33), (torch.float32, 3)):
        x = torch.randn(tokens, columns, device="cuda").to(dtype)
        check(linear(x, tensors, None, scheme), x, tensors, None, scheme)


@pytest.mark.parametrize("tokens", [1, 130, 1000])
def test_a_layer_of_full_size(tokens):
    """Measures tiles. Rows are split for one token; many tokens take several tiles."""
    scheme, tensors = stored(WEIGHT_SCHEMES["vq-4"].spec(), 4096, 4096)
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(tokens, 4096, device="cuda").to(dtype)
        check(linear(x, tensors, None, scheme), x, tensors, None, scheme)


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_extreme_codes(byte, one_tile):
    one_tile(0)
    for spec, rows, columns in ODD:
        scheme, tensors = stored(spec, rows, columns)
        tensors["codes"].fill_(byte)
        x = torch.randn(2, columns, device="cuda").half()
        check(linear(x, tensors, None, scheme), x, tensors, None, scheme)


def test_graph():
    """After one call, which tunes."""
    scheme, tensors = stored(WEIGHT_SCHEMES["vq-2"].spec(), 512, 512)
    x = torch.randn(8, 512, device="cuda", dtype=torch.float16)
    ops.linear(x, tensors, None, scheme)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, tensors, None, scheme)
    for _ in range(3):
        x.copy_(torch.randn(8, 512, device="cuda"))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(y, x, tensors, None, scheme)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")  # of the compilers
def test_compiled(backend):
    if backend == "inductor" and not (shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("inductor needs a C compiler")
    scheme, tensors = stored(WEIGHT_SCHEMES["turboquant-4"].spec(), 256, 256)
    x = torch.randn(8, 256, device="cuda", dtype=torch.float16)

    def forward(x):
        return ops.linear(x, tensors, None, scheme) + 1

    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(compiled(x), forward(x))


def test_threads_do_not_mix_arguments_of_the_tuner():
    """The tuner keeps the arguments of a call in itself; threads must not mix them."""
    from concurrent.futures import ThreadPoolExecutor

    layers = [stored(WEIGHT_SCHEMES["vq-4"].spec(), 128 * i, 256) for i in range(1, 5)]
    x = torch.randn(4, 256, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()

    def work(turn):
        scheme, tensors = layers[turn % 4]
        with torch.cuda.stream(torch.cuda.Stream()):
            y = ops.linear(x, tensors, None, scheme)
            torch.cuda.current_stream().synchronize()
        return turn, y

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(32)))
    for turn, y in results:
        scheme, tensors = layers[turn % 4]
        check(y, x, tensors, None, scheme)
