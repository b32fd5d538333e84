"""Suite `serve`: tokens per second of continuous batching, with pages of floats and of codes.

A Llama with random weights answers random prompts, as many at once as a row says. Weights and pages
share one budget of memory, so pages of codes hold more requests: a row of `ALL` has as many as fit.
On a GPU the model has the shape of Llama 3 8B, prompts 1024 tokens and answers 512 (as in QServe's
tables); on a CPU all is small.

Each row also has the memory roofline: every step reads the weights and the pages of all
requests once, as fast as memory can be read, and prompts take no time.

Rows of codes also compare their text with that of plain decoding (`same_text`).
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig

from hf_vq.errors import VQBackendError, VQError
from hf_vq.evaluation.text_tables import markdown_table
from hf_vq.hf.generation import enable_cache_backend
from hf_vq.serving.continuous_batching import objection

from ..random_llama import random_llama
from . import same_text

FLOATS, DENSE = "floats", "dense"
"""Pages of Transformers' own, and linear layers without codes."""
PAGE = 256
ALL = 0
"""Requests of a row that has as many as its pages hold."""
_GB = 1 << 30
_MOST = 512  # requests at once
_BATCH = 2048  # tokens of a forward, on a GPU: the remaining memory of the budget
_SECONDS = 3600.0  # that a row may take


@dataclass(frozen=True)
class Case:
    """Model, schemes and load of one measurement.

    Args:
        config: configuration of the model.
        pairs: WEIGHTS/PAGES, schemes of the linear layers and of pages, or `DENSE` and `FLOATS`.
        requests: concurrent requests; `ALL` = as many as fit.
        prompt: tokens of a prompt.
        new: tokens of an answer.
        memory_gb: GPU memory for weights, pages and all else.
    """

    config: LlamaConfig
    pairs: tuple[str, ...]
    requests: tuple[int, ...]
    prompt: int
    new: int
    memory_gb: float

    def but(self, **given: Any) -> Case:
        """The case with other values; None = unchanged."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def settings(self) -> dict[str, Any]:
        """Shape and load, as a record holds them."""
        shape = "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"
        return {
            **{name: getattr(self.config, name) for name in shape},
            "prompt": self.prompt, "new": self.new, "memory_gb": self.memory_gb,
        }  # fmt: skip


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, words: int
) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=hidden // heads, intermediate_size=ffn,
        vocab_size=words, max_position_embeddings=8192, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


CASES = {
    "cpu": Case(
        _llama(4, 512, 4, 2, 1536, 8000),
        ("dense/floats", "dense/u4", "dense/u2", "dense/qserve-kv4"), (1, 4, 16), 512, 32, 0.0,
    ),
    "cuda": Case(
        _llama(32, 4096, 32, 8, 14336, 128256),
        ("dense/floats", "dense/u4", "vq-4/u4", "vq-4/u2", "qoq-w4a8-g128/qserve-kv4"),
        (1, 16, 64, ALL), 1024, 512, 24.0,
    ),
}  # fmt: skip


def pair(text: str) -> str:
    """Format as WEIGHTS/PAGES.

    Raises:
        ValueError: it is something else.
    """
    weights, pages = text.split("/")
    if not (weights and pages):
        raise ValueError(text)
    return text


def run(
    *,
    pairs: Sequence[str] | None = None,
    requests: Sequence[int] | None = None,
    prompt: int | None = None,
    new: int | None = None,
    memory_gb: float | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Serve every number of requests with every pair of weights and pages; `report` gets each row.

    Args:
        pairs: WEIGHTS/PAGES, with equal weights next to each other; None = those of the
            device's case, as are the next four.
        requests: at once, `ALL` = as many as fit.
        prompt: tokens.
        new: tokens.
        memory_gb: for weights, pages and all else; 0 = pages for all requests, whatever they take.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: this Transformers cannot hold codes in pages.
    """
    if problem := objection():
        raise VQBackendError(f"the suite serve needs another release of Transformers: {problem}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = CASES[device].but(
        pairs=pairs, requests=requests, prompt=prompt, new=new, memory_gb=memory_gb
    )
    prompt, new, memory = case.prompt, case.new, case.memory_gb
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = []
    for stored, of in itertools.groupby(
        (pair.split("/") for pair in case.pairs), operator.itemgetter(0)
    ):
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)  # until the model is made
        model = random_llama(case.config, dtype, None if stored == DENSE else stored, device)
        model.generation_config = GenerationConfig()
        for _, scheme in of:
            for count in case.requests:
                name = str(dtype)[6:] if stored == DENSE else stored
                row = {"weights": name, "kv": scheme, "requests": count, "all": count == ALL}
                try:
                    if count == ALL:
                        count = row["requests"] = _fitting(model, scheme, prompt + new, memory)
                    settings = _settings(count, prompt + new, memory)
                    row |= _serve_row(model, scheme, count, prompt, new, settings)
                    row |= _reading(model, row, prompt, new)
                    if scheme != FLOATS:
                        row["text"] = _text(model, scheme, count)
                except (VQError, MemoryError, torch.OutOfMemoryError) as error:
                    row["failed"] = str(error).partition(". ")[0]
                    _empty()
                rows.append(row)
                report(row)
        del model
        _empty()
    return {**case.settings, "page": PAGE, "dtype": str(dtype)[6:]}, {"rows": rows}


