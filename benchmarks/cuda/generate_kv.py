"""Suite `cuda-generate-kv`: `generate()` after a long context on a GPU, a random Llama-3-8B.

Caches are filled with random tokens, so no long prompt is computed. The baseline is a static cache
in bfloat16, which `generate` compiles; ours is `VQCache(max_cache_len=...)`, with dense weights
and with codes. Each row also has the time of one eager step in a CUDA graph. For bfloat16 there is
one more, with a cache exactly as long as its tokens: PyTorch's fastest attention takes no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_vq import VQCache, capture
from hf_vq.cache.argument import CACHE, cache_argument
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import kv_scheme

from ..random_llama import TokenClock, fill_cache, random_llama
from ..timing import Candidate
from .generate import LAYERS, bytes_read, forget_compiled, llama_8b, process, step_parts
from .timing import interleave_graphs

SCHEMES = ("u4",)
WEIGHTS = "vq-4"
DENSE, EXACT = "bf16", "bf16, no mask"  # caches
TOKENS = 40  # of a call of generate
_FIRST = 4  # steps that are not counted: the prompt, and those that look what is compiled
_EAGER_ROUNDS = 1  # of 24 steps, and one before
_RATIOS = ("generate_ms", "captured_ms", "step_ms", "eager_graph_ms", "gigabytes")
_ROOM = 512  # tokens that caches have room for behind the context
_DTYPE = torch.bfloat16


class Case(NamedTuple):
    """Rows of a batch, and tokens in the cache of each."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse ROWSxTOKENS, the inverse of `str`."""
        batch, _, context = text.partition("x")
        return cls(int(batch), int(context))

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


CASES = (Case(1, 65536), Case(8, 16384))


class ExactLayer(DynamicLayer):
    """A dense layer with room ahead of its tokens, which are never copied."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the first update [B, H, n, D] and `_ROOM` tokens more."""
        super().lazy_initialization(key_states, value_states)
        batch, heads, tokens, dim = key_states.shape
        room = batch, heads, tokens + _ROOM, dim
        self.memory = key_states.new_empty(room), value_states.new_empty(room)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; return views of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        for memory, tokens in zip(self.memory, (key_states, value_states), strict=True):
            memory[:, :, begin:end] = tokens
        self.keys, self.values = (memory[:, :, :end] for memory in self.memory)
        return self.keys, self.values


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    layers: int = LAYERS,
    config: LlamaConfig | None = None,
    cases: Sequence[Case] = CASES,
    rounds: int = 1,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every cache in every case; `report` gets each row when it is known.

    Args:
        schemes: of the caches.
        layers: of the model, of 32.
        config: of the model; None for Llama-3-8B.
        cases: cases to time, in order.
        rounds: calls of `generate` that are timed.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-generate-kv needs a CUDA device.")
    config = config or llama_8b(layers)
    config.max_position_embeddings = max(case.context for case in cases) + _ROOM
    candidates = [(DENSE, DENSE), *((w, s) for w in (DENSE, WEIGHTS) for s in schemes)]
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        workers = [stack.enter_context(process(_open, *pair, config)) for pair in candidates]
        for case in cases:
            for compiled in [worker.submit(_compile, *case) for worker in workers]:
                compiled.result()
            peer: dict[str, Any] | None = None
            for worker in workers:  # one worker uses the GPU
                for row in worker.submit(_measure, rounds).result():
                    peer = peer or row
                    if row is not peer:
                        row["speedup"] = {
                            how: peer[how] / row[how] for how in _RATIOS if how in row
                        }
                    found.append(row)
                    report(row)
    settings = {
        "rounds": rounds, "dtype": str(_DTYPE)[6:], "layers": config.num_hidden_layers,
        "tokens": TOKENS,
    }  # fmt: skip
    return settings, {"rows": found}


class _Session:
    """A separate process with one model and one kind of cache."""

    model: LlamaForCausalLM
    weights: str
    name: str
    case: Case
    cache: Cache
    gigabytes: float


_session = _Session()


def _open(weights: str, name: str, config: LlamaConfig) -> None:
    scheme = None if weights == DENSE else weights
    _session.weights, _session.name = weights, name
    _session.model = random_llama(config, _DTYPE, scheme, "cuda", {"lm_head": None})


