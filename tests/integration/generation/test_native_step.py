"""Decoding steps of `generate` as one call of libhf_vq_cpu: numbers, texts, caches, fallbacks."""

import copy
import pickle
import weakref

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

import hf_vq
from hf_vq import VQCache, VQConfig
from hf_vq.backends.cpu import library
from hf_vq.hf.step import run, snapshot, why_not

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FULL = {"head_dim": 16, "layer_types": ["full_attention"] * 2}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-biases": lambda: LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "gemma2": lambda: Gemma2Config(**SIZES, **FULL),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, **FULL),
    "phi3": lambda: Phi3Config(**SIZES),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
    "gpt-neox": lambda: GPTNeoXConfig(
        **{name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    ),
    "gpt2": lambda: GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=2048, vocab_size=96, bos_token_id=0,
        eos_token_id=1,
    ),
    "gemma3-sliding": lambda: Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=32, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen2-sliding": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "gemma2-sliding": lambda: Gemma2Config(**SIZES, head_dim=16, sliding_window=32),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}  # fmt: skip
COVERED = [name for name in CONFIGS if name not in ("gemma2-sliding", "qwen3-moe")]


def tiny(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("HF_VQ_NATIVE_STEP", "1")


@pytest.fixture
def steps(monkeypatch):
    """How many steps ran as programs."""
    counted = []
    plain = run._Native.run

    def counting(*args):
        out = plain(*args)
        counted.append(out is not None)
        return out

    monkeypatch.setattr(run._Native, "run", counting)
    return counted


def prompt(length=80, rows=1, seed=1, words=96):
    return torch.randint(3, words, (rows, length), generator=torch.Generator().manual_seed(seed))


def token_inputs(cache, token):
    """Inputs of a decoding step, as `generate` gives them."""
    return {
        "input_ids": torch.as_tensor(token).view(1, 1), "past_key_values": cache,
        "position_ids": torch.tensor([[cache.get_seq_length()]]), "use_cache": True,
        "return_dict": True,
    }  # fmt: skip


def prompted(model, ids=None, cache=None):
    """A cache that holds a prompt, of a model whose step was traced."""
    cache = VQCache(model.config) if cache is None else cache
    run.install(model, 0)
    assert why_not(model, VQCache(model.config)) is None
    with torch.no_grad():
        model(prompt() if ids is None else ids, past_key_values=cache, use_cache=True)
    return cache


def both(model, cache, token):
    """Logits of a token by a step of the library, and by PyTorch over a copy of the cache."""
    other = copy.deepcopy(cache)
    with torch.no_grad():
        out = type(model).forward(model, **token_inputs(other, token)).logits
        return model(**token_inputs(cache, token)).logits, out


def generate(monkeypatch, on, model, ids, new, scheme="u4", **options):
    """Tokens, logits [new, rows, words] and the cache of `generate`."""
    monkeypatch.setenv("HF_VQ_NATIVE_STEP", str(int(on)))
    cache = options.pop("cache", None) or VQCache(model.config, scheme)
    options = {"do_sample": False, **options}
    if on:
        why_not(model, cache)  # traces it now; else some tokens pass before
    torch.manual_seed(5)
    out = model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, past_key_values=cache, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits).float(), cache


