"""LoRA adapters on a quantized model: train, save, load; `test_peft_merging` has the rest."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_vq.nn import VQLinear
from tests.fixtures.tiny_models import tokens

peft = pytest.importorskip("peft")
LOAD = AutoModelForCausalLM.from_pretrained
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore:.*is_gradient_checkpointing:FutureWarning"
)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora(quantized, tmp_path, name, dtype):
    base = LOAD(quantized(name), dtype=dtype)
    codes = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    model = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=TARGETS[name], r=4, task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 5e-3)
    losses = []
    for _ in range(6):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert any(isinstance(module, VQLinear) for module in model.modules())
    kept = {key.replace(".base_layer", ""): tensor for key, tensor in base.state_dict().items()}
    assert all(torch.equal(kept[key], tensor) for key, tensor in codes.items())
    model.eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(tokens()).logits
        again = peft.PeftModel.from_pretrained(LOAD(quantized(name), dtype=dtype), tmp_path)
        assert torch.equal(again(tokens()).logits, expected)
        other = LOAD(quantized(name), dtype=dtype)
        other.load_adapter(str(tmp_path))
        assert torch.equal(other(tokens()).logits, expected)
        other.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
