"""Folds leave what a model computes unchanged, each alone and all together, or are refused."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
)

from hf_vq import VQCalibrationError
from hf_vq.calibration.equivalent_transforms.apply import apply_transforms, layers_to_record
from hf_vq.calibration.equivalent_transforms.largest_inputs import largest_inputs
from hf_vq.calibration.equivalent_transforms.structure import structure_of
from hf_vq.hf.calibration_options import EQUIVALENT_TRANSFORMS
from tests.fixtures.tiny_models import CONFIGS, tokens

SIZES = {
    "vocab_size": 96, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
BUILT_SO = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "one head": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": CONFIGS["qwen3"](),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "granite": GraniteConfig(**SIZES),
}
PREFIX = "model.layers"


class Float64Norm(torch.nn.Module):
    """A norm as Transformers', which computes in float32, in float64."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def make(config, dtype=torch.float64):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for layer in model.get_submodule(PREFIX) if hasattr(model, "model") else ():
            if hasattr(layer.mlp, "up_proj"):  # channels of very different sizes
                layer.mlp.up_proj.weight.mul_(torch.randn(len(layer.mlp.up_proj.weight), 1).exp())
    if dtype == torch.float64:
        for name, module in list(model.named_modules()):
            if type(module).__name__.endswith("RMSNorm"):
                model.set_submodule(name, Float64Norm(module))
    return model


def text():
    return torch.randint(3, 96, (4, 32), generator=torch.Generator().manual_seed(0))


def folded(model, on, groups=True):
    transforms = dict.fromkeys(EQUIVALENT_TRANSFORMS, False) | dict.fromkeys(on, True)
    keys = transforms["smooth_attention"]
    largest = largest_inputs(
        model, text(), layers_to_record(model, PREFIX, transforms), keys, False
    )
    apply_transforms(model, PREFIX, transforms, largest, text()[0], groups=groups)
    return largest


def logits(model):
    with torch.no_grad():
        return model(tokens(4, 32)).logits


