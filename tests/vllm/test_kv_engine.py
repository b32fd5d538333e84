"""vLLM's engine with a KV cache of codes: its text, its capacity, and what may not change it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import _cached_get_attn_backend

from hf_vq import calibrate_kv
from hf_vq.cache.codebooks import FILE_NAME
from hf_vq.cache.key_means import Rotary
from hf_vq.cache.rotary import RopeFrequencies
from hf_vq.formats import KV_SCHEMES
from hf_vq.vllm import kv_cache
from hf_vq.vllm.config import register
from tests.fixtures.continuous_batching import Decoded
from tests.vllm.test_engine import MODEL, OPTIONS, PROMPTS, quantized

NEW = 20
ROUNDING = 0.05  # of a log-probability; with blocks that kernels read, which round to bytes, more
LONG = "It was a dark and stormy night, and the old man sat by the fire in the old house. " * 2


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """An engine of this process leaves groups of processes behind, and the backend its name."""
    yield
    cleanup_dist_env_and_memory()
    forget()


def forget() -> None:
    """What vLLM remembers of backends."""
    for backend in (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
        backend.clear_override()
    _cached_get_attn_backend.cache_clear()


def engine(model: Path | str, scheme: str | None, patch: pytest.MonkeyPatch, **options: Any) -> LLM:
    """An engine with a KV cache of this scheme; None = its own."""
    patch.setenv("HF_VQ_VLLM_KV", scheme or "")
    register()
    return LLM(str(model), **{**OPTIONS, "enforce_eager": True, **options})


def answers(llm: LLM, prompts: list[str], new: int = NEW) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens of each prompt, all at once, and their log-probabilities."""
    sampling = SamplingParams(temperature=0, max_tokens=new, logprobs=0, ignore_eos=True)
    found = []
    for answer in llm.generate(prompts, sampling):
        (out,) = answer.outputs
        tokens = list(out.token_ids)
        logprobs = [at[t].logprob for at, t in zip(out.logprobs, tokens, strict=True)]
        found.append((tokens, torch.tensor(logprobs, dtype=torch.float64)))
    return found


@torch.no_grad()
def predicted(model: Any, ids: torch.Tensor, scheme: str, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of Transformers, with a cache that holds what codes
    say of every key and value; where these tokens were chosen."""
    layers = {}
    books = kv_cache._codebooks(model.name_or_path, None)
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    for index in range(model.config.num_hidden_layers):
        known = None if books is None else books.means[index]
        like = torch.empty(1, heads, 1, dim)
        rope = RopeFrequencies(model.config)
        rotary = None if known is None else Rotary.of(rope, index, like, known)
        mean, turning = (
            None if each is None else each[None, :, None]
            for each in ((None, None) if known is None else (known.mean, known.rotary_mean))
        )
        layers[index] = SimpleNamespace(mean=mean, rotary_mean=turning, rotary=rotary)
    cache = Decoded(model.config, scheme, layers)  # type: ignore[arg-type]
    whole = torch.cat([ids, torch.tensor([tokens[:-1]], dtype=ids.dtype)], 1)
    logits = model(whole, past_key_values=cache).logits[0, ids.shape[1] - 1 :]
    return logits.double().log_softmax(-1)


def compare(folder: Path | str, scheme: str, llm: LLM, rounding: float = ROUNDING) -> None:
    """Check the text of several prompts at once. Where both predict a tie, up to what they differ
    by, either token may be taken."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, prompts = AutoTokenizer.from_pretrained(folder), [*PROMPTS, LONG]
    for prompt, (tokens, theirs) in zip(prompts, answers(llm, prompts), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        ours = predicted(model, ids, scheme, tokens)
        chosen = ours[torch.arange(len(tokens)), torch.tensor(tokens)]
        difference = (chosen - theirs).abs().max()
        assert difference < rounding
        assert (ours.max(-1).values - chosen).max() <= 2 * difference


@pytest.mark.parametrize("scheme", kv_cache.SCHEMES)
def test_text_is_that_of_transformers(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(MODEL, scheme, engine(MODEL, scheme, monkeypatch, block_size=16))


def test_blocks_that_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(MODEL, "u4", engine(MODEL, "u4", monkeypatch, block_size=256), rounding=0.5)


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(MODEL, "u4", engine(MODEL, "u4", monkeypatch, enforce_eager=False))


def test_calibrated_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of their own, or beside codes of weights, which vLLM reads one by one."""
    dense, codes = tmp_path / "dense", quantized(tmp_path / "codes")
    shutil.copytree(MODEL, dense)
    for folder, scheme, where in ((dense, "u2", dense / kv_cache.FOLDER), (codes, "u4", codes)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        books = calibrate_kv(model, scheme, LONG * 20, tokenizer, tokens=256, progress=False)
        assert books.key_rotary_means is not None
        where.mkdir(exist_ok=True)
        books.save(where / FILE_NAME)
        if folder == codes:  # its kernels round inputs to 8 bits, of a batch otherwise
            monkeypatch.setenv("HF_VQ_BACKEND", "reference")
        llm = engine(folder, scheme, monkeypatch)
        compare(folder, scheme, llm)
        del llm
        cleanup_dist_env_and_memory()


def test_nothing_else_changes_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix caching, chunks of prompts, and requests that lose their blocks and come again."""
    prompts = [LONG + end for end in ("", "He", "She said", "They came")]
    plain = engine(MODEL, "u4", monkeypatch, block_size=16, enable_prefix_caching=False)
    alone = [answers(plain, [prompt])[0] for prompt in prompts]
    del plain
    cleanup_dist_env_and_memory()
    others = {
        "prefix caching": {"enable_prefix_caching": True},
        "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_chunked_prefill": True},
        "eviction": {"num_gpu_blocks_override": 13, "enable_prefix_caching": False},
    }
    for name, options in others.items():
        llm = engine(MODEL, "u4", monkeypatch, block_size=16, disable_log_stats=False, **options)
        rounds = [answers(llm, prompts) for _ in range(2)]
        counted = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
        if name == "prefix caching":
            assert counted["vllm:prefix_cache_hits"] > 100
        if name == "eviction":
            assert counted["vllm:num_preemptions"] > 0
        for found in rounds:
            for (tokens, logprobs), (wanted, right) in zip(found, alone, strict=True):
                assert tokens == wanted, name
                assert (logprobs - right).abs().max() < ROUNDING, name
        del llm
        cleanup_dist_env_and_memory()


def test_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many more blocks as codes are smaller than floats, in the same memory."""
    found = {}
    for scheme in (None, *kv_cache.SCHEMES):
        llm = engine(MODEL, scheme, monkeypatch, block_size=32, kv_cache_memory_bytes=1 << 24)
        found[scheme] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        del llm
        cleanup_dist_env_and_memory()
        forget()
    dim = AutoModelForCausalLM.from_pretrained(MODEL).config.head_dim
    floats = 2 * dim * 4
    for scheme in kv_cache.SCHEMES:
        size = kv_cache.token_bytes(KV_SCHEMES[scheme], dim)
        assert found[scheme] / found[None] == pytest.approx(floats / size, rel=0.01)
