"""Fused expert tensors: which layouts are quantized, and which are refused."""

import copy
import inspect
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.moe import use_experts_implementation
from transformers.models.dbrx.modeling_dbrx import DbrxExpertGLU

from hf_vq.errors import VQConfigError
from hf_vq.fit import fit_weight
from hf_vq.formats.catalog import weight_scheme
from hf_vq.hf import VQConfig
from hf_vq.hf.checkpoint.headers import packaged
from hf_vq.nn import VQExperts, replace_modules
from hf_vq.nn.experts import VQSortedExperts
from hf_vq.nn.replace import vq_modules
from tests.fixtures.checkpoints import assert_same_state
from tests.fixtures.tiny_models import CONFIGS, tokens

LOAD = AutoModelForCausalLM.from_pretrained
SCHEME = weight_scheme("vq-4")
EXPERTS, HIDDEN, INNER = 3, 32, 48


def experts_class(**flags):
    """A class of experts with random parameters, as Transformers' models define them."""
    gate, bias = flags.get("has_gate", True), flags.get("has_bias", False)

    @use_experts_implementation(**flags)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = EXPERTS
            self.act_fn = nn.SiLU()
            first = "gate_up_proj" if gate else "up_proj"
            for name, out, size in (
                (first, INNER * (2 if gate else 1), HIDDEN),
                ("down_proj", HIDDEN, INNER),
            ):
                shape = (size, out) if flags.get("is_transposed") else (out, size)
                self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *shape) * 0.2))
                if bias:
                    self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, out)))
            if flags.get("has_post_expert_norm"):
                self.post_expert_norm = nn.RMSNorm(HIDDEN)

        def forward(self, hidden, index, weights):
            raise NotImplementedError

        if not flags.get("is_concatenated", True):

            def _apply_gate(self, gate_up):
                gate, up = gate_up[..., ::2], gate_up[..., 1::2]
                return (up + 1) * torch.sigmoid(gate)

    return Experts


class Config:
    _experts_implementation = "batched_mm"


@pytest.mark.parametrize("has_post_expert_norm", [False, True])
@pytest.mark.parametrize("is_concatenated", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.usefixtures("reference_kernels")
def test_every_layout(has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm):
    flags = locals()
    known = inspect.signature(use_experts_implementation).parameters
    if not flags.keys() <= known.keys() and not has_post_expert_norm:
        del flags["has_post_expert_norm"]
    if not flags.keys() <= known.keys():
        pytest.skip("this Transformers has no such experts")
    original = experts_class(**flags)(Config())
    kept = copy.deepcopy(original)
    with torch.device("meta"):
        module = VQExperts(original, SCHEME)
    for name in module.weights():
        module.register_parameter(name, None)
        dense = getattr(kept, name)
        fitted = [
            fit_weight(m, SCHEME, search="norm").tensors for m in module.matrices(name, dense)
        ]
        for attribute, tensor in module.begin_load(name, fitted).items():
            assert tensor.shape == module.specs[attribute].shape
            setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))
    for attribute in module.shared_names():
        module._buffers[attribute] = torch.empty(0)
    module.set_shared(packaged([module], seed=0))
    for name in module.weights():
        getattr(kept, name).data.copy_(module.decoded(name))
    x = torch.randn(5, HIDDEN)
    index, weights = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0], [1, 2]]), torch.rand(5, 2)
    exact = copy.deepcopy(kept).double()(x.double(), index, weights.double())
    allowed = 2 * (kept(x, index, weights) - exact).abs().max() + 1e-5 * exact.abs().max()
    assert (module(x, index, weights) - exact).abs().max() <= allowed
    # All experts, and one token whose fewer slots copy the codes of each.
    for rows in (slice(None), slice(1)):
        y = module.forward_unsynchronized(x[rows], index[rows], weights[rows])
        assert (y - exact[rows]).abs().max() <= allowed
    restored = module.restored(torch.float32)
    assert type(restored) is type(kept)
    assert torch.equal(restored(x, index, weights), kept(x, index, weights))


