"""Suite `quality-kv`: what each KV cache scheme costs in quality, against QServe's and KIVI's.

Teacher-forced over whole sequences with the window exact for every query (`banded`). Keys are
quantized after RoPE, by the ops and the centring rule of `VQCache`: their mean is that of the
prompt, which here is the whole sequence. The case `short prompt` takes the mean that the cache
takes if the prompt is no longer than sinks and window: over the first half of the first window.

The case `shifted` adds a constant of five times the key norm to the 16 slowest RoPE pairs of every
key before it is stored and takes it off afterwards. Softmax does not see such a constant, so the
model computes the same function; it stands for models whose keys have a large bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
CASES = ("window", "short prompt", "no window", "shifted")
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
    results: dict[str, Any] = {"perplexity": reference.perplexity, "rows": []}
    head_dim = getattr(model.config, "head_dim", None)
    head_dim = head_dim or model.config.hidden_size // model.config.num_attention_heads
    contestants = [*(_baselines(head_dim) if with_baselines else ()), *_schemes(schemes, head_dim)]
    for one in contestants:
        for case in CASES:
            keys = one.short if case == "short prompt" else one.keys
            if keys is None:
                continue
            if case == "shifted":
                keys = shifted(keys)
            window = 0 if case == "no window" else WINDOW
            with simulate(model, Simulation(keys, one.values, window, SINKS)):
                scores = score(model_forward(model), reference).to_dict()
            row = {
                "name": one.name,
                "kind": one.kind,
                "case": case,
                "bits_per_element": one.bits,
                "window": window,
                **scores,
            }
            results["rows"].append(row)
            report(row)
    settings = {
        "model": Path(model_dir).name,
        **text_facts(text),
        "tokens": sequences.numel(),
        "context": context,
        "sinks": SINKS,
        "dtype": "float32",
    }
    return settings, results


@dataclass(frozen=True)
class _Contestant:
    """A way to store keys and values; `short` stores keys as after a short prompt, None = same."""

    name: str
    kind: str
    bits: float
    keys: RoundTrip
    values: RoundTrip
    short: RoundTrip | None = None


def _schemes(names: Sequence[str], head_dim: int) -> Iterator[_Contestant]:
    for name in names:
        scheme = kv_scheme(name)
        bits = (_stored_bits(scheme.key, head_dim) + _stored_bits(scheme.value, head_dim)) / 2
        keys = round_trip(scheme.key, centre=scheme.centre_keys)
        values = round_trip(scheme.value, centre=False)
        short = None
        if scheme.centre_keys:
            short = round_trip(scheme.key, centre=True, known=SINKS + WINDOW // 2)
        yield _Contestant(name, "scheme", bits, keys, values, short)


def _stored_bits(scheme: VQScheme, head_dim: int) -> float:
    """Bits per number of what is stored of one token and head."""
    stored = ops.encode_kv(torch.ones(1, 1, head_dim), universal_tensor(scheme), scheme)
    return 8 * sum(tensor.nbytes for tensor in stored) / head_dim


def _baselines(head_dim: int) -> Iterator[_Contestant]:
    def qserve(x: Tensor) -> Tensor:
        return baselines.asymmetric(x, 4, head_dim)

    name = "QServe KV4 (no SmoothAttention)"
    yield _Contestant(name, "baseline", 4 + 32 / head_dim, qserve, qserve)

    def kivi_values(x: Tensor) -> Tensor:
        return baselines.asymmetric(x, 4, 32)

    def kivi_keys(x: Tensor) -> Tensor:
        return baselines.per_channel(x, 4, 32)

    yield _Contestant("KIVI-4 g32", "baseline", 4 + 32 / 32, kivi_keys, kivi_values)


def round_trip(scheme: VQScheme, *, centre: bool, known: int | None = None) -> RoundTrip:
    """Store and read back [kv heads, tokens, head_dim] the way `VQCache` does.

    Args:
        scheme: of keys or of values.
        centre: take off the mean over the first `known` tokens without the sinks.
        known: None = all tokens.
    """
    codebook = universal_tensor(scheme)

    def stored(x: Tensor) -> Tensor:
        mean = key_mean(x[None, :, :known], SINKS)[0] if centre else torch.zeros(())
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
