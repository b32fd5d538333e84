"""`model.generate` with a `VQCache`, on tiny random models whose attention is far from uniform."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from hf_vq.cache import VQCache, VQHandle
from hf_vq.cache.store import key_mean
from hf_vq.errors import VQCacheError
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.shared import universal_tensor
from hf_vq.hf import attention, generation
from hf_vq.ops import decode_kv, encode_kv

attention.register()
generation.register()

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "eos_token_id": 95, "bos_token_id": 1, "max_position_embeddings": 256,
}  # fmt: skip
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
MLA = {
    **{k: v for k, v in SMALL.items() if k != "head_dim"}, "num_key_value_heads": 4,
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 4, "moe_intermediate_size": 16,
}  # fmt: skip
# name: (family, fields of its config, whether `sdpa` runs it)
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "mha": ("Llama", {**SMALL, "num_key_value_heads": 4}, True),
    "gqa": ("Llama", SMALL, True),
    "mqa": ("Llama", {**SMALL, "num_key_value_heads": 1}, True),
    "qwen3": ("Qwen3", SMALL, True),
    "gemma3": ("Gemma3", {**SMALL, **HYBRID, "query_pre_attn_scalar": 16}, True),
    "gemma2": (
        "Gemma2",
        {**SMALL, **HYBRID, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16},
        False,
    ),
    "gpt_oss": (
        "GptOss",
        {**SMALL, **HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
        False,
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256,
         "pad_token_id": 0, "eos_token_id": 95, "bos_token_id": 1},
        True,
    ),
    "deepseek_v3": ("DeepseekV3", MLA, True),
}  # fmt: skip

Build = Callable[..., Any]


def build(name: str, implementation: str = "sdpa", seed: int = 0, **fields: Any) -> Any:
    """A random model whose weights are scaled up, so that a wrong cache changes its tokens."""
    family, config_fields, _ = MODELS[name]
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, head)(
        getattr(transformers, config_name)(**{**config_fields, **fields})
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)
    model.set_attn_implementation(implementation)
    return model.eval()


def prompt(length: int, batch: int = 1) -> Tensor:
    return torch.randint(2, 94, (batch, length))


def greedy(model: Any, ids: Tensor, cache: Any = None, new: int = 16, **options: Any) -> Tensor:
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, **options}
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, past_key_values=cache, pad_token_id=0, **options)


def step_by_step(model: Any, ids: Tensor, cache: Any, new: int, chunk: int = 10**9) -> Tensor:
    """Greedy decoding by plain forwards."""
    with torch.no_grad():
        for part in ids[:, cache.get_seq_length() :].split(chunk, 1):
            logits = model(part, past_key_values=cache).logits
        for _ in range(new):
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            if _ < new - 1:
                logits = model(ids[:, -1:], past_key_values=cache).logits
    return ids


@pytest.mark.parametrize("name", MODELS)
def test_every_attention_reads_the_same_cache(name: str) -> None:
    """`eager` decodes, `sdpa` and `vq` read codes; token by token they are one function."""
    ids = prompt(30, batch=2)
    model = build(name, "eager")
    cache = VQCache(model.config, window=8)
    eager = greedy(model, ids, cache)
    coded = len(cache.coded_layers)
    assert coded and all(count == 2 * 15 for count in cache.fallbacks.values())
    for implementation in ("vq", *(["sdpa"] if MODELS[name][2] else [])):
        model.set_attn_implementation(implementation)
        cache = VQCache(model.config, window=8, strict=name != "deepseek_v3")
        assert torch.equal(greedy(model, ids, cache), eager)
        if name != "deepseek_v3":  # its attention expands a latent: always decoded
            assert set(cache.fallbacks.values()) == {0}
        plain = greedy(model, ids, DynamicCache(config=model.config))
        assert torch.equal(greedy(model, ids), plain)
        quiet = VQCache(model.config, window=300)
        assert torch.equal(greedy(model, ids, quiet), plain)  # nothing has left the window
    assert coded == sum(kind != "sliding_attention" for kind in kinds(model.config))


def kinds(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt_oss"])
def test_quantized_sliding_layers(name: str) -> None:
    ids = prompt(30, batch=2)
    model = build(name, "eager")
    make = lambda: VQCache(model.config, window=4, quantize_sliding=True)  # noqa: E731
    eager = greedy(model, ids, make())
    model.set_attn_implementation("vq")
    cache = make()
    assert torch.equal(greedy(model, ids, cache), eager)
    assert set(cache.fallbacks.values()) == {0} and len(cache.coded_layers) == 2


def simulation(prompt_length: int, sinks: int, window: int, scheme: str) -> Callable[..., Any]:
    """Attention over a whole sequence whose tokens after the prompt came one by one."""
    both = KV_SCHEMES[scheme]

    def coded(x: Tensor, part: Any, mean: Any) -> Tensor:
        codebook = universal_tensor(part)
        codes, scale = encode_kv(x.float() - mean, codebook, part)
        return (decode_kv(codes, scale, codebook, part, x.shape[-1]) + mean).to(x.dtype)

    def run(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        groups, length = q.shape[1] // k.shape[1], q.shape[2]
        mean = key_mean(k[:, :, :prompt_length], sinks)
        i, j = torch.arange(length)[:, None], torch.arange(length)
        exact = (j < sinks) | (j > i - window) | ((i < prompt_length) & (j < prompt_length))
        far = coded(k, both.key, mean), coded(v, both.value, 0.0)
        k, v, far_k, far_v = (x.repeat_interleave(groups, 1) for x in (k, v, *far))
        scores = torch.where(exact, q @ k.mT, q @ far_k.mT) * scaling
        weights = scores.masked_fill(j > i, -torch.inf).softmax(-1)
        out = (weights * exact) @ v + (weights * ~exact) @ far_v
        return out.transpose(1, 2), None

    return run


@pytest.mark.parametrize("scheme", ["u4", "u2", "k4v2"])
@pytest.mark.parametrize("name", ["gqa", "qwen3"])
def test_steps_equal_the_whole_sequence(name: str, scheme: str) -> None:
    sinks, window, length = 4, 8, 40
    ids = prompt(70, batch=2)
    model = build(name)

    @torch.no_grad()
    def steps(cache: Any) -> Tensor:
        parts = [ids[:, :length], *ids[:, length:].split(1, 1)]
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    vq = steps(VQCache(model.config, scheme, sinks, window, strict=True))
    plain = steps(DynamicCache(config=model.config))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        AttentionInterface.register("simulation", simulation(length, sinks, window, scheme))
        AttentionMaskInterface.register("simulation", sdpa_mask)
        model.set_attn_implementation("simulation")
        simulated = model(ids, use_cache=False).logits
    noise = (plain - whole).abs().max()  # float32 in another order, same model
    effect = (simulated - whole)[:, length:].abs().max()
    # A code may flip when its input moves by a rounding; at most a few of thousands do.
    assert effect > 1000 * noise
    assert (vq - simulated).abs().max() <= 2 * noise


def test_left_padding_equals_each_row_alone() -> None:
    model = build("gqa")
    lengths = [40, 33, 12, 3]
    rows = [prompt(length) for length in lengths]
    ids = torch.cat([torch.nn.functional.pad(row, (40 - row.shape[1], 0)) for row in rows])
    mask = (torch.arange(40) >= 40 - torch.tensor(lengths)[:, None]).long()
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        cache = VQCache(model.config, window=8)
        together = greedy(model, ids, cache, 12, attention_mask=mask)
        for index, row in enumerate(rows):
            alone = greedy(model, row, VQCache(model.config, window=8), 12)
            assert torch.equal(together[index, 40:], alone[0, row.shape[1] :])


def test_beams_and_samples() -> None:
    model = build("gqa")
    ids = prompt(30, batch=2)
    ids[0, :5] = 0
    mask = (ids != 0).long()
    beams = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        cache = VQCache(model.config, window=8)
        options = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2}
        beams.append(greedy(model, ids, cache, 12, **options))
        assert beams[0].shape[0] == 4 and torch.equal(beams[-1], beams[0])
    torch.manual_seed(5)
    options = {"do_sample": True, "num_return_sequences": 3, "top_k": 5, "attention_mask": mask}
    sampled = greedy(model, ids, VQCache(model.config, window=8), **options)
    model.set_attn_implementation("vq")
    torch.manual_seed(5)
    assert torch.equal(sampled, greedy(model, ids, VQCache(model.config, window=8), **options))


@pytest.mark.filterwarnings("ignore:.*return_dict_in_generate.*")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [6, 23, 45])
def test_assisted_decoding_is_greedy_decoding(length: int, seed: int) -> None:
    model = build("gqa", seed=seed)
    helper = build("gqa", seed=seed)
    for parameter in helper.parameters():  # right often, but not always
        parameter.data += 0.15 * parameter.data.std() * torch.randn_like(parameter)
    ids = prompt(length)
    ids[0, length // 2 :] = ids[0, : length - length // 2].clone()  # something to look up
    helper.generation_config.num_assistant_tokens = 4
    wanted = greedy(model, ids, VQCache(model.config, window=16, strict=True), 30)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": helper}):
        cache = VQCache(model.config, window=16, strict=True)
        assert torch.equal(greedy(model, ids, cache, 30, **options), wanted)
    plain = VQCache(helper.config, window=16)
    assert not torch.equal(greedy(helper, ids, plain, 30), wanted)  # candidates were rejected


def test_several_turns() -> None:
    model = build("gqa")
    ids, more = prompt(30), prompt(9)
    cache = VQCache(model.config, window=8, strict=True)
    first = greedy(model, ids, cache, 10)
    second = greedy(model, torch.cat([first, more], 1), cache, 10)
    plain = VQCache(model.config, window=8)
    assert torch.equal(step_by_step(model, ids, plain, 10), first)
    assert torch.equal(step_by_step(model, torch.cat([first, more], 1), plain, 10), second)


@pytest.mark.parametrize("chunk", [5, 16])
def test_chunked_prefill(chunk: int) -> None:
    model = build("gqa")
    ids = prompt(43)
    cache = VQCache(model.config, window=8, strict=True)
    chunked = greedy(model, ids, cache, 10, prefill_chunk_size=chunk)
    plain = VQCache(model.config, window=8)
    assert torch.equal(step_by_step(model, ids, plain, 10, chunk), chunked)


def test_a_shipped_prompt(tmp_path: Path) -> None:
    model = build("gqa")
    ids = prompt(50)
    cache = VQCache(model.config, window=8)
    with torch.no_grad():
        model(ids[:, :45], past_key_values=cache)
    cache.save(tmp_path / "prompt.safetensors")
    loaded = VQCache.load(tmp_path / "prompt.safetensors", model.config)
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids, loaded))


def test_cache_implementation(tmp_path: Path) -> None:
    model = build("gemma3")  # Transformers' own quantized cache refuses sliding layers
    ids = prompt(30)
    wanted = greedy(model, ids, VQCache(model.config, "u2", window=8))
    options = {"backend": "vq", "scheme": "u2", "window": 8}
    kinds_of_cache = {"cache_implementation": "quantized", "return_dict_in_generate": True}
    for _ in range(2):  # the options must not be consumed
        out = greedy(model, ids, cache_config=options, **kinds_of_cache)
        assert isinstance(out.past_key_values, VQCache)
        assert torch.equal(out.sequences, wanted)
    model.generation_config.cache_implementation = "quantized"
    model.generation_config.cache_config = options
    model.generation_config.save_pretrained(tmp_path)
    model.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert torch.equal(greedy(model, ids), wanted)
    for wrong, message in (
        ({"nbits": 4}, r"unknown keys \['nbits'\]"), ({"window": "8"}, "window"),
        ({"key_means": None}, "key_means"),
    ):  # fmt: skip
        with pytest.raises(VQCacheError, match=message):
            greedy(model, ids, cache_config={"backend": "vq", **wrong}, **kinds_of_cache)
    with pytest.raises(ValueError, match="Unknown quantization backend `nope`"):
        greedy(model, ids, cache_config={"backend": "nope"}, **kinds_of_cache)


def test_registering_twice_changes_nothing() -> None:
    from transformers.generation import utils

    before = utils.GenerationMixin._prepare_cache_for_generation
    generation.register()
    assert utils.GenerationMixin._prepare_cache_for_generation is before


def test_strict_names_the_cure() -> None:
    model = build("gqa", "eager")
    with pytest.raises(VQCacheError, match='set_attn_implementation\\("vq"\\)'):
        greedy(model, prompt(30), VQCache(model.config, strict=True))


def test_no_layer_to_code() -> None:
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8)
    with pytest.warns(UserWarning, match="quantize_sliding=True"):
        VQCache(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedded_model(tinybooks: Path, root: Path, dtype: torch.dtype) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tinybooks, dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tinybooks)
    text = (root / "tests" / "models" / "tinybooks-5m-eval.txt").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :120]
    error = {}
    for scheme in ("u4", "u2"):
        caches = [
            DynamicCache(config=model.config),
            VQCache(model.config, scheme, window=16, strict=True),
        ]
        with torch.no_grad():
            parts = [ids[:, :100], *ids[:, 100:].split(1, 1)]
            logits = [
                torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)
                for cache in caches
            ]
        exact, coded = (x[:, 100:].float().log_softmax(-1) for x in logits)
        assert torch.equal(logits[0][:, :100], logits[1][:, :100])
        error[scheme] = (exact.exp() * (exact - coded)).sum(-1).mean().item()
    assert 0 < error["u4"] < error["u2"] < 0.2
    assert isinstance(caches[1].layers[0].keys, VQHandle)
