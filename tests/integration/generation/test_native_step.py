"""Decoding steps of `generate` as one call of libhf_vq_cpu: numbers, texts and caches."""

import copy
import pickle
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import hf_vq
from hf_vq import VQCache, VQConfig
from hf_vq.backends.cpu import library
from hf_vq.backends.cpu import step as native_step
from hf_vq.hf.step import run, why_not
from hf_vq.nn.dense_head import DenseHead
from tests.fixtures.native_steps import (
    COVERED,
    SIZES,
    both,
    generate,
    prompt,
    prompted,
    same_steps,
    tiny,
    token_inputs,
)

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_text_of_each_architecture(name, dtype, steps, monkeypatch):
    model, ids = tiny(name, dtype), prompt()
    assert why_not(model, VQCache(model.config)) is None
    first = generate(monkeypatch, True, model, ids, 60)
    assert steps.count(True) >= 58  # the prompt gives the first token
    second = generate(monkeypatch, False, model, ids, 60)
    same_steps(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_logits_are_as_exact_as_those_of_pytorch(name, dtype, steps, monkeypatch):
    """err <= 2 * err(the same in PyTorch) + eps against float64, while all tokens are floats."""
    model, ids, more = tiny(name, dtype), prompt(20), prompt(40, seed=2)
    exact = copy.deepcopy(model).double()
    found = {}
    for which, net in (("native", model), ("torch", model), ("exact", exact)):
        monkeypatch.setenv("HF_VQ_NATIVE_STEP", str(int(which == "native")))
        cache = DynamicCache() if which == "exact" else VQCache(net.config)
        if which == "native":
            run.install(net, cache, 0)
            why_not(net, cache)
        with torch.no_grad():
            net(ids, past_key_values=cache, use_cache=True)
            outs = [net(**token_inputs(cache, token)).logits for token in more[0]]
        found[which] = torch.cat(outs, 1).double()
    assert steps == [True] * more.shape[1]
    errors = {key: (found[key] - found["exact"]).abs().max() for key in ("native", "torch")}
    eps = torch.finfo(dtype).eps * found["exact"].abs().max()
    assert errors["native"] <= 2 * errors["torch"] + eps


@pytest.mark.parametrize("scheme", ["u4", "nomad-u4", "u3", "u2", "k4v2"])
def test_text_of_a_real_model_over_each_cache(scheme, tinybooks, steps, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tinybooks).eval()
    for seed in (1, 2):
        ids = prompt(90, seed=seed, words=8000)
        first = generate(monkeypatch, True, model, ids, 200, scheme=scheme)
        second = generate(monkeypatch, False, model, ids, 200, scheme=scheme)
        same_steps(first, second)
        assert_same_cache(first[2], second[2])
    assert steps.count(True) >= 396


def assert_same_cache(first, second):
    for a, b in zip(first.layers, second.layers, strict=True):
        assert (a.length, a.coded, a.tail_start) == (b.length, b.coded, b.tail_start)
        for one, other in ((a.k, b.k), (a.v, b.v)):
            assert len(one.codes) == len(other.codes)
            assert torch.equal(one.codes.rows(), other.codes.rows())
            assert torch.equal(one.tail.view(), other.tail.view())


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
@pytest.mark.parametrize(
    ("scheme", "rows"),
    [
        ("vq-4", "int8"),
        ("turboquant-4", "int8"),
        ("vq-4", "turboquant-6"),
        ("turboquant-3", "turboquant-5"),
        ("turboquant-4+2", "int8"),
    ],
)
def test_layers_of_codes(scheme, rows, name, tmp_path, steps, monkeypatch):
    tiny(name, torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=VQConfig(scheme, embeddings=rows)
    ).eval()
    ids = prompt()
    first = generate(monkeypatch, True, model, ids, 60)
    assert steps.count(True) >= 58
    same_steps(first, generate(monkeypatch, False, model, ids, 60))


@pytest.mark.parametrize("isa", library.isas())
def test_every_instruction_set(isa, steps, monkeypatch):
    model, ids = tiny("qwen3", torch.bfloat16), prompt()
    library.use_isa(isa)
    try:
        first = generate(monkeypatch, True, model, ids, 60)
        second = generate(monkeypatch, False, model, ids, 60)
    finally:
        library.use_isa("")
    assert steps.count(True) >= 58
    same_steps(first, second)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(threads, tinybooks, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tinybooks).eval()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ids = prompt(90, words=8000)
        first = generate(monkeypatch, True, model, ids, 40)
        same_steps(first, generate(monkeypatch, False, model, ids, 40))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 20},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
        {"attention_mask": torch.tensor([[0] * 5 + [1] * 75])},
        {"repetition_penalty": 1.3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_modes_of_generate(options, monkeypatch):
    model, ids = tiny("llama"), prompt()
    if "prompt_lookup_num_tokens" in options:
        ids = ids[:, :20].repeat(1, 4)
    first = generate(monkeypatch, True, model, ids, 60, **options)
    second = generate(monkeypatch, False, model, ids, 60, **options)
    same_steps(first, second)


def test_several_rows(steps, monkeypatch):
    model, ids = tiny("llama"), prompt(rows=2)
    first = generate(monkeypatch, True, model, ids, 20)
    assert torch.equal(first[0], generate(monkeypatch, False, model, ids, 20)[0])
    assert steps == []


def test_cache_goes_on_after_steps(steps, tmp_path, monkeypatch):
    """Cropped, saved, copied and reordered, it is the cache that it would have been."""
    model, ids = tiny("llama"), prompt()
    found = []
    for on in (True, False):
        sequence, _, cache = generate(monkeypatch, on, model, ids, 100)
        cache.crop(-10)
        cache.save(tmp_path / f"{on}.safetensors")
        loaded = VQCache.load(tmp_path / f"{on}.safetensors", model.config)
        ends = [sequence[:, : cache.get_seq_length() + 1]] * 3
        caches = [copy.deepcopy(cache), loaded, cache]
        caches[0].reorder_cache(torch.tensor([0]))
        found.append([generate(monkeypatch, on, model, end, 30, cache=each)[0]
                      for end, each in zip(ends, caches, strict=True)])  # fmt: skip
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_two_caches_in_turns(steps, monkeypatch):
    """A program forgets the cache that it ran on when another one comes."""
    monkeypatch.setenv("HF_VQ_NATIVE_STEP", "1")
    model, ids = tiny("llama"), prompt()
    caches = [VQCache(model.config) for _ in range(2)]
    run.install(model, caches[0], 0)
    why_not(model, caches[0])
    outs = []
    with torch.no_grad():
        for cache in caches:
            model(ids, past_key_values=cache, use_cache=True)
        for token in prompt(10, seed=3)[0]:
            outs.append([model(**token_inputs(cache, token)).logits for cache in caches])
    assert steps.count(True) >= 18
    assert all(torch.equal(one, other) for one, other in outs)


def test_a_deep_crop_is_seen(steps):
    """The length is the same again, and the floats lie elsewhere."""
    model = tiny("llama")
    cache = prompted(model, prompt(200))
    assert both(model, cache, 5) and steps[-1]
    cache.crop(cache.get_seq_length() - 100)
    with torch.no_grad():
        for size in (32, 32, 32, 4):
            model(prompt(size, seed=size), past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 201
    found, wanted = both(model, cache, 7)
    assert steps[-1] and torch.equal(found, wanted)


def test_a_cache_of_another_model_is_refused_as_ever(steps):
    """The memory of a program has no room for its heads."""
    sizes = {**SIZES, "num_key_value_heads": 1}
    model, other = AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).eval(), tiny("llama")
    cache = prompted(other)
    prompted(model)
    run.install(model, cache, run._PAYS)
    with torch.no_grad(), pytest.raises((hf_vq.errors.VQError, RuntimeError)):
        model(**token_inputs(cache, 5))
    assert steps == [False]


def test_what_only_the_model_knows_is_left_to_it(steps):
    """Positions that nobody gave, and tokens that it does not have."""
    model = tiny("llama")
    cache = prompted(model)
    with torch.no_grad():
        model(**{**token_inputs(cache, 5), "position_ids": None})
        with pytest.raises(IndexError):
            model(**token_inputs(cache, 96))
    assert steps == [False]


@pytest.mark.parametrize("length", [10, 31, 32, 90])
def test_windows_that_are_not_full_and_full_ones(length, steps):
    """Each token writes what PyTorch would have written, and the views stay right for others."""
    model = tiny("gemma3-sliding")
    cache = prompted(model, prompt(length))
    for token in prompt(100, seed=4)[0]:
        found, wanted = both(model, cache, token)
        assert torch.equal(found, wanted)
    assert steps.count(True) >= 95  # PyTorch decides means
    layer = cache.layers[0]
    assert layer.keys.shape == layer.values.shape == (1, 2, 31, 16)
    assert layer.get_seq_length() == cache.get_seq_length() == length + 100


def test_windows_that_others_change(steps, tmp_path):
    """Crops, steps of PyTorch in between, copies, recording and files."""
    model = tiny("gemma3-sliding")
    cache = prompted(model, prompt(20))

    def step(number):
        found, wanted = both(model, cache, number + 5)
        assert torch.equal(found, wanted)

    def by_pytorch():
        with torch.no_grad():
            type(model).forward(model, **token_inputs(cache, 9))

    changes = [
        lambda: cache.crop(-3), by_pytorch, lambda: copy.deepcopy(cache),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: [layer.keys.mul_(0.5) for layer in cache.layers if layer.is_sliding],
        lambda: pickle.loads(pickle.dumps(cache)), cache.activate_past_recording, by_pytorch,
        lambda: (cache.crop(-1), cache.stop_past_recording()),
    ]  # fmt: skip
    for number, change in enumerate(changes):
        step(number)
        change()
        for more in range(4):
            step(number + more)
    assert steps.count(True) > 30 and steps[-1]


def test_a_window_over_several_memories(steps, monkeypatch):
    model, ids = tiny("qwen2-sliding"), prompt()
    cache = VQCache(model.config, quantize_sliding=False)
    first = generate(monkeypatch, True, model, ids, 300, cache=cache)
    assert steps.count(True) >= 298
    same_steps(first, generate(monkeypatch, False, model, ids, 300))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", ["tied", "untied", "bias"])
def test_a_dense_head_is_an_instruction_with_the_bits_of_the_module(head, dtype):
    model = tiny("llama", dtype)
    if head == "tied":
        model.lm_head.weight = model.model.embed_tokens.weight
    elif head == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.randn(96).to(dtype))
    model = hf_vq.quantize_model(model, VQConfig("turboquant-4", activations=None))
    assert type(model.lm_head) is DenseHead
    for change in range(2):
        cache, token = prompted(model), torch.tensor(7)
        found = run._steps_of(model).find(model, cache)
        ops = [(one.op, one.detail) for one in found.compiled.program.instructions]
        assert [d.tensor.dtype for op, d in ops if op == "dense"] == [dtype]
        step, plain = both(model, cache, token)
        assert torch.equal(step, plain), change
        with torch.no_grad():  # in place, then another tensor
            model.lm_head.weight.mul_(1.5)
        step, plain = both(model, cache, token)
        assert torch.equal(step, plain), change
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.5)


