"""Generated CUDA kernels against the references in float64: every scheme, odd sizes, every dtype.

Fresh random codes, scales and inputs; outputs lie in memory full of NaN. For the whole file a GPU
needs less than a minute, most of it compiling.
"""

import contextlib
import copy
import random
import shutil

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cuda.linear import dequantize as cuda
from hf_vq.backends.cuda.linear import fused
from hf_vq.codegen.families.dequantize import decodable
from hf_vq.codegen.families.dequantize_rotated import restorable
from hf_vq.codegen.families.linear import MOST_TOKENS, LinearProblem, best, fusable
from hf_vq.codegen.families.linear_tile_codebook import tiled
from hf_vq.codegen.families.linear_wgmma import fewest_tokens
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import KV_SCHEMES, WEIGHT_SCHEMES, VQScheme, weight_scheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.stored_weight import StoredWeight, rotation_of
from hf_vq.ops.library import linear_problem
from hf_vq.ops.reference import codes as reference
from tests.fixtures.cuda_layers import ODD, ROTATED_BACK, poison, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CATALOGUE = [name for name in WEIGHT_SCHEMES if not decodable(WEIGHT_SCHEMES[name])]
CASES = [(WEIGHT_SCHEMES[name].spec(), 130, 1152) for name in CATALOGUE] + ODD


def double_weight(tensors, scheme, in_features):
    """The weight, still rotated, in float64: entries and scales are exact in float32."""
    rows = reference.decode_rotated(
        tensors["codes"],
        tensors["codebook"],
        torch.ones_like(tensors["scale"]),
        scheme,
        in_features,
    )
    grouped = rows.double().unflatten(-1, (tensors["scale"].shape[-1], -1))
    return (grouped * tensors["scale"].double()[..., None]).flatten(-2)


def rotated_back(rows, tensors, scheme):
    return reference.rotate(rows, rotation_of(tensors), scheme, True)


def runs_linear(x, scheme, n):
    return dispatch.select(linear_problem("linear", x, scheme.spec(), n)).name


@contextlib.contextmanager
def only_cuda(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("HF_VQ_BACKEND", "cuda")
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "rows", "columns"), CASES)
def test_decoded_rows(spec, rows, columns, dtype):
    """float32 is equal to the reference bit by bit, the others are that, rounded once."""
    scheme, tensors = stored(spec, rows, columns)
    arguments = (tensors["codes"], tensors["codebook"], tensors["scale"], scheme, columns)
    found = torch.full((rows + 1, columns), float("nan"), device="cuda", dtype=dtype)
    with torch.cuda.device("cuda"):
        cuda.DeviceWeight(*arguments).decode(0, found[:rows])
    assert torch.equal(found[:rows], reference.decode_rotated(*arguments).to(dtype))
    assert found[rows:].isnan().all()  # nothing beyond the last row


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("spec", "rows", "columns"), [*CASES, *ROTATED_BACK])
def test_rows_that_are_rotated_back(spec, rows, columns, dtype):
    """Stages and three sums of pairs are rounded to 11 bits, the result once more."""
    scheme, tensors = stored(spec, rows, columns)
    if restorable(scheme, columns, cuda.DTYPES[dtype]):
        pytest.skip("has no such kernel")
    arguments = (tensors["codes"], tensors["codebook"], tensors["scale"], scheme, columns)
    found = torch.full((rows + 1, columns), float("nan"), device="cuda", dtype=dtype)
    with torch.cuda.device("cuda"):
        for first in range(0, rows, 256):  # some at a time
            part = found[first : min(first + 256, rows)]
            cuda.DeviceWeight(*arguments).restore(first, rotation_of(tensors), part)
    exact = rotated_back(double_weight(tensors, scheme, columns), tensors, scheme)
    bound = (scheme.streams + 3) * 2**-11 + torch.finfo(dtype).eps / 2
    assert (found[:rows] - exact).norm() <= bound * exact.norm()
    assert found[rows:].isnan().all()  # nothing beyond the last row


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize(("spec", "rows", "columns"), CASES)
def test_extreme_codes(spec, rows, columns, byte):
    scheme, tensors = stored(spec, rows, columns)
    tensors["codes"].fill_(byte)
    arguments = (tensors["codes"], tensors["codebook"], tensors["scale"], scheme, columns)
    found = torch.full((rows, columns), float("nan"), device="cuda")
    with torch.cuda.device("cuda"):
        cuda.DeviceWeight(*arguments).decode(0, found)
    assert torch.equal(found, reference.decode_rotated(*arguments))


