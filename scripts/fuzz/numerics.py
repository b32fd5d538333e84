"""Hostile numbers: finite inputs stay finite, or are refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from campaign import Finding, Try, outcome_of_error
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from hf_vq import VQCache
from hf_vq.fit import fit_weight
from hf_vq.formats.catalog import linear_scheme

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x, "zero": lambda x: x * 0, "constant": lambda x: x * 0 + 3,
    "one row": lambda x: x * (torch.arange(x.shape[-2]) == 1)[:, None],
    "one column": lambda x: x * (torch.arange(x.shape[-1]) == 1),
    "one number": lambda x: x * (torch.arange(x.numel()) == 5).view(x.shape),
    "outliers": lambda x: torch.where(x.abs() > 2.5, x * 1000, x),
    "rows apart": lambda x: x * torch.logspace(-6, 4, x.shape[-2])[:, None],
    "columns apart": lambda x: x * torch.logspace(-4, 3, x.shape[-1]),
}  # fmt: skip
SIZES = (1e-38, 1e-12, 1e-8, 1e-4, 1.0, 100.0, 3e4, 6e4, 7e4, 1e6, 1e15, 3e38)
KV = ("u4", "u3", "u2", "k4v2", "nomad-u4", "qserve-kv4", "turboquant-4", "turboquant-3-prod")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def prepare(folder: Path) -> Try:
    """Load one layer of each scheme."""
    layers = {
        kind: models.load(saved).model.layers[0].self_attn.q_proj
        for kind, saved in models.checkpoints(folder.parent / "models").items()
        if not models.KINDS[kind]
    }

    @torch.no_grad()
    def attempt(rng: random.Random, number: int) -> str:
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        shape, size = rng.choice(sorted(SHAPES)), rng.choice(SIZES)

        def make(*dims: int) -> Tensor:
            return SHAPES[shape](torch.randn(dims, generator=generator)) * size

        kind, about = models.choose(rng, layers), f"{shape} x {size:g}"
        what = rng.choice(["weights", "activations", "cache", "cache"])
        if what == "weights":
            return weights(kind, make(16, 128), about)
        if what == "activations":
            x = make(rng.choice([2, 5, 33]), 128)
            return activations(layers[kind], x, rng, f"{kind}, {about}")
        return cache(rng, make, about)

    return attempt


def weights(scheme: str, dense: Tensor, about: str) -> str:
    """Check that the stored form of a finite weight is finite."""
    if not bool(dense.isfinite().all()):
        return "not finite"
    try:
        fitted = fit_weight(dense, linear_scheme(scheme), where="weight")
    except Exception as error:
        return outcome_of_error(error, f"{scheme}, {about}")
    for key, tensor in fitted.tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Finding("stored numbers are not finite", f"{key} of {scheme}, {about}")
    return "weights"


def activations(layer: Any, x: Tensor, rng: random.Random, about: str) -> str:
    """A row of inputs that is not finite reaches no other row."""
    expected, poisoned = layer(x), x.clone()
    poisoned[0, rng.randrange(x.shape[1])] = rng.choice([torch.nan, torch.inf, -torch.inf])
    if not torch.equal(layer(poisoned)[1:].nan_to_num(), expected[1:].nan_to_num()):
        raise Finding("a row reaches another", about)
    return "activations"


def cache(rng: random.Random, make: Callable[..., Tensor], about: str) -> str:
    """Finite keys and values whose dense attention is finite: so is that over codes."""
    dtype, scheme = rng.choice(DTYPES), rng.choice(KV)
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        hidden_size=128,
    )  # fmt: skip
    keys, values = (make(1, 2, 40, 32).to(dtype) for _ in "kv")
    if rng.random() < 0.5:
        keys = keys.clamp(-3, 3)
    if not bool(keys.isfinite().all() and values.isfinite().all()):
        return "not finite"
    query = keys.new_full((1, 4, 1, 32), 0.01)
    cache = VQCache(config, scheme, window=rng.choice([0, 8]), static=False)
    where = f"{scheme}, {dtype}, {about}"
    try:
        for begin, end in ((0, 30), (30, 39), (39, 40)):
            found = cache.update(keys[:, :, begin:end], values[:, :, begin:end], 0)
        out = scaled_dot_product_attention(query, *found, enable_gqa=True)
    except Exception as error:
        return outcome_of_error(error, where)
    exact = (part.double() for part in (query, keys, values))
    dense = scaled_dot_product_attention(*exact, enable_gqa=True)
    fits = bool(dense.to(dtype).isfinite().all())
    if fits and not bool(out.isfinite().all()):
        raise Finding("attention is not finite", where)
    return "cache"
