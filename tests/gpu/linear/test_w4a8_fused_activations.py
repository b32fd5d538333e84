"""RMSNorm and gated products that kernels round for W4A8 layers, against the models' own modules.

A gated product has the same bits. A norm's sum of squares has an order of its own, so its floats
are compared with float64: twice the error of PyTorch's norm in that dtype is allowed.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_vq import ops, patches
from hf_vq.backends.cuda import w4a8_inputs
from hf_vq.errors import VQFormatError
from hf_vq.formats import linear_scheme
from hf_vq.formats.qoq import encode
from hf_vq.hf import VQConfig
from hf_vq.nn import W4A8Linear
from hf_vq.nn.lazy_activation import Gated, LazyActivation, Norm
from hf_vq.ops import fused_inputs, w4a8
from tests.fixtures.cuda_layers import natural, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = (torch.float16, torch.bfloat16)
SLOTS = [patch.target.partition(":")[2] for patch in patches.TABLE if patch.fills]
COLUMNS = (32, 704, 4096, 14336)
NAMES = ("qoq-w4a8", "qoq-w4a8-g128")


def agree(rounded, floats):
    """The same integers, scales and sums as of floats."""
    numbers, size = w4a8.quantize_tokens(floats)
    found, of_tokens, sums = natural(rounded)
    columns = floats.shape[-1]
    assert torch.equal(found[:, :columns], numbers) and not found[:, columns:].any()
    assert torch.equal(of_tokens.nan_to_num(-1), size.nan_to_num(-1))
    assert torch.equal(sums, numbers.sum(1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_one_token_alone(columns, dtype):
    gate, up = (torch.randn(1, columns, device="cuda").to(dtype) for _ in range(2))
    poison()
    agree(w4a8_inputs.gated(False, gate, up), fused_inputs.gated(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
def test_gated_products_have_the_same_bits(columns, swizzled, dtype):
    tokens = 21
    gate = torch.randn(tokens, columns, device="cuda").mul_(4).to(dtype)
    up = torch.randn(tokens, columns, device="cuda").to(dtype)
    gate[1], up[2], gate[3] = 0, 0, -40
    gate[4, -1], up[5, 0], gate[6, 1] = torch.nan, torch.inf, -torch.inf
    poison()
    agree(w4a8_inputs.gated(swizzled, gate, up), fused_inputs.gated(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_every_number_has_the_same_bits(dtype):
    """One row of all numbers under each factor: |silu| of 16 bits is told apart by 8 only where it
    is large, so rows are of numbers of one exponent and sign."""
    every = torch.arange(1 << 16, device="cuda").to(torch.int32).sub(1 << 15).to(torch.int16)
    gate = every.view(dtype).view(-1, 64)
    for factor in (1.0, 0.73, -3.1):
        up = torch.full_like(gate, factor)
        agree(w4a8_inputs.gated(True, gate, up), fused_inputs.gated(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
def test_norms_of_whole_numbers_have_the_same_bits(columns, swizzled, dtype):
    """Their sums of squares are exact in any order."""
    x = torch.randint(-5, 6, (21, columns), device="cuda").to(dtype)
    x[1], x[2, -1], x[3, 0] = 0, torch.nan, torch.inf
    norm = LlamaRMSNorm(columns, eps=1e-5).to("cuda", dtype)
    with torch.no_grad():
        norm.weight.normal_()
        poison()
        agree(w4a8_inputs.norm(swizzled, x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
@torch.no_grad()
def test_norms_are_as_near_as_those_of_torch(columns, dtype):
    sizes = torch.logspace(-3, 2, 40, device="cuda")[:, None]
    x = (torch.randn(40, columns, device="cuda") * sizes).to(dtype)
    weight = torch.randn(columns, device="cuda").to(dtype)
    wide, eps = x.double(), 1e-6
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
    numbers, size = w4a8.quantize_tokens(fused_inputs.rms_norm(x, weight, eps))
    torchs = (numbers * size).double() - exact
    found, of_tokens, sums = natural(w4a8_inputs.norm(True, x, weight, eps))
    ours = (found[:, :columns] * of_tokens).double() - exact
    bound = torch.finfo(torch.float32).eps * exact.norm(dim=-1)
    assert bool((ours.norm(dim=-1) <= 2 * torchs.norm(dim=-1) + bound).all())
    # A float is at most a rounding of 16 bits apart, twice: so is a scale, and an integer by one.
    assert bool(((of_tokens - size).abs() <= 2 * torch.finfo(dtype).eps * size).all())
    assert int((found[:, :columns].int() - numbers.int()).abs().max()) <= 1
    assert torch.equal(sums, found.sum(1, dtype=torch.int32))


@torch.no_grad()
def test_tensors_that_do_not_belong_together_are_refused():
    x, weight = torch.randn(3, 64, device="cuda").bfloat16(), torch.ones(64, device="cuda")
    for wrong in (weight, weight.bfloat16()[:32], weight.bfloat16().cpu()):
        with pytest.raises(VQFormatError, match=r"norm of .* got"):
            w4a8_inputs.norm(False, x, wrong, 1e-6)
        with pytest.raises(VQFormatError, match=r"gated of .* got"):
            w4a8_inputs.gated(False, x, wrong)
    w4a8_inputs.norm(False, x, weight.bfloat16(), 1e-6)


def layer(name, rows, columns):
    return encode(torch.randn(rows, columns, device="cuda"), linear_scheme(name))


@pytest.mark.parametrize("tokens", [1, 2, 9, 16, 17, 64, 130, 600])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_products_of_rounded_inputs_have_the_same_bits(name, tokens):
    """Layers of several sizes, whose plans differ, read the same integers."""
    columns, dtype = 2080, torch.bfloat16
    gate, up = (torch.randn(tokens, columns, device="cuda").to(dtype) for _ in range(2))
    plain = fused_inputs.gated(gate, up)
    later = LazyActivation(Gated(gate[None], up[None]))
    poison()
    for rows in (4096, 37, 1024, 256):
        tensors = layer(name, rows, columns)
        bias = torch.randn(rows, device="cuda").to(dtype)
        for added in (bias, None):
            y = later.times(tensors, added, name)
            assert y.shape == (1, tokens, rows) and y.dtype == dtype
            assert torch.equal(y[0], ops.w4a8_linear(plain, tensors, added, name))
    assert len(later._rounded) == 1


@pytest.mark.parametrize("tokens", [1, 16, 100])
@torch.no_grad()
def test_inputs_and_weights_that_were_just_written(tokens):
    """Kernels begin before those before them have ended."""
    name, columns = "qoq-w4a8-g128", 1024
    tensors, others = layer(name, 1024, columns), [layer(name, 1024, columns) for _ in range(3)]
    weight = torch.ones(columns, device="cuda", dtype=torch.bfloat16)
    x = torch.randint(-9, 10, (tokens, columns), device="cuda").bfloat16()
    for turn in range(12):
        for key, tensor in tensors.items():
            tensor.copy_(others[turn % 3][key])
        h = x * (turn + 1)
        later = LazyActivation(Norm(h, weight, 1e-6))
        found = [later.times(each, None, name) for each in (tensors, others[0], tensors)]
        floats = fused_inputs.rms_norm(h, weight, 1e-6)
        torch.cuda.synchronize()
        assert torch.equal(found[0], ops.w4a8_linear(floats, others[turn % 3], None, name))
        assert torch.equal(found[1], ops.w4a8_linear(floats, others[0], None, name))
        assert torch.equal(found[2], found[0])


@pytest.mark.parametrize("tokens", [1, 16, 96])
@torch.no_grad()
def test_in_a_graph(tokens):
    name = "qoq-w4a8-g128"
    tensors = layer(name, 512, 1024)
    gate, up = (torch.randn(tokens, 1024, device="cuda").bfloat16() for _ in range(2))
    LazyActivation(Gated(gate, up)).times(tensors, None, name)  # compiles, which no graph holds
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = LazyActivation(Gated(gate, up)).times(tensors, None, name)
    y.fill_(float("nan"))
    gate.copy_(torch.randn_like(gate))
    graph.replay()
    assert torch.equal(y, ops.w4a8_linear(fused_inputs.gated(gate, up), tensors, None, name))


class Several(torch.nn.Module):
    """Three layers with one input, as a model has them."""

    def __init__(self, name):
        super().__init__()
        self.each = torch.nn.ModuleList(
            W4A8Linear(1024, rows, False, linear_scheme(name)) for rows in (512, 128, 128)
        )
        for one in self.each:
            one.assign(layer(name, one.out_features, 1024), None)

    def forward(self, x):
        return [one(x) for one in self.each]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("tokens", "expected"), [(16, 1), (1, 0), (100, 1)])
@torch.no_grad()
def test_compiled(tokens, expected, monkeypatch):
    from torch._inductor import config

    made, plain = [], w4a8_inputs.rounded

    def counted(kernel, *arguments, **options):
        made.append(kernel.plan.source.value)
        return plain(kernel, *arguments, **options)

    monkeypatch.setattr(w4a8_inputs, "rounded", counted)
    model, x = Several("qoq-w4a8-g128"), torch.randn(tokens, 1024, device="cuda").bfloat16()
    apart = model(x)
    assert made == ["tokens"] * 3 * expected
    torch.compiler.reset()  # or numbers of tokens become symbols
    with config.patch({slot: None for slot in SLOTS}):
        compiled = torch.compile(model, fullgraph=True)
        compiled(x)
        made.clear()
        assert all(map(torch.equal, compiled(x), apart))
    assert made == ["tokens"] * expected


SIZES = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@torch.no_grad()
def test_models_fuse_activations_and_round_no_worse(kind, tmp_path, monkeypatch):
    AutoModelForCausalLM.from_config(kind(**SIZES)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=VQConfig("qoq-w4a8-g128"), dtype=torch.bfloat16,
        device_map="cuda",
    )  # fmt: skip
    dense = copy.deepcopy(model).dequantize(torch.float32).float()
    made, plain = [], w4a8_inputs.rounded

    def counted(kernel, *arguments, **options):
        made.append(kernel.plan.source.value)
        return plain(kernel, *arguments, **options)

    monkeypatch.setattr(w4a8_inputs, "rounded", counted)
    for length, alone in ((1, 0), (9, 1), (40, 1)):
        ids = torch.randint(3, 320, (1, length), device="cuda")
        made.clear()
        found = model(ids, use_cache=False).logits.float()
        block = ["norm", *["tokens"] * alone, "norm", "gated"]  # o rounds for itself
        assert made == block * 2
        monkeypatch.setenv("HF_VQ_FUSED_INPUTS", "0")
        made.clear()
        apart = model(ids, use_cache=False).logits.float()
        assert set(made) <= {"tokens"}
        monkeypatch.delenv("HF_VQ_FUSED_INPUTS")
        # An integer may turn where norms differ in their last bit: as much as rounding does itself.
        exact = dense(ids, use_cache=False).logits
        assert (found - exact).norm() <= 2 * (apart - exact).norm()
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    made.clear()
    assert model.generate(ids, **asked).shape == (1, 45)
    assert made.count("norm") == 5 * 4 and made.count("gated") == 5 * 2