def test_an_expert_of_another_rank_is_skipped(quantized):
    experts = LOAD(quantized("qwen3-moe")).model.layers[0].mlp.experts
    x, weights = torch.randn(2, 64), torch.ones(2, 2)
    some = experts(x, torch.tensor([[1, 4], [4, 4]]), weights)
    assert torch.equal(some[0], experts.expert(1, x[:1])[0]) and not some[1].any()
    experts.vq_down_proj_scale.data[0] = torch.inf  # nor does it matter what expert 0 says
    for rows in (slice(None), slice(1)):
        index = torch.tensor([[1, 4], [4, 4]])[rows]
        y = experts.forward_unsynchronized(x[rows], index, weights[rows])
        torch.testing.assert_close(y, some[rows])


def test_names_do_not_start_with_a_parameters_name(quantized):
    experts = LOAD(quantized("gpt-oss")).model.layers[0].mlp.experts
    assert isinstance(experts, VQExperts)
    assert set(dict(experts.named_parameters())) == {
        "gate_up_proj_bias", "down_proj_bias",
        *(f"vq_{p}_proj_{k}" for p in ("gate_up", "down") for k in ("codes", "scale", "signs")),
    }  # fmt: skip


def test_routers_stay_dense(quantized):
    for name, router in (("qwen3-moe", "gate"), ("gpt-oss", "router")):
        layer = getattr(LOAD(quantized(name)).model.layers[0].mlp, router)
        assert layer.weight.dtype == torch.float32


def test_experts_can_be_left_out(dense, tmp_path):
    config = VQConfig(modules_to_not_convert=["experts"])
    model = LOAD(dense("qwen3-moe"), quantization_config=config)
    assert not any(isinstance(module, VQExperts) for module in model.modules())
    model.save_pretrained(tmp_path)
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.usefixtures("reference_kernels")
def test_llama4(tmp_path):
    config = Llama4TextConfig(
        hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=2,
        vocab_size=64, interleave_moe_layer_step=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    model = LOAD(tmp_path / "dense", quantization_config=VQConfig())
    assert sum(isinstance(module, VQSortedExperts) for module in model.modules()) == 1
    model.save_pretrained(tmp_path / "vq")
    again = LOAD(tmp_path / "vq")
    ids = tokens() % 64
    expected = model(ids).logits
    assert torch.equal(again(ids).logits, expected)
    dense = again.dequantize()
    assert type(dense.model.layers[0].feed_forward.experts).__name__ == "Llama4TextExperts"
    torch.testing.assert_close(dense(ids).logits, expected, rtol=1e-4, atol=1e-5)
    one = ids[:, :1]
    torch.testing.assert_close(dense(one).logits, model(one).logits, rtol=1e-4, atol=1e-5)


def test_experts_below_one_another_are_refused():
    sizes = {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 2, "ffn_act_fn": {}}
    model = nn.ModuleDict({"mlp": DbrxExpertGLU(SimpleNamespace(**sizes))})
    with pytest.raises(VQConfigError, match=r"mlp \(DbrxExpertGLU\).*not_convert=\['mlp'\]"):
        replace_modules(model, lambda name: SCHEME)


def test_mixtral(tmp_path):
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3, vocab_size=96,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    model = LOAD(tmp_path / "dense", quantization_config=VQConfig())
    assert sum(isinstance(module, VQExperts) for module in model.modules()) == 1
    model.save_pretrained(tmp_path / "vq")
    again = LOAD(tmp_path / "vq")
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


class SharesExperts(Qwen3MoeForCausalLM):
    """Its second layer has the experts of the first, as a decoder may have its encoder's."""

    _tied_weights_keys: ClassVar = {
        f"model.layers.1.mlp.experts.{name}": f"model.layers.0.mlp.experts.{name}"
        for name in ("gate_up_proj", "down_proj")
    }


@pytest.mark.usefixtures("reference_kernels")
def test_tied_experts_stay_dense(tmp_path):
    config = CONFIGS["qwen3-moe"]()
    config.tie_word_embeddings = True
    SharesExperts(config).save_pretrained(tmp_path / "dense")
    model = SharesExperts.from_pretrained(tmp_path / "dense", quantization_config=VQConfig())
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert not any(isinstance(each, VQExperts) for each in experts)
    assert experts[0].down_proj is experts[1].down_proj
    assert "model.layers.0.self_attn.q_proj" in vq_modules(model)
    model.save_pretrained(tmp_path / "vq")
    again = SharesExperts.from_pretrained(tmp_path / "vq")
    assert_same_state(model, again)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
