"""`hf-vq eval`: one model on one text, as a table and as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..cache.argument import CACHE, cache_argument
from ..errors import VQError
from ..formats.catalog import kv_scheme
from ..hf.checkpoint.save import check_card, save_evaluation
from .load import load_model, load_tokenizer
from .record import machine, today, versions
from .score import Reference, Score, model_forward, score
from .storage import Storage, model_storage
from .text import read_sequences, text_facts
from .text_tables import significant, text_table

MOST_TOKENS = 16384  # without --tokens: enough for a standard error of a few percent
BATCH = 8  # sequences per forward
CHUNK = 8  # tokens per step when a cache is read
EXACT = 4 + 64  # sinks and window of a VQCache: a shorter prompt leaves nothing to read as codes


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`; `score` is None without a reference.

    `skipped` predictions at the start of each sequence are not scored.
    """

    model: str
    reference: str | None
    cache: str | None
    text: dict[str, str]
    tokens: int
    context: int
    perplexity: float
    score: Score | None
    bits_per_weight: float
    bits_per_parameter: float
    nbytes: int
    bits_per_kv_element: float | None
    scored_tokens_per_second: float
    generated_tokens_per_second: float
    skipped: int = 0
    device: str = "cpu"

    def to_dict(self) -> dict[str, Any]:
        """JSON types, with the machine and the versions."""
        return {**asdict(self), "machine": machine(self.device), "versions": versions()}

    def facts(self) -> dict[str, Any]:
        """Facts for a model card, as JSON types; needs a score."""
        assert self.score is not None
        return {
            "model": self.reference or self.model,
            **self.text,
            "tokens": self.tokens,
            "context": self.context,
            **self.score.to_dict(),
            "hf_vq": versions()["hf-vq"],
            "date": today(),
        }

    def table(self) -> str:
        """Two columns for a terminal."""
        rows = [["perplexity", f"{self.perplexity:.3f}"]]
        if self.score is not None:
            s = self.score
            rows += [
                ["perplexity against the reference", f"{s.change:+.2f} % ± {s.change_se:.2f}"],
                ["KL divergence", f"{significant(s.kld)} ± {significant(s.kld_se, 1)}"],
                ["KL divergence, 99th percentile", significant(s.kld_p99)],
                ["top-1 agreement", f"{s.top1:.2f} % ± {s.top1_se:.2f}"],
            ]
        rows += [
            ["stored bits per quantized weight", f"{self.bits_per_weight:.3f}"],
            ["stored bits per parameter", f"{self.bits_per_parameter:.3f}"],
            ["stored size", f"{self.nbytes / 1e6:.2f} MB"],
        ]
        if self.bits_per_kv_element is not None:
            rows.append(["bits per KV element", f"{self.bits_per_kv_element:.3f}"])
        rows += [
            ["tokens/s, scoring", f"{self.scored_tokens_per_second:.0f}"],
            ["tokens/s, generating", f"{self.generated_tokens_per_second:.1f}"],
            ["text", f"{self.tokens} tokens of {self.text['text']}, context {self.context}"],
        ]
        if self.skipped:
            rows.append(["not scored", f"the first {self.skipped} of each context: the prompt"])
        return text_table(["", self.model], rows)