@pytest.mark.parametrize(
    "on", [*((name,) for name in EQUIVALENT_TRANSFORMS), EQUIVALENT_TRANSFORMS], ids="+".join
)
@pytest.mark.parametrize("name", BUILT_SO)
def test_the_model_computes_the_same(name, on):
    model = make(BUILT_SO[name])
    before, weights = logits(model), [p.clone() for p in model.parameters()]
    folded(model, on)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-12 * float(before.norm()))
    after = list(model.parameters())
    assert len(after) > len(weights) or any(
        not torch.equal(a, b) for a, b in zip(after, weights, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_within_rounding(dtype):
    model = make(BUILT_SO["qwen3"], dtype)
    before = logits(model).double()
    folded(model, EQUIVALENT_TRANSFORMS)
    moved = (logits(model).double() - before).norm() / before.norm()
    assert 0 < moved < 8 * torch.finfo(dtype).eps
    assert all(p.dtype == dtype for p in model.parameters())


def test_norms_become_one_and_hidden_states_are_spread():
    model = make(BUILT_SO["llama"])
    model.model.embed_tokens.weight.data[:, 5] *= 50  # one channel much larger than the others
    structure = structure_of(model, PREFIX)
    before = model.model.embed_tokens(tokens())
    folded(model, ["rotate"])
    after = model.model.embed_tokens(tokens())
    torch.testing.assert_close(after.norm(dim=-1), before.norm(dim=-1))
    assert after.abs().max() / after.std() < before.abs().max() / before.std() / 2
    norms = [structure.norm, *(b.attention_norm for b in structure.blocks)]
    assert all((norm.weight == 1).all() for norm in norms)


def test_a_tied_head_gets_its_own_weight_and_keeps_it(tmp_path):
    model = make(BUILT_SO["tied"], torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    folded(model, ["rotate"])
    assert not model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("groups", [True, False])
def test_down_is_smoothed_as_the_formula_says(groups):
    model = make(BUILT_SO["llama"])
    layer = model.model.layers[1].mlp
    up, down = layer.up_proj.weight.clone(), layer.down_proj.weight.clone()
    largest = folded(model, ["smooth_outputs"], groups)["model.layers.1.mlp.down_proj"].double()
    a, b = (0.3, 0.7) if groups else (0.1, 0.9)
    factors = largest**a / down.abs().amax(0) ** b
    factors /= factors.log().mean().exp()
    torch.testing.assert_close(layer.up_proj.weight, up / factors[:, None])
    torch.testing.assert_close(layer.down_proj.weight, down * factors)


def test_reordered_channels_fall():
    model = make(BUILT_SO["llama"])
    folded(model, ["reorder"])
    transforms = dict.fromkeys(EQUIVALENT_TRANSFORMS, False) | {"reorder": True}
    again = largest_inputs(model, text(), layers_to_record(model, PREFIX, transforms), False, False)
    assert len(again) == 2
    for channels in again.values():
        assert (channels.diff() <= 1e-6).all() and channels[0] > 2 * channels[-1]


def test_silent_channels_are_left_alone():
    model = make(BUILT_SO["llama"])
    layer = model.model.layers[0].mlp
    with torch.no_grad():
        layer.up_proj.weight[3], layer.down_proj.weight[:, 4] = 0, 0
    kept = layer.up_proj.weight[4].clone()
    before = logits(model)
    folded(model, ["smooth_outputs"])
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-12 * float(before.norm()))
    assert torch.equal(layer.up_proj.weight[4], kept)


REFUSED = {
    "gemma3": (CONFIGS["gemma3"], "Gemma3RMSNorm at model.norm that is not x / rms"),
    "gpt2": (CONFIGS["gpt2"], "transformer.wpe.* outside its blocks"),
    "qwen3-moe": (CONFIGS["qwen3-moe"], "has no model.layers.0.mlp.gate_proj"),
    "gpt-oss": (CONFIGS["gpt-oss"], "has no model.layers.0.mlp.gate_proj"),
    "cohere": (lambda: CohereConfig(**SIZES), "CohereLayerNorm at model.norm"),
    "olmo2": (lambda: Olmo2Config(**SIZES), "has no model.layers.0.input_layernorm"),
    "phi3": (lambda: Phi3Config(**SIZES), "has no model.layers.0.self_attn.q_proj"),
    "size": (lambda: LlamaConfig(**{**SIZES, "hidden_size": 92}), "Hadamard matrix of size 92"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_name(name):
    config, message = REFUSED[name]
    model = make(config(), torch.float32)
    prefix = "transformer.h" if name == "gpt2" else PREFIX
    transforms = dict.fromkeys(EQUIVALENT_TRANSFORMS, False) | {"rotate": True}
    with pytest.raises(VQCalibrationError, match=message) as caught:
        layers_to_record(model, prefix, transforms)
        apply_transforms(model, prefix, transforms, {}, text()[0], groups=True)
    assert type(model).__name__ in str(caught.value) and "'rotate': False" in str(
        caught.value
    ).replace('"', "'")


def test_a_model_that_does_something_else_is_found_out():
    """What no name tells: a block that adds a constant to its hidden states."""
    model = make(BUILT_SO["llama"])
    model.model.layers[0].register_forward_hook(lambda module, args, result: result + 0.5)
    with pytest.raises(VQCalibrationError, match="changed the logits of LlamaForCausalLM"):
        folded(model, ["rotate"])


def test_an_mlp_that_is_not_gated_so():
    model = make(BUILT_SO["llama"])
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.gate_proj(x) * mlp.act_fn(mlp.up_proj(x)))
    with pytest.raises(VQCalibrationError, match=r"LlamaMLP at model.layers.1.mlp"):
        structure_of(model, PREFIX)


def test_inputs_that_are_not_finite():
    model = make(BUILT_SO["llama"])
    model.model.layers[0].mlp.up_proj.weight.data[2] *= 1e200  # beyond float32
    with pytest.raises(VQCalibrationError, match=r"inputs of .*layers.0.mlp.down_proj hold NaN"):
        folded(model, ["reorder"])
    model.model.layers[1].mlp.up_proj.weight.data[2] = torch.nan
    with pytest.raises(VQCalibrationError, match=r"layers.1.mlp.up_proj.weight holds NaN"):
        folded(model, ["reorder"])