@pytest.mark.parametrize(("spec", "rows", "columns"), CASES)
def test_decode(spec, rows, columns, monkeypatch):
    scheme, tensors = stored(spec, rows, columns)
    poison()
    asked = dispatch.DecodeProblem("cuda", scheme.spec(), dispatch.bucket(rows), columns)
    assert dispatch.select(asked).name == "cuda.decode"
    with only_cuda(monkeypatch):
        found = ops.decode_weight(tensors, scheme, columns)
    rotated = double_weight(tensors, scheme, columns)
    exact = rotated_back(rotated, tensors, scheme)
    same = rotated_back(rotated.float(), tensors, scheme)
    eps = torch.finfo(torch.float32).eps * exact.norm()
    assert (found - exact).norm() <= 2 * (same - exact).norm() + eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 16, 33, 64, 90])
@pytest.mark.parametrize(("spec", "rows", "columns"), CASES)
def test_linear(spec, rows, columns, tokens, dtype, monkeypatch):
    """As far from float64 as the same maths in torch at that dtype, at most twice."""
    scheme, tensors = stored(spec, rows, columns)
    x = torch.randn(tokens, columns, device="cuda").to(dtype)
    bias = torch.randn(rows, device="cuda").to(dtype) if tokens > 1 else None
    poison()
    few = tokens <= MOST_TOKENS and dtype != torch.float32 and not fusable(scheme, columns)
    wide = tokens >= fewest_tokens(scheme) and "cuda.wide_linear"
    ran = runs_linear(x, scheme, rows)
    tiles = tokens <= 2 * MOST_TOKENS and dtype != torch.float32 and not tiled(scheme, columns)
    assert ran in {wide, few and "cuda.fused_linear", tiles and "cuda.tile_linear", "cuda.linear"}
    with only_cuda(monkeypatch):
        y = ops.linear(x, tensors, bias, scheme)
    assert y.dtype == dtype and y.shape == (tokens, rows)
    check(y, x, tensors, bias, scheme)


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize(("spec", "rows", "columns"), CASES)
def test_decoded_linear(spec, rows, columns, tokens, monkeypatch):
    """Also where the fused kernel would run."""
    scheme, tensors = stored(spec, rows, columns)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.float16)
    poison()
    monkeypatch.setenv("HF_VQ_BACKEND", "cuda.linear")
    check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


def test_the_catalogue_is_fused(monkeypatch):
    """Every scheme runs linear.cu or linear_tile_codebook.cu, for all numbers of tokens."""
    for name in CATALOGUE:
        for tokens in (1, 8, 16, 64):
            x = torch.empty(tokens, 4096, device="cuda", dtype=torch.bfloat16)
            expected = {f"cuda.{'tile' if name == 'gptvq-2' else 'fused'}_linear"}
            if tokens >= fewest_tokens(WEIGHT_SCHEMES[name]) and name != "gptvq-2":
                expected.add("cuda.wide_linear")  # on a GPU that has it
            assert runs_linear(x, WEIGHT_SCHEMES[name], 4096) in expected, (name, tokens)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80])
@pytest.mark.parametrize("name", CATALOGUE)
def test_extreme_codes_multiplied(name, byte):
    scheme, tensors = stored(WEIGHT_SCHEMES[name].spec(), 130, 1152)
    tensors["codes"].fill_(byte)
    for tokens in (1, 7):
        x = torch.randn(tokens, 1152, device="cuda", dtype=torch.float16)
        check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


PLANS = [
    (name, tokens, 16 * rows + odd, columns)
    for name, columns in (
        ("vq-4", 1152),
        ("aqlm-2", 1100 * 4),
        ("aqlm-3-int7", 1152),
        ("quip-sharp-4", 640),
    )
    for tokens in (1, 8, 16, 32)
    for rows, odd in ((3, 1), (140, 0))
]


