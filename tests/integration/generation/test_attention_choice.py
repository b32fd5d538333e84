"""Attention over codes is `vq` whatever the model's attention is, and nothing else is changed."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

import hf_vq
from hf_vq import VQCache, patches
from hf_vq.backends.cpu import library
from hf_vq.errors import VQCacheError
from hf_vq.hf import attention_choice
from tests.fixtures.attention_modules import HOME, choice, filled, layer
from tests.fixtures.generation import build, decoded, greedy, prompt

pytestmark = pytest.mark.usefixtures("reference_kernels")


@contextmanager
def implementation(name: str, function: Any) -> Iterator[None]:
    tables = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = tables[0].get(name)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, tables[1].get(name, eager_mask))
    try:
        yield
    finally:
        tables[0].pop(name) if before is None else tables[0].update({name: before})


def test_weights_that_are_asked_for() -> None:
    model = build("gqa", "eager")
    ids = prompt(30)
    options = {"return_dict_in_generate": True, "output_attentions": True}
    with decoded():
        wanted = greedy(model, ids, VQCache(model.config, window=8), **options)
    cache = VQCache(model.config, window=8)
    out = greedy(model, ids, cache, **options)
    assert torch.equal(out.sequences, wanted.sequences) and min(cache.fallbacks.values()) > 0
    for step, other in zip(out.attentions, wanted.attentions, strict=True):
        assert len(step) == 2 and all(map(torch.equal, step, other))
    # Transformers' hooks stay in the model; the weights are not asked for any more.
    assert any(module._forward_hooks for module in model.modules())
    cache = VQCache(model.config, window=8, strict=True)
    assert torch.equal(greedy(model, ids, cache), wanted.sequences)
    model.config.output_attentions = True
    cache = VQCache(model.config, window=8)
    greedy(model, ids, cache)
    assert min(cache.fallbacks.values()) > 0
    model.config.output_attentions = False
    seen: list[Any] = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, out: seen.append(out[1]))
    cache = VQCache(model.config, window=8)
    greedy(model, ids, cache)
    assert all(weights is not None for weights in seen)
    assert cache.fallbacks[0] > 0 and cache.fallbacks[1] == 0
    with pytest.raises(VQCacheError, match=r"layer 0.* a forward hook .*remove the hook"):
        greedy(model, ids, VQCache(model.config, window=8, strict=True))


def other(scores: Callable[[Tensor], Tensor], home: str = HOME) -> Any:
    """An attention that a model defines itself, unlike all others."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any, **_: Any):
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        logits = query @ key.mT * scaling
        weights = scores(logits if mask is None else logits + mask).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    attention.__module__ = home
    return attention


SCORES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "alike": (lambda x: x, True),
    "sharper": (lambda x: x * 1.01, False),
    "clamped": (lambda x: x.clamp(-1, 1), False),
    "clamped far out": (lambda x: x.clamp(-50, 50), False),
    "capped": (lambda x: 50 * (x / 50).tanh(), False),
    "capped far out": (lambda x: 100 * (x / 100).tanh(), False),
    "of one length": (lambda x: x + x.new_tensor([0.0] * 40 + [0.1]), False),  # cannot be tried
}


@pytest.mark.parametrize("name", SCORES)
def test_attention_that_a_model_defines_itself(name: str) -> None:
    scores, alike = SCORES[name]
    cache, query, key, value = filled()
    function, mask = other(scores), torch.zeros(1, 1, 1, 41)
    state = torch.get_rng_state()
    out, weights = choice("eager", function)(layer(), query, key, value, mask, scaling=0.25)
    assert torch.equal(torch.get_rng_state(), state)
    assert (weights is None) is alike and cache.fallbacks == {0: 0 if alike else 2}
    wanted = function(layer(), query, key.decode(), value.decode(), mask, 0.25)[0]
    assert (out - wanted).abs().max() < 1e-5


def test_no_mask_means_all_to_eager_and_the_past_to_sdpa() -> None:
    _, query, key, value = filled(new=3)
    keys, values = key.decode(), value.decode()
    everything = torch.ones(1, 1, 3, 43, dtype=torch.bool)
    causal = everything.tril(40)
    for name, module, mask in (
        ("eager", layer(), everything),
        ("sdpa", layer(), causal),
        ("sdpa", layer(causal=False), everything),
    ):
        out, _ = choice(name)(module, query, key, value, None, scaling=0.25)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=0.25, enable_gqa=True
        )
        far = (out.transpose(1, 2) - wanted).abs().max()
        assert far < 0.05, name  # the window moves with the query: what is decoded has one
        ahead = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=everything ^ (mask ^ causal), scale=0.25,
            enable_gqa=True,
        )  # fmt: skip
        assert far < (out.transpose(1, 2) - ahead).abs().max()


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["dropout", "position bias", "training", "gradients"])
def test_what_needs_decoded_keys(name: str, case: str) -> None:
    cache, query, key, value = filled()
    module, kwargs = layer(), {"scaling": 0.25}
    function: Any = eager_attention_forward
    if case == "dropout":
        kwargs["dropout"] = 0.5
    elif case == "position bias":
        kwargs["position_bias"] = torch.randn(1, 4, 1, 41)
    elif case == "gradients":
        query.requires_grad_()
    else:
        module.train()
    run = choice(name, function)
    torch.manual_seed(3)
    out, _ = run(module, query, key, value, None, **kwargs)
    # sdpa trains as it runs, and adds a bias to the mask, which codes are read under.
    read = name == "sdpa" and case in ("training", "position bias")
    assert cache.fallbacks == {0: 0 if read else 2}
    torch.manual_seed(3)
    plain = AttentionInterface._global_mapping.get(name, function)
    wanted, _ = plain(module, query, key.decode(), value.decode(), None, **kwargs)
    assert (out - wanted).abs().max() < 1e-5
    if case == "gradients":
        out.sum().backward()
        assert query.grad is not None


