"""`hf_vq.capture`: the tokens of `generate`, from CUDA graphs of our own."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import transformers.generation.utils
from transformers import (
    CompileConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_vq
from hf_vq import VQCache, patches
from hf_vq.cache.argument import CACHE
from hf_vq.errors import VQBackendError
from hf_vq.hf.graphs import cuda_graphs
from tests.fixtures.generation import build, prompt


def test_the_method_of_one_model_while_it_generates() -> None:
    """It is that of the model alone: not of its class, nor of a copy, nor of a user's own."""
    model = build("gqa")
    captured = cuda_graphs._Captured.__new__(cuda_graphs._Captured)
    captured.automatic = False
    model.__dict__[cuda_graphs._ATTRIBUTE] = captured
    options = {"generation_config": model.generation_config}
    with cuda_graphs.loop(model, options, False):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not isinstance(other.get_compiled_call(None), cuda_graphs._Decoding)
        assert isinstance(model.get_compiled_call(None), cuda_graphs._Decoding)
    assert "get_compiled_call" not in model.__dict__
    hf_vq.capture(model, enabled=False)
    with cuda_graphs.loop(model, options, True):
        assert not isinstance(model.get_compiled_call(None), cuda_graphs._Decoding)
    assert model.__dict__[cuda_graphs._ATTRIBUTE] is False  # nor by itself
    hf_vq.capture(model, enabled=None)
    assert cuda_graphs._ATTRIBUTE not in model.__dict__


def test_a_model_on_a_cpu() -> None:
    with pytest.raises(VQBackendError, match=r"one GPU.*cpu.*device_map"):
        hf_vq.capture(build("gqa"))


def test_a_wrapped_model() -> None:
    with pytest.raises(VQBackendError, match=r"Linear; in a PeftModel"):
        hf_vq.capture(torch.nn.Linear(3, 3))  # type: ignore[arg-type]