@pytest.mark.parametrize("scheme", ["vq-4", "turboquant-6"])
def test_an_output_head_of_codes_is_an_instruction(scheme):
    config = VQConfig("turboquant-4", layers={"lm_head": scheme}, activations=None)
    model = hf_vq.quantize_model(tiny("llama"), config)
    cache, token = prompted(model), torch.tensor(7)
    found = run._steps_of(model).find(model, cache)
    ops = [(one.op, one.detail) for one in found.compiled.program.instructions]
    assert 96 in [len(detail.first.codes) for op, detail in ops if op == "codes"]
    step, plain = both(model, cache, token)
    torch.testing.assert_close(step, plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lost", [0, 1])
def test_an_interrupt_that_ctypes_loses_ends_the_step(lost, monkeypatch):
    """Ctrl-C before the first line of a callback: ctypes prints it, and says that all went well."""
    model = tiny("gemma3-sliding")  # whose layer of floats PyTorch computes
    cache, token, before = prompted(model), torch.tensor(7), native_step._Calls.__call__
    length, calls, printed = cache.get_seq_length(), [], []

    def interrupted(self, number):
        calls.append(number)
        if len(calls) == lost + 1:
            raise KeyboardInterrupt
        return before(self, number)

    both(model, cache, token)  # binds it
    length += 1
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    monkeypatch.setattr(native_step._Calls, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(**token_inputs(cache, token))
    assert len(calls) > lost and [each.exc_type for each in printed] == [KeyboardInterrupt]
    monkeypatch.setattr(native_step._Calls, "__call__", before)
    assert cache.get_seq_length() == length
    step, plain = both(model, cache, token)
    assert torch.equal(step, plain)
