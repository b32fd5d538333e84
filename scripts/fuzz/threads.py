"""Threads that share a model, each with its own cache: same tokens as in one thread."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import torch
from campaign import Finding, Try

from hf_vq import VQCache

SCHEMES = ("u4", "u3", "turboquant-4", "qserve-kv4")
THREADS = 4
LIMITS = {"limit": 60}


def prepare(folder: Path) -> Try:
    """Load one model of each kind."""
    known: dict[str, Any] = {}
    for kind, saved in models.checkpoints(folder.parent / "models").items():
        known[kind] = models.load(saved)
        known[kind].set_attn_implementation("vq")

    @torch.no_grad()
    def attempt(rng: random.Random, number: int) -> str:
        # PyTorch makes its own pool anew after a fork, and not if several threads ask at once.
        torch.set_num_threads(1)
        kind = models.choose(rng, known)
        model, scheme, window = known[kind], rng.choice(SCHEMES), rng.choice([0, 4, 16])
        prompts = [
            torch.tensor([[rng.randrange(3, 48) for _ in range(rng.randint(1, 40))]])
            for _ in range(THREADS)
        ]

        @torch.no_grad()
        def generate(prompt: torch.Tensor) -> torch.Tensor:
            cache = VQCache(model.config, scheme, window=window, static=False)
            logits = [model(prompt, past_key_values=cache).logits[:, -1]]
            for _ in range(6):
                token = logits[-1].argmax(-1, keepdim=True)
                logits.append(model(token, past_key_values=cache).logits[:, -1])
            return torch.cat(logits)

        separate = [generate(prompt) for prompt in prompts]
        with ThreadPoolExecutor(THREADS) as pool:
            together = list(pool.map(generate, prompts))
        for one, other in zip(separate, together, strict=True):
            if not torch.equal(one, other):
                raise Finding("threads differ", f"{kind}, {scheme}, window {window}")
        return kind

    return attempt
