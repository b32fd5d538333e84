"""`hf_vq.capture` on a GPU: the tokens of `generate`, from CUDA graphs of our own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache
from transformers.generation.utils import DeferredStopCheck

import hf_vq
from hf_vq.cache import VQCache
from hf_vq.hf.graphs import cuda_graphs, greedy_loop
from tests.fixtures.generation import build, greedy, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


CAPACITY = 96


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many graphs were captured, and how many steps replayed; only after `hf_vq.capture`."""
    torch._dynamo.reset()
    monkeypatch.setenv("HF_VQ_CAPTURE", "0")
    counts = [0, 0]
    launch, init = cuda_graphs._Graph.launch, cuda_graphs._Graph.__init__

    def counted(self: Any, cache: Any) -> None:
        counts[1] += 1
        launch(self, cache)

    def made(self: Any, *args: Any) -> None:
        counts[0] += 1
        init(self, *args)

    monkeypatch.setattr(cuda_graphs._Graph, "launch", counted)
    monkeypatch.setattr(cuda_graphs._Graph, "__init__", made)
    return counts


def ids_and_mask(rows: int = 2) -> tuple[Tensor, Tensor]:
    ids = prompt(30, rows).cuda()
    mask = torch.ones_like(ids)
    mask[-1, :7] = 0
    return ids, mask


def cache_of(kind: str, model: Any) -> Any:
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=CAPACITY)
    return VQCache(model.config, max_cache_len=CAPACITY, window=8)