@pytest.mark.filterwarnings("ignore:.* spills .* bytes per thread")  # nobody chose them
@pytest.mark.parametrize(("name", "tokens", "rows", "columns"), PLANS)
def test_every_kind_of_plan(name, tokens, rows, columns):
    """Not only those that are chosen: a sample of all feasible ones."""
    scheme, tensors = stored(WEIGHT_SCHEMES[name].spec(), rows, columns)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    arch = device_arch(0)
    plans = best(LinearProblem(scheme, tokens, rows, columns, Dtype.BFLOAT16, arch))
    for plan in random.Random(0).sample(plans, min(6, len(plans))):
        launch = fused.prepare(plan, scheme, (rows,), columns, x.dtype, 0)
        y = torch.full((tokens + 1, rows), float("nan"), device="cuda", dtype=torch.bfloat16)
        poison()
        weight = StoredWeight.of(tensors, scheme, columns)
        fused.run(x, (weight,), (bias,), (y[:tokens],), 0, launch)
        check(y[:tokens], x, tensors, bias, scheme)
        assert y[tokens:].isnan().all()


@pytest.mark.parametrize("name", ["vq-4", "vq-4-scaled"])
def test_weights_that_were_just_written(name):
    """A kernel begins before the one before it has ended, and must not read old codes."""
    scheme, tensors = stored(weight_scheme(name).spec(), 4096, 4096)
    others = [stored(weight_scheme(name).spec(), 4096, 4096)[1] for _ in range(4)]
    x = torch.randn(1, 4096, device="cuda", dtype=torch.float16)
    exact = [ops.linear(x, other, None, scheme) for other in others]
    for turn in range(40):
        for key in ("codes", "scale", "diagonal" if scheme.is_scaled else "signs"):
            tensors[key].copy_(others[turn % 4][key])
        y = ops.linear(x, tensors, None, scheme)
        again = ops.linear(x, tensors, None, scheme)
        assert torch.equal(y, exact[turn % 4]) and torch.equal(again, y)


def test_layers_that_ran_can_be_copied_and_saved(tmp_path):
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 64, 256)
    layer = torch.nn.Parameter(tensors["codes"], requires_grad=False)
    x = torch.randn(1, 256, device="cuda", dtype=torch.float16)
    y = ops.linear(x, {**tensors, "codes": layer}, None, scheme)
    torch.save(layer, tmp_path / "layer.pt")
    for other in (
        copy.deepcopy(layer),
        copy.deepcopy(layer.data),
        torch.load(tmp_path / "layer.pt"),
    ):
        assert torch.equal(ops.linear(x, {**tensors, "codes": other}, None, scheme), y)


def check(y, x, tensors, bias, scheme):
    columns, dtype = x.shape[-1], x.dtype
    rotation = rotation_of(tensors)
    weight = double_weight(tensors, scheme, columns)
    inputs = reference.rotate(x.double(), rotation, scheme, False)
    exact = inputs @ weight.T + (0 if bias is None else bias.double())
    rounded = reference.rotate(x.float(), rotation, scheme, False).to(dtype)
    same = torch.nn.functional.linear(rounded, weight.to(dtype), bias)
    eps = torch.finfo(dtype).eps * exact.norm()
    assert (y.double() - exact).norm() <= 2 * (same.double() - exact).norm() + eps


@pytest.mark.parametrize("shape", [(0, 256), (256,), (2, 3, 256), (1, 1, 256), (700, 256)])
@pytest.mark.parametrize("name", ["vq-4", "gptvq-2"])
def test_shapes(name, shape, monkeypatch):
    scheme, tensors = stored(weight_scheme(name).spec(), 77, 256)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    with only_cuda(monkeypatch):
        y = ops.linear(x, tensors, None, scheme)
    assert y.shape == (*shape[:-1], 77)
    if x.numel():
        check(y.reshape(-1, 77), x.reshape(-1, 256), tensors, None, scheme)


def test_tensors_at_odd_places(monkeypatch):
    """Not contiguous, not aligned, scales and codebooks in another dtype."""
    scheme, tensors = stored(weight_scheme("vq-2").spec(), 65, 256)
    wide = torch.randn(9, 515, device="cuda", dtype=torch.float16)
    for x in (wide[:, 1:257], wide[:, 2:514:2], wide[:, :256].flip(0), wide[::2, 3:259]):
        moved = {}
        for key, tensor in tensors.items():
            place = torch.empty(tensor.numel() + 3, dtype=tensor.dtype, device="cuda")[3:]
            moved[key] = place.view(tensor.shape).copy_(tensor)
        moved["scale"] = moved["scale"].float()
        with only_cuda(monkeypatch):
            y = ops.linear(x, moved, None, scheme)
        check(y, x, tensors, None, scheme)


