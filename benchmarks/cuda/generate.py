"""Suite `cuda-generate`: tokens a second of `generate()` on a GPU, a random Llama-3-8B.

`generate` with a static cache compiles the model for one token (torch.compile) and replays CUDA
graphs: those of Transformers, or those of `hf_vq.capture`, as it does by itself where weights or
the cache are codes. The suite measures as well: the same model after `hf_vq.capture`, a CUDA graph
of one eager forward, which shows the gain of compilation; the time of a step by kind of kernel; its
linear layers back to back; and the bytes that a step must read. The output layer stays dense, the
default of `VQConfig`, but for a name such as `vq-4+head:turboquant-6`, which says its scheme.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from hf_vq import VQCache, capture
from hf_vq.cache.argument import cache_argument
from hf_vq.errors import VQBackendError
from hf_vq.formats.stored_weight import flat
from hf_vq.nn import VQLinear

from ..random_llama import random_llama
from ..timing import Candidate
from .timing import interleave_graphs

SCHEMES = ("vq-4", "turboquant-4", "vq-2")
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
PROMPT, TOKENS = 128, 128
_ALONE_ROUNDS = 5
_EAGER_ROUNDS = 3  # of 24 steps, and two before: the cache has room for them
_FIRST = 8  # tokens that are not counted: compilers run, a graph is captured for a new cache
_DTYPE = torch.bfloat16
HEAD = "+head:"  # before the scheme of the output layer
DENSE_ROW, CACHE = "bf16", "u4"  # without codes; of a VQCache
_RATIOS = ("generate_ms", "captured_ms", "step_ms", "eager_graph_ms")
DENSE, OTHERS, IDLE = "dense layers", "norms, RoPE, activations", "between kernels"
Kernel = tuple[str, int, int]  # name, start and end in ns
_OURS = {"linear": "quantized layers", "rotate": "rotation"}  # by the names of kernels
_PARTS = {  # by what they contain; the first that fits
    "append": "cache", "kv_step": "cache", "attention": "attention", "sdpa": "attention",
    "fmha": "attention", "triton_": OTHERS,
    "gemm": DENSE, "gemv": DENSE, "nvjet": DENSE, "splitk": DENSE,
}  # fmt: skip


def llama_8b(layers: int = LAYERS) -> LlamaConfig:
    """The shapes of Llama-3-8B."""
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=FFN,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    config: LlamaConfig | None = None,
    rounds: int = 3,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time the dense model, then every scheme; `report` gets each row.

    Args:
        config: of the model; None for Llama-3-8B.
        rounds: calls of `generate` that are timed.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-generate needs a CUDA device.")
    config = config or llama_8b()
    candidates = [(DENSE_ROW, DENSE_ROW)]
    candidates += [(name, cache) for name in schemes for cache in (DENSE_ROW, CACHE)]
    found: list[dict[str, Any]] = []
    dense: dict[str, Any] = {}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(process(_open, name, cache, config)) for name, cache in candidates
        ]
        for compiled in [worker.submit(_compile) for worker in workers]:
            compiled.result()
        for worker in workers:  # one worker uses the GPU
            row = worker.submit(_measure, rounds).result()
            dense = dense or row
            if row is not dense:
                row["speedup"] = {how: dense[how] / row[how] for how in _RATIOS if how in row}
                row["speedup"]["bytes"] = dense["gigabytes"] / row["gigabytes"]
                row["ceiling"] = _ceiling(row, dense)
            found.append(row)
            report(row)
    settings = {
        "rounds": rounds, "dtype": str(_DTYPE)[6:], "layers": config.num_hidden_layers,
        "prompt": PROMPT, "tokens": TOKENS,
    }  # fmt: skip
    return settings, {"rows": found}


def process(open_: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """A process with one model: compiling takes most of the time, so models compile side by side.

    Args:
        open_: called there with `arguments` before anything else.
    """
    return ProcessPoolExecutor(1, get_context("spawn"), open_, arguments)


class _Session:
    """State of a measuring process."""

    model: LlamaForCausalLM
    name: str
    cache: VQCache | None


_session = _Session()


def _open(name: str, cache: str, config: LlamaConfig) -> None:
    scheme, _, head = name.partition(HEAD)
    _session.name = name
    _session.model = random_llama(
        config, _DTYPE, None if scheme == DENSE_ROW else scheme, "cuda", {"lm_head": head or None}
    )
    _session.cache = None
    if cache != DENSE_ROW:
        _session.cache = VQCache(config, cache, max_cache_len=PROMPT + TOKENS)


@torch.no_grad()
def _compile() -> None:
    for captured in (False, None, True):
        capture(_session.model, captured)
        _generate(_session.model, _session.cache)


@torch.no_grad()
def _measure(rounds: int) -> dict[str, Any]:
    model, cache = _session.model, _session.cache
    row: dict[str, Any] = {
        "name": _session.name, "cache": DENSE_ROW if cache is None else CACHE,
        "gigabytes": bytes_read(model) / 1e9, "layer_gigabytes": bytes_read(model.model) / 1e9,
    }  # fmt: skip
    for how, captured in (("captured_ms", True), ("generate_ms", None)):
        capture(model, captured)
        _generate(model, cache)
        row[how] = median(_generate(model, cache) for _ in range(rounds))
    row["tokens_per_second"] = 1e3 / row["generate_ms"]
    capture(model, False)
    _generate(model, cache)
    row["step_ms"], row["parts_ms"] = step_parts(partial(_generate, model, cache))
    row["alone_ms"] = linear_layers_ms(model)
    row["gb_per_second"] = row["gigabytes"] / row["step_ms"] * 1e3
    if cache is None:
        row["eager_graph_ms"] = _eager_graph(model)
    del _session.model, _session.cache, model, cache
    forget_compiled()
    return row


def forget_compiled() -> None:
    """Let go of compiled code and of memory, so that the next model finds neither."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _ceiling(row: dict[str, Any], dense: dict[str, Any]) -> float:
    """Upper bound of the speedup of a step: codes are read at the bandwidth of dense layers.

    Norms and attention take the time of the dense model.
    """
    step: float = dense["step_ms"]
    left, parts = step, dense["parts_ms"]
    for part, read in (("dense layers", _layers_read), ("output layer", _output_read)):
        left -= (1 - read(row) / read(dense)) * parts[part]
    return step / left