def same_text(first, second, start):
    """Equal, or different from a token on whose logits are nearly a tie."""
    (one, logits, _), (other, _, _) = first, second
    differ = (one != other).any(0).nonzero()
    if len(differ) == 0:
        return True
    best = logits[differ[0].item() - start, 0].topk(2).values
    return bool(best[0] - best[1] <= 1e-2 * logits.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_text_of_each_architecture(name, dtype, steps, monkeypatch):
    model, ids = tiny(name, dtype), prompt()
    assert why_not(model, VQCache(model.config)) is None
    first = generate(monkeypatch, True, model, ids, 60)
    assert steps.count(True) >= 58  # the prompt gives the first token
    second = generate(monkeypatch, False, model, ids, 60)
    assert same_text(second, first, ids.shape[1])


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
            run.install(net, 0)
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
        assert same_text(second, first, 90)
        if bool((first[0] == second[0]).all()):
            assert_same_cache(first[2], second[2])
    assert steps.count(True) >= 396


def assert_same_cache(first, second):
    for a, b in zip(first.layers, second.layers, strict=True):
        assert (a.length, a.coded, a.tail_start) == (b.length, b.coded, b.tail_start)
        for one, other in ((a.k, b.k), (a.v, b.v)):
            assert len(one.codes) == len(other.codes)
            same = (one.codes.rows() == other.codes.rows()).float().mean()
            assert same > 0.98, same  # a number between two entries may go to either
            torch.testing.assert_close(
                one.tail.view().float(), other.tail.view().float(), rtol=0.05, atol=0.05
            )


@pytest.mark.parametrize("scheme", ["vq-4", "turboquant-4"])
def test_layers_of_codes(scheme, tmp_path, steps, monkeypatch):
    tiny("qwen2", torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=VQConfig(scheme, embeddings="int8")
    ).eval()
    ids = prompt()
    first = generate(monkeypatch, True, model, ids, 60)
    assert steps.count(True) >= 58
    assert same_text(generate(monkeypatch, False, model, ids, 60), first, 80)


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
    assert same_text(second, first, 80)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(threads, tinybooks, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tinybooks).eval()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ids = prompt(90, words=8000)
        first = generate(monkeypatch, True, model, ids, 40)
        assert same_text(generate(monkeypatch, False, model, ids, 40), first, 90)
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
    assert torch.equal(first[0], second[0])


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
    run.install(model, 0)
    why_not(model, caches[0])
    outs = []
    with torch.no_grad():
        for cache in caches:
            model(ids, past_key_values=cache, use_cache=True)
        for token in prompt(10, seed=3)[0]:
            outs.append([model(**token_inputs(cache, token)).logits for cache in caches])
    assert steps.count(True) >= 18
    assert all(torch.equal(one, other) for one, other in outs)


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
            assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max(), number
            assert steps[-1] or not at_once
    assert steps.count(True) > len(changes)


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
    assert steps[-1] and (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_cache_of_another_model_is_refused_as_ever(steps):
    """The memory of a program has no room for its heads."""
    sizes = {**SIZES, "num_key_value_heads": 1}
    model, other = AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).eval(), tiny("llama")
    cache = prompted(other)
    prompted(model)
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


def test_a_model_that_changes_again_and_again_is_traced_no_more(steps, monkeypatch):
    model, traced = tiny("llama"), []
    cache = prompted(model)
    made = run._made
    monkeypatch.setattr(run, "_made", lambda *args: traced.append(1) or made(*args))
    for number in range(1000):
        with torch.no_grad():
            if number % 30 == 0:
                model.config.hidden_act = str(number)
            run._steps_of(model).end = 10_000
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
    run.install(model, 10_000)
    problem = run.problem
    monkeypatch.setattr(run, "problem", lambda model: asked.append(1) or problem(model))
    with torch.no_grad():
        model(prompt(), past_key_values=cache, use_cache=True)
        for expected in (1, 1, 2):
            if expected == 2:
                model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
                run.install(model, 10_000)
            for _ in range(run._WAIT + 5):
                model(**token_inputs(cache, 5))
            assert len(asked) == expected
    assert steps == []


def test_a_program_that_is_slower_than_the_model_is_dropped(steps, monkeypatch):
    model = tiny("llama")
    cache = prompted(model)
    run.install(model, 10_000)
    run._steps_of(model).least = 0.0  # PyTorch takes no time
    with torch.no_grad():
        for _ in range(20):
            model(**token_inputs(cache, 5))
    assert steps == [True] * run._TIMED
    assert "a token as one call took" in why_not(model, cache)


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


@pytest.mark.parametrize("new", [20, run._WAIT + run._PAYS - 2, run._WAIT + run._PAYS + 1])
def test_a_program_is_made_where_it_pays(new, steps, monkeypatch):
    model, ids = tiny("llama"), prompt()
    monkeypatch.setenv("HF_VQ_NATIVE_STEP", "1")
    options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new}
    out = model.generate(ids, past_key_values=VQCache(model.config), **options)
    assert len(steps) == max(0, new - 1 - run._WAIT) * (new > run._WAIT + run._PAYS)
    assert torch.equal(out, generate(monkeypatch, False, model, ids, new)[0])


def test_many_short_calls_make_a_program(steps):
    model, ids = tiny("llama"), prompt()
    for _ in range(20):
        model.generate(ids, past_key_values=VQCache(model.config), max_new_tokens=11,
                       min_new_tokens=11, do_sample=False)  # fmt: skip
    assert len(steps) == 200 - run._SURELY


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
    assert "product of several rows" in why_not(sliding, VQCache(sliding.config))
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
        "decoding step: one call of libhf_vq_cpu"
    )
    assert "decoding step" not in str(hf_vq.explain(model))
    model.train()
    shown = str(hf_vq.explain(model, cache=cache))
    assert "decoding step: PyTorch, because the model is in training mode" in shown


def test_a_copy_has_its_own_steps(monkeypatch):
    model, ids = tiny("llama"), prompt()
    first = generate(monkeypatch, True, model, ids, 20)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.forward.model is other
        assert torch.equal(generate(monkeypatch, True, other, ids, 20)[0], first[0])


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


def test_a_tensor_that_is_no_part_of_the_model_is_refused():
    model = tiny("llama")
    layer = model.model.layers[0].mlp
    plain = type(layer).forward
    factor = torch.ones(64)
    layer.__class__ = type(
        "Odd", (type(layer),), {"forward": lambda self, x: plain(self, x * factor)}
    )
    assert "no parameter and no buffer" in why_not(model, VQCache(model.config))


@pytest.mark.parametrize("length", [10, 31, 32, 90])
def test_windows_that_are_not_full_and_full_ones(length, steps):
    """Each token writes what PyTorch would have written, and the views stay right for others."""
    model = tiny("gemma3-sliding")
    cache = prompted(model, prompt(length))
    for token in prompt(100, seed=4)[0]:
        found, wanted = both(model, cache, token)
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
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
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()

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
    assert same_text(generate(monkeypatch, False, model, ids, 300), first, 80)