def _settings(count: int, length: int, memory: float) -> Any:
    """The config of continuous batching that keeps to the budget."""
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import get_device_and_memory_breakdown

    settings = ContinuousBatchingConfig(page_size=PAGE, max_requests_per_batch=count)
    settings.max_blocks_per_request = -(-length // PAGE)
    if not memory:
        settings.num_blocks = count * -(-length // PAGE) + 1
        settings.max_batch_tokens = 1024
        return settings
    _empty()
    device, total, reserved, allocated = get_device_and_memory_breakdown()
    used = max(reserved, allocated)
    settings.max_batch_tokens = _BATCH
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(memory * _GB / total, 1.0))
        torch.cuda.reset_peak_memory_stats()
    # What is left goes to workspaces that Transformers does not count.
    settings.max_memory_percent = 0.95 * (memory * _GB - used) / (total - used)
    return settings


def _empty() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _serve_row(
    model: Any, scheme: str, count: int, prompt: int, new: int, settings: Any
) -> dict[str, Any]:
    """One row: `count` requests at once, all of the same lengths, all different."""
    prompts = _prompts(model, count + 1, prompt)
    with model.continuous_batching_context_manager(
        generation_config=_greedy(scheme, new), continuous_batching_config=settings
    ) as manager:
        attention = model.config._attn_implementation
        manager.add_request(prompts[count], max_new_tokens=2)
        _results(manager, 1)  # what is compiled at the first call is compiled
        start = time.perf_counter()
        manager.add_requests(prompts[:count], record_timestamps=True)
        results = _results(manager, count)
        seconds = time.perf_counter() - start
        cache = manager.batch_processor.cache
        capacity = cache.num_blocks * PAGE
        pages = cache.cache_tensor.nbytes
        del cache
    del manager
    _empty()
    tokens = sum(len(result.generated_tokens) for result in results)
    prompted = max(result.timestamps[0] for result in results)  # all generate from then on
    later = [at for result in results for at in result.timestamps if at > prompted]
    row = {
        "tokens_per_second": tokens / seconds, "seconds": seconds, "capacity_tokens": capacity,
        "pages_gb": pages / _GB, "attention": attention, "prompts_seconds": prompted - start,
        "later_tokens_per_second": len(later) / (max(later) - prompted) if later else None,
    }  # fmt: skip
    if torch.cuda.is_available():
        row["peak_gb"] = torch.cuda.max_memory_allocated() / _GB
    return row


def _greedy(scheme: str, new: int) -> GenerationConfig:
    enable_cache_backend()
    options = None if scheme == FLOATS else {"backend": "vq", "scheme": scheme}
    return GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0,
        cache_implementation=None if options is None else "quantized", cache_config=options,
    )  # fmt: skip


