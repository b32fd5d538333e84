"""Tiny random models of the architectures that the tests cover."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,  # 3 x 32: a smaller group and rotation block
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32}

CONFIGS = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama-tied": lambda: LlamaConfig(**{**_SIZES, "tie_word_embeddings": True}),
    "qwen3": lambda: Qwen3Config(**_SIZES, attention_bias=True),
    "gemma3": lambda: Gemma3TextConfig(**{**_SIZES, "tie_word_embeddings": True}),
    "gpt2": lambda: GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=96, bos_token_id=0,
        eos_token_id=1,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(**{**_SIZES, **_EXPERTS, "num_experts": 4}),
    "gpt-oss": lambda: GptOssConfig(
        **{**_SIZES, **_EXPERTS, "num_local_experts": 4, "sliding_window": 16}
    ),
}  # fmt: skip


def save_tiny(name: str, folder: Path) -> Path:
    """Save a random float32 model of an architecture; biases and norms are random too."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    """Token ids [batch, length] of the tiny vocabulary."""
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(0))
