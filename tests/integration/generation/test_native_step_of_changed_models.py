"""When a decoding step is one call of libhf_vq_cpu: models that change, refusals, reasons, cost."""

import copy
import functools
import pickle
import weakref
from functools import partial

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import hf_vq
from hf_vq import VQCache, VQConfig
from hf_vq.backends.cpu import library
from hf_vq.hf.step import run, snapshot, why_not
from hf_vq.nn.linear import VQLinear
from hf_vq.nn.residual_offload import SecondPass
from tests.fixtures.native_steps import (
    both,
    generate,
    prompt,
    prompted,
    same_steps,
    tiny,
    token_inputs,
)

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())


def test_weights_that_change_are_seen(steps, monkeypatch):
    model, ids = tiny("llama"), prompt()
    generate(monkeypatch, True, model, ids, 10)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1)
    in_place = generate(monkeypatch, True, model, ids, 20)
    assert torch.equal(in_place[0], generate(monkeypatch, False, model, ids, 20)[0])
    model.model.layers[0].mlp.up_proj.weight.data = torch.randn(96, 64)
    moved = generate(monkeypatch, True, model, ids, 20)
    assert torch.equal(moved[0], generate(monkeypatch, False, model, ids, 20)[0])
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(96, 64, bias=True).eval()
    other = generate(monkeypatch, True, model, ids, 20)
    assert torch.equal(other[0], generate(monkeypatch, False, model, ids, 20)[0])
    assert steps.count(True) >= 60


def test_second_passes_that_are_placed_elsewhere_are_seen(steps, monkeypatch):
    model = hf_vq.quantize_model(tiny("llama"), VQConfig("turboquant-4+4", activations=None))
    ids, texts = prompt(), []
    for place in ("resident", "prefill_only", {"mlp": "offload"}, "resident"):
        hf_vq.place_pass2(model, place)
        found = generate(monkeypatch, True, model, ids, 20)
        same_steps(found, generate(monkeypatch, False, model, ids, 20))
        texts.append(found[0])
    assert steps.count(True) == 4 * 19
    assert torch.equal(texts[0], texts[3])
    for layer in (each for each in model.modules() if type(each) is VQLinear):
        layer.second = SecondPass(prefill_only=True)  # no tensor changes
    found = generate(monkeypatch, True, model, ids, 20)
    same_steps(found, generate(monkeypatch, False, model, ids, 20))


def test_weights_that_change_between_two_tokens_are_seen(steps, monkeypatch):
    """Of any one tensor, value or class."""
    model = tiny("gemma2")
    cache = prompted(model)
    layer = model.model.layers[1]
    changes = [
        lambda: layer.mlp.down_proj.weight.data.copy_(torch.randn(64, 96)),
        lambda: setattr(layer.mlp.down_proj.weight, "data", torch.randn(64, 96)),
        lambda: layer.input_layernorm.weight.detach().add_(3),
        lambda: layer.input_layernorm.weight.data.add_(-1),  # 1 + weight is what it computes with
        lambda: model.model.norm.weight.data.uniform_(-1, 1),
        lambda: model.model.rotary_emb.inv_freq.mul_(0.9),
        lambda: setattr(layer.self_attn, "scaling", 0.01),
        lambda: setattr(model.config, "final_logit_softcapping", 0.1),
        lambda: setattr(layer.mlp, "act_fn", torch.nn.ReLU().eval()),
        lambda: monkeypatch.setattr(type(layer.mlp), "forward", lambda self, x: -x),
    ]
    for number, change in enumerate(changes):
        model.forward(**token_inputs(cache, 5))
        change()
        run._steps_of(model).changes = 0
        for at_once in (False, True):
            if at_once:
                assert why_not(model, cache) is None
            found, wanted = both(model, cache, 7)
            assert torch.equal(found, wanted), number
            assert steps[-1] or not at_once
    assert steps.count(True) > len(changes)


