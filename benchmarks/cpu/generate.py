"""Suite `cpu-generate`: milliseconds a token of `generate()` on the CPU, a Llama of the 1B class.

Ours: all linear layers as `vq-4`, the cache as `u4`; and 4 bits in 16 entries, `turboquant-4` and
`nomad-u4`, which take fewer instructions than 256 entries.
Peers: the same model dense in bfloat16 with `DynamicCache`, with the attention implementations
`sdpa` and `eager`; and llama.cpp, given the paths of its `llama-bench` and of GGUF files of this
model. Weights and contexts are random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache

from hf_vq import VQCache
from hf_vq.cache.argument import CACHE
from hf_vq.formats.catalog import kv_scheme
from hf_vq.nn import VQLinear

from ..peers import llama_bench as llama
from ..random_llama import TokenClock, fill_cache, llama_config, random_llama

CONTEXTS = (0, 16384)
KV_HEADS = (16, 4)
OURS = {"vq-4 + u4": ("vq-4", "u4"), "turboquant-4 + nomad-u4": ("turboquant-4", "nomad-u4")}
TOKENS = {0: 24, 16384: 8}  # generated per run; the first is not counted
DENSE_TOKENS = {0: 12, 16384: 4}  # by Transformers' own model, which takes most of the time
UNTIMED = 8  # tokens of a model's first run, which finds what it will call again
LLAMA_SETTINGS = (  # weights, flash attention, type of the cache; after a context the first alone
    ("Q4_0", 0, "f16"),
    ("Q4_0", 1, "q4_0"),
    ("Q4_K_M", 0, "f16"),
)


def run(
    *,
    contexts: Sequence[int] = CONTEXTS,
    kv_heads: Sequence[int] = KV_HEADS,
    rounds: int = 3,
    threads: int = 1,
    peers: bool = True,
    llama_bench: Path | None = None,
    gguf: Path | None = None,
    llama_contexts: Sequence[int] = CONTEXTS,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every model at every context; `report` gets each row when it is known.

    Args:
        peers: whether the dense model runs too.
        llama_bench: program of llama.cpp.
        gguf: folder with `kv<heads>-<weights>.gguf`, e.g. kv16-Q4_0.gguf.
        llama_contexts: those of `contexts` at which llama.cpp runs. It reads a prompt as long
            before, which takes one thread ten minutes at 16,384, so only the setting that
            was found the fastest there runs.

    Returns:
        (settings, results) of the record.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found: list[dict[str, Any]] = []
    try:
        for heads in kv_heads:
            config = llama_config(heads, max(contexts) + 64)
            models = {
                name: random_llama(config, torch.bfloat16, scheme)
                for name, (scheme, _) in OURS.items()
            } | _dense(config, peers)
            for context in contexts:
                for row in _generate(models, context, rounds, threads):
                    found.append({"kv_heads": heads, **row})
                    report(found[-1])
                if llama_bench is not None and gguf is not None and context in llama_contexts:
                    for row in _llama(llama_bench, gguf, heads, context, threads):
                        found.append({"kv_heads": heads, **row})
                        report(found[-1])
    finally:
        torch.set_num_threads(before)
    settings = {"rounds": rounds, "threads": threads}
    return settings, {"rows": found}


def _layers(model: LlamaForCausalLM) -> list[VQLinear]:
    return [module for module in model.modules() if isinstance(module, VQLinear)]


def _bytes_of_codes(model: LlamaForCausalLM, cache: str, context: int) -> int:
    """Bytes of codes and scales that one token reads, of weights and of `context` cached tokens."""
    config, scheme = model.config, kv_scheme(cache)
    weights = sum(
        tensor.nbytes for layer in _layers(model) for tensor in layer.parameters(recurse=False)
    )
    bits = 0
    for part in (scheme.key, scheme.value):
        bits += config.head_dim // part.vector_size * part.entry_bits + 16 * part.has_scale
    return weights + context * config.num_hidden_layers * config.num_key_value_heads * bits // 8


def _dense(config: Any, peers: bool) -> dict[str, LlamaForCausalLM]:
    if not peers:
        return {}
    model = random_llama(config, torch.bfloat16, None)
    return {"bf16 sdpa": model, "bf16 eager": model}


def _generate(
    models: Mapping[str, LlamaForCausalLM], context: int, rounds: int, threads: int
) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for name, model in models.items():
        _token_seconds(model, _cache(name, model.config), 0, UNTIMED)
    filled: dict[str, Cache] = {}
    for _ in range(rounds):
        for name, model in models.items():
            own = name in OURS
            model.set_attn_implementation("eager" if name.endswith("eager") else "sdpa")
            cache_name = name if own else "dense"
            if cache_name not in filled or not context:
                filled[cache_name] = _cache(name, model.config)
                if context:
                    fill_cache(filled[cache_name], model.config, context, torch.bfloat16)
            tokens = (TOKENS if own else DENSE_TOKENS).get(context, 8)
            seconds[name] += _token_seconds(model, filled[cache_name], context, tokens)
            if context:
                filled[cache_name].crop(context - filled[cache_name].get_seq_length())
    found = []
    first = median(seconds[next(iter(OURS))])
    for name, times in seconds.items():
        row: dict[str, Any] = {
            "name": name, "context": context, "threads": threads, "ms": median(times) * 1e3,
        }  # fmt: skip
        if name in OURS:
            row["bytes"] = _bytes_of_codes(models[name], OURS[name][1], context)
        else:
            row["times_ours"] = median(times) / first
        found.append(row)
    return found


def _cache(name: str, config: Any) -> Cache:
    return VQCache(config, OURS[name][1]) if name in OURS else DynamicCache(config=config)


def _token_seconds(model: LlamaForCausalLM, cache: Cache, context: int, tokens: int) -> list[float]:
    prompt, clock = torch.randint(100, 1000, (1, context + 1)), TokenClock()
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), **{CACHE: cache},
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=clock,
    )  # fmt: skip
    return clock.seconds


def _llama(
    program: Path, gguf: Path, kv_heads: int, context: int, threads: int
) -> list[dict[str, Any]]:
    found = []
    for weights, flash, cache in LLAMA_SETTINGS[:1] if context else LLAMA_SETTINGS:
        model = gguf / f"kv{kv_heads}-{weights}.gguf"
        options: dict[str, Any] = {"tokens": 6, "depth": context, "threads": threads, "repeats": 2}
        tokens_per_second = llama.rows(program, model, (flash, cache), **options)[-1]["avg_ts"]
        found.append(
            {
                "name": f"llama.cpp {weights}, {cache} cache" + (", flash" if flash else ""),
                "context": context, "threads": threads, "ms": 1e3 / tokens_per_second,
            }
        )  # fmt: skip
    return found