class Event:
    """`torch.Event`, which CPUs do not have: their copies end at once."""

    def __init__(self, device: torch.device, blocking: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Streamed:
    """Streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, restored_patches: None) -> Iterator[Any]:
    """A model on the CPU whose tokens are read one step late, as after `capture`; checks are
    counted."""
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(cuda_graphs, "GPUS", ("cpu",))
    patches.apply(patches.CAPTURE)
    model = build("gqa")
    captured = cuda_graphs._Captured.__new__(cuda_graphs._Captured)
    captured.automatic = False
    model.__dict__[cuda_graphs._ATTRIBUTE] = captured
    model.late_checks = 0
    check = transformers.generation.utils.DeferredStopCheck
    call = check.__call__

    def counted(self: Any, *args: Any) -> bool:
        model.late_checks += 1
        return bool(call(self, *args))

    monkeypatch.setattr(check, "__call__", counted)
    yield model
    patches.undo()


def ended(model: Any, cache: Any, end: list[int] | None, ids: torch.Tensor) -> Any:
    """Greedy ids and what was streamed; sequences end at the tokens `end`."""
    streamer = Streamed() if len(ids) == 1 else None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=20,
        do_sample=False, eos_token_id=end, pad_token_id=0, streamer=streamer,
    )  # fmt: skip
    return out, streamer and streamer.tokens


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("place", [0, 7, 18, 19, None])
def test_tokens_that_are_read_late_are_the_same(late: Any, rows: int, place: int | None) -> None:
    """Text, stream and cache, wherever the longest sequence ends; then another turn."""
    plain = build("gqa")
    plain.load_state_dict(late.state_dict())

    def new_cache() -> VQCache:
        return VQCache(plain.config, max_cache_len=64, window=4, static=True)

    ids = prompt(12, rows)
    whole, _ = ended(plain, new_cache(), None, ids)
    end = None if place is None else whole[:, 12 + place].unique().tolist()
    caches = new_cache(), new_cache()
    wanted, found = ended(plain, caches[0], end, ids), ended(late, caches[1], end, ids)
    assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]
    assert late.late_checks >= found[0].shape[1] - 12
    lengths = [[int(layer.get_seq_length()) for layer in cache.layers] for cache in caches]
    assert lengths[0] == lengths[1]
    more = torch.cat([found[0], prompt(3, rows)], 1)
    turns = [
        model.generate(
            more, attention_mask=torch.ones_like(more), past_key_values=cache, max_new_tokens=6,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )
        for model, cache in zip((plain, late), caches, strict=True)
    ]  # fmt: skip
    assert torch.equal(*turns)


def test_other_models_and_caches_read_every_token_at_once(
    late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not captured, a copy of one that is, a cache that cannot forget, a CPU."""
    plain, ids = build("gqa"), prompt(12, 1)
    ended(plain, VQCache(plain.config, max_cache_len=64, static=True), None, ids)
    ended(copy.deepcopy(late), VQCache(plain.config, max_cache_len=64, static=True), None, ids)
    ended(late, StaticCache(config=plain.config, max_cache_len=64), None, ids)
    assert late.late_checks == 0
    ended(late, VQCache(plain.config, max_cache_len=64, static=True), None, ids)
    assert late.late_checks == 20
    monkeypatch.setattr(cuda_graphs, "GPUS", ("cuda",))  # the model has moved to the CPU since
    ended(late, VQCache(plain.config, max_cache_len=64, static=True), None, ids)
    assert late.late_checks == 20
    hf_vq.capture(late, enabled=False)
    ended(late, VQCache(plain.config, max_cache_len=64, static=True), None, ids)
    assert late.late_checks == 20


def no_hook(*args: Any) -> None:
    """Does nothing."""


class OwnModel(LlamaForCausalLM):
    """A model of the user's."""


def hooked(model: Any, options: dict[str, Any]) -> None:
    model.model.norm.register_forward_hook(no_hook)


def configured(model: Any, options: dict[str, Any]) -> None:
    options["generation_config"].compile_config = CompileConfig()


def growing(model: Any, options: dict[str, Any]) -> None:
    options["model_kwargs"][CACHE] = VQCache(model.config)


def of_floats(model: Any, options: dict[str, Any]) -> None:
    options["model_kwargs"][CACHE] = StaticCache(config=model.config, max_cache_len=64)


def of_the_user(model: Any, options: dict[str, Any]) -> None:
    model.__class__ = OwnModel


def with_a_layer_of_the_user(model: Any, options: dict[str, Any]) -> None:
    model.model.layers[1].mlp.__class__ = type("OwnMLP", (type(model.model.layers[1].mlp),), {})


def replaced(model: Any, options: dict[str, Any]) -> None:
    model.model.layers[1].mlp.forward = no_hook


def eager(model: Any, options: dict[str, Any]) -> None:
    model.config._attn_implementation = "eager"


def in_parts(model: Any, options: dict[str, Any]) -> None:
    model._can_compile_fullgraph = False


def wrapped(model: Any, options: dict[str, Any]) -> None:
    forward = model.model.layers[1].mlp.forward

    @functools.wraps(forward)
    def spy(x: torch.Tensor) -> Any:
        return forward(x)

    model.model.layers[1].mlp.forward = spy


def compiled_as_a_module(model: Any, options: dict[str, Any]) -> None:
    model.model.norm.compile(backend="eager")


def compiled_by_the_user(model: Any, options: dict[str, Any]) -> None:
    model.get_compiled_call = no_hook


def together(model: Any, options: dict[str, Any]) -> None:
    options["synced_gpus"] = True


def switched_off(model: Any, options: dict[str, Any]) -> None:
    hf_vq.capture(model, enabled=False)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """A model on the CPU, and options of the loop over tokens, as `_automatic` gets them."""
    monkeypatch.setattr(cuda_graphs, "GPUS", ("cpu",))
    model = build("gqa", "sdpa")
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args: True)
    cache = VQCache(model.config, max_cache_len=64, static=True)
    config = copy.deepcopy(model.generation_config)
    return model, {"generation_config": config, "model_kwargs": {CACHE: cache}}