def test_a_loop_without_code_of_the_users_compares_the_model_once(steps, tinybooks, monkeypatch):
    compared = []
    plain = snapshot.Snapshot.is_current

    def counting(*args):
        compared.append(plain(*args))
        return compared[-1]

    monkeypatch.setattr(snapshot.Snapshot, "is_current", counting)
    model, ids = tiny("llama"), prompt()
    generate(monkeypatch, True, model, ids, 5)
    written = TextStreamer(AutoTokenizer.from_pretrained(tinybooks))
    for streamer, most in ((None, 2), (written, 2), (TextStreamer(Words()), 40), (Clock(), 40)):
        before = len(compared)
        generate(monkeypatch, True, model, ids, 30, streamer=streamer)
        assert most / 2 <= len(compared) - before <= most
    cache = prompted(model)  # and in a loop of the user's own before every token
    before = len(compared)
    for token in (5, 6, 7):
        both(model, cache, token)
    assert len(compared) - before == 3 and steps[-3:] == [True] * 3


class Words:
    """A tokenizer of the user's that writes nothing."""

    def __init__(self, act=lambda: None):
        self.act = act

    def decode(self, ids, **_):
        self.act()
        return ""


class Clock(BaseStreamer):
    """A streamer of the user's, which does something at token number `at`."""

    def __init__(self, act=lambda: None, at=0):
        self.act, self.left = act, at

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            self.act()

    def end(self):
        pass

    def process(self, *args, words=None):
        """As a function of allowed tokens."""
        self.put(None)
        return words


class Processor(Clock, LogitsProcessor):
    def __call__(self, ids, scores):
        self.put(None)
        return scores


class Criterion(Clock, StoppingCriteria):
    def __call__(self, ids, scores):
        self.put(None)
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "kind",
    ["streamer", "tokenizer", "processor", "criterion", "allowed", "hook", "forward", "inputs"],
)
def test_code_of_the_users_between_two_tokens_may_change_the_model(kind, steps, monkeypatch):
    found = []
    for on in (True, False):
        model, ids = tiny("llama"), prompt()
        weight = model.model.layers[1].mlp.up_proj.weight

        def change(weight=weight):
            weight.data = -weight.data

        clock, options = Clock(change, 12), {}
        if kind == "streamer":
            options = {"streamer": clock}
        elif kind == "tokenizer":
            options = {"streamer": TextStreamer(Words(lambda clock=clock: clock.put(None)))}
        elif kind == "hook":
            model.register_forward_pre_hook(lambda *_, clock=clock: clock.put(None))
        elif kind in ("forward", "inputs"):
            name = "forward" if kind == "forward" else "prepare_inputs_for_generation"
            run.install(model, VQCache(model.config), 100)
            plain = getattr(model, name)

            def wrapped(*args, plain=plain, clock=clock, **kwargs):
                clock.put(None)
                return plain(*args, **kwargs)

            setattr(model, name, functools.wraps(plain)(wrapped))
        elif kind == "processor":
            options = {"logits_processor": LogitsProcessorList([Processor(change, 12)])}
        elif kind == "criterion":
            options = {"stopping_criteria": StoppingCriteriaList([Criterion(change, 12)])}
        else:
            options = {"prefix_allowed_tokens_fn": partial(clock.process, words=[*range(96)])}
        found.append(generate(monkeypatch, on, model, ids, 30, **options))
    same_steps(*found)
    assert steps.count(True) > 20


