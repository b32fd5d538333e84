"""`model.generate` with a `VQCache` on a GPU: fused kernels alone run, and say what the CPU says.

Logits are compared with those of the same weights in float32 on the CPU, where the reference runs.
What may differ, in root mean squares over all logits:

    noise    of the dtype, without codes: measured with a DynamicCache
    flips    a number that moves by `noise` changes its code with probability noise / step, and then
             moves by a step, so sqrt(noise * step); a step changes the logits by what coding does,
             `effect`, which is measured on the CPU

A logit is a sum of many such errors, so 6 of their root mean squares bound them all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CompileConfig, DynamicCache, LlamaConfig
from transformers.cache_utils import Cache

from hf_vq import dispatch
from hf_vq.cache import VQCache, rotary
from hf_vq.calibration.kv_codebooks import calibrate_kv
from hf_vq.hf import attention, enable_cache_backend, explain

DEVICE = "cuda"
WINDOW = 8
PROMPT, STEPS = 40, 12

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

attention.register()
enable_cache_backend()

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 95,
    "bos_token_id": 1, "max_position_embeddings": 512,
}  # fmt: skip
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
# name: (family, fields of its config, attention that reads codes)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {**SMALL, "head_dim": 128}, "sdpa"),
    "llama-mha": ("Llama", {**SMALL, "num_key_value_heads": 4, "head_dim": 64}, "sdpa"),
    "qwen3": ("Qwen3", {**SMALL, "num_key_value_heads": 1, "head_dim": 128}, "sdpa"),
    "gemma3": ("Gemma3", {**SMALL, **HYBRID, "head_dim": 256}, "sdpa"),
    "gpt-oss": (
        "GptOss",
        {**SMALL, **HYBRID, "head_dim": 64, "num_local_experts": 2, "num_experts_per_tok": 2},
        "vq",
    ),
}  # fmt: skip


class Pair(NamedTuple):
    """A model with the same weights twice: `cpu` in float32, `gpu` in float16."""

    cpu: Any
    gpu: Any
    fields: dict[str, Any]


def build(name: str, dtype: torch.dtype = torch.float16) -> Pair:
    """Random weights, scaled up so that attention is far from uniform."""
    family, fields, implementation = MODELS[name]
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config(**fields))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    model.set_attn_implementation(implementation)
    gpu = copy.deepcopy(model.eval()).to(dtype).to(DEVICE)
    model.load_state_dict({key: tensor.float() for key, tensor in gpu.state_dict().items()})
    return Pair(model, gpu, {"quantize_sliding": "layer_types" in fields})


@pytest.fixture(autouse=True)
def _same_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU would measure more rotary means: here it does as a GPU does."""
    monkeypatch.setitem(rotary.LEAST, "cpu", rotary.LEAST["cuda"])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Every (op, entry) that the dispatch table chose for a tensor on the GPU; no reference row."""
    chosen: set[tuple[str, str]] = set()
    select = dispatch.select

    def recording(problem: dispatch.Problem) -> dispatch.Entry:
        entry = select(problem)
        if problem.device == DEVICE:
            chosen.add((problem.op, entry.name))
        return entry

    monkeypatch.setattr(dispatch, "select", recording)
    yield chosen
    assert {"kv_attention", "kv_append"} <= {op for op, _ in chosen}
    assert not [row for row in chosen if row[1] == "reference"], chosen


def prompt(length: int = PROMPT, batch: int = 1) -> Tensor:
    return torch.randint(2, 94, (batch, length))


def cache_of(pair: Pair, scheme: str = "u4", **options: Any) -> VQCache:
    options = {**pair.fields, **options}
    return VQCache(pair.cpu.config, scheme, window=WINDOW, strict=True, **options)


@torch.no_grad()
def logits(model: Any, cache: Cache, ids: Tensor, mask: Tensor, first: int) -> Tensor:
    """Float32 logits [B, tokens, vocabulary] of the tokens from `first` - 1 on, one by one."""
    device = next(model.parameters()).device
    if isinstance(cache, VQCache):
        cache.expect_prompt(mask[:, :first].to(device), first)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found, begin = [], 0
    for end in range(first, ids.shape[1] + 1):
        out = model(
            ids[:, begin:end].to(device), attention_mask=mask[:, :end].to(device),
            position_ids=positions[:, begin:end].to(device), past_key_values=cache,
        ).logits  # fmt: skip
        found.append(out[:, -1:].float().cpu())
        begin = end
    return torch.cat(found, 1)


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


class Bound(NamedTuple):
    """Errors of logits: root mean square that may be, and what coding does."""

    rms: float
    effect: float


def bound_of(pair: Pair, ids: Tensor, mask: Tensor, wanted: Tensor, first: int) -> Bound:
    """The bound of this module's docstring; `wanted` are the logits of the CPU over codes."""
    plain = logits(pair.cpu, DynamicCache(config=pair.cpu.config), ids, mask, first)
    noisy = logits(pair.gpu, DynamicCache(config=pair.cpu.config), ids, mask, first)
    noise, effect = rms(noisy - plain), rms(wanted - plain)
    return Bound(2 * (noise + sqrt(noise * effect)), effect)


