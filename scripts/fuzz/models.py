"""Tiny models of one layer, quantized and saved: the originals of mutated files."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from hf_vq.hf import VQConfig

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 128, "head_dim": 32,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
MIXED = {"layers": {"q_proj": "vq-2", "down_proj": "turboquant-4+4"}}
KINDS: dict[str, dict[str, Any]] = {
    "vq-4": {}, "vq-3": {}, "vq-2": {}, "quip-sharp-2": {}, "aqlm-2": {}, "gptvq-2-int7": {},
    "turboquant-4": {}, "turboquant-4+4": {}, "qoq-w4a8": {}, "qoq-w4a8-g128": {},
    "mixed": {"scheme": "vq-4", **MIXED}, "experts": {"scheme": "vq-4"},
}  # fmt: skip


def save_dense(folder: Path, experts: bool = False, **sizes: Any) -> Path:
    """A random model in float32."""
    config: Any = LlamaConfig(**{**SIZES, **sizes})
    if experts:
        more = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
        config = Qwen3MoeConfig(**{**SIZES, **more})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def save_quantized(folder: Path, kind: str, dense: Path) -> Path:
    """A model of one of `KINDS`."""
    config = VQConfig(**{"scheme": kind, **KINDS[kind]})
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    model.save_pretrained(folder)
    return folder


@functools.cache
def checkpoints(folder: Path, kinds: tuple[str, ...] = tuple(KINDS)) -> dict[str, Path]:
    """A checkpoint of each of `kinds`, made once for all subjects."""
    dense = {False: save_dense(folder / "dense"), True: save_dense(folder / "sparse", experts=True)}
    return {kind: save_quantized(folder / kind, kind, dense[kind == "experts"]) for kind in kinds}


def load(folder: Path) -> Any:
    """A model as a user loads it."""
    return AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Logits of a fixed prompt."""
    return model(torch.arange(3, 15)[None], return_dict=True).logits


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def choose(rng: random.Random, found: dict[str, Any]) -> str:
    """One of the keys."""
    return rng.choice(sorted(found))
