"""`replace_lora_weights_loftq`: adapters that begin with what the codes lost."""

import pytest
import torch

import hf_vq
from hf_vq.errors import VQBackendError, VQFormatError
from hf_vq.nn.replace import vq_modules
from tests.fixtures.checkpoints import LOAD
from tests.fixtures.tiny_models import tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


def adapted(base, name="llama", **options):
    config = peft.LoraConfig(target_modules=TARGETS[name], r=8, lora_alpha=24, **options)
    return peft.get_peft_model(base, config).eval()


def lora_layers(model):
    return {n: m for n, m in model.get_base_model().named_modules() if hasattr(m, "lora_A")}


def products(model):
    """The dense weight that each adapter adds [out, in]."""
    return {n: m.get_delta_weight("default").detach() for n, m in lora_layers(model).items()}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_it_is_the_best_of_its_rank(dense, quantized, name, rslora):
    original, model = LOAD(dense(name)), adapted(LOAD(quantized(name)), name, use_rslora=rslora)
    hf_vq.replace_lora_weights_loftq(model, dense(name))
    for where, product in products(model).items():
        weight = original.get_submodule(where).weight
        weight = weight.T if name == "gpt2" else weight
        lost = weight - lora_layers(model)[where].get_base_layer().decoded()
        left, sizes, right = torch.linalg.svd(lost.detach(), full_matrices=False)
        best = (left[:, 8:] * sizes[8:] @ right[8:]).norm()
        assert product.shape == lost.shape
        assert (lost - product).norm() <= 1.02 * best < 0.98 * lost.norm()
    with torch.no_grad():
        wanted, found = original(tokens()).logits, model(tokens()).logits
        with model.disable_adapter():
            before = model(tokens()).logits
    assert (found - wanted).norm() < (before - wanted).norm()


def test_the_dense_model_is_found_by_itself(dense):
    config = hf_vq.VQConfig(activations=None)
    model = adapted(LOAD(dense("llama"), quantization_config=config))
    generator = torch.get_rng_state()
    hf_vq.replace_lora_weights_loftq(model)
    assert torch.equal(torch.get_rng_state(), generator)
    first = products(model)
    hf_vq.replace_lora_weights_loftq(model)
    assert all(product.any() for product in first.values())
    assert all(torch.equal(product, first[n]) for n, product in products(model).items())
    loss = model.train()(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    assert all(m.lora_A["default"].weight.grad.any() for m in lora_layers(model).values())


def test_another_adapter_and_a_callback(dense, quantized):
    model = adapted(LOAD(quantized()))
    model.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"], r=4))
    layers, asked = lora_layers(model), []
    before = {n: m.lora_A["default"].weight.clone() for n, m in layers.items()}

    def keep(given, name):
        assert given is model
        asked.append(name)
        return "v_proj" in name

    hf_vq.replace_lora_weights_loftq(model, dense("llama"), callback=keep)
    assert asked == list(layers)
    for name, layer in layers.items():
        same = torch.equal(layer.lora_A["default"].weight, before[name])
        assert same != ("v_proj" in name) and layer.lora_B["default"].weight.any() != same
    hf_vq.replace_lora_weights_loftq(model, dense("llama"), "other")
    others = [m for m in layers.values() if "other" in m.lora_A]
    assert len(others) == 2 and all(m.lora_B["other"].weight.any() for m in others)


def test_errors(dense, quantized, tmp_path):
    loftq, path = hf_vq.replace_lora_weights_loftq, dense("llama")
    with pytest.raises(VQBackendError, match="get_peft_model first"):
        loftq(LOAD(quantized()), path)
    with pytest.raises(VQBackendError, match="'other'"):
        loftq(adapted(LOAD(quantized())), path, "other")
    with pytest.raises(VQBackendError, match="give model_path of the dense one"):
        loftq(adapted(LOAD(quantized())))
    with pytest.raises(VQBackendError, match="is DoraLinearVariant, which is more than LoRA"):
        loftq(adapted(LOAD(quantized()), use_dora=True), path)
    with pytest.raises(VQFormatError, match=r"q_proj.weight of the dense model is \[64, 64\]"):
        model = adapted(LOAD(quantized()))
        next(iter(vq_modules(model).values())).out_features = 32
        loftq(model, path)
    other = LOAD(path)
    other.model.layers[1].mlp.down_proj.weight.data.normal_()
    other.save_pretrained(tmp_path)
    with pytest.raises(VQFormatError, match=r"layers.1.mlp.down_proj.weight .* is not what"):
        loftq(adapted(LOAD(quantized())), tmp_path)
    ada = peft.AdaLoraConfig(target_modules=["q_proj"], init_r=4, total_step=8)
    with pytest.raises(VQBackendError, match="more than LoRA"):
        loftq(peft.get_peft_model(LOAD(quantized()), ada), path)
    model = adapted(LOAD(quantized()))
    model.merge_adapter()
    with pytest.raises(VQBackendError, match="call unmerge_adapter first"):
        loftq(model, path)
    model = adapted(LOAD(quantized()))
    model.base_model.model.config._name_or_path = ""
    with pytest.raises(VQBackendError, match="give its model_path"):
        loftq(model)