def _prompts(model: Any, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shape = (count, length)
    found: list[list[int]] = torch.randint(
        0, model.config.vocab_size, shape, generator=generator
    ).tolist()
    return found


def _text(model: Any, scheme: str, count: int) -> dict[str, Any]:
    """Compare the text of `count` concurrent requests with that of plain decoding."""
    prompts = _prompts(model, count, same_text.PROMPT)
    length = same_text.PROMPT + same_text.NEW

    def answer() -> same_text.Answers:
        # Pages for all, and no more: plain decoding needs memory, too.
        settings = _settings(count, length, 0.0)
        settings.return_logprobs = True
        with model.continuous_batching_context_manager(
            generation_config=_greedy(scheme, same_text.NEW), continuous_batching_config=settings
        ) as manager:
            names = manager.add_requests(prompts)
            results = {result.request_id: result for result in _results(manager, count)}
        del manager
        _empty()
        return [(results[name].generated_tokens, results[name].logprobs) for name in names]

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
    return same_text.compare(answer)


def _fitting(model: Any, scheme: str, length: int, memory: float) -> int:
    """Number of requests of `length` tokens whose pages fit into `memory`."""
    found = _serve_row(model, scheme, 1, 1, 2, _settings(_MOST, length, memory))
    return max(1, min(found["capacity_tokens"] // (-(-length // PAGE) * PAGE), _MOST))


def _reading(model: Any, row: dict[str, Any], prompt: int, new: int) -> dict[str, float]:
    """Memory roofline of a row: only reading takes time."""
    if not torch.cuda.is_available():
        return {}
    tensors = {x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}
    tensors.pop(model.get_input_embeddings().weight.data_ptr())  # a row for each token
    token = row["pages_gb"] * _GB / row["capacity_tokens"]
    page_bytes = row["requests"] * (prompt + new / 2) * token
    step = (sum(tensors.values()) + page_bytes) / _bandwidth()
    return {
        "reading_tokens_per_second": row["requests"] / step,
        "weights_gb": sum(tensors.values()) / _GB,
    }


@functools.cache
def _bandwidth() -> float:
    """Bytes that the GPU reads in a second, while it writes as many: of a copy."""
    x, y = torch.empty(2, 1 << 28, dtype=torch.int32, device="cuda").unbind()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = 0.0
    for _ in range(10):
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        best = max(best, 2 * x.nbytes / (start.elapsed_time(end) / 1e3))
    return best


def _results(manager: Any, count: int) -> list[Any]:
    found: list[Any] = []
    end = time.perf_counter() + _SECONDS
    while len(found) < count:
        result = manager.get_result(timeout=1)
        if result is None and (not manager.is_running() or time.perf_counter() > end):
            raise VQBackendError(
                f"continuous batching stopped after {len(found)} of {count} requests: "
                f"{manager.background_thread_status.fatal_error}."
            )
        if result is not None and result.is_finished():
            if result.error is not None:
                raise VQBackendError(f"a request failed: {result.error}.")
            found.append(result)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens per second: a line for each kind of weights and pages, with the attention that ran and
    the tokens of all requests that pages hold; a column for each number of requests, and for as
    many as fit, with what reading alone allows them, with how many of their texts are those of
    plain decoding, and how far apart log-probabilities are up to the first other token."""
    counts = sorted({row["requests"] for row in rows if not row.get("all")})
    head = ["weights", "pages", "attention", "tokens that fit", *(f"{n} requests" for n in counts)]
    full = [row for row in rows if row.get("all")]
    head += ["as many as fit", "reading alone", "same text"] if full else []
    lines = []
    for pair in dict.fromkeys((row["weights"], row["kv"]) for row in rows):
        of = [row for row in rows if (row["weights"], row["kv"]) == pair]
        speeds = {row["requests"]: row.get("tokens_per_second") for row in of if not row.get("all")}
        fits = of[-1].get("capacity_tokens")
        attentions = dict.fromkeys(row["attention"] for row in of if "attention" in row)
        line = [
            f"`{pair[0]}`", f"`{pair[1]}`", ", ".join(f"`{name}`" for name in attentions) or "-",
            "-" if fits is None else f"{fits:,}", *(_speed(speeds.get(count)) for count in counts),
        ]  # fmt: skip
        lines.append(line + [cell for row in of if row.get("all") for cell in _of_all(row)])
    return markdown_table(head, lines)


def _speed(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:,.0f}"


def _of_all(row: dict[str, Any]) -> tuple[str, str, str]:
    """The cells of a row with as many requests as fit."""
    if "tokens_per_second" not in row:
        return "-", "-", "-"
    speed, text = f"{_speed(row['tokens_per_second'])} ({row['requests']})", "-"
    if "text" in row:
        of, apart = row["text"], row["text"]["largest_difference"]
        text = f"{of['same_text']} of {of['requests']}"
        text += ", NaN" if apart is None else f", {apart:.2g} apart"
    return speed, _speed(row.get("reading_tokens_per_second")), text
