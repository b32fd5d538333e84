"""Float32 copies of a model's weights for the time in which it writes a text."""

import platform

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_vq
from hf_vq import VQConfig
from hf_vq.calibration import blocks
from hf_vq.calibration.blocks import in_float32
from hf_vq.calibration.text import own_words

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def model(request, monkeypatch):
    monkeypatch.setattr(blocks, "multiplied_by_tiles", lambda: None)
    monkeypatch.setattr(blocks, "free_memory", lambda place: 1 << 40)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(request.param).eval()


def test_weights_come_back_untouched(model):
    before = {name: (p, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(KeyboardInterrupt), in_float32(model) as converted:
        assert converted
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model(torch.tensor([[1, 2]])).logits.dtype == torch.float32
        raise KeyboardInterrupt
    for name, p in model.named_parameters():
        same, place, value = before[name]
        assert p is same and p.data_ptr() == place and torch.equal(p, value)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_codes_keep_their_dtype(model):
    """Kernels read scales in float16."""
    hf_vq.quantize_model(model, VQConfig("vq-4", activations=None))
    coded = model.model.layers[0].self_attn.q_proj
    before = {name: p.dtype for name, p in coded.named_parameters()}
    with in_float32(model):
        assert {name: p.dtype for name, p in coded.named_parameters()} == before
        assert model.model.norm.weight.dtype == torch.float32
        assert bool(model(torch.tensor([[1, 2]])).logits.isfinite().all())


@pytest.mark.parametrize("reason", ["memory", "unknown memory", "tiles", "Arm"])
def test_a_model_is_left_alone(model, reason, monkeypatch):
    if reason == "tiles":
        monkeypatch.setattr(blocks, "multiplied_by_tiles", lambda: model.dtype)
    elif reason == "Arm":
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    else:
        free = 8 * model.num_parameters() - 1 if reason == "memory" else None
        monkeypatch.setattr(blocks, "free_memory", lambda place: free)
    with in_float32(model) as converted:
        assert not converted and model.dtype in (torch.float16, torch.bfloat16)


def test_an_error_of_a_model_that_was_left_alone_is_raised_at_once(model, monkeypatch):
    """It would fail again, after as long."""
    monkeypatch.setattr(blocks, "multiplied_by_tiles", lambda: model.dtype)
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        raise RuntimeError("no")

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(RuntimeError, match="no"):
        own_words(model, 2, 4, seed=1)
    assert len(calls) == 1


def test_a_model_that_needs_its_dtype_writes_in_it(model, monkeypatch):
    """As one whose code names it."""
    forward, seen = model.forward, []

    def picky(*args, **kwargs):
        seen.append(model.dtype)
        if model.dtype == torch.float32:
            raise RuntimeError("expected another dtype")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", picky)
    with torch.no_grad():
        assert own_words(model, 2, 4, seed=1).shape == (2, 4)
    assert seen[0] == torch.float32 and set(seen[1:]) == {model.dtype}
