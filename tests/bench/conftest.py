"""A model so small that a whole suite runs on it in seconds."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, tinybooks) -> Path:
    """A random two-layer Llama with the embedded model's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=2,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tinybooks).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def eval_text(tinybooks) -> Path:
    """The demo's evaluation text."""
    return tinybooks.with_name("tinybooks-5m-eval.txt")