def _layers_read(row: dict[str, Any]) -> float:
    found: float = row["layer_gigabytes"]
    return found


def _output_read(row: dict[str, Any]) -> float:
    found: float = row["gigabytes"] - row["layer_gigabytes"]
    return found


def bytes_read(model: nn.Module) -> int:
    """Bytes of all parameters but the embedding, of which a step reads one row."""
    return sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if "embed_tokens" not in name
    )


def _prompt(model: LlamaForCausalLM) -> Tensor:
    return torch.randint(model.config.vocab_size, (1, PROMPT), device="cuda")


def _generate(model: LlamaForCausalLM, cache: VQCache | None) -> float:
    """Milliseconds a token of the user's clock, with a cache or the static one of Transformers.

    The first tokens are left out by a second, shorter call: nothing of ours runs between tokens.
    """
    all_, first = (_seconds(model, cache, tokens) for tokens in (TOKENS, _FIRST))
    return (all_ - first) / (TOKENS - _FIRST) * 1e3


def _seconds(model: LlamaForCausalLM, cache: VQCache | None, tokens: int) -> float:
    """Seconds of a call of `generate`."""
    prompt = _prompt(model)
    options: dict[str, Any] = {"cache_implementation": "static"}
    if cache is not None:
        cache.reset()
        options = {cache_argument(model): cache}
    torch.cuda.synchronize()
    begin = perf_counter()
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens,
        min_new_tokens=tokens, do_sample=False, **options,
    )  # fmt: skip
    torch.cuda.synchronize()
    return perf_counter() - begin


def step_parts(generate: Callable[[], Any]) -> tuple[float, dict[str, float]]:
    """Milliseconds of a compiled step of `generate` on the GPU, and of its parts."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        generate()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    graphs: dict[int, list[Kernel]] = {}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            start = event.start_ns()
            kernel = event.name(), start, start + event.duration_ns()
            graphs.setdefault(event.correlation_id(), []).append(kernel)
    # What one launch of the host started: a step is the largest graph.
    most = max(map(len, graphs.values()))
    steps = [split_step(kernels) for kernels in graphs.values() if len(kernels) == most]
    parts = {part: median(found[part] for found in steps) for part in steps[0]}
    return median(sum(found.values()) for found in steps), parts


def split_step(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Milliseconds of each part of a step, from all its kernels; they add up to the whole step.

    Kernels that overlap share no time: one counts from the end of those before it, and the time in
    which none runs is a part. The dense layer that takes longest is the output layer.
    """
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    longest = max(kernels, key=lambda kernel: (_part(kernel[0]) == DENSE, kernel[2] - kernel[1]))
    found = dict.fromkeys((*_OURS.values(), *_PARTS.values(), "output layer", IDLE), 0.0)
    before = kernels[0][1]
    for kernel in kernels:
        name, start, end = kernel
        part = "output layer" if kernel is longest else _part(name)
        found[part] += max(end - max(start, before), 0) / 1e6
        found[IDLE] += max(start - before, 0) / 1e6
        before = max(before, end)
    return found


def linear_layers_ms(model: LlamaForCausalLM) -> float:
    """Milliseconds of all linear layers except the output layer, back to back in a CUDA graph.

    Those of codes that have one input are one launch, as in a compiled step.
    """
    config = model.config
    hidden, inner = (
        torch.randn(1, 1, size, dtype=_DTYPE, device="cuda")
        for size in (config.hidden_size, config.intermediate_size)
    )

    def step(i: int) -> None:
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            _multiply(hidden, attention.q_proj, attention.k_proj, attention.v_proj)
            _multiply(hidden, attention.o_proj)
            _multiply(hidden, mlp.gate_proj, mlp.up_proj)
            _multiply(inner, mlp.down_proj)

    return median(interleave_graphs({"step": Candidate(step)}, _ALONE_ROUNDS)["step"]) * 1e3


def _multiply(x: Tensor, *layers: nn.Module) -> None:
    coded = [layer for layer in layers if isinstance(layer, VQLinear)]
    if not coded:
        for layer in layers:
            layer(x)
        return
    stored = [flat(layer.tensors())[:4] for layer in coded]
    tensors = (list(of) for of in zip(*stored, strict=True))
    torch.ops.hf_vq.linears(x, *tensors, [layer.bias for layer in coded], coded[0].spec)


def _part(kernel: str) -> str:
    lower = kernel.lower()
    found = (part for word, part in _PARTS.items() if word in lower)
    return _OURS.get(kernel) or next(found, OTHERS)


def _eager_graph(model: LlamaForCausalLM) -> float:
    """Milliseconds of one forward as eager code launches it, without the host."""
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + TOKENS)
    model(_prompt(model), **{cache_argument(model): cache}, use_cache=True)
    token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    position = torch.full((1, 1), PROMPT, device="cuda")

    def step(i: int) -> Tensor:
        found = model(
            token, **{cache_argument(model): cache}, position_ids=position, use_cache=True
        )
        logits: Tensor = found.logits
        return logits

    seconds = interleave_graphs({"step": Candidate(step)}, _EAGER_ROUNDS)
    return median(seconds["step"]) * 1e3
