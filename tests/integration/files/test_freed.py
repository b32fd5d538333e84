"""The memory of a model is free when nobody holds the model, before Python looks for cycles."""

import gc
import weakref

import pytest
import torch

from hf_vq import VQCache, VQConfig, quantize_model
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
