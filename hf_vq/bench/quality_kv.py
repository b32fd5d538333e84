"""Suite `quality-kv`: what each KV cache scheme costs in quality, against QServe's and KIVI's.

Teacher-forced over whole sequences with the window exact for every query (`banded`). Keys are
quantized after RoPE, by the ops and the centring rule of `VQCache`.

The `shifted` case adds a constant of five times the key norm to the 16 slowest RoPE pairs of every
key before it is stored and takes it off afterwards. Softmax does not see such a constant, so the
model computes the same function; it stands for models whose keys have a large bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..cache.store import key_mean
from ..formats.catalog import kv_scheme
from ..formats.scheme import VQScheme
from ..formats.shared import universal_tensor
from . import baselines
from .banded import RoundTrip, Simulation, simulate
from .load import load_model, load_tokenizer
from .score import Reference, model_forward, score
from .text import read_sequences, text_facts

SCHEMES = ("u4", "u3", "k4v2", "u2")
CASES = ("window", "no window", "shifted")
WINDOW = 64
SINKS = 4
_SHIFT = 5.0  # times the mean norm of the keys
_SLOW_PAIRS = 16


def run(
    model_dir: str,
    text: str | Path,
    *,
    tokens: int = 16384,
    context: int = 2048,
    schemes: Sequence[str] = SCHEMES,
    with_baselines: bool = True,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure; `report` gets each row when it is known.

    Returns:
        (settings, results) of the record.
    """
    tokenizer = load_tokenizer(model_dir)
    sequences = read_sequences(tokenizer, text, context=context, tokens=tokens)
    model = load_model(model_dir, dtype=torch.float32)
    reference = Reference(model_forward(model), sequences)
    results: dict[str, Any] = {"perplexity": round(reference.perplexity, 4), "rows": []}
    head_dim = getattr(model.config, "head_dim", None)
    head_dim = head_dim or model.config.hidden_size // model.config.num_attention_heads
    contestants = [*(_baselines(head_dim) if with_baselines else ()), *_schemes(schemes, head_dim)]
    for name, kind, bits, keys, values in contestants:
        for case in CASES:
            stored = shifted(keys) if case == "shifted" else keys
            window = 0 if case == "no window" else WINDOW
            with simulate(model, Simulation(stored, values, window, SINKS)):
                scores = score(model_forward(model), reference).to_dict()
            row = {
                "name": name,
                "kind": kind,
                "case": case,
                "bits_per_element": bits,
                "window": window,
                **scores,
            }
            results["rows"].append(row)
            report(row)
    settings = {
        "model": Path(model_dir).name,
        **text_facts(text),
        "tokens": tokens,
        "context": context,
        "sinks": SINKS,
        "dtype": "float32",
    }
    return settings, results


Contestant = tuple[str, str, float, RoundTrip, RoundTrip]  # name, kind, bits, keys, values


def _schemes(names: Sequence[str], head_dim: int) -> Iterator[Contestant]:
    for name in names:
        scheme = kv_scheme(name)
        bits = (scheme.key.bits(head_dim) + scheme.value.bits(head_dim)) / 2
        keys = round_trip(scheme.key, centre=scheme.centre_keys)
        yield name, "scheme", bits, keys, round_trip(scheme.value, centre=False)


def _baselines(head_dim: int) -> Iterator[Contestant]:
    def qserve(x: Tensor) -> Tensor:
        return baselines.asymmetric(x, 4, head_dim)

    yield "QServe KV4 (no SmoothAttention)", "baseline", 4 + 32 / head_dim, qserve, qserve

    def kivi_values(x: Tensor) -> Tensor:
        return baselines.asymmetric(x, 4, 32)

    def kivi_keys(x: Tensor) -> Tensor:
        return baselines.per_channel(x, 4, 32)

    yield "KIVI-4 g32", "baseline", 4 + 32 / 32, kivi_keys, kivi_values


def round_trip(scheme: VQScheme, *, centre: bool) -> RoundTrip:
    """Store and read back [kv heads, tokens, head_dim] the way `VQCache` does."""
    codebook = universal_tensor(scheme)

    def stored(x: Tensor) -> Tensor:
        mean = key_mean(x[None], SINKS)[0] if centre else torch.zeros(())
        codes, scale = ops.encode_kv(x - mean, codebook, scheme)
        return ops.decode_kv(codes, scale, codebook, scheme, x.shape[-1]) + mean

    return stored


def shifted(keys: RoundTrip) -> RoundTrip:
    """`keys` on the shifted twin: a fixed random constant per head on the slowest RoPE pairs."""

    def stored(x: Tensor) -> Tensor:
        heads, _, head_dim = x.shape
        half = head_dim // 2
        slow = range(half - min(_SLOW_PAIRS, half), half)
        columns = [*slow, *(half + i for i in slow)]
        constant = torch.zeros(heads, 1, head_dim)
        constant[:, :, columns] = torch.randn(
            heads, 1, len(columns), generator=torch.Generator().manual_seed(5)
        )
        size = _SHIFT * x.norm(dim=-1).mean(1).reshape(heads, 1, 1)
        constant *= size / constant.norm(dim=-1, keepdim=True)
        return keys(x + constant) - constant

    return stored
