"""Mutated files of a VQCache: an error of hf_vq, or exactly the same logits for what follows."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import models
import torch
from campaign import Finding, Try, outcome_of_error
from mutations import change_safetensors
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_vq import VQCache, calibrate_kv
from hf_vq.cache.codebooks import KVCodebooks

SCHEMES: tuple[dict[str, Any], ...] = (
    {"scheme": "u4"}, {"scheme": "u3"}, {"scheme": "k4v2", "max_cache_len": 120},
    {"scheme": "turboquant-4"}, {"scheme": "qserve-kv4"}, {"scheme": "nomad-4"},
    {"scheme": "u4", "quantize_sliding": True},
)  # fmt: skip


def dense_model() -> Any:
    """A random model whose attention reads codes."""
    config = LlamaConfig(**models.SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("vq")
    return model


def learned(model: Any, scheme: str) -> KVCodebooks:
    """Codebooks that were calibrated on random text."""
    text = torch.randint(3, 48, (4096,), generator=torch.Generator().manual_seed(1))
    return calibrate_kv(model, scheme, text, tokens=2048, context=64)


@torch.no_grad()
def continued(model: Any, cache: VQCache) -> torch.Tensor:
    """Logits of some more tokens, at once and one by one."""
    parts = [torch.arange(3, 11)[None], torch.tensor([[5]]), torch.tensor([[7]])]
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


@torch.no_grad()
def prepare(folder: Path) -> Try:
    """Save one cache of each scheme."""
    model = dense_model()
    known = []
    for number, options in enumerate(SCHEMES):
        books = learned(model, "nomad-4") if options["scheme"] == "nomad-4" else None
        cache = VQCache(model.config, window=8, sinks=2, static=False, codebooks=books, **options)
        model(torch.randint(3, 48, (1, 40)), past_key_values=cache)
        path = folder / f"{number}.safetensors"
        cache.save(path)
        expected = continued(model, VQCache.load(path, model.config))
        known.append((path.read_bytes(), expected, str(options)))

    def attempt(rng: random.Random, number: int) -> str:
        data, expected, about = rng.choice(known)
        changed, what = change_safetensors(data, rng, description="hf_vq_cache")
        path = folder / f"try-{os.getpid()}"
        path.write_bytes(changed)
        try:
            found = continued(model, VQCache.load(path, model.config))
        except Exception as error:
            return outcome_of_error(error)
        if torch.equal(found, expected):
            return "same"
        kind = "data" if what.startswith("data") else "structure"
        raise Finding(f"silent change, {kind}", f"{about}, {what}")

    return attempt