@pytest.mark.parametrize("kind", ["static", "vq"])
@pytest.mark.parametrize("name", ["gqa", "qwen3"])
def test_captured_steps_give_the_tokens_of_plain_ones(
    name: str, kind: str, replays: list[int]
) -> None:
    """Of several calls, caches, batches, with weights that change; all as without."""
    model = build(name, "sdpa").cuda()
    other = copy.deepcopy(model)
    hf_vq.capture(model)
    cache, captured = cache_of(kind, model), 0
    for rows in (2, 2, 1, 2):
        ids, mask = ids_and_mask(rows)
        if rows == 1:
            cache = cache_of(kind, model)
        cache.reset()
        wanted = greedy(other, ids, cache_of(kind, other), 40, attention_mask=mask)
        before = replays[1]
        out = greedy(model, ids, cache, 40, attention_mask=mask)
        assert torch.equal(out, wanted) and replays[1] - before >= 36
        if kind == "vq":
            assert cache.layers[0].length == 30 + 39
        if rows == 1:
            cache = cache_of(kind, model)
        captured = replays[0]
    with torch.no_grad():  # in place: the same graph
        for one in (model, other):
            one.model.layers[0].mlp.down_proj.weight.mul_(-1)
    # Elsewhere: another graph.
    moved = model.model.norm.weight.detach() * 1.5
    for one in (model, other):
        one.model.norm.weight = torch.nn.Parameter(moved.clone())
    cache.reset()
    wanted = greedy(other, ids, cache_of(kind, other), 40, attention_mask=mask)
    assert torch.equal(greedy(model, ids, cache, 40, attention_mask=mask), wanted)
    assert captured < replays[0] <= 5
    assert len(model.__dict__["_hf_vq_captured"].graphs) <= 4
    hf_vq.capture(model, False)
    before = list(replays)
    cache.reset()
    assert torch.equal(greedy(model, ids, cache, 40, attention_mask=mask), wanted)
    assert replays == before


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["internal", "vq"])
@pytest.mark.parametrize("place", [3, 20, 38, 39])
def test_an_early_end_is_read_one_step_late(
    place: int, kind: str, index: int, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text ends where it does without, and the cache forgets the step too many; also on a GPU
    that is not the current one."""
    if index >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    model = build("gqa", "sdpa").to(f"cuda:{index}")
    other = copy.deepcopy(model)
    hf_vq.capture(model)
    ids, mask = (part.to(model.device) for part in ids_and_mask())

    options: dict[str, Any] = {"attention_mask": mask}
    if kind == "internal":
        options["cache_implementation"] = "static"

    def new_cache() -> Any:
        return cache_of("vq", model) if kind == "vq" else None

    whole = greedy(other, ids, new_cache(), 40, **options)
    end = whole[:, 30 + place].unique().tolist()
    checks, check = [0], DeferredStopCheck.__call__

    def counted(self: Any, *args: Any) -> bool:
        checks[0] += 1
        return bool(check(self, *args))

    flag = greedy_loop._Flags.read

    def read(self: Any, step: int) -> bool:
        checks[0] += 1
        return flag(self, step)

    monkeypatch.setattr(DeferredStopCheck, "__call__", counted)
    monkeypatch.setattr(greedy_loop._Flags, "read", read)
    first, second = new_cache(), new_cache()
    wanted = greedy(other, ids, first, 40, eos_token_id=end, **options)
    assert not checks[0]
    out = greedy(model, ids, second, 40, eos_token_id=end, **options)
    assert torch.equal(out, wanted) and checks[0] >= out.shape[1] - 31
    if kind == "vq":
        assert second.layers[0].length == first.layers[0].length == out.shape[1] - 1
        more = torch.cat([out, ids[:, :5]], 1)
        seen = torch.cat([mask, torch.ones_like(more[:, 30:])], 1)
        turns = [
            greedy(one, more, cache, 8, attention_mask=seen)
            for one, cache in ((other, first), (model, second))
        ]
        assert torch.equal(*turns)


def test_sampling_and_inference_mode(replays: list[int]) -> None:
    model = build("gqa", "sdpa").cuda()
    ids, mask = ids_and_mask()

    def sampled() -> Tensor:
        torch.manual_seed(3)
        return model.generate(
            ids, attention_mask=mask, past_key_values=cache_of("vq", model), max_new_tokens=30,
            do_sample=True, min_new_tokens=30,
        )  # fmt: skip

    wanted = sampled()
    hf_vq.capture(model)
    assert torch.equal(sampled(), wanted)
    with torch.inference_mode():
        assert torch.equal(sampled(), wanted)
    assert torch.equal(sampled(), wanted) and replays[1] > 3 * 25


@pytest.mark.parametrize("kind", ["vq", "codes"])
def test_codes_are_captured_by_generate_itself(
    kind: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coded cache of a dense model, and a model of codes over a dense cache."""
    model = build("gqa", "sdpa").cuda()
    if kind == "codes":
        config = hf_vq.VQConfig("turboquant-4", activations=None)
        model = hf_vq.quantize_model(model.half(), config)
    of_cache = "vq" if kind == "vq" else "static"
    ids, mask = ids_and_mask()

    def run(**options: Any) -> Tensor:
        return greedy(model, ids, cache_of(of_cache, model), 40, attention_mask=mask, **options)

    wanted = run()
    end = wanted[:, 50].unique().tolist()
    ended = run(eos_token_id=end)
    assert replays == [0, 0]
    monkeypatch.delenv("HF_VQ_CAPTURE")
    assert torch.equal(run(), wanted) and replays[1] >= 36
    assert torch.equal(run(eos_token_id=end), ended)

    seen = list(replays)
    hook = model.model.norm.register_forward_hook(lambda *args: None)
    assert torch.equal(run(), wanted) and replays == seen
    hook.remove()
    assert torch.equal(run(), wanted) and replays[1] >= seen[1] + 36
    seen = list(replays)
    hf_vq.capture(model, False)
    assert torch.equal(run(), wanted) and replays == seen


def test_experts_of_codes_run_as_always(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which experts compute is read by the host, so the model is no single graph."""
    config = hf_vq.VQConfig("turboquant-4", activations=None)
    model = hf_vq.quantize_model(build("qwen3_moe", "sdpa").cuda().half(), config)
    ids, mask = ids_and_mask()
    wanted = greedy(model, ids, cache_of("vq", model), 20, attention_mask=mask)
    torch._dynamo.reset()
    monkeypatch.delenv("HF_VQ_CAPTURE")
    for _ in range(2):
        out = greedy(model, ids, cache_of("vq", model), 20, attention_mask=mask)
        assert torch.equal(out, wanted)


def test_sampling_draws_no_more_than_without(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An early end leaves the GPU's generator where it is without graphs."""
    model = build("gqa", "sdpa").cuda()
    ids, mask = ids_and_mask(1)

    def sampled(end: int | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        cache = cache_of("vq", model)
        options = {"eos_token_id": end, "pad_token_id": 0, "attention_mask": mask}
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=40, do_sample=True, **options
        )
        return out, torch.rand(4, device="cuda")

    end = int(sampled(None)[0][0, 50])
    wanted = sampled(end)
    monkeypatch.delenv("HF_VQ_CAPTURE")
    found = sampled(end)
    assert all(map(torch.equal, found, wanted)) and replays[1] > 5


def test_what_is_compiled_as_always(replays: list[int]) -> None:
    """Caches that count in Python, and outputs of every kind."""
    ids, mask = ids_and_mask()
    model = build("gemma3", "sdpa").cuda()
    wanted = greedy(model, ids, cache_of("vq", model), 40, attention_mask=mask)
    hf_vq.capture(model)
    out = greedy(model, ids, cache_of("vq", model), 40, attention_mask=mask)
    assert torch.equal(out, wanted) and replays == [0, 0]

    model = build("gqa", "sdpa").cuda()
    options = {"output_hidden_states": True, "return_dict_in_generate": True}
    options |= {"output_logits": True, "attention_mask": mask}
    wanted = greedy(model, ids, VQCache(model.config, window=8), 12, **options)
    hf_vq.capture(model)
    out = greedy(model, ids, cache_of("vq", model), 12, **options)
    assert replays[1] >= 8
    for step, expected in zip(out.hidden_states, wanted.hidden_states, strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(step, expected, strict=True))
    assert len({tuple(logits.flatten().tolist()) for logits in out.logits}) == 12


def test_without_a_compiler(replays: list[int]) -> None:
    """Switched off, or a model that is no single graph: as always, and nothing is captured."""
    model = build("gqa", "sdpa").cuda()
    ids, mask = ids_and_mask()
    wanted = greedy(model, ids, cache_of("static", model), 20, attention_mask=mask)
    hf_vq.capture(model)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            out = greedy(model, ids, cache_of("static", model), 20, attention_mask=mask)
            assert torch.equal(out, wanted) and replays == [0, 0]

    @torch._dynamo.disable
    def opaque(module: Any, args: Any) -> None:
        """What no graph holds."""

    model.model.norm.register_forward_pre_hook(opaque)
    with pytest.warns(UserWarning, match="runs as always"):
        out = greedy(model, ids, cache_of("static", model), 20, attention_mask=mask)
    assert torch.equal(out, wanted) and replays == [0, 0]


def test_captured_models_are_copied_and_freed(replays: list[int]) -> None:
    model = build("gqa", "sdpa").cuda()
    ids, mask = ids_and_mask()
    hf_vq.capture(model)
    loaded = pickle.loads(pickle.dumps(model))  # what torch compiled cannot be written
    wanted = greedy(model, ids, cache_of("vq", model), 20, attention_mask=mask)
    assert replays[1] > 10
    for other in (copy.deepcopy(model), loaded):
        before = list(replays)
        out = greedy(other, ids, cache_of("vq", model), 20, attention_mask=mask)
        assert torch.equal(out, wanted) and replays == before
    hf_vq.capture(model, False)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
