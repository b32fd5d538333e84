"""The methods of models of codes are of their class: `del` frees a model at once, and classes that
override a method do so inside of what saves whole folders."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, MobileBertConfig, MobileBertForMaskedLM

from hf_vq import VQCache, VQConfig, patches, quantize_model
from hf_vq.errors import VQConfigError
from tests.fixtures.checkpoints import LOAD
from tests.fixtures.tiny_models import tokens


def loaded(folder, quantized, path):
    return LOAD(quantized("llama", "vq-4"))


def generating(folder, quantized, path):
    model = loaded(folder, quantized, path)
    cache = VQCache(model.config, "u4")
    model.generate(tokens(1, 9), past_key_values=cache, max_new_tokens=20, min_new_tokens=20)
    return model


def saved(folder, quantized, path):
    model = loaded(folder, quantized, path)
    model.save_pretrained(path)
    return model


def calibrated(folder, quantized, path):
    return LOAD(folder, quantization_config=VQConfig("vq-3"))


def of_integers(folder, quantized, path):
    config = VQConfig("vq-4", embeddings="int8", activations=None)
    return LOAD(folder, quantization_config=config)


def in_memory(folder, quantized, path):
    return quantize_model(LOAD(folder), VQConfig("vq-4", activations=None))


def dequantized(folder, quantized, path):
    return loaded(folder, quantized, path).dequantize(torch.float32)


USES = [loaded, generating, saved, calibrated, of_integers, in_memory, dequantized]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_del_frees_a_model(dense, quantized, tmp_path, monkeypatch, use):
    monkeypatch.setenv("HF_VQ_NATIVE_STEP", "1")
    folder = dense("llama")
    use(folder, quantized, tmp_path / "first")  # what stays once for all models
    gc.collect()
    gc.disable()
    try:
        model = use(folder, quantized, tmp_path / "second")
        held = {name: weakref.ref(p) for name, p in model.named_parameters()}
        del model
        assert held and [name for name, p in held.items() if p() is not None] == []
    finally:
        gc.enable()


def test_a_model_that_nobody_holds_is_saved(quantized, tmp_path):
    LOAD(quantized("llama", "vq-4")).save_pretrained(tmp_path)
    assert LOAD(quantized("llama", "vq-4")).num_parameters() > 0
    assert (tmp_path / "README.md").is_file()


class Writing(LlamaForCausalLM):
    """A class that saves more than Transformers does, as Granite Speech."""

    fails = False

    def save_pretrained(self, save_directory, *args, **kwargs):
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.fails:
            raise KeyboardInterrupt
        Path(save_directory, "more.txt").write_text("more")


def test_a_class_that_saves_more(quantized, tmp_path):
    model = Writing.from_pretrained(quantized("llama", "vq-4"))
    model.fails = True
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    model.fails = False
    model.save_pretrained(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"more.txt", "README.md", "model.safetensors"} <= names
    assert any("Writing.save_pretrained" in target for target in patches.applied())
    LOAD(tmp_path / "out")


def test_a_refused_resize_changes_nothing(tmp_path):
    """MobileBERT resizes another layer before it asks `PreTrainedModel`."""
    config = MobileBertConfig(
        vocab_size=256, hidden_size=128, embedding_size=64, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=64, intra_bottleneck_size=64,
        true_hidden_size=128, use_bottleneck=False, num_feedforward_networks=1,
        tie_word_embeddings=False, trigram_input=False,
    )  # fmt: skip
    MobileBertForMaskedLM(config).save_pretrained(tmp_path)
    codes = VQConfig("vq-4", embeddings="int8", activations=None)
    model = MobileBertForMaskedLM.from_pretrained(tmp_path, quantization_config=codes)
    before = {name: p.shape for name, p in model.named_parameters()}
    with pytest.raises(VQConfigError, match="cannot be resized"):
        model.resize_token_embeddings(300)
    assert {name: p.shape for name, p in model.named_parameters()} == before