@pytest.mark.parametrize("scheme", ["u4", "u2", "k4v2", "qserve-kv4"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_the_cpu(name: str, scheme: str, rows: set[tuple[str, str]]) -> None:
    """With left padding, token by token behind a prompt."""
    pair = build(name)
    ids = prompt(PROMPT + STEPS, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    wanted = logits(pair.cpu, cache_of(pair, scheme), ids, mask, PROMPT)
    cache = cache_of(pair, scheme)
    found = logits(pair.gpu, cache, ids, mask, PROMPT)
    bound = bound_of(pair, ids, mask, wanted, PROMPT)
    assert set(cache.fallbacks.values()) == {0} and len(cache.coded_layers) == 2
    assert rms(found - wanted) <= bound.rms < bound.effect, "a wrong code would be noticed"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("scheme", ["learned-4", "learned-2"])
def test_steps_over_learned_codebooks(scheme: str, name: str, rows: set[tuple[str, str]]) -> None:
    """Those of keys are not those of values, and each layer has its own."""
    pair = build(name)
    ids = prompt(PROMPT + STEPS, batch=2)
    mask = torch.ones_like(ids)
    text = prompt(256, batch=8)
    books = calibrate_kv(pair.cpu, scheme, text, tokens=text.numel(), context=256, progress=False)
    wanted = logits(pair.cpu, cache_of(pair, scheme, codebooks=books), ids, mask, PROMPT)
    cache = cache_of(pair, scheme, codebooks=books)
    found = logits(pair.gpu, cache, ids, mask, PROMPT)
    bound = bound_of(pair, ids, mask, wanted, PROMPT)
    assert set(cache.fallbacks.values()) == {0} and len(cache.coded_layers) == 2
    assert rms(found - wanted) <= bound.rms < bound.effect, "a wrong code would be noticed"
    # That codebooks are exchanged would be, too.
    exchanged = replace(books, keys=books.values, values=books.keys)
    other = logits(pair.cpu, cache_of(pair, scheme, codebooks=exchanged), ids, mask, PROMPT)
    assert rms(other - wanted) > bound.rms


def regret(
    pair: Pair, out: Tensor, mask: Tensor, first: int, **options: Any
) -> tuple[float, float]:
    """By how much the CPU's largest logit exceeds that of the token that the GPU chose, at most;
    and by how much it may."""
    mask = torch.cat([mask, mask.new_ones(len(mask), out.shape[1] - first)], 1)
    wanted = logits(pair.cpu, cache_of(pair, **options), out[:, :-1], mask[:, :-1], first)
    chosen = wanted.gather(2, out[:, first:, None])[..., 0]
    bound = bound_of(pair, out[:, :-1], mask[:, :-1], wanted, first)
    allowed = 2 * 6 * bound.rms
    assert allowed < (wanted.amax(-1) - wanted.mean(-1)).mean(), "a random token would be noticed"
    return (wanted.amax(-1) - chosen).max().item(), allowed


def generate(pair: Pair, ids: Tensor, mask: Tensor, cache: Cache, **options: Any) -> Any:
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, **options}
    return pair.gpu.generate(
        ids.to(DEVICE), attention_mask=mask.to(DEVICE), past_key_values=cache, pad_token_id=0,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch(name: str, rows: set[tuple[str, str]]) -> None:
    pair = build(name)
    ids = prompt(batch=3)
    mask = torch.ones_like(ids)
    mask[1, :7], mask[2, :31] = 0, 0
    cache = cache_of(pair)
    out = generate(pair, ids, mask, cache).cpu()
    assert set(cache.fallbacks.values()) == {0}
    found, allowed = regret(pair, out, mask, PROMPT)
    assert found <= allowed


@pytest.mark.parametrize("name", MODELS)
def test_beams(name: str, rows: set[tuple[str, str]]) -> None:
    """A beam's score is that of its tokens one by one on the CPU."""
    pair = build(name)
    ids = prompt(batch=2)
    cache = cache_of(pair)
    out = generate(
        pair, ids, torch.ones_like(ids), cache, num_beams=3, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    assert set(cache.fallbacks.values()) == {0}
    sequences = out.sequences.cpu()
    mask = torch.ones_like(sequences)[:, :-1]
    wanted = logits(pair.cpu, cache_of(pair), sequences[:, :-1], mask, PROMPT)
    bound = bound_of(pair, sequences[:, :-1], mask, wanted, PROMPT)
    chosen = wanted.log_softmax(-1).gather(2, sequences[:, PROMPT:, None])[..., 0]
    # log_softmax moves by at most twice what the logits move.
    assert (chosen.mean(1) - out.sequences_scores.cpu()).abs().max() <= 2 * 6 * bound.rms


@pytest.mark.filterwarnings("ignore:.*return_dict_in_generate.*")
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("name", MODELS)
def test_assisted_decoding(name: str, kind: str, rows: set[tuple[str, str]]) -> None:
    pair = build(name)
    ids = prompt()
    ids[0, 20:] = ids[0, :20].clone()  # something to look up
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if kind == "assistant":
        helper = copy.deepcopy(pair.gpu)
        helper.generation_config.num_assistant_tokens = 4
        for parameter in helper.parameters():  # right often, but not always
            parameter.data += 0.15 * parameter.data.std() * torch.randn_like(parameter)
        options = {"assistant_model": helper}
    cache = cache_of(pair)
    out = generate(pair, ids, mask, cache, **options).cpu()
    assert set(cache.fallbacks.values()) == {0}
    found, allowed = regret(pair, out, mask, PROMPT)
    assert found <= allowed


@pytest.mark.filterwarnings("ignore::UserWarning")  # of inductor
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "scheme"),
    [("llama", "u4"), ("llama", "qserve-kv4"), ("gemma3", "u4"), ("gpt-oss", "u4")],
)
def test_compiled(name: str, scheme: str, rows: set[tuple[str, str]]) -> None:
    """A static cache: decoding is one graph without a break, in CUDA graphs."""
    pair = build(name)
    ids = prompt(batch=2)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    torch._dynamo.reset()
    options: dict[str, Any] = {"scheme": scheme, "quantize_sliding": False}
    cache = cache_of(pair, max_cache_len=PROMPT + STEPS, **options)
    fullgraph = CompileConfig(fullgraph=True)
    out = generate(pair, ids, mask, cache, compile_config=fullgraph).cpu()
    assert cache.is_compileable and set(cache.fallbacks.values()) == {0}
    assert {("kv_attention", "cuda.vq_attention"), ("kv_append", "cuda.vq_store")} <= rows
    found, allowed = regret(pair, out, mask, PROMPT, **options)
    assert found <= allowed


@pytest.mark.parametrize("scheme", ["u4", "qserve-kv4"])
def test_explain_names_the_kernels(scheme: str, rows: set[tuple[str, str]]) -> None:
    pair = build("llama", torch.bfloat16)
    ids = prompt()
    cache = cache_of(pair, scheme)
    generate(pair, ids, torch.ones_like(ids), cache)
    explained = explain(pair.gpu, cache=cache)
    assert {(row.problem.op, row.kernel) for row in explained} == rows
    many = {row.problem.op: row for row in explain(pair.gpu, cache=cache, tokens=256)}
    one = {row.problem.op: row for row in explained}
    assert one["kv_attention"].kernel != many["kv_attention"].kernel
    reasons = {v.entry.name: v.reason for v in many["kv_attention"].verdicts}
    assert "queries" in reasons[one["kv_attention"].kernel]


@pytest.mark.parametrize(
    ("name", "scheme"), [*((name, "u4") for name in MODELS), ("llama", "qserve-kv4")]
)
def test_a_second_turn(name: str, scheme: str, rows: set[tuple[str, str]]) -> None:
    """A prompt behind codes: more queries than one step has."""
    pair = build(name)
    ids = prompt(PROMPT + 90)
    cache, plain = cache_of(pair, scheme), cache_of(pair, scheme)
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def turns(model: Any, cache: Cache) -> Tensor:
        parts = ids.to(next(model.parameters()).device).split([PROMPT, 90], 1)
        return [model(part, past_key_values=cache).logits.float().cpu() for part in parts][1]

    found, wanted = turns(pair.gpu, cache), turns(pair.cpu, plain)
    assert set(cache.fallbacks.values()) == {0}
    exact = [turns(model, DynamicCache(config=pair.cpu.config)) for model in pair[:2]]
    noise, effect = rms(exact[1] - exact[0]), rms(wanted - exact[0])
    assert rms(found - wanted) <= 2 * (noise + sqrt(noise * effect)) < effect
    assert mask.sum() == cache.get_seq_length()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", ["u4", "u3", "u2", "qserve-kv4"])
def test_finite_keys_and_values_give_finite_attention(scheme, dtype):
    """Of any size: scales saturate, and so do results that float16 has no number for."""
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64,
    )  # fmt: skip
    attention = torch.nn.functional.scaled_dot_product_attention
    for size in (3e4, 65504.0, 1e6, 1e20, 1e30):
        if size > torch.finfo(dtype).max:
            continue
        for states in (torch.randn(2, 2, 2, 400, 64), torch.randn(2, 2, 2, 400, 64).sign()):
            keys, values = (states.clamp(-1, 1) * size).to("cuda", dtype).unbind(0)
            cache = VQCache(config, scheme, sinks=2, window=16, static=False)
            for begin, end in ((0, 300), (300, 301), (301, 309), (309, 400)):
                k, v = cache.update(keys[:, :, begin:end], values[:, :, begin:end], 0)
                query = (torch.randn(2, 4, end - begin, 64, device="cuda") / size).to(dtype)
                mask = torch.ones(end - begin, end, dtype=torch.bool, device="cuda").tril(begin)
                out = attention(query, k, v, attn_mask=mask, enable_gqa=True)
                assert out.isfinite().all(), (size, begin)
