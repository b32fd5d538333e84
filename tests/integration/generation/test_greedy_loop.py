"""Greedy `generate` whose loop is left for graphs: on a CPU, where a stand-in runs what a graph
would replay."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    LogitsProcessorList,
    MistralConfig,
    Qwen2Config,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
)

from hf_vq import VQCache, patches
from hf_vq.cache.argument import CACHE
from hf_vq.hf.graphs import cuda_graphs, greedy_loop
from tests.fixtures.generation import build, prompt
from tests.integration.generation.test_cuda_graphs import Event, Streamed


class Captured:
    """Stands for `_Captured`: whatever ran, is the same."""

    whole, automatic = True, True

    def __init__(self, model: Any, device: torch.device, automatic: bool) -> None:
        self.model, self.device = model, device
        self.graphs: OrderedDict[Any, Any] = OrderedDict()
        self.lock = threading.Lock()

    def checked(self, inputs: Any) -> tuple[Any, Any]:
        return self.model(**inputs), "the same"

    def keep(self, key: Any, graph: Any) -> Any:
        self.graphs[key] = graph
        return graph


class Graph(cuda_graphs._Graph):
    """Runs the model on the private inputs."""

    def __init__(self, captured: Any, inputs: Any) -> None:
        leaves, self.structure = cuda_graphs._leaves(inputs)
        self.inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        self.model, self.next = captured.model, {}
        vocabulary = self.model.config.vocab_size
        self.out = {"logits": torch.zeros(len(inputs["input_ids"]), 1, vocabulary)}
        self.kind = captured.kind

    def launch(self, cache: Any) -> None:
        own = torch.utils._pytree.tree_unflatten(self.inputs, self.structure)
        with torch.no_grad():
            self.out["logits"].copy_(self.model(**own, **{CACHE: cache}).logits)


class Replayed:
    """Stands for a CUDA graph."""

    def __init__(self, captured: Any, launch: Callable[[], None]) -> None:
        self.replay = launch


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch, restored_patches: None) -> Iterator[list[int]]:
    """Tokens that were chosen after the loop was left, of each call that did."""
    counts: list[int] = []
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(cuda_graphs, "GPUS", ("cpu",))
    monkeypatch.setattr(cuda_graphs, "_on_gpu", lambda x: isinstance(x, Tensor))
    monkeypatch.setattr(cuda_graphs, "_Captured", Captured)
    monkeypatch.setattr(cuda_graphs, "_Graph", Graph)
    monkeypatch.setattr(cuda_graphs, "record", Replayed)
    run = greedy_loop.GreedyRest._run

    def counted(self: Any, *args: Any) -> Tensor:
        tokens = run(self, *args)
        counts.append(tokens.shape[1])
        return tokens

    monkeypatch.setattr(greedy_loop.GreedyRest, "_run", counted)
    patches.apply(patches.CAPTURE)
    yield counts
    patches.undo()


def model_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = build(name, "sdpa")
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args: True)
    kind = type(model(prompt(3)))
    monkeypatch.setattr(Captured, "kind", kind, raising=False)
    monkeypatch.setattr(type(model), "get_compiled_call", lambda self, config: self.__call__)
    return model


def generated(model: Any, cache: Any, ids: Tensor, **options: Any) -> Tensor:
    options = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, **options}
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, do_sample=False, **options
    )


def new_cache(model: Any) -> VQCache:
    return VQCache(model.config, max_cache_len=96, window=4, static=True)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("place", [0, 2, 4, 5, 6, 7, 13, 18, 19, None])
@pytest.mark.parametrize("name", ["gqa", "qwen3"])
def test_texts_that_end_anywhere(
    left: list[int], monkeypatch: pytest.MonkeyPatch, name: str, rows: int, place: int | None
) -> None:
    """Ids and cache are those of Transformers' loop, also of the next turn, and of padded rows."""
    model = model_of(name, monkeypatch)
    ids = prompt(12, rows)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, :5] = 0
    caches = new_cache(model), new_cache(model)
    monkeypatch.setenv("HF_VQ_CAPTURE", "0")
    whole = generated(model, new_cache(model), ids, attention_mask=mask)
    assert not left
    end = None if place is None else whole[:, 12 + place].unique().tolist()
    found = []
    for cache, switch in zip(caches, "01", strict=True):
        monkeypatch.setenv("HF_VQ_CAPTURE", switch)
        first = generated(model, cache, ids, eos_token_id=end, attention_mask=mask)
        more = torch.cat([mask, torch.ones_like(first[:, 12:])], 1)
        second = generated(model, cache, first, attention_mask=more, max_new_tokens=30)
        found.append((first, second, cache.get_seq_length()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]
    assert left and left[-1] >= 20  # the second turn never ends
    if place is None:
        assert len(left) == 2 and left[0] >= 12


@pytest.mark.parametrize("kind", ["vq", "static", "own static"])
def test_up_to_the_last_place_of_a_cache(
    left: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No text ends before; the default static cache has a place less than the text has tokens."""
    model = model_of("gqa", monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_CODED", (torch.nn.Linear,))
    ids, texts = prompt(12, 2), []
    for switch in "01":
        monkeypatch.setenv("HF_VQ_CAPTURE", switch)
        cache: Any = None
        options = {"cache_implementation": "static"} if kind == "static" else {}
        if kind == "vq":
            cache = VQCache(model.config, max_cache_len=31, window=4, static=True)
        elif kind == "own static":
            cache = StaticCache(config=model.config, max_cache_len=31)
        texts.append(generated(model, cache, ids, **options))
    assert torch.equal(*texts) and texts[0].shape[1] == 32
    assert left and left[0] >= 12


@pytest.mark.parametrize("kind", ["vq", "static", "own static"])
def test_caches(left: list[int], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One of floats that the user has, which cannot forget a step, is read at once."""
    model = model_of("gqa", monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_CODED", (torch.nn.Linear,))  # as if it were codes
    ids = prompt(12, 2)
    lengths, texts = [], []
    monkeypatch.setenv("HF_VQ_CAPTURE", "0")
    whole = generated(model, new_cache(model), ids)
    for switch in "01":
        monkeypatch.setenv("HF_VQ_CAPTURE", switch)
        end = whole[0, 25:26].tolist() + whole[1, 27:28].tolist()
        options: dict[str, Any] = {"eos_token_id": end}
        cache = None
        if kind == "vq":
            cache = new_cache(model)
        elif kind == "own static":
            cache = StaticCache(config=model.config, max_cache_len=64)
        else:
            options["cache_implementation"] = "static"
        texts.append(generated(model, cache, ids, **options))
        lengths.append(None if cache is None else int(cache.get_seq_length()))
    assert torch.equal(*texts) and lengths[0] == lengths[1]
    assert left


def test_what_stays_with_transformers(left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("gqa", monkeypatch), prompt(12)
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    for options in (
        {"logits_processor": penalty},
        {"repetition_penalty": 1.2},
        {"return_dict_in_generate": True},
        {"streamer": Streamed()},
        {"max_time": 1000.0},
        {"max_new_tokens": 4},
    ):
        generated(model, new_cache(model), ids, **options)
        assert not left, options
    generated(model, new_cache(model), ids)
    assert left


def test_a_graph_that_cannot_be_recorded(left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("gqa", monkeypatch), prompt(12)
    wanted = generated(model, new_cache(model), ids)

    def fail(captured: Any, launch: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cuda_graphs, "record", fail)
    again = model_of("gqa", monkeypatch)
    left.clear()
    assert torch.equal(generated(again, new_cache(again), ids), wanted) and not left


def test_windows_stay_with_transformers(left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma3", monkeypatch)
    generated(model, new_cache(model), prompt(12))
    assert not left


@pytest.mark.parametrize(
    ("config", "to_all"),
    [
        (MistralConfig(sliding_window=4096), False),
        (MistralConfig(sliding_window=None), True),
        (Qwen2Config(sliding_window=4096, use_sliding_window=False), True),
        (Qwen2Config(sliding_window=16, use_sliding_window=True, max_window_layers=0), False),
        (LlamaConfig(), True),
        (Gemma3TextConfig(), False),
        (Llama4TextConfig(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_configs_that_hide_no_token_again(config: Any, to_all: bool) -> None:
    assert greedy_loop._attends_to_all(config) is to_all


def test_inputs_that_no_rule_knows() -> None:
    """Each kind of input, and what is none."""
    rule, one = greedy_loop._rule, torch.tensor([[3]])
    mask = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    now, two = mask.clone(), mask.clone()
    now[..., 4], two[..., 4:6] = True, True
    assert rule(one, one + 1) == greedy_loop.Rule("count")
    assert rule(one, one.clone()) == greedy_loop.Rule("same") == rule("a", "a")
    assert rule(mask, now) == greedy_loop.Rule("column", 4, True)
    assert rule(one, one + 2) is None and rule(mask, two) is None
    uneven = mask.clone()
    uneven[0, ..., 4] = True
    assert rule(mask, uneven) is None
    floats = torch.full((1, 1, 1, 8), -1e9)
    after = floats.clone()
    after[..., 2] = 0
    assert rule(floats, after) == greedy_loop.Rule("column", 2, 0.0)
    follows = greedy_loop._follow
    assert follows([rule(mask, now)], [greedy_loop.Rule("column", 5, True)])
    assert not follows([rule(mask, now)], [rule(mask, now)])
    assert not follows([rule(one, one + 1)], [rule(one, one.clone())])


@pytest.mark.parametrize("size", [50257, 49152, 128256, 151936, 32, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logit(size: int, dtype: torch.dtype) -> None:
    """The first of equal ones, as `argmax` in float32 has it; bfloat16 has many."""
    logits = torch.randn(3, size).to(dtype)
    logits[2] = 1.5
    expected = logits.float().argmax(-1)
    assert torch.equal(greedy_loop.largest(logits), expected) and expected[2] == 0