@torch.no_grad()
def _compile(batch: int, context: int) -> None:
    """Compile the model for a case and generate some tokens."""
    forget_compiled()
    _session.case = Case(batch, context)
    _session.cache, _session.gigabytes = _filled(
        _session.name, _session.model.config, batch, context, static=True
    )
    for captured in (False, True):
        capture(_session.model, captured)
        _generate(_session.model, _session.cache, batch)


@torch.no_grad()
def _measure(rounds: int) -> list[dict[str, Any]]:
    """The rows of the case that was compiled."""
    model, name, cache = _session.model, _session.name, _session.cache
    batch, context = _session.case
    row = _row(name) | {"cache_gigabytes": _session.gigabytes}
    for how in ("captured_ms", "generate_ms"):
        seconds = [step for _ in range(rounds) for step in _generate(model, cache, batch)[_FIRST:]]
        row[how] = sum(seconds) / len(seconds) * 1e3
        capture(model, False)
    row["tokens_per_second"] = batch * 1e3 / row["generate_ms"]
    row["captured_per_second"] = batch * 1e3 / row["captured_ms"]
    row["step_ms"], row["parts_ms"] = step_parts(partial(_generate, model, cache, batch))
    del cache, _session.cache
    forget_compiled()
    rows = [row]
    if name == DENSE:
        rows.append(_row(EXACT))
    for row in rows:
        cache, gigabytes = _filled(row["cache"], model.config, batch, context, static=False)
        row.setdefault("cache_gigabytes", gigabytes)
        row["eager_graph_ms"] = _eager_graph(model, cache, batch)
        del cache
        forget_compiled()
    return rows


def _row(cache: str) -> dict[str, Any]:
    batch, context = _session.case
    model = _session.model
    nbytes = bytes_read(model) + _cache_bytes(cache, model.config, batch * context)
    return {
        "weights": _session.weights, "cache": cache, "batch": batch, "context": context,
        "gigabytes": nbytes / 1e9,
    }  # fmt: skip


def _filled(
    name: str, config: LlamaConfig, batch: int, context: int, *, static: bool
) -> tuple[Cache, float]:
    """A cache of random tokens, and the GB that were allocated for it.

    Args:
        static: whether its memory may not move, where there is a choice.
    """
    before = torch.cuda.memory_allocated()
    room = context + _ROOM
    cache: Cache
    if name == DENSE:
        cache = StaticCache(config=config, max_cache_len=room)
    elif name == EXACT:
        cache = DynamicCache(config=config)
        cache.layers = [ExactLayer() for _ in cache.layers]
    else:
        cache = VQCache(config, name, max_cache_len=room if static else None, static=static)
    fill_cache(cache, config, context, _DTYPE, batch=batch, device="cuda")
    return cache, (torch.cuda.memory_allocated() - before) / 1e9


def _cache_bytes(name: str, config: LlamaConfig, tokens: int) -> float:
    """Bytes that a step must read of so many tokens."""
    bits = 2 * 16.0
    if name not in (DENSE, EXACT):
        scheme = kv_scheme(name)
        bits = scheme.key.bits(config.head_dim) + scheme.value.bits(config.head_dim)
    elements = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens
    return elements * bits / 8


def _generate(model: LlamaForCausalLM, cache: Cache, batch: int) -> list[float]:
    """Seconds of each step behind what the cache holds."""
    clock, length = TokenClock(), int(cache.get_seq_length())
    prompt = torch.randint(model.config.vocab_size, (batch, length + 1), device="cuda")
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), **{CACHE: cache},
        max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, streamer=clock,
        compile_config=CompileConfig(fullgraph=True),
    )  # fmt: skip
    return clock.seconds


def _eager_graph(model: LlamaForCausalLM, cache: Cache, batch: int) -> float:
    """Milliseconds of a forward of one token as eager code launches it, without the host."""
    token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    position = torch.full((batch, 1), int(cache.get_seq_length()), device="cuda")

    def step(i: int) -> Tensor:
        found = model(
            token, **{cache_argument(model): cache}, position_ids=position, use_cache=True
        )
        logits: Tensor = found.logits
        return logits

    seconds = interleave_graphs({"step": Candidate(step)}, _EAGER_ROUNDS, warmup=1)
    return median(seconds["step"]) * 1e3