def test_many_rows_are_decoded_some_at_a_time(monkeypatch):
    for name in ("vq-4", "gptvq-2"):
        scheme, tensors = stored(weight_scheme(name).spec(), 1000, 512)
        x = torch.randn(40, 512, device="cuda", dtype=torch.float16)
        bias = torch.randn(1000, device="cuda", dtype=torch.float16)
        with only_cuda(monkeypatch), monkeypatch.context() as patch:
            patch.setattr(cuda, "DECODED_BYTES", 256 * 512 * 2)
            y = ops.linear(x, tensors, bias, scheme)
        check(y, x, tensors, bias, scheme)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [4, 16, 32, 128, 256, 512, 1024])
def test_rotations(block, dtype):
    for kind in ("hadamard", "random_hadamard", "scaled_hadamard"):
        scheme, columns = VQScheme(1, 4, rotation=kind, rotation_block=0, scale_group=0), 3 * block
        rotation = rotation_of(stored(scheme.spec(), 1, columns)[1])
        x = torch.randn(37, columns, device="cuda").to(dtype)
        for inverse in (False, True):
            y = torch.full((38, columns), float("nan"), device="cuda")
            cuda._rotate(x, rotation, scheme, y[:37], inverse)
            exact = reference.rotate(x.double(), rotation, scheme, inverse)
            # A sum of `block` terms in log2(block) roundings.
            bound = torch.finfo(torch.float32).eps * (block.bit_length() + 1) * exact.norm()
            assert (y[:37] - exact).norm() <= bound
            assert y[37:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("name", ["vq-4", "vq-4-scaled"])
def test_rotate_as_an_op(name, dtype, inverse):
    """Also rows that do not lie side by side, or nowhere."""
    scheme = weight_scheme(name)
    rotation = rotation_of(stored(scheme.spec(), 1, 256)[1])
    wide = torch.randn(5, 3, 300, device="cuda").to(dtype)
    for x in (wide[..., 3:259], wide[:, :0, :256], wide[:, :, :256].transpose(0, 1)):
        asked = dispatch.RotateProblem("cuda", str(dtype)[6:], scheme.spec(), 16, 256)
        assert dispatch.select(asked).name == "cuda.rotate"
        y = ops.rotate(x, rotation, scheme, inverse)
        exact = reference.rotate(x.double(), rotation, scheme, inverse)
        assert y.shape == x.shape and y.dtype == dtype
        # A sum of 128 terms in 7 roundings of float32, rounded once.
        bound = (torch.finfo(torch.float32).eps * 8 + torch.finfo(dtype).eps) * exact.norm()
        assert (y - exact).norm() <= bound
    plain = VQScheme(2, 8, rotation="none")
    assert torch.equal(ops.rotate(wide, None, plain), wide)


@pytest.mark.parametrize("name", ["u4", "u3", "u2", "nomad-u4"])
def test_keys_and_values(name, monkeypatch):
    scheme = KV_SCHEMES[name].key
    codebook = universal_tensor(scheme).cuda()
    x = torch.randn(2, 3, 33, 128, device="cuda")
    codes, scale = ops.encode_kv(x, codebook, scheme)
    for part in (slice(None), slice(1, 20)):
        tape, sizes = codes[:, :, part], scale[:, :, part]
        with only_cuda(monkeypatch):
            found = ops.decode_kv(tape, sizes, codebook, scheme, 128)
        expected = reference.decode_rows(tape, codebook, sizes, scheme, 128)
        assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_another_stream(monkeypatch):
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 2048, 2048)
    x = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outputs = []
    with only_cuda(monkeypatch):
        for turn in range(12):  # scratch of one stream must not be another's
            with torch.cuda.stream(streams[turn % 3]):
                outputs.append(ops.linear(x * (turn + 1), tensors, None, scheme))
    torch.cuda.synchronize()
    for turn, y in enumerate(outputs):
        check(y, x * (turn + 1), tensors, None, scheme)