def test_a_model_that_changes_again_and_again_is_traced_no_more(steps, monkeypatch):
    model, traced = tiny("llama"), []
    cache = prompted(model)
    made = run._made
    monkeypatch.setattr(run, "_made", lambda *args: traced.append(1) or made(*args))
    with torch.no_grad():
        for number in range(20):
            model.config.hidden_act = str(number // 2)
            model(**token_inputs(cache, 5))
    assert 1 <= len(traced) <= run._CHANGES + 1
    assert why_not(model, cache) == "the model changes again and again"


def test_configs_inside_of_configs_are_seen():
    model = tiny("llama")
    model.config.text_config = LlamaConfig(rope_parameters={"rope_theta": 5.0, "rope_type": "x"})
    taken = snapshot.Snapshot(model)
    inner = model.config.text_config
    changes = [
        lambda: setattr(inner, "hidden_act", "relu"),
        lambda: inner.rope_parameters.update(rope_theta=6.0),
        lambda: setattr(model.config, "rope_parameters", dict(model.config.rope_parameters)),
        lambda: setattr(model, "vocab_size", 5),
    ]
    for change in changes:
        assert taken.is_current(model)
        change()
        assert not taken.is_current(model)
        taken = snapshot.Snapshot(model)


def test_a_refusal_is_remembered_until_generate_is_called_again(steps, monkeypatch):
    model, asked = tiny("qwen3-moe"), []
    cache = VQCache(model.config)
    run.install(model, cache, run._PAYS)
    problem = run.problem
    monkeypatch.setattr(run, "problem", lambda model: asked.append(1) or problem(model))
    with torch.no_grad():
        model(prompt(), past_key_values=cache, use_cache=True)
        for expected in (1, 1, 2):
            if expected == 2:
                model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
                run.install(model, cache, run._PAYS)
            for _ in range(5):
                model(**token_inputs(cache, 5))
            assert len(asked) == expected
    assert steps == []


def test_weights_that_are_computed_at_every_token_are_not_kept():
    model = tiny("llama")
    linear = torch.nn.Linear(64, 96 * 256, bias=False)  # more than a program keeps

    class Sum(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, linear.weight * 2)[..., :96]

    model.model.layers[0].mlp.up_proj.__class__ = Sum
    model.more = linear
    assert "large weight" in why_not(model.eval(), VQCache(model.config))


def test_hooks_and_outputs_run_the_model(steps, monkeypatch):
    model, ids, seen = tiny("llama"), prompt(), []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(1))
    generate(monkeypatch, True, model, ids, 10)
    assert len(seen) == 10 and steps == []
    assert "has hooks" in why_not(model, VQCache(model.config))
    hook.remove()
    assert why_not(model, VQCache(model.config)) is None
    out = generate(monkeypatch, True, model, ids, 5, output_hidden_states=True)
    assert out and steps == []
    generate(monkeypatch, True, model, ids, 5)
    assert steps.count(True) >= 3


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_hooks_of_all_modules_run_the_model(kind, steps, monkeypatch):
    """Also if they come when a step is a program already."""
    model, ids, seen = tiny("llama"), prompt(), []
    wanted = generate(monkeypatch, True, model, ids, 6)
    assert steps.count(True) == 5
    steps.clear()
    register = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")
    hook = register(lambda module, *_: seen.append(module))
    try:
        cache = VQCache(model.config)
        assert why_not(model, cache) == "all modules have hooks"
        same_steps(generate(monkeypatch, True, model, ids, 6), wanted)
        assert steps == [] and seen.count(model.model.layers[1].mlp) == 6
    finally:
        hook.remove()
    same_steps(generate(monkeypatch, True, model, ids, 6), wanted)
    assert steps.count(True) == 5


@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_models_that_were_asked_for_enough_tokens_run_programs(limit, steps):
    """At once in a long call, and in short ones when they add up."""
    ids = prompt()
    for calls in ([run._PAYS - 1, 1, 4], [run._PAYS, 2]):
        model, asked = tiny("llama"), 0
        for new in calls:
            length = {limit: new if limit == "max_new_tokens" else new + ids.shape[1]}
            options = {"do_sample": False, "min_new_tokens": new, **length}
            steps.clear()
            model.generate(ids, past_key_values=VQCache(model.config), **options)
            asked += new
            assert len(steps) == (new - 1 if asked >= run._PAYS else 0)


def test_a_model_is_freed_with_its_last_reference(monkeypatch):
    model = tiny("llama")
    generate(monkeypatch, True, model, prompt(), 5)
    known = weakref.ref(model)
    del model
    assert known() is None


def test_reasons(monkeypatch):
    model = tiny("llama")
    cache = VQCache(model.config)
    assert why_not(model.train(), cache) == "the model is in training mode"
    model.eval()
    monkeypatch.setenv("HF_VQ_NATIVE_STEP", "0")
    assert why_not(model, cache) == "HF_VQ_NATIVE_STEP is 0"
    monkeypatch.setenv("HF_VQ_NATIVE_STEP", "1")
    sliding = tiny("gemma2-sliding")
    assert "keys or values of older" in why_not(sliding, VQCache(sliding.config))
    coded = tiny("gemma3-sliding")
    reason = why_not(coded, VQCache(coded.config, quantize_sliding=True))
    assert reason == "a layer of the cache is a VQSlidingCacheLayer"
    assert "no instruction computes aten." in why_not(tiny("qwen3-moe"), cache)
    monkeypatch.setenv("HF_VQ_BACKEND", "reference")
    assert why_not(model, cache) == "HF_VQ_BACKEND=reference"


