"""Suite `quality-kv`: what each KV cache scheme costs in quality, against QServe's and KIVI's.

Teacher-forced over whole sequences with the window exact for every query (`banded`). Keys are
quantized after RoPE, by the ops and the centring rule of `VQCache`: their mean is that of the
prompt, which here is the whole sequence. The case `short prompt` takes the mean that the cache
takes if the prompt is no longer than sinks and window: over the first half of the first window.

The case `shifted` adds a constant of five times the key norm to the 16 slowest RoPE pairs of every
key before it is stored and takes it off afterwards. Softmax does not see such a constant, so the
model computes the same function; it stands for models whose keys have a large bias.

Learned schemes are calibrated on another text. Besides what this package ships, NoMAD-Attention is
measured as its paper has it: keys alone are coded, and their scores are sums of tables in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_vq import ops
from hf_vq.cache.codebooks import KVCodebooks, needs_codebooks
from hf_vq.cache.key_means import Calibrated, Rotary
from hf_vq.cache.rotary import RopeFrequencies
from hf_vq.calibration.kv_codebooks import calibrate_kv
from hf_vq.calibration.text import read_text
from hf_vq.errors import VQError
from hf_vq.evaluation.load import load_model, load_tokenizer
from hf_vq.evaluation.score import Reference, model_forward, score
from hf_vq.evaluation.text import read_sequences, text_facts
from hf_vq.formats.catalog import kv_scheme, of_layer
from hf_vq.formats.nearest import nearest_in_groups
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.ops.reference.codes import mean_of
from hf_vq.ops.reference.key_means import prompt_means
from hf_vq.ops.reference.nomad import quantized_tables, score_tables
from hf_vq.ops.rotary_mean import rotated

from . import baselines
from .banded import RoundTrip, Scores, Simulation, dot_products, simulate

LEARNED = ("nomad-4", "nomad-2", "nomad-1", "cq-4", "cq-2")
SCHEMES = ("u4", "nomad-u4", "u3", "k4v2", "u2", *LEARNED)
CASES = ("window", "short prompt", "no window", "shifted")
LEARNED_CASES = ("window", "no window")
WINDOW = 64
SINKS = 4
CALIBRATION_TOKENS = 8192
_SHIFT = 5.0  # times the mean norm of the keys
_SLOW_PAIRS = 16


def run(
    model_dir: str,
    text: str | Path,
    *,
    calibration: str | Path | None = None,
    tokens: int = 16384,
    context: int = 2048,
    schemes: Sequence[str] = SCHEMES,
    with_baselines: bool = True,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure; `report` gets each row when it is known.

    Args:
        calibration: text for learned schemes; not `text`.

    Returns:
        (settings, results) of the record.

    Raises:
        VQError: a scheme must be calibrated, and there is no text for it.
    """
    learned = [name for name in schemes if needs_codebooks(kv_scheme(name))]
    if learned and calibration is None:
        raise VQError(f"{', '.join(learned)} must be calibrated: give --calibration TEXT.")
    tokenizer = load_tokenizer(model_dir)
    sequences = read_sequences(tokenizer, text, context=context, tokens=tokens)
    model = load_model(model_dir, dtype=torch.float32)
    reference = Reference(model_forward(model), sequences)
    results: dict[str, Any] = {"perplexity": reference.perplexity, "rows": []}
    head_dim = getattr(model.config, "head_dim", None)
    head_dim = head_dim or model.config.hidden_size // model.config.num_attention_heads

    def candidates() -> Iterator[Candidate]:
        if with_baselines:
            yield from _baselines(head_dim)
        universal = [name for name in schemes if name not in learned]
        yield from _schemes(universal, head_dim, model.config)
        known = "" if calibration is None else read_text(calibration)
        for name in learned:
            codebooks = calibrate_kv(
                model, name, known, tokenizer,
                tokens=min(CALIBRATION_TOKENS, tokens), context=context, progress=False,
            )  # fmt: skip
            yield from _learned(name, codebooks, head_dim)

    for one in candidates():
        for row in measured(one, model, reference):
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
    if calibration is not None:
        facts = text_facts(calibration)
        settings["calibration_text"] = facts["text"]
        settings["calibration_text_sha256"] = facts["text_sha256"]
        settings["calibration_tokens"] = min(CALIBRATION_TOKENS, tokens)
    return settings, results