def test_other_implementations_are_asked_themselves() -> None:
    seen: list[Any] = []

    def mine(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append(type(key).__name__)
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    model = build("gqa", "sdpa")
    ids = prompt(30)
    wanted = greedy(model, ids, VQCache(model.config, window=8))
    with implementation("mine", mine):
        model.set_attn_implementation("mine")
        cache = VQCache(model.config, window=8)
        assert torch.equal(greedy(model, ids, cache), wanted)
    assert "LazyKV" in seen and min(cache.fallbacks.values()) > 0

    def my_sdpa(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append(type(key).__name__)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    with implementation("sdpa", my_sdpa):  # a user's, under the name of Transformers' own
        model.set_attn_implementation("sdpa")
        seen.clear()
        assert torch.equal(greedy(model, ids, VQCache(model.config, window=8)), wanted)
    assert "LazyKV" in seen


def test_flex_attention_gets_decoded_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler cannot trace a tensor that decodes itself, and says so only after minutes."""
    seen: list[Any] = []

    def flex(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.extend([type(key), type(value)])
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    model = build("gqa", "sdpa")
    ids = prompt(30)
    wanted = greedy(model, ids, VQCache(model.config, window=8))
    monkeypatch.setattr(attention_choice, "flex_attention_forward", flex)
    with implementation("flex_attention", flex):
        model.set_attn_implementation("flex_attention")
        AttentionMaskInterface._global_mapping["flex_attention"] = eager_mask
        cache = VQCache(model.config, window=8)
        assert torch.equal(greedy(model, ids, cache), wanted)
    assert set(seen) == {Tensor} and min(cache.fallbacks.values()) > 0


@pytest.mark.usefixtures("restored_patches")
def test_other_caches_and_no_cache_are_as_before() -> None:
    """Bit by bit, with the patches and without."""
    results = []
    for name in ("eager", "sdpa"):
        model, ids = build("gqa", name), prompt(12, batch=2)
        for patched in (False, True):
            VQCache(model.config) if patched else patches.undo()
            with torch.no_grad():
                out = model(ids, past_key_values=DynamicCache(config=model.config))
                results.append((out.logits, model(ids, use_cache=False).logits))
        assert all(map(torch.equal, results[-1], results[-2]))


def test_one_model_with_and_without_codes_in_two_threads() -> None:
    model, ids = build("gqa", "eager"), prompt(30)
    make = {"codes": lambda: VQCache(model.config, "u2", window=4, strict=True),
            "floats": lambda: DynamicCache(config=model.config)}  # fmt: skip
    wanted = {name: greedy(model, ids, cache(), 16) for name, cache in make.items()}
    assert not torch.equal(*wanted.values())
    wrong: list[str] = []

    def run(name: str) -> None:
        for _ in range(3):
            if not torch.equal(greedy(model, ids, make[name](), 16), wanted[name]):
                wrong.append(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in make]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and model.config._attn_implementation == "eager"


def test_eager_under_autocast() -> None:
    """What is tried on numbers is not rounded."""
    model, ids = build("gqa", "eager"), prompt(30)
    cache = VQCache(model.config, window=8, strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        greedy(model, ids, cache)
    assert set(cache.fallbacks.values()) == {0}


def test_nothing_is_remembered_of_functions() -> None:
    """Dynamo guards what a compiled model reads, so that a new function would compile all again."""
    choice("eager")
    compiles = CompileCounter()
    get = torch.compile(
        lambda x: ALL_ATTENTION_FUNCTIONS.get_interface("eager", one)(None, x, x, x, None)[0],
        backend=compiles,
    )
    one = lambda module, q, k, v, mask: (q + k + v, None)  # noqa: E731
    x = torch.ones(1, 1, 1, 1)
    for _ in range(4):
        assert get(x) == 3
        choice("eager", other(lambda x: x))
    assert compiles.frame_count == 1
    owner = layer()
    owner.attention = types.MethodType(lambda self, *args: None, owner)
    alive = weakref.ref(owner)
    choice("eager", owner.attention)
    del owner
    gc.collect()
    assert alive() is None


def test_a_function_is_tried_once_for_each_layer_of_a_cache() -> None:
    calls = 0

    def counted(scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return scores * factor

    module, run, factor = layer(), choice("eager", other(counted)), 1.0
    for alike in (True, False):
        cache, query, key, value = filled(20)
        for _ in range(2):
            run(module, query, key, value, None, scaling=0.25)
            tried, calls = calls, 0
            key, value = cache.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)
        assert tried == (0 if alike else 1) and (cache.fallbacks == {0: 0}) is alike
        factor = 1.1  # as a layer whose temperature was changed
    owners = len(attention_choice._tried)
    del cache, key, value
    gc.collect()
    assert len(attention_choice._tried) < owners


def test_functions_that_somebody_put_in_place_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    calls: list[str] = []
    before = modeling_llama.eager_attention_forward

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(type(args[2]).__name__)
        return before(*args, **kwargs)

    model, ids = build("gqa", "eager"), prompt(30)
    assert type(model).__module__ == HOME
    wanted = greedy(model, ids, VQCache(model.config, window=8))
    for function in (mine, functools.wraps(before)(mine)):
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", function)
        calls.clear()
        cache = VQCache(model.config, window=8)
        assert torch.equal(greedy(model, ids, cache), wanted)
        assert calls.count("LazyKV") == 2 * 7 and min(cache.fallbacks.values()) > 0


@pytest.mark.parametrize("name", ["stablelm", "nemotron"])
def test_weights_of_models_that_keep_arguments_from_their_layers(name: str) -> None:
    config = AutoConfig.for_model(
        name, num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    cache = VQCache(config, window=8)
    ids = prompt(30) % 64
    with torch.no_grad():
        for step, asked in enumerate((False, False, True, False)):
            out = model(ids, past_key_values=cache, output_attentions=asked)
            shapes = [tuple(one.shape) for one in out.attentions or ()]
            assert shapes == ([(1, 4, 1, 30 + step)] * 2 if asked else [])
            assert (min(cache.fallbacks.values()) > 0) == (step >= 2)
            ids = out.logits[:, -1:].argmax(-1)


def test_any_hook_counts_where_transformers_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layer()
    wanted = attention_choice._weights_are_wanted
    assert not wanted(module, {})

    def output_capturing_hook(*args: Any) -> None:
        """As Transformers names its own."""

    module.register_forward_hook(output_capturing_hook)
    assert not wanted(module, {})
    monkeypatch.setattr(attention_choice, "_collector", None)
    assert wanted(module, {}) and not wanted(layer(), {})


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2"])
def test_ways_to_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The mask by name is the mask; any other way is left to the function itself."""
    seen: list[Any] = []

    def plain(*args: Any, **kwargs: Any) -> Any:
        seen.append((len(args), sorted(kwargs)))
        return args[1] if args else kwargs["query"], None

    plain.__module__ = HOME
    for each in ("sdpa_attention_forward", "flash_attention_forward"):
        monkeypatch.setattr(attention_choice, each, plain)
    run = {
        "eager": functools.partial(attention_choice._eager, plain),
        "sdpa": attention_choice._sdpa,
        "flash_attention_2": attention_choice._flash,
    }[name]
    monkeypatch.setattr(attention_choice, "_is_vq", lambda *arguments: True)
    cache, query, key, value = filled(dtype=torch.bfloat16)
    mask = None if name == "flash_attention_2" else torch.ones(1, 1, 1, 41, dtype=torch.bool)
    out, _ = run(layer(), query, key, value, mask, scaling=0.25)
    assert torch.equal(out, run(layer(), query, key, value, attention_mask=mask, scaling=0.25)[0])
    assert seen == [] and cache.fallbacks == {0: 0}
    run(layer(), query, key, value, mask, 0.0, 0.25, None, 3)
    run(query=query, key=key, value=value, anything=1)
    assert seen == [(9, []), (0, ["anything", "key", "query", "value"])]


def test_devices_without_float64() -> None:
    class NoFloat64(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if torch.float64 in (*args, *(kwargs or {}).values()):
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
            return func(*args, **(kwargs or {}))

    cache, query, key, value = filled()
    with NoFloat64():
        choice("eager")(layer(), query, key, value, None, scaling=0.25)
    assert cache.fallbacks == {0: 0}


@pytest.mark.skipif(library.load() is None, reason="the CPU library is not built")
def test_calls_of_a_layer_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python frames inside hf_vq of one update and its attention, GQA of 4: they are most of the
    time of a small layer."""
    monkeypatch.delenv("HF_VQ_BACKEND")
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2)
    cache, module = VQCache(config), layer()
    module.num_key_value_groups = 4
    states = [torch.randn(1, 2, 200, 64) for _ in range(2)]
    query, new = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 1, 64)
    root = str(Path(hf_vq.__file__).parent)
    count = 0

    def step() -> None:
        run = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention_forward)
        run(module, query, *cache.update(new, new, 0), None, dropout=0.0, scaling=0.125)

    def see(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(root)

    with torch.no_grad():
        cache.update(*states, 0)
        for _ in range(3):
            step()
        sys.setprofile(see)
        try:
            step()
        finally:
            sys.setprofile(None)
    assert 20 < count <= 45
