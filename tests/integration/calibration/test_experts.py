"""Calibration of fused experts: what each one reads, what is shrunk, what is recorded."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_vq.calibration.hessians import SHRINKAGE, Listener, Site
from hf_vq.calibration.text import sample_text
from hf_vq.hf import VQConfig
from hf_vq.nn import VQExperts
from tests.fixtures.tiny_models import CONFIGS

CALIBRATION = {"text": "model", "tokens": 256, "context": 32}
MOE = ["qwen3-moe", "gpt-oss"]


@pytest.fixture
def layer(dense):
    """`layer("gpt-oss")`: the first block's experts of a tiny model."""

    def find(name, **options):
        model = AutoModelForCausalLM.from_pretrained(dense(name), **options)
        return model.model.layers[0].mlp.experts

    return find


def routing(tokens, experts):
    index = torch.tensor([[token % experts, (token + 1) % experts] for token in range(tokens)])
    return index, torch.rand(tokens, 2)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", MOE)
def test_a_listener_changes_nothing_and_hears_each_expert(name, implementation, layer):
    experts = layer(name, experts_implementation=implementation)
    x = torch.randn(7, 64)
    index, weights = routing(7, 3)  # nothing for the fourth
    expected = experts(x, index, weights)
    listener = Listener()
    with listener.listening({"e": experts}):
        torch.testing.assert_close(experts(x, index, weights), expected, atol=1e-5, rtol=1e-4)
    first, last = listener.sites
    assert (first.layers, last.layers) == (["e.gate_up_proj"], ["e.down_proj"])
    for expert in range(4):
        read = x[(index == expert).any(1)]
        assert first.tokens[expert] == last.tokens[expert] == len(read)
        torch.testing.assert_close(first.total[expert], read.T @ read)
    again = experts(x, index, weights)
    assert torch.equal(again, expected), "it is itself again"
    inner = last.total.sum(0)
    assert inner.shape == (32, 32) and float(inner.diagonal().min()) > 0


def test_gradients_of_each_expert(layer):
    """Squares of what backward gives, for the output of each projection."""
    experts, x = layer("qwen3-moe"), torch.randn(6, 64, requires_grad=True)
    index, weights = routing(6, 4)
    listener = Listener(gradients=True)
    with listener.listening({"e": experts}):
        y = experts(x, index, weights)
    out = torch.randn_like(y)
    y.backward(out)
    for expert in range(4):
        token, position = torch.where(index == expert)
        expected = (weights[token, position, None] * out[token]).square().sum(0)
        torch.testing.assert_close(listener.weights["e.down_proj"][expert], expected)
    assert listener.weights["e.gate_up_proj"].shape == (4, 64)


def test_experts_of_few_tokens_lean_on_the_others():
    total = torch.stack([3.0 * torch.eye(8), torch.zeros(8, 8), 1e5 * torch.ones(8, 8)])
    site = Site(["e"], total, [3, 0, 100_000])
    pooled = total.sum(0) / 100_003
    torch.testing.assert_close(site.hessian(1), pooled)
    prior = SHRINKAGE * 8
    expected = (3 * torch.eye(8) + prior * pooled) / (3 + prior)
    torch.testing.assert_close(site.hessian(0), expected)
    torch.testing.assert_close(site.hessian(2), torch.ones(8, 8), atol=1e-3, rtol=0)


@pytest.mark.filterwarnings("ignore:vq-2 loses much quality")
@pytest.mark.parametrize("name", MOE)
def test_each_expert_comes_closer_on_what_it_reads(name, dense):
    """The attention before the first experts is left dense, so that they read what they read in
    the original; errors are those of their outputs, expert by expert, without the router."""
    keep = {"modules_to_not_convert": ["self_attn"]}
    load = AutoModelForCausalLM.from_pretrained
    plain = load(dense(name), quantization_config=VQConfig("vq-2", **keep))
    config = VQConfig("vq-2", calibration=CALIBRATION, **keep)
    model, original = load(dense(name), quantization_config=config), load(dense(name))
    read = {}

    def hear(module, args, output):
        read["x"], read["index"] = args[0], args[1]

    with torch.no_grad():
        handle = original.model.layers[0].mlp.experts.register_forward_hook(hear)
        inputs = []
        for ids in sample_text(original, 8, 32):
            original(ids[None])
            inputs.append((read["x"], read["index"]))
        handle.remove()
        x, index = (torch.cat(parts) for parts in zip(*inputs, strict=True))
        exact = original.model.layers[0].mlp.experts
        errors = []
        for other in (model, plain):
            module = other.model.layers[0].mlp.experts
            assert isinstance(module, VQExperts)
            wrong = module.decoded("gate_up_proj") - exact.gate_up_proj
            turned = wrong if module.is_transposed else wrong.transpose(1, 2)
            heard = [x[(index == e).any(1)] for e in range(4)]
            errors.append(
                [float((a @ w).square().sum()) for a, w in zip(heard, turned, strict=True)]
            )
        assert sum(errors[0]) < 0.9 * sum(errors[1])
    about = model.config.quantization_config.provenance
    names = {f"model.layers.{i}.mlp.experts.{w}" for i in (0, 1) for w in module.projections}
    assert names <= set(about["relative_error"])
    assert names <= set(about["calibration"]["output_error"])


def test_an_expert_without_tokens_is_recorded(dense, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dense("gpt-oss"))
    model.model.layers[1].mlp.router.bias.data[2] = -1e4
    model.save_pretrained(tmp_path / "model")
    config = VQConfig("vq-3", calibration=CALIBRATION)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)
    fallbacks = found.config.quantization_config.provenance["calibration"]["fallbacks"]
    where = "model.layers.1.mlp.experts"
    assert fallbacks == {
        f"{where}.{weight}": "has experts without a token (2): calibrated on the inputs of the "
        "other experts"
        for weight in ("gate_up_proj", "down_proj")
    }
    found.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(part, again[key]) for key, part in found.state_dict().items())


def test_moe_models_are_among_those_that_are_tested():
    assert set(MOE) <= set(CONFIGS)