def test_what_generate_captures_by_itself(
    as_on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = as_on_a_gpu
    place = torch.device("cpu")
    assert cuda_graphs._automatic(model, options) == place
    assert cuda_graphs._automatic(copy.deepcopy(model), options) == place
    coded = hf_vq.quantize_model(
        copy.deepcopy(model), hf_vq.VQConfig("turboquant-4", activations=None)
    )
    of_floats(model, options)
    assert cuda_graphs._automatic(coded, options) == place
    monkeypatch.setenv("HF_VQ_CAPTURE", "0")
    assert cuda_graphs._automatic(coded, options) is None


@pytest.mark.parametrize(
    "change",
    [hooked, configured, growing, of_floats, of_the_user, together, with_a_layer_of_the_user,
     replaced, wrapped, eager, in_parts, compiled_as_a_module, compiled_by_the_user],
)  # fmt: skip
def test_what_it_does_not(as_on_a_gpu: Any, change: Any) -> None:
    model, options = as_on_a_gpu
    change(model, options)
    assert cuda_graphs._automatic(model, options) is None


def test_a_loop_of_another_library(as_on_a_gpu: Any) -> None:
    """Its arguments may have no names."""
    model, options = as_on_a_gpu
    with cuda_graphs.loop(model, {"args": (), "kwargs": options}, True):
        assert cuda_graphs.in_loop() is None


def test_hooks_of_all_modules(as_on_a_gpu: Any) -> None:
    hook = torch.nn.modules.module.register_module_forward_hook(no_hook)
    try:
        assert cuda_graphs._automatic(*as_on_a_gpu) is None
    finally:
        hook.remove()


def test_models_elsewhere(as_on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "GPUS", ("cuda",))
    assert cuda_graphs._automatic(*as_on_a_gpu) is None


class Captured:
    """Stands for `_Captured`, which needs a GPU."""

    def __init__(self, model: Any, device: torch.device, automatic: bool) -> None:
        self.device, self.automatic = device, automatic


def test_a_loop_captures_the_model_while_it_runs(
    as_on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch, restored_patches: None
) -> None:
    """And reads tokens late unless they are sampled. Code of the user's ends it for one loop."""
    monkeypatch.setattr(cuda_graphs, "_Captured", Captured)
    model, options = as_on_a_gpu
    options["generation_config"].do_sample = False

    def decodes() -> bool:
        return isinstance(model.get_compiled_call(None), cuda_graphs._Decoding)

    for unchanging in (False, True, False, True):
        with cuda_graphs.loop(model, options, unchanging):
            assert decodes() == unchanging == cuda_graphs._thread.is_late
            with cuda_graphs.loop(build("gqa"), options, False):  # another model's, inside of it
                assert not decodes() and not cuda_graphs._thread.is_late
            assert decodes() == unchanging == cuda_graphs._thread.is_late
        assert not decodes() and not cuda_graphs._thread.is_late
    options["generation_config"].do_sample = True
    with cuda_graphs.loop(model, options, True):
        assert decodes() and not cuda_graphs._thread.is_late
    switched_off(model, options)
    with cuda_graphs.loop(model, options, True):
        assert not decodes()
    patches.undo()


class Failing(Captured):
    """Its model does not compile."""

    whole = True
    lock = threading.Lock()
    graphs: ClassVar[dict[Any, Any]] = {}

    def checked(self, inputs: Any) -> Any:
        raise torch._dynamo.exc.UserError(torch._dynamo.exc.UserErrorType.ANTI_PATTERN, "why\nand")


def test_a_model_that_does_not_compile_runs_as_always(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_repeats", lambda inputs: True)
    for automatic in (True, False):
        captured: Any = Failing(None, torch.device("cpu"), automatic)
        decode = cuda_graphs._Decoding(captured, lambda **inputs: "as always")
        with caplog.at_level("INFO", "hf_vq"), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert decode(**{CACHE: None}) == "as always" and not captured.whole
        assert ("UserError: why" in caplog.text) == automatic == (not warned)
        caplog.clear()


def test_encoder_decoders_of_codes_generate() -> None:
    """Their cache is two caches."""
    config = T5Config(
        vocab_size=32, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = hf_vq.quantize_model(
        T5ForConditionalGeneration(config), hf_vq.VQConfig("turboquant-4", activations=None)
    )
    assert model.generate(torch.arange(1, 9)[None], max_new_tokens=3).shape[1] <= 4


def remembered(graph: Any, inputs: Any) -> Any:
    """A backend that says what ran, as that of `_Captured` does."""

    def run(*flat: Any) -> Any:
        cuda_graphs._thread.ran = run, flat
        return graph.forward(*flat)

    return run


class OnTheCpu(cuda_graphs._Captured):
    """Compiles as on a GPU, without streams and graphs."""

    def __init__(self, model: Any, device: torch.device, automatic: bool) -> None:
        self.automatic, self.device, self.whole = automatic, device, True
        self.compiled = torch.compile(model.__call__, backend=remembered, fullgraph=True)
        self.lock, self.graphs = threading.Lock(), OrderedDict()


@pytest.fixture
def captures_on_the_cpu(monkeypatch: pytest.MonkeyPatch, restored_patches: None) -> Iterator[None]:
    """Models on the CPU are compiled as captured ones are; nothing is recorded."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(cuda_graphs, "GPUS", ("cpu",))
    monkeypatch.setattr(cuda_graphs, "_Captured", OnTheCpu)
    monkeypatch.setattr(cuda_graphs, "_on_gpu", lambda x: isinstance(x, torch.Tensor))
    compiles = {
        "_valid_auto_compile_criteria": lambda *args: True,
        "get_compiled_call": lambda self, config: self.__call__,
    }
    for name, function in compiles.items():
        monkeypatch.setattr(PreTrainedModel, name, function, raising=False)
    yield
    patches.undo()


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = VQCache(model.config, max_cache_len=64, window=4, static=True)
    return ended(model, cache, None, ids)[0]


@pytest.mark.usefixtures("captures_on_the_cpu")
def test_experts_of_codes_run_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which experts compute is read by the host, so the model is no single graph."""
    model = hf_vq.quantize_model(
        build("qwen3_moe", "sdpa"), hf_vq.VQConfig("turboquant-4", activations=None)
    )
    ids = prompt(12, 2)
    monkeypatch.setenv("HF_VQ_CAPTURE", "0")
    wanted = generated(model, ids)
    monkeypatch.delenv("HF_VQ_CAPTURE")
    assert torch.equal(generated(model, ids), wanted)
    assert model.__dict__[cuda_graphs._ATTRIBUTE].whole is False
    assert torch.equal(generated(model, ids), wanted)


@pytest.mark.usefixtures("captures_on_the_cpu")
def test_a_step_that_cannot_be_recorded_runs_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this cache; and nothing of it is kept."""
    recordings = []

    def failing(*args: Any) -> None:
        recordings.append(args)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(cuda_graphs, "_Graph", failing)
    monkeypatch.setattr(cuda_graphs, "_identity", lambda x: getattr(x, "data_ptr", int)())
    model, ids = build("gqa", "sdpa"), prompt(12, 2)
    monkeypatch.setenv("HF_VQ_CAPTURE", "0")
    wanted = generated(model, ids)
    monkeypatch.delenv("HF_VQ_CAPTURE")
    for count in (1, 2):
        assert torch.equal(generated(model, ids), wanted) and len(recordings) == count
    assert cuda_graphs._thread.ran is None
    assert model.__dict__[cuda_graphs._ATTRIBUTE].whole


@pytest.mark.usefixtures("captures_on_the_cpu")
def test_memory_that_never_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of weights that wrap others: after a few steps Transformers' own code runs."""
    monkeypatch.setattr(cuda_graphs, "_identity", lambda x: None)
    model, checks, checked = build("gqa", "sdpa"), [0], OnTheCpu.checked

    def counted(self: Any, inputs: Any) -> Any:
        checks[0] += 1
        return checked(self, inputs)

    monkeypatch.setattr(OnTheCpu, "checked", counted)
    generated(model, prompt(12, 2))
    assert checks[0] == cuda_graphs._UNSETTLED