def measured(one: Candidate, model: Any, reference: Reference) -> Iterator[dict[str, Any]]:
    """A row for each case of a candidate, with the cache of `model`."""
    for case in one.cases:
        keys = one.short if case == "short prompt" else one.keys
        if keys is None:
            continue
        if case == "shifted":
            keys = shifted(keys)
        window = 0 if case == "no window" else WINDOW
        with simulate(model, Simulation(keys, one.values, window, SINKS, one.scores)):
            scores = score(model_forward(model), reference).to_dict()
        yield {
            "name": one.name,
            "kind": one.kind,
            "case": case,
            "bits_per_element": one.bits,
            "window": window,
            **scores,
        }


@dataclass(frozen=True)
class Candidate:
    """A way to store keys and values; `short` stores keys as after a short prompt, None = same."""

    name: str
    kind: str
    bits: float
    keys: RoundTrip
    values: RoundTrip
    short: RoundTrip | None = None
    cases: Sequence[str] = CASES
    scores: Callable[[Tensor, int], Scores] = dot_products


def _schemes(names: Sequence[str], head_dim: int, config: Any) -> Iterator[Candidate]:
    for name in names:
        scheme = kv_scheme(name)
        bits = (stored_bits(scheme.key, head_dim) + stored_bits(scheme.value, head_dim)) / 2
        keys = round_trip(scheme.key, centre=scheme.centre_keys, config=config)
        values = round_trip(scheme.value, centre=False)
        short = None
        if scheme.centre_keys:
            short = round_trip(scheme.key, centre=True, known=SINKS + WINDOW // 2, config=config)
        yield Candidate(name, "scheme", bits, keys, values, short)


def _learned(name: str, codebooks: KVCodebooks, head_dim: int) -> Iterator[Candidate]:
    """A learned scheme as it is shipped, and the paper's own form of NoMAD-Attention."""
    scheme = of_layer(codebooks.scheme, 0)
    sides = (scheme.key, codebooks.keys), (scheme.value, codebooks.values)
    keys, values = (round_trip(part, centre=False, codebooks=books) for part, books in sides)
    key_bits, value_bits = (stored_bits(part, head_dim, books[0]) for part, books in sides)
    bits = (key_bits + value_bits) / 2
    yield Candidate(name, "scheme", bits, keys, values, cases=LEARNED_CASES)
    if not name.startswith("nomad"):
        return

    def exact(x: Tensor, layer: int) -> Tensor:
        return x

    def in_8_bits(k_stored: Tensor, layer: int) -> Scores:
        codebook = codebooks.keys[layer]
        assert codebook is not None
        return table_scores(k_stored, codebook)

    paper = f"NoMAD d_sub {scheme.key.vector_size}, keys only"
    options: dict[str, Any] = {"cases": LEARNED_CASES}
    yield Candidate(paper, "baseline", key_bits, keys, exact, **options)
    options["scores"] = in_8_bits
    yield Candidate(f"{paper}, 8-bit tables", "baseline", key_bits, keys, exact, **options)


def stored_bits(scheme: VQScheme, head_dim: int, codebook: Tensor | None = None) -> float:
    """Bits per number of what is stored of one token and head."""
    heads = 1 if codebook is None else len(codebook)
    codebook = universal_tensor(scheme) if codebook is None else codebook
    stored = ops.encode_kv(torch.ones(heads, 1, head_dim), codebook, scheme)
    return 8 * sum(tensor.nbytes for tensor in stored) / (heads * head_dim)


def _baselines(head_dim: int) -> Iterator[Candidate]:
    def qserve(x: Tensor, layer: int) -> Tensor:
        return baselines.asymmetric(x, 4, head_dim)

    name = "QServe KV4 (no SmoothAttention)"
    yield Candidate(name, "baseline", 4 + 32 / head_dim, qserve, qserve)

    def kivi_values(x: Tensor, layer: int) -> Tensor:
        return baselines.asymmetric(x, 4, 32)

    def kivi_keys(x: Tensor, layer: int) -> Tensor:
        return baselines.per_channel(x, 4, 32)

    yield Candidate("KIVI-4 g32", "baseline", 4 + 32 / 32, kivi_keys, kivi_values)


def round_trip(
    scheme: VQScheme,
    *,
    centre: bool,
    known: int | None = None,
    codebooks: Sequence[Tensor | None] | None = None,
    means: Sequence[Calibrated | None] | None = None,
    config: Any = None,
) -> RoundTrip:
    """Store and read back [kv heads, tokens, head_dim] the way `VQCache` does.

    Args:
        scheme: of keys or of values.
        centre: take off the means over the first `known` tokens without the sinks.
        known: None = all tokens.
        codebooks: of each layer; None, or None for a layer = the universal one.
        means: calibrated ones of each layer, to take off instead.
        config: of the model, whose keys may turn; None = they do not.
    """
    universal = universal_tensor(scheme) if scheme.codebook == "universal" else None

    def stored(x: Tensor, layer: int) -> Tensor:
        calibrated = None if means is None else means[layer]
        mean = means_of(x, layer, known, calibrated, config) if centre else torch.zeros(())
        learned = None if codebooks is None else codebooks[layer]
        codebook = universal if learned is None else learned
        assert codebook is not None, f"no codebook for layer {layer}"
        codebook = codebook.to(x.device)
        codes, scale = ops.encode_kv(x - mean, codebook, scheme)
        return ops.decode_kv(codes, scale, codebook, scheme, x.shape[-1]) + mean

    return stored


def means_of(
    keys: Tensor, layer: int, known: int | None, calibrated: Calibrated | None, config: Any
) -> Tensor:
    """The means that `VQCache` takes off keys [kv heads, tokens, head_dim]: one, or for each token.

    Arguments as of `round_trip`.
    """
    positions = torch.arange(keys.shape[1], device=keys.device)
    prompt = keys[None, :, SINKS:known]
    rotary = Rotary.of(RopeFrequencies(config), layer, prompt, calibrated)
    turning: Tensor | None = None
    if calibrated is not None:
        mean, turning = calibrated.mean, calibrated.rotary_mean
        mean = mean[None, :, None].to(keys)
        turning = None if turning is None else turning[None, :, None].to(keys)
    elif rotary is None:
        mean = mean_of(prompt)
    else:
        mean, turning, shown = prompt_means(prompt, SINKS, rotary.inv_freq, rotary.interleaved)
        rotary = Rotary(rotary.inv_freq, bool(shown[0]))
    if rotary is None or turning is None:
        return mean[0]
    return (mean + rotated(turning, rotary.inv_freq, bool(rotary.interleaved), positions))[0]


def table_scores(k_stored: Tensor, codebook: Tensor) -> Scores:
    """Scores of stored keys [kv heads, tokens, head_dim] as sums of tables in 8 bits.

    Args:
        codebook: fp16 [kv heads, S, entries, x], whose entries the stored keys consist of.
    """
    heads, groups, entries, size = codebook.shape
    vectors = k_stored.unflatten(-1, (groups, size)).transpose(1, 2).flatten(0, 1)
    codes = nearest_in_groups(vectors, codebook.float().flatten(0, 1))
    # Summing table entries by codes is a product with a matrix of zeros and ones, and exact.
    chosen = torch.zeros(len(vectors), entries, k_stored.shape[1])
    chosen.scatter_(1, codes[:, None], 1.0)
    chosen = chosen.reshape(heads, groups * entries, -1)

    def scores(q: Tensor, end: int) -> Tensor:
        tables, step, low = quantized_tables(score_tables(q.transpose(0, 1), codebook))
        sums = torch.einsum("ghqc,hck->hgqk", tables.float().flatten(-2), chosen[..., :end])
        return sums * step[..., 0].transpose(0, 1) + low[..., 0].transpose(0, 1)

    return scores


def shifted(keys: RoundTrip) -> RoundTrip:
    """`keys` on the shifted twin: a fixed random constant per head on the slowest RoPE pairs."""

    def stored(x: Tensor, layer: int) -> Tensor:
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
        return keys(x + constant, layer) - constant

    return stored