def test_explain_says_how_a_token_runs(monkeypatch):
    model = tiny("llama")
    cache = VQCache(model.config)
    assert str(hf_vq.explain(model, cache=cache)).endswith(
        "decoding step: one call of libhf_vq_cpu, once the model was asked for 48 tokens"
    )
    monkeypatch.setenv("HF_VQ_NATIVE_STEP", "1")
    assert str(hf_vq.explain(model, cache=cache)).endswith("one call of libhf_vq_cpu")
    assert "decoding step" not in str(hf_vq.explain(model))
    model.train()
    shown = str(hf_vq.explain(model, cache=cache))
    assert "decoding step: PyTorch, because the model is in training mode" in shown


def test_a_copy_has_its_own_steps(monkeypatch):
    model, ids = tiny("llama"), prompt()
    first = generate(monkeypatch, True, model, ids, 20)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert other.forward.__self__ is other  # that of its class, until it generates
        same_steps(generate(monkeypatch, True, other, ids, 20), first)
        assert other.forward.model is other and model.forward.model is model


def test_a_copy_keeps_the_hooks_of_accelerate(monkeypatch):
    """They wrap the `forward` of a step: the copy's is of the copy, also once they are removed."""
    model, ids = tiny("llama"), prompt()
    first = generate(monkeypatch, True, model, ids, 20)
    add_hook_to_module(model, ModelHook())
    other = copy.deepcopy(model)
    assert type(other._hf_hook) is ModelHook
    remove_hook_from_module(other)
    assert other.forward.model is other and model._old_forward.model is model
    same_steps(generate(monkeypatch, True, other, ids, 20), first)


def test_a_shallow_copy_outlives_the_model(steps, monkeypatch):
    """It shares modules, and has attributes of its own."""
    model, ids = tiny("llama"), prompt()
    wanted = generate(monkeypatch, False, model, ids, 12)
    generate(monkeypatch, True, model, ids, 12)
    model = copy.copy(model)  # nobody refers to the first one now
    assert model(ids).logits.shape == (1, 80, 96)
    steps.clear()
    same_steps(generate(monkeypatch, True, model, ids, 12), wanted)
    assert steps.count(True) == 11


def test_a_model_that_looks_at_the_position_is_refused(monkeypatch):
    """What depends on a token in Python cannot be a program."""
    model = tiny("llama")
    layer = model.model.layers[0]
    plain = type(layer).forward

    class Odd(type(layer)):
        def forward(self, x, *args, position_ids=None, past_key_values=None, **kwargs):
            length = float(past_key_values.get_seq_length())
            return plain(
                self, x * (1 + length), *args, position_ids=position_ids,
                past_key_values=past_key_values, **kwargs,
            )  # fmt: skip

    layer.__class__ = Odd
    assert "depends on the token's position" in why_not(model, VQCache(model.config))


def test_a_mask_that_hides_tokens_later_is_refused():
    """It hides nothing at the length of the trace."""
    model = tiny("llama")
    layer = model.model.layers[0]
    plain = type(layer).forward

    class Windowed(type(layer)):
        def forward(self, x, attention_mask=None, past_key_values=None, **kwargs):
            length = past_key_values.get_seq_length() + x.shape[1]
            mask = torch.arange(length)[None, None, None] >= length - 500
            return plain(self, x, mask, past_key_values=past_key_values, **kwargs)

    layer.__class__ = Windowed
    assert why_not(model, VQCache(model.config)) == "attention with a mask has no instruction"


def test_tracing_draws_no_random_numbers_of_others(monkeypatch):
    model = tiny("llama")
    plain = type(model).forward

    class Drawing(type(model)):
        def forward(self, *args, position_ids=None, **kwargs):
            torch.rand(3)
            return plain(self, *args, position_ids=position_ids, **kwargs)

    model.__class__ = Drawing
    before = torch.get_rng_state()
    why_not(model, VQCache(model.config))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_that_is_no_part_of_the_model_is_refused():
    model = tiny("llama")
    layer = model.model.layers[0].mlp
    plain = type(layer).forward
    factor = torch.ones(64)
    layer.__class__ = type(
        "Odd", (type(layer),), {"forward": lambda self, x: plain(self, x * factor)}
    )
    assert "no parameter and no buffer" in why_not(model, VQCache(model.config))
