"""What `turboquant-model` (version 0.1.0) gets wrong, where no other test of ours is about it.

Others: docs/turboquant.md lists all, and the test of each.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hf_vq import VQConfig, VQScheme, dispatch, ops
from hf_vq.backends.cpu import library
from hf_vq.errors import VQConfigError, VQSchemeError
from hf_vq.fit import fit_weight
from hf_vq.fit.weight import fixed_tensors
from hf_vq.formats import weight_scheme
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
TWO_PASSES = [
    "turboquant-4+2",
    "vq1x3+1r2-universal-g32-random_hadamard32-shared",
    "vq1x2r2-universal-g32-qr32-rerotated",
]


@torch.no_grad()
@pytest.mark.parametrize("rotation", ["random_hadamard0", "hadamard0", "qr0"])
@pytest.mark.parametrize("columns", [96, 320])
def test_groups_of_a_whole_row(columns, rotation):
    """There: a crash, where a row is no power of two (Hadamard), or wrong sizes of its tail."""
    scheme = VQScheme.parse(f"vq1x4r1-universal-g0-{rotation}")
    weight = torch.randn(7, columns)
    tensors = {**fit_weight(weight, scheme).tensors, **fixed_tensors(scheme, columns, 0)}
    wrong = ops.decode_weight(tensors, scheme, columns) - weight
    assert float(wrong.square().mean()) < 0.0125  # of a scale for so long a row; a tail: 1
    assert wrong.reshape(7, -1, 16).square().mean((0, 2)).max() < 0.05


def test_rows_of_an_odd_number_of_columns():
    """There: a crash, after a padding that no reader takes away. Here: an error with a name."""
    with pytest.raises(VQSchemeError, match=r"mlp\.up has in_features=63"):
        fit_weight(torch.randn(4, 63), weight_scheme("turboquant-4"), where="mlp.up")


@pytest.mark.parametrize("option", ["norm_codec", "entropy_coding", "rotation_strategy"])
def test_no_option_is_taken_and_ignored(option):
    """There: quantize_model takes norm_codec and entropy_coding, and does nothing with them."""
    with pytest.raises(VQConfigError, match=f"no argument '{option}'"):
        VQConfig("turboquant-4", **{option: "fp16"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_keep_their_dtype(dense, dtype):
    """There: x becomes float32, so that no tensor core of 16 bits is ever used, and so does y."""
    model = LOAD(dense("llama"), quantization_config=VQConfig(TWO_PASSES[0]), dtype=dtype)
    x = torch.randn(2, 64, dtype=dtype, requires_grad=True)
    y = model.model.layers[0].mlp.up_proj(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype


@pytest.mark.parametrize("scheme", ["turboquant-4", TWO_PASSES[2]])
@torch.no_grad()
def test_nothing_is_drawn_in_a_forward(dense, tmp_path, monkeypatch, scheme):
    """There: signs of every group are drawn on the CPU at every call, and matrices from seeds that
    a saved file may have wrong. Here a file holds them."""
    LOAD(dense("llama"), quantization_config=VQConfig(scheme)).save_pretrained(tmp_path)

    def drawn(*_, **__):
        raise AssertionError

    model, ids = LOAD(tmp_path), tokens()
    for name in ("randint", "randn", "rand"):
        monkeypatch.setattr(torch, name, drawn)
    monkeypatch.setattr(torch.linalg, "qr", drawn)
    assert model(ids).logits.isfinite().all()


class Bytes(TorchDispatchMode):
    """Ops that make tensors of bytes, as copies of codes are."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.uint8:
            self.seen.append(str(func))
        return out


@pytest.mark.skipif(library.load() is None, reason=library.why_not())
@torch.no_grad()
def test_codes_are_not_copied(dense):
    """There: the codes of every group are made contiguous at every call."""
    model = LOAD(dense("llama"), quantization_config=VQConfig("turboquant-4"))
    with Bytes() as watched:
        model(tokens())
    assert watched.seen == []


@pytest.mark.parametrize("scheme", TWO_PASSES)
@torch.no_grad()
def test_layers_of_two_passes_compile(dense, scheme):
    """There: neither torch.compile nor CUDA graphs (those: tests/gpu/linear/test_residual.py)."""
    model = LOAD(dense("llama"), quantization_config=VQConfig(scheme))
    layer, x = model.model.layers[0].mlp.down_proj, torch.randn(2, 96)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_an_installed_package_is_no_gpu():
    """There: a kernel is chosen because cuda.tile can be imported, and fails without a GPU."""
    problem = dispatch.LinearProblem("cpu", "bfloat16", "vq1x4r1-universal-g0-none", 1, 64, 64)
    assert dispatch.select(problem).name.partition(".")[0] not in ("cuda", "triton")
