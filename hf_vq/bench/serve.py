"""Suite `serve`: tokens per second of continuous batching, with pages of floats and of codes.

A Llama with random weights answers random prompts, as many at once as a row says. Weights and pages
share one budget of memory, so pages of codes hold more requests. On a GPU the model has the shape
of Llama 3 8B, prompts 1024 tokens and answers 512 (as in QServe's tables); on a CPU all is small.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig

from ..errors import VQBackendError, VQError
from ..hf.paged import objection
from .random_llama import random_llama
from .show import markdown_table

FLOATS = "floats"
SCHEMES = (FLOATS, "u4", "u2", "qserve-kv4")
"""Of pages: floats, Transformers' own, or codes."""
PAGE = 256
_GB = 1 << 30
_SECONDS = 3600.0  # that a row may take


@dataclass(frozen=True)
class Case:
    """What is served where.

    Args:
        config: of the model.
        weights: schemes of the linear layers; None = dense.
        requests: at once.
        prompt: tokens of a prompt.
        new: tokens of an answer.
        memory_gb: of weights, pages and all else.
    """

    config: LlamaConfig
    weights: tuple[str | None, ...]
    requests: tuple[int, ...]
    prompt: int
    new: int
    memory_gb: float


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
    "cpu": Case(_llama(4, 512, 4, 2, 1536, 8000), (None,), (1, 4, 16), 512, 32, 0.0),
    "cuda": Case(
        _llama(32, 4096, 32, 8, 14336, 128256), (None, "vq-4"), (1, 4, 16, 64, 128, 256),
        1024, 512, 24.0,
    ),
}  # fmt: skip


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    requests: Sequence[int] | None = None,
    prompt: int | None = None,
    new: int | None = None,
    memory_gb: float | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Serve every number of requests with every kind of page; `report` gets each row.

    Args:
        schemes: of pages.
        requests: at once; None = those of the device's case, as are the next three.
        prompt: tokens.
        new: tokens.
        memory_gb: for weights, pages and all else; 0 = pages for all requests as floats.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: this Transformers cannot hold codes in pages.
    """
    if problem := objection():
        raise VQBackendError(f"the suite serve needs a newer Transformers: {problem}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = CASES[device]
    requests = tuple(requests or case.requests)
    prompt, new = prompt or case.prompt, new or case.new
    memory = case.memory_gb if memory_gb is None else memory_gb
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = []
    for weights in case.weights:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)  # until the model is made
        model = random_llama(case.config, dtype, weights, device)
        model.generation_config = GenerationConfig()
        for scheme in schemes:
            for count in requests:
                row = {"weights": weights or str(dtype)[6:], "kv": scheme, "requests": count}
                settings = _settings(count, prompt + new, memory)
                try:
                    row |= _served(model, scheme, count, prompt, new, settings)
                except (VQError, MemoryError, torch.OutOfMemoryError) as error:
                    row["failed"] = str(error).partition(". ")[0]
                    _empty()
                rows.append(row)
                report(row)
        del model
        _empty()
    keys = "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"
    shape = {key: getattr(case.config, key) for key in keys}
    return (
        {**shape, "prompt": prompt, "new": new, "memory_gb": memory, "page": PAGE,
         "dtype": str(dtype)[6:]},
        {"rows": rows},
    )  # fmt: skip


def _settings(count: int, length: int, memory: float) -> Any:
    """The config of continuous batching that keeps to the budget."""
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import get_device_and_memory_breakdown

    settings = ContinuousBatchingConfig(page_size=PAGE, max_requests_per_batch=count)
    if not memory:
        settings.num_blocks = count * -(-length // PAGE) + 1
        settings.max_batch_tokens = 1024
        return settings
    _empty()
    device, total, reserved, allocated = get_device_and_memory_breakdown()
    used = max(reserved, allocated)
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


def _served(
    model: Any, scheme: str, count: int, prompt: int, new: int, settings: Any
) -> dict[str, Any]:
    """One row: `count` requests at once, all of the same lengths, all different."""
    options = None if scheme == FLOATS else {"backend": "vq", "scheme": scheme}
    config = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0,
        cache_implementation=None if options is None else "quantized", cache_config=options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shape = (count + 1, prompt)
    prompts = torch.randint(0, model.config.vocab_size, shape, generator=generator).tolist()
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings
    ) as manager:
        attention = model.config._attn_implementation
        manager.add_request(prompts[count], max_new_tokens=2)
        _results(manager, 1)  # what is compiled at the first call is compiled
        start = time.perf_counter()
        manager.add_requests(prompts[:count])
        results = _results(manager, count)
        seconds = time.perf_counter() - start
        cache = manager.batch_processor.cache
        capacity = cache.num_blocks * PAGE
        pages = cache.cache_tensor.nbytes
        del cache
    del manager
    _empty()
    tokens = sum(len(result.generated_tokens) for result in results)
    row = {
        "tokens_per_second": tokens / seconds, "seconds": seconds, "capacity_tokens": capacity,
        "pages_gb": pages / _GB, "attention": attention,
    }  # fmt: skip
    if torch.cuda.is_available():
        row["peak_gb"] = torch.cuda.max_memory_allocated() / _GB
    return row


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
    """Tokens per second: a line for each kind of weights and pages, with the attention that ran, a
    column for each number of requests, and the tokens of all requests that the pages of the last
    one hold."""
    counts = sorted({row["requests"] for row in rows})
    head = ["weights", "pages", "attention", "tokens that fit", *(f"{n} requests" for n in counts)]
    lines = []
    for pair in dict.fromkeys((row["weights"], row["kv"]) for row in rows):
        found = {row["requests"]: row for row in rows if (row["weights"], row["kv"]) == pair}
        speeds = [found.get(count, {}).get("tokens_per_second") for count in counts]
        fits = found[max(found)].get("capacity_tokens")
        attentions = dict.fromkeys(row["attention"] for row in found.values() if "attention" in row)
        lines.append([
            f"`{pair[0]}`", f"`{pair[1]}`", ", ".join(f"`{name}`" for name in attentions) or "-",
            "-" if fits is None else f"{fits:,}",
            *("-" if speed is None else f"{speed:,.0f}" for speed in speeds),
        ])  # fmt: skip
    return markdown_table(head, lines)