def evaluate(
    model: str,
    *,
    text: str | Path,
    reference: str | None = None,
    tokens: int | None = None,
    context: int = 1024,
    cache: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    card: bool = False,
) -> Evaluation:
    """Score a model on a text.

    Args:
        model: directory or Hub id, quantized or not.
        text: UTF-8 text file.
        reference: the unquantized model. Without one, `cache` compares the model with itself under
            its own cache, and without `cache` there is only a perplexity.
        tokens: how many tokens of the text; None = all, at most MOST_TOKENS.
        context: tokens per sequence.
        cache: KV scheme to read keys and values from, with the codebooks or means that were
            calibrated for the model, if there are. The start of each sequence is then a prompt
            (`prompt_length`), and only what follows it is scored: every scored prediction reads
            codes, except for the sinks and its 64 to 71 newest tokens.
        dtype: of both models.
        device_map: of both models.
        card: also write what was found into the model's folder: README.md and config.json.

    Raises:
        VQError: a model, the text, the scheme or, with `card`, the folder cannot be used.
    """
    if card:
        if reference is None or cache is not None:
            raise VQError("a card tells the distance to the original: give a reference, no cache.")
        check_card(model)
    if cache is not None:
        kv_scheme(cache)  # a wrong name, before anything is loaded
    prompt = prompt_length(context) if cache is not None else 0
    tokenizer = load_tokenizer(model)
    sequences = read_sequences(
        tokenizer, text, context=context, tokens=tokens, most=max(MOST_TOKENS, 2 * context)
    )
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    loaded = load_model(model, dtype=torch_dtype, device_map=device_map)
    new_cache = None if cache is None else cache_factory(loaded, cache)
    original = loaded
    if reference is not None:
        original = load_model(reference, dtype=torch_dtype, device_map=device_map)
    expected = Reference(model_forward(original), sequences, skip=prompt)
    caches: list[Any] = []

    def recorded() -> Any:
        assert new_cache is not None
        caches[:] = [new_cache()]
        return caches[0]

    forward = model_forward(loaded)
    if new_cache:
        forward = model_forward(loaded, recorded, prompt=prompt, chunk=CHUNK)
    found = score(forward, expected, BATCH)
    compared = reference is not None or cache is not None
    storage: Storage = model_storage(loaded)
    speed = generation_speed(
        loaded, sequences[0][: context // 2], 32, recorded if new_cache else None
    )
    result = Evaluation(
        model=shown_name(model),
        reference=shown_name(reference) if reference else None,
        cache=cache,
        text=text_facts(text),
        tokens=sequences.numel(),
        context=context,
        perplexity=found.perplexity,
        score=found if compared else None,
        bits_per_weight=storage.bits_per_weight,
        bits_per_parameter=storage.bits_per_parameter,
        nbytes=storage.nbytes,
        bits_per_kv_element=float(caches[0].bits_per_element) if caches else None,
        scored_tokens_per_second=found.tokens_per_second,
        generated_tokens_per_second=speed,
        skipped=prompt,
        device=str(loaded.device),
    )
    if card:
        save_evaluation(loaded, model, result.facts())
    return result


def prompt_length(context: int) -> int:
    """Tokens of a sequence that are its prompt when a cache is measured: a quarter, at least EXACT.

    Raises:
        VQError: little would be left to score.
    """
    if context < 2 * EXACT:
        raise VQError(
            f"in a context of {context} tokens hardly a code is read: sinks and window are {EXACT} "
            f"tokens. Use a context of {2 * EXACT} or more."
        )
    return max(context // 4, EXACT)


def cache_factory(model: Any, scheme: str) -> Callable[[], Any]:
    """Makes empty caches of a scheme for a loaded model; the first is made at once.

    Raises:
        VQError: the scheme needs learned codebooks, and the model's folder has none.
    """
    from ..cache import VQCache

    VQCache.from_pretrained(model, scheme)
    return lambda: VQCache.from_pretrained(model, scheme)


@torch.no_grad()
def generation_speed(
    model: Any, prompt: torch.Tensor, count: int, new_cache: Callable[[], Any] | None = None
) -> float:
    """Tokens per second of greedy decoding of one sequence, after the prefill of `prompt`."""
    ids = prompt[None].to(model.device)
    options: dict[str, Any] = {}
    if new_cache is not None:
        options[cache_argument(model)] = new_cache()
    state = model(ids, use_cache=True, **options)
    start = math.nan
    for step in range(count + 1):
        if step == 1:  # the first step is a warm-up
            start = time.perf_counter()
        token = state.logits[:, -1:].argmax(-1)
        state = model(token, **{cache_argument(model): state.get(CACHE)}, use_cache=True)
    return count / max(time.perf_counter() - start, 1e-9)


def shown_name(model: str) -> str:
    """Name of a model in a record: the last part of a directory, or a Hub id in full."""
    return Path(model).resolve().name if Path(model).is_dir() else model
