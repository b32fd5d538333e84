"""`hf-vq eval --compare`: schemes and other libraries on one model and one text, row by row.

Weights predict the whole text; caches what follows the prompt of each sequence (`evaluate`), each
with the sinks and newest tokens that it keeps exact by default.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ..cache.codebooks import needs_codebooks
from ..calibration.text import read_text
from ..errors import VQError
from ..formats.catalog import kv_scheme, weight_scheme
from ..hf.config import VQConfig
from ..progress import bar
from .evaluate import BATCH, CHUNK, MOST_TOKENS, cache_factory, prompt_length, shown_name
from .kv_stress import SHORTEST, CopyProbe, attention_states, logit_correlation
from .libraries import (
    CACHE_PEERS,
    CALIBRATION_TOKENS,
    WEIGHT_PEERS,
    Job,
    cache_bits,
    quantized,
    quantized_cache,
)
from .load import fingerprint, first_line, load_model, load_tokenizer
from .record import Recorder, make_record
from .score import Reference, model_forward, score
from .storage import model_storage, read_config
from .text import read_sequences, text_facts

WEIGHTS = ("vq-4", "vq-3", "vq-2", "turboquant-4", "quip-sharp-2", *WEIGHT_PEERS)
CACHES = ("u4", "u3", "u2", "nomad-u4", *CACHE_PEERS)
PROBED = 4  # sequences that the probes of a cache use


@dataclass(frozen=True)
class Candidate:
    """A row: `what` is "weights" or "cache"; `kind` "scheme", "calibrated" or "peer"."""

    what: str
    name: str
    kind: str

    @property
    def label(self) -> str:
        """Label in a table or a plot."""
        if self.kind == "peer":
            peers: dict[str, Any] = WEIGHT_PEERS if self.what == "weights" else CACHE_PEERS
            return str(peers[self.name].label)
        return self.name + ", calibrated" * (self.kind == "calibrated")


def candidates(weights: Sequence[str], caches: Sequence[str], calibrated: bool) -> list[Candidate]:
    """The rows of a comparison; schemes that can be calibrated get a second one if `calibrated`.

    Raises:
        VQError: a name is neither a scheme nor a peer.
    """
    found = []
    for name in dict.fromkeys(weights):
        if name in WEIGHT_PEERS:
            found.append(Candidate("weights", name, "peer"))
            continue
        _known(weight_scheme, name, WEIGHT_PEERS)
        found.append(Candidate("weights", name, "scheme"))
        if calibrated:
            found.append(Candidate("weights", name, "calibrated"))
    for name in dict.fromkeys(caches):
        if name in CACHE_PEERS:
            found.append(Candidate("cache", name, "peer"))
            continue
        learned = needs_codebooks(_known(kv_scheme, name, CACHE_PEERS))
        found.append(Candidate("cache", name, "calibrated" if learned else "scheme"))
    return found


def _known(find: Callable[[str], Any], name: str, peers: dict[str, Any]) -> Any:
    try:
        return find(name)
    except VQError as error:
        raise VQError(f"{error} Or one of the peers: {', '.join(peers)}.") from None


class Comparison:
    """One model and one text, on which the candidates are measured.

    Args:
        model: directory or Hub id of the original.
        text: UTF-8 text file.
        weights: names of schemes and peers.
        caches: the same of KV caches.
        calibration: another UTF-8 text, for schemes and peers that are calibrated.
        tokens: how many tokens of the text; None = all, at most MOST_TOKENS.
        context: tokens of a sequence.
        dtype: of the model; "auto" is its own.
        device_map: as `from_pretrained` takes it.

    Raises:
        VQError: a name is unknown, or the model or a text cannot be used.
    """

    def __init__(
        self,
        model: str,
        text: str | Path,
        weights: Sequence[str] = (),
        caches: Sequence[str] = (),
        *,
        calibration: str | Path | None = None,
        tokens: int | None = None,
        context: int = 1024,
        dtype: torch.dtype | str = "auto",
        device_map: str | None = None,
    ) -> None:
        self.candidates = candidates(weights, caches, calibration is not None)
        if read_config(model).get("quantization_config") and weights:
            raise VQError(
                f"{model} is quantized already: compare weights on the original, or give only "
                "--cache names."
            )
        self.model = model
        self.calibration = calibration
        self.job = Job(model, dtype, device_map, calibration, context)
        self.prompt = prompt_length(context) if caches else 0
        if caches and context < SHORTEST:
            raise VQError(f"comparing caches needs a context of {SHORTEST} tokens or more.")
        self.tokenizer = load_tokenizer(model)
        most = max(MOST_TOKENS, 2 * context)
        self.sequences = read_sequences(
            self.tokenizer, text, context=context, tokens=tokens, most=most
        )
        self._learned = "" if calibration is None else read_text(calibration)
        self.settings: dict[str, Any] = {
            "model": shown_name(model),
            "model_sha256": fingerprint(model),
            **text_facts(text),
            "tokens": self.sequences.numel(),
            "context": context,
            "dtype": str(dtype).removeprefix("torch."),
            "not scored with a cache": f"the first {self.prompt} of each context",
        }
        if calibration is not None:
            facts = text_facts(calibration)
            self.settings |= {f"calibration_{key}": fact for key, fact in facts.items()}
            self.settings["calibration_tokens"] = CALIBRATION_TOKENS

    def rows(
        self, kept: Sequence[dict[str, Any]] = (), *, progress: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Measure every candidate, in order.

        Args:
            kept: rows of an earlier run with the same settings: those that did not fail are not
                measured again.
            progress: show a bar.

        Yields:
            A row: `what`, `name`, `kind`, `label`, and either `failed`, the reason, or `bits`,
            stored of a weight or of a coded number of the cache, and `score`'s numbers; of weights
            also `seconds` to quantize, of a cache `correlation`, `worst_layer` and `recall`.
        """
        done = {_key(row): row for row in kept if "failed" not in row}
        for one in bar(self.candidates, "comparing", progress):
            row: dict[str, Any] = {
                "what": one.what, "name": one.name, "kind": one.kind, "label": one.label,
            }  # fmt: skip
            if (again := done.get(_key(row))) is not None:
                yield again
                continue
            measure = self._weights if one.what == "weights" else self._cache
            expected = Exception if one.kind == "peer" else (VQError, torch.OutOfMemoryError)
            try:
                row |= measure(one)
            except expected as error:
                row["failed"] = reason(error)
            yield row

    @property
    def perplexity(self) -> float:
        """Perplexity of the original on the whole text."""
        return self._reference.perplexity

    @cached_property
    def _original(self) -> Any:
        return load_model(self.model, dtype=self.job.dtype, device_map=self.job.device_map)

    @cached_property
    def _reference(self) -> Reference:
        return Reference(model_forward(self._original), self.sequences)

    @cached_property
    def _behind_prompts(self) -> Reference:
        return Reference(model_forward(self._original), self.sequences, skip=self.prompt)

    @cached_property
    def _states(self) -> Any:
        return attention_states(self._original, self.sequences[:PROBED])

    @cached_property
    def _copies(self) -> CopyProbe:
        return CopyProbe(self._original, self.sequences[:PROBED])

    def _weights(self, one: Candidate) -> dict[str, Any]:
        start = time.perf_counter()
        if one.kind == "peer":
            model, bits = quantized(WEIGHT_PEERS[one.name], self.job)
        else:
            model = self._quantized(one)
            bits = model_storage(model).bits_per_weight
        seconds = time.perf_counter() - start
        found = score(model_forward(model), self._reference, BATCH)
        return {"bits": bits, "seconds": seconds, **found.to_dict()}

    def _quantized(self, one: Candidate) -> Any:
        calibration = None
        if one.kind == "calibrated":
            calibration = {
                "text": str(self.calibration),
                "tokens": CALIBRATION_TOKENS,
                "context": self.job.context,
            }
        with warnings.catch_warnings():  # that 2 bits without data lose much is what rows show
            warnings.filterwarnings("ignore", message=".* loses much quality ")
            config = VQConfig(one.name, calibration=calibration)
        return load_model(
            self.model, dtype=self.job.dtype, config=config, device_map=self.job.device_map
        )

    def _cache(self, one: Candidate) -> dict[str, Any]:
        new_cache = self._new_cache(one)
        caches: list[Any] = []

        def recorded() -> Any:
            caches[:] = [new_cache()]
            return caches[0]

        forward = model_forward(self._original, recorded, prompt=self.prompt, chunk=CHUNK)
        found = score(forward, self._behind_prompts, BATCH)
        bits = cache_bits(caches[0]) if one.kind == "peer" else caches[0].bits_per_element
        correlation, layer = logit_correlation(self._states, new_cache)
        return {
            "bits": float(bits),
            **found.to_dict(),
            "correlation": correlation,
            "worst_layer": layer,
            "recall": self._copies.run(new_cache),
        }

    def _new_cache(self, one: Candidate) -> Callable[[], Any]:
        from ..cache import VQCache
        from ..calibration.kv_codebooks import calibrate_kv

        if one.kind == "peer":
            new = partial(quantized_cache, CACHE_PEERS[one.name], self._original.config)
            new()
            return new
        if one.kind == "scheme" or not self._learned:
            return cache_factory(self._original, one.name)
        books = calibrate_kv(
            self._original, one.name, self._learned, self.tokenizer,
            context=self.job.context, progress=False,
        )  # fmt: skip
        return partial(VQCache, self._original.config, one.name, codebooks=books)


def record(comparison: Comparison, command: str, out: Path | None) -> dict[str, Any]:
    """Measure with a progress bar, and save each row as soon as it is measured.

    Args:
        comparison: what to measure.
        command: result of `record.command_line`.
        out: path of the record; None = save nothing. An interrupted run with the same settings is
            continued.

    Returns:
        The record.
    """
    device = comparison.job.device_map or "cpu"
    settings = comparison.settings
    recorder = None
    if out is not None:
        recorder = Recorder(out, "compare", command, device=device, settings=settings)
    rows = []
    for row in comparison.rows(recorder.kept() if recorder else (), progress=True):
        rows.append(row)
        if recorder:
            recorder.add(row)
    results = {"perplexity": comparison.perplexity, "rows": rows}
    if recorder:
        return recorder.finish(settings, results)
    return make_record("compare", command, settings, results, device=device)


def reason(error: BaseException) -> str:
    """Reason of a failure for a row: one line, without folders of this machine."""
    line = re.sub(r"(?<![\w:/])(?:/[\w.+@-]+)+/", "", first_line(error)).replace("|", "/")
    return line if isinstance(error, VQError) else f"{type(error).__name__}: {line}"


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["what"], row["name"], row["kind"]
