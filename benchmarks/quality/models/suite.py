"""Suite `quality-models`: weights, embeddings, KV caches and passkeys on any models.

Each model has its record, `quality-models-NAME.jsonl`. Every row names the revision
that it was measured at. `--resume` keeps the rows of this revision and of the same texts, and
measures the others; a row whose package is not installed says so.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_vq.calibration.text import read_text, usual_context
from hf_vq.evaluation.load import fingerprint, first_line, load_model, load_tokenizer
from hf_vq.evaluation.score import Reference, model_forward, score
from hf_vq.evaluation.text import text_facts

from . import caches, passkey, texts, weights

SOURCES = {
    "smollm2-135m": "Q4_1", "qwen2.5-coder-0.5b": "Q4_K", "qwen2.5-coder-1.5b": "Q4_K",
    "gemma-3-270m": "Q4_K",
}  # fmt: skip
"""Type of the file that a model was converted from; rows whose format has its grid are marked."""
PASSKEYS = ("u4", "u3", "u2")  # caches that are asked for passkeys, besides the exact one
KV_CHUNK = 8  # tokens of a step that reads the cache


@dataclass(frozen=True)
class Options:
    """Options of the suite, as the command line names them."""

    text: Path
    rows: tuple[str, ...] = ("*",)
    tokens: int = 8192
    context: int = 1024
    prompts: Path | None = None
    answers: Path = Path("answers")
    chat_tokens: int = 8192
    chat_context: int = 256
    kv_passages: int = 8
    kv_prompt: int = 256
    kv_scored: int = 256
    kv_long: int = 4096
    kv_long_passages: int = 4
    passkeys: tuple[int, ...] = (1024, 4096, 16384)
    calibration: Path | None = None
    calibration_tokens: int = 1 << 16
    ggml: Path | None = None
    device: str | None = None


def names(options: Options) -> list[str]:
    """Names of the rows that `options.rows` asks for, in the order in which they are measured."""
    found = [f"kv:{row.name}" for row in caches.rows()]
    found += [f"kv:{name}@{options.kv_long}" for name in caches.BEHIND_LONG_PROMPTS]
    found += [
        f"passkey:{name}@{length}" for length in options.passkeys for name in ("exact", *PASSKEYS)
    ]
    found += [f"weights:{row.name}" for row in weights.rows()]
    found += [f"embeddings:{row.name}" for row in weights.embeddings()]
    return [n for n in found if any(fnmatch.fnmatch(n, wanted) for wanted in options.rows)]


class ModelSuite:
    """The rows of one model.

    Args:
        model_dir: its folder.
        options: what is measured.

    Attributes:
        settings: those of the record: the texts, by name, digest and tokens.
    """

    def __init__(self, model_dir: str, options: Options) -> None:
        self.model_dir, self.options = model_dir, options
        self.name = Path(model_dir).resolve().name
        self.tokenizer = load_tokenizer(model_dir)
        self.model = load_model(model_dir, dtype=torch.float32, device_map=options.device)
        natural = texts.natural(self.tokenizer, options.text, options.tokens, options.context)
        self.passages = [natural]
        if options.prompts is not None:
            self.passages.append(
                texts.chat(
                    self.model, self.tokenizer, model_dir, options.prompts, options.answers,
                    options.chat_tokens, options.chat_context,
                )
            )  # fmt: skip
        self.settings = self._settings()
        self.job = self._job()

    def _settings(self) -> dict[str, Any]:
        options = self.options
        found: dict[str, Any] = {
            "model": self.name, "model_sha256": fingerprint(self.model_dir),
            "source": SOURCES.get(self.name), "dtype": "float32", **text_facts(options.text),
        }  # fmt: skip
        for passages in self.passages:
            found |= passages.facts()
        if options.prompts is not None:
            found |= {f"prompts_{k}": v for k, v in text_facts(options.prompts).items()}
        found |= {
            "kv_passages": options.kv_passages, "kv_prompt": options.kv_prompt,
            "kv_scored": options.kv_scored, "kv_long": options.kv_long,
            "kv_long_passages": options.kv_long_passages,
            "kv_chunk": KV_CHUNK, "sinks": caches.SINKS, "window": caches.WINDOW,
        }  # fmt: skip
        if options.calibration is not None:
            facts = text_facts(options.calibration)
            found |= {f"calibration_{key}": fact for key, fact in facts.items()}
            found["calibration_tokens"] = options.calibration_tokens
        return found

    def _job(self) -> weights.Job:
        options, learned, calibration = self.options, None, None
        if options.calibration is not None:
            count = options.calibration_tokens
            context = min(usual_context(count), count)
            learned = texts.natural(self.tokenizer, options.calibration, count, context).ids
            calibration = {"text": str(options.calibration), "tokens": count, "context": context}
        return weights.Job(
            self.model_dir, self.model, learned, calibration, options.ggml, options.device
        )

    def measure(self, name: str) -> Iterator[dict[str, Any]]:
        """The rows of one name: of weights, one for each text."""
        what, _, which = name.partition(":")
        try:
            if what in ("weights", "embeddings"):
                yield from self._weights(what, which)
            else:
                yield from {"kv": self._cache, "passkey": self._passkey}[what](which)
        except Exception as error:
            yield {"what": what, "name": which, "failed": first_line(error)}

    def _weights(self, what: str, name: str) -> Iterator[dict[str, Any]]:
        rows = weights.rows() if what == "weights" else weights.embeddings()
        row = next(row for row in rows if row.name == name)
        quantized, seconds = row.measure(self.job)
        grid = row.grid if self.settings["source"] else None
        for passages in self.passages:
            found = score(model_forward(quantized.model), self._reference(passages)).to_dict()
            yield {
                "what": what, "name": name, "kind": row.kind, "on": passages.name,
                "bits_per_weight": quantized.bits, "grid": grid, "quantize_seconds": seconds,
                **quantized.facts, **found,
            }  # fmt: skip

    def _reference(self, passages: texts.Passages) -> Reference:
        kept: dict[str, Reference] = self.__dict__.setdefault("_references", {})
        if passages.name not in kept:
            forward = model_forward(self.model)
            kept[passages.name] = Reference(
                forward, passages.ids, skip=passages.skip, keep_bytes=1 << 30
            )
        return kept[passages.name]

    def _cache(self, which: str) -> Iterator[dict[str, Any]]:
        options, (name, _, long) = self.options, which.partition("@")
        row = next(row for row in caches.rows() if row.name == name)
        prompt, count = options.kv_prompt, options.kv_passages
        if long:
            prompt, count = int(long), options.kv_long_passages
        length = prompt + options.kv_scored
        made: list[Any] = []

        def new_cache() -> Any:
            made[:] = [row.new(self.model.config)]
            return made[0]

        kept: dict[int, Reference] = self.__dict__.setdefault("_kv_reference", {})
        if prompt not in kept:
            kept.clear()  # gigabytes
            passages = texts.natural(self.tokenizer, options.text, length * count, length)
            exact = model_forward(self.model)
            kept[prompt] = Reference(exact, passages.ids, skip=prompt, keep_bytes=2 << 30)
        with_cache = model_forward(self.model, new_cache, prompt=prompt, chunk=KV_CHUNK)
        found = score(with_cache, kept[prompt]).to_dict()
        yield {
            "what": "kv", "name": name, "kind": row.kind, **({"length": prompt} if long else {}),
            "bits_per_element": row.bits(made[0]), **found,
        }  # fmt: skip

    def _passkey(self, name: str) -> Iterator[dict[str, Any]]:
        which, _, length = name.partition("@")
        new_cache = None
        if which != "exact":
            row = next(row for row in caches.rows() if row.name == which)

            def new_cache() -> Any:
                return row.new(self.model.config)

        text = self.tokenizer(
            read_text(self.options.text), add_special_tokens=False, verbose=False
        ).input_ids
        found = passkey.measure(
            self.model, self.tokenizer, torch.tensor(text), int(length), new_cache=new_cache
        )
        yield {"what": "passkey", "name": which, "length": int(length), **found}

    def perplexities(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The original's perplexity on the texts that rows were measured on, now or before."""
        read = {row.get("on") for row in rows}
        return {p.name: self._reference(p).perplexity for p in self.passages if p.name in read}


def row_name(row: dict[str, Any]) -> str:
    """The name, as of `names`, that a row was measured for."""
    at = f"@{row['length']}" if "length" in row else ""
    return f"{row['what']}:{row['name']}{at}"


def run(
    suite: ModelSuite,
    kept: Sequence[dict[str, Any]],
    revision: str | None,
    report: Callable[[dict[str, Any]], None],
    say: Callable[[str], None] = print,
) -> None:
    """Measure the rows that are asked for and not in `kept`; `report` gets each one."""
    known = {row_name(row) for row in kept if "failed" not in row}
    todo = [name for name in names(suite.options) if name not in known]
    start = time.monotonic()
    for number, name in enumerate(todo):
        for row in suite.measure(name):
            report({**row, "revision": revision})
        gc.collect()
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
        left = (time.monotonic() - start) / (number + 1) * (len(todo) - number - 1)
        say(f"{suite.name}: {number + 1} of {len(todo)} rows, about {left / 60:.0f} min left")