def test_graph(monkeypatch):
    """Captured without a call before it: also a kernel that is compiled during capture."""
    cuda._decoder.cache_clear()
    cuda._rotator.cache_clear()
    cuda._kernel.cache_clear()
    for cache in (fused._kernel, fused.rotator, fused.prepared):
        cache.cache_clear()
    layers = [stored(weight_scheme(name).spec(), 512, 512) for name in ("vq-4", "quip-sharp-2")]
    x = torch.randn(8, 512, device="cuda", dtype=torch.float16)
    torch.mm(x, x.T)  # cuBLAS has its workspace before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with only_cuda(monkeypatch), torch.cuda.graph(graph):
        outputs = [ops.linear(x, tensors, None, scheme) for scheme, tensors in layers]
    for _ in range(3):
        x.copy_(torch.randn(8, 512, device="cuda"))
        for y in outputs:
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for y, (scheme, tensors) in zip(outputs, layers, strict=True):
            check(y, x, tensors, None, scheme)


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs", "inductor"])
@pytest.mark.filterwarnings("ignore")  # of the compilers
def test_compiled(backend, monkeypatch):
    if backend == "inductor" and not (shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("inductor needs a C compiler")
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 256, 256)
    x = torch.randn(8, 256, device="cuda", dtype=torch.float16)

    def forward(x):
        return ops.linear(x, tensors, None, scheme) + 1

    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    with only_cuda(monkeypatch), torch.inference_mode():
        for _ in range(3):
            assert torch.equal(compiled(x).clone(), forward(x))


def test_gradients(monkeypatch):
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 96, 256)
    x = torch.randn(5, 256, device="cuda", requires_grad=True)
    bias = torch.randn(96, device="cuda", requires_grad=True)
    grad = torch.randn(5, 96, device="cuda")
    with only_cuda(monkeypatch):
        ops.linear(x, tensors, bias, scheme).backward(grad)
    weight = rotated_back(double_weight(tensors, scheme, 256), tensors, scheme)
    expected = grad.double() @ weight
    assert (x.grad - expected).norm() <= 1e-5 * expected.norm()
    assert torch.allclose(bias.grad, grad.sum(0))


def test_threads_do_not_mix_arguments_of_launches(monkeypatch):
    """The arguments of a launch are one block of memory; threads must not mix them."""
    from concurrent.futures import ThreadPoolExecutor

    layers = [stored(weight_scheme("vq-4").spec(), 256, 256) for _ in range(8)]
    x = torch.randn(4, 256, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()

    def work(turn):
        scheme, tensors = layers[turn % 8]
        with torch.cuda.stream(torch.cuda.Stream()):
            y = ops.linear(x, tensors, None, scheme)
            torch.cuda.current_stream().synchronize()
        return turn, y

    with only_cuda(monkeypatch), ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(64)))
    for turn, y in results:
        scheme, tensors = layers[turn % 8]
        check(y, x, tensors, None, scheme)


def test_sizes_that_do_not_belong_together():
    from hf_vq.errors import VQFormatError

    scheme, tensors = stored(weight_scheme("vq-4").spec(), 64, 256)
    x = torch.randn(1, 256, device="cuda")
    short = {
        "codes": lambda t: t[:, :-1],
        "codebook": lambda t: t[:, :-1],
        "scale": lambda t: t[1:],
    }
    for key, cut in short.items():
        with pytest.raises(VQFormatError, match="64 rows of 256 weights"):
            ops.linear(x, {**tensors, key: cut(tensors[key])}, None, scheme)
    with pytest.raises(VQFormatError, match="a sign for each"):
        ops.linear(x, {**tensors, "signs": tensors["signs"][:-1]}, None, scheme)


def test_schemes_without_a_kernel_say_why(monkeypatch):
    codes = torch.empty(1, 2048, dtype=torch.uint8, device="cuda")
    for spec, reason in (
        ("vq1x4r2-universal-g128-random_hadamard128-shared", "second pass"),
        ("vq2x8r1-universal-g128-qr128", "QR"),
        ("vq2x8r1-universal-g128-random_hadamard0", "2048"),
    ):
        asked = linear_problem("linear", codes.half(), spec, 64)
        verdicts = {verdict.entry.name: verdict for verdict in dispatch.explain(asked)}
        assert reason in verdicts["cuda.linear"].reason
        assert reason in verdicts["cuda.fused_linear"].reason
        assert not verdicts["cuda.linear"].chosen
