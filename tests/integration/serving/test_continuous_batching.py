"""Continuous batching over pages of codes gives what plain decoding of the same codes gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.generation.continuous_batching import PagedAttentionCache

from hf_vq.cache import rotary
from hf_vq.cache.codebooks import KVCodebooks
from hf_vq.calibration.kv_codebooks import calibrate_kv
from hf_vq.errors import VQCacheError
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.ops.rotary_mean import rotated
from hf_vq.serving import attention as paged_attention
from hf_vq.serving import continuous_batching as paged
from tests.fixtures.continuous_batching import (
    MARKS,
    NEW,
    PAGE,
    Decoded,
    batching,
    config_of,
    prompts_of,
    serve,
)
from tests.fixtures.generation import build

pytestmark = MARKS


if paged.objection() is None:
    from hf_vq.serving.key_means import template_of
    from hf_vq.serving.manager import PagedManager

LENGTHS = (5, 40, 1, 17)


def alone(
    model: Any, prompts: list[list[int]], found: list[list[int]], scheme: str, cache: Any
) -> list[list[int]]:
    """What greedy decoding of each prompt alone says behind `found`, which is `found` if that is
    what it finds: a token's codes do not depend on the tokens that come with it."""
    expected = []
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == NEW
        whole = torch.tensor([[*prompt, *tokens[:-1]]])
        with torch.no_grad():
            past = Decoded(model.config, scheme, cache.layers)
            logits = model(whole, past_key_values=past).logits
        expected.append(logits[0, len(prompt) - 1 :].argmax(-1).tolist())
    return expected


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("gqa", "u4"), ("gqa", "u2"), ("mqa", "k4v2"), ("qwen3", "qserve-kv4"), ("gemma3", "u4"),
     ("gemma2", "u4"), ("gpt2", "nomad-u4"), ("gpt_oss", "u2")],
)  # fmt: skip
def test_requests_get_what_they_get_alone(name: str, scheme: str) -> None:
    """Prompts are cut into chunks of at most 24 tokens and computed beside those that decode."""
    model = build(name)
    prompts = prompts_of(*LENGTHS)
    found, cache = serve(model, prompts, scheme)
    assert found == alone(model, prompts, found, scheme, cache)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 2
    assert len(cache.layers) == kinds.count("full_attention")


@pytest.mark.parametrize(
    ("name", "scheme", "fields"),
    [("gqa", "u4", {}), ("qwen3", "qserve-kv4", {}), ("gemma3", "u4", {}), ("gpt_oss", "u2", {}),
     ("gpt2", "u4", {"max_blocks_per_request": 3}), ("gqa", "u2", {"max_blocks_per_request": 0})],
)  # fmt: skip
def test_requests_whose_pages_are_read_through_tables(
    name: str, scheme: str, fields: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels do on a GPU, by their specification. Steps of one token have block tables, where
    none is too short for a request and there are no sliding layers."""
    monkeypatch.setattr("hf_vq.serving.pages.through_tables", lambda *asked: True)
    model = build(name)
    prompts = prompts_of(*LENGTHS)
    found, cache = serve(model, prompts, scheme, **fields)
    assert found == alone(model, prompts, found, scheme, cache)
    blocks = fields.get("max_blocks_per_request", 32) * (name not in ("gemma3", "gpt_oss"))
    assert cache.max_decode_fast_path_length == blocks * PAGE
    assert (cache._step is not None) == (blocks > 0)


@pytest.mark.parametrize("tables", [False, True])
def test_one_of_the_layers_turns(tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where layers have rotary means whose keys have a large bias."""
    monkeypatch.setitem(rotary.LEAST, "cpu", rotary.LEAST["cuda"])
    if tables:
        monkeypatch.setattr("hf_vq.serving.pages.through_tables", lambda *asked: True)
    model = build("gqa", attention_bias=True)
    model.model.layers[1].self_attn.k_proj.bias.data.normal_(std=20.0)
    prompts = prompts_of(*LENGTHS)
    found, cache = serve(model, prompts)
    assert [pages.turns for pages in cache.layers.values()] == [False, True]
    assert found == alone(model, prompts, found, "u4", cache)


@pytest.mark.parametrize("name", ["gqa", "gemma3", "gpt_oss"])
def test_probabilities_are_those_of_codes_and_not_of_floats(name: str) -> None:
    model = build(name)
    prompts = prompts_of(30, 21)
    with model.continuous_batching_context_manager(
        config_of("u2"), continuous_batching_config=batching(return_logprobs=True)
    ) as manager:
        names = manager.add_requests(prompts)
        results = [manager.get_result(timeout=120) for _ in prompts]
        cache = manager.batch_processor.cache
    for result in results:
        ids = torch.tensor([prompts[names.index(result.request_id)]])
        whole = torch.cat([ids, torch.tensor([result.generated_tokens])], 1)
        logprobs = []
        for past in (Decoded(model.config, "u2", cache.layers), DynamicCache(config=model.config)):
            with torch.no_grad():
                logits = model(whole, past_key_values=past).logits[0, ids.shape[1] - 1 : -1]
            every = logits.float().log_softmax(-1)
            logprobs.append(every.gather(1, whole[0, ids.shape[1] :, None])[:, 0])
        found = torch.tensor(result.logprobs)
        torch.testing.assert_close(found, logprobs[0], rtol=1e-3, atol=1e-4)
        assert not torch.allclose(found, logprobs[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [7, 64])
def test_the_cut_of_prompts_changes_nothing(tokens: int) -> None:
    model = build("qwen3")
    prompts = prompts_of(1, 33, 17, 5)
    found, cache = serve(model, prompts, max_batch_tokens=tokens)
    assert found == alone(model, prompts, found, "u4", cache)


def logprobs_behind(model: Any, earlier: list[list[int]], prompt: list[int]) -> list[float]:
    """Those of the answer to `prompt` of a server that answered `earlier` ones, one at a time."""
    with model.continuous_batching_context_manager(
        config_of("u2"), continuous_batching_config=batching(return_logprobs=True)
    ) as manager:
        for each in [*earlier, prompt]:
            manager.add_request(each)
            result = manager.get_result(timeout=120)
            assert result is not None, manager.background_thread_status.fatal_error
    return result.logprobs


@pytest.mark.parametrize("name", ["gqa", "gemma3"])
def test_answers_do_not_depend_on_who_came_first(name: str) -> None:
    model = build(name)
    wanted, one, other = prompts_of(21, 1, 40)
    alone = logprobs_behind(model, [], wanted)
    for earlier in ([one], [other, one]):
        assert logprobs_behind(model, earlier, wanted) == pytest.approx(alone, rel=1e-4, abs=1e-5)


def test_one_request_without_numbers_spoils_no_other() -> None:
    model = build("gqa")
    with model.continuous_batching_context_manager(
        config_of("u4"), continuous_batching_config=batching()
    ) as manager:
        with manager.pause():
            model.get_input_embeddings().weight.data[1] = float("nan")
        manager.add_request([1, 1, 1, 5, 6, 7])
        manager.get_result(timeout=120)
        prompt = prompts_of(13)
        manager.add_request(prompt[0])
        found = [manager.get_result(timeout=120).generated_tokens]
        assert 1 not in found[0]
        cache = manager.batch_processor.cache
    assert found == alone(model, prompt, found, "u4", cache)


def test_a_mean_without_numbers_is_refused() -> None:
    model = build("gqa")
    model.get_input_embeddings().weight.data[5] = float("nan")
    with pytest.raises(VQCacheError, match=r"NaN or infinity.*calibrate --kv"):
        model.init_continuous_batching(config_of("u4"), batching())
    assert model.config._attn_implementation == "sdpa"
    assert type(model.init_continuous_batching(config_of("qserve-kv4"), batching())) is PagedManager


def test_requests_come_and_go() -> None:
    model = build("gqa")
    prompts = prompts_of(*LENGTHS, 20, 3)
    results = {}
    with model.continuous_batching_context_manager(
        config_of("u4"), continuous_batching_config=batching()
    ) as manager:
        names = manager.add_requests(prompts[:3])
        for later in prompts[3:]:
            result = manager.get_result(timeout=120)
            results[result.request_id] = result.generated_tokens
            names.append(manager.add_request(later))
            if later is prompts[4]:
                manager.cancel_request(names.pop())
        while len(results) < len(names):
            result = manager.get_result(timeout=120)
            results[result.request_id] = result.generated_tokens
        cache = manager.batch_processor.cache
    kept = [prompt for prompt in prompts if prompt is not prompts[4]]
    found = [results[name] for name in names]
    assert found == alone(model, kept, found, "u4", cache)
    assert not cache.codes.block_table
    blocks = cache.compute_free_capacity(relative=False) / cache.codes.bytes_per_block
    assert blocks + len(cache.codes.ledger.cached_blocks) == cache.num_blocks


def test_requests_that_do_not_fit_are_evicted_and_computed_again(monkeypatch: Any) -> None:
    from transformers.generation.continuous_batching.requests import RequestState

    evicted = []
    again = RequestState.create_equivalent_initial_request

    def counted(state: Any) -> Any:
        evicted.append(state.request_id)
        return again(state)

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", counted)
    model = build("gqa")
    prompts = prompts_of(15, 14, 13, 16)
    found, cache = serve(model, prompts, num_blocks=9)
    assert evicted
    assert cache.num_blocks == 9
    assert found == alone(model, prompts, found, "u4", cache)


def test_a_prefix_is_shared() -> None:
    model = build("gqa")
    prefix = prompts_of(3 * PAGE + 2)[0]
    prompts = [prefix + more for more in prompts_of(4, 9, 1)]
    hits = []
    search = PagedAttentionCache.search_prefix_match

    def counted(self: Any, *arguments: Any) -> int:
        hits.append(search(self, *arguments))
        return hits[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedAttentionCache, "search_prefix_match", counted)
        found, cache = serve(model, prompts, max_requests_per_batch=1)
    assert sorted(hits) == [0, 3 * PAGE, 3 * PAGE]
    assert found == alone(model, prompts, found, "u4", cache)


def test_forks_copy_the_page_that_is_not_full() -> None:
    model = build("gqa")
    prompts = prompts_of(2 * PAGE + 3)
    of = config_of("u4")
    of.num_return_sequences = 3  # greedy: all are equal
    found, cache = serve(model, prompts, of=of)
    assert found == alone(model, prompts * 3, found, "u4", cache)
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize("name", ["gqa", "gemma3"])
@pytest.mark.parametrize("lengths", [(7, 1, 9), (1, 7, 1), (1, 1, 30)])
def test_forks_without_a_token_left_lie_amid_others(name: str, lengths: tuple[int, ...]) -> None:
    """All but the last token of a prompt is computed before its forks, which is nothing of one."""
    model = build(name)
    prompts = prompts_of(*lengths)
    of = config_of("u4")
    of.num_return_sequences = 2
    found, cache = serve(model, prompts, of=of, allow_block_sharing=False)
    first, children = found[: len(prompts)], found[len(prompts) :]
    assert first == alone(model, prompts, first, "u4", cache)
    assert sorted(children) == sorted(first)


def test_forks_whose_prefix_is_shared_but_for_one_token_lie_amid_others() -> None:
    model = build("gqa")
    prompts = prompts_of(5, 2 * PAGE + 1, 6)
    of = config_of("u4")
    of.num_return_sequences = 2
    with model.continuous_batching_context_manager(
        of, continuous_batching_config=batching()
    ) as manager:
        found = {}
        for more in (prompts[1:2], prompts):
            names = manager.add_requests(more)
            for _ in range(2 * len(more)):
                result = manager.get_result(timeout=120)
                assert result is not None, manager.background_thread_status.fatal_error
                found[result.request_id] = result.generated_tokens
        cache = manager.batch_processor.cache
    first = [found[name] for name in names]
    assert first == alone(model, prompts, first, "u4", cache)
    assert found["req_0"] == first[1]


def test_weights_may_be_codes_too(quantized: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(quantized("qwen3")).eval()
    prompts = prompts_of(5, 11)
    found, cache = serve(model, prompts)
    assert found == alone(model, prompts, found, "u4", cache)


def test_calibrated_means_are_found(tmp_path: Any) -> None:
    model = build("gqa")
    means = [torch.randn(2, 16) for _ in range(2)]
    none: list[Tensor | None] = [None, None]
    KVCodebooks(KV_SCHEMES["u4"], none, none, means).save(tmp_path / "kv_codebooks.safetensors")
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = prompts_of(5, 20)
    found, cache = serve(model, prompts)
    for layer, mean in zip(cache.layers.values(), means, strict=True):
        assert torch.equal(layer.mean[0, :, 0], mean)
    assert found == alone(model, prompts, found, "u4", cache)


def test_means_of_random_words_are_nearly_those_of_a_text(tinybooks: Any) -> None:
    """What is left of the means, over positions, is a small part of them; of a constant, nothing
    would be."""
    model = AutoModelForCausalLM.from_pretrained(tinybooks).eval()
    text = (tinybooks.parent / "tinybooks-5m-eval.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(tinybooks)(text).input_ids
    of_text = calibrate_kv(model, "u4", ids, tokens=2048, context=512, progress=False).means
    inv_freq = model.model.rotary_emb.inv_freq
    template, positions = template_of(model, "u4"), torch.arange(0, 512, 7)
    for layer, known in zip(template.layers, of_text, strict=True):
        wanted, found = (
            means.mean[:, None] + rotated(means.rotary_mean[:, None], inv_freq, False, positions)
            for means in (known, layer.calibrated)
        )
        assert (found - wanted).square().sum() < 0.25 * wanted.square().sum()


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"window": 64}, "asks for window"),
        ({"strict": True}, "keys \\['strict'\\]"),
        ({"scheme": "u9"}, "u9"),
    ],
)
def test_options_that_pages_cannot_follow_are_refused(fields: Any, wrong: str) -> None:
    of = config_of("u4")
    of.cache_config.update(fields)
    with pytest.raises(Exception, match=wrong) as error:
        build("gqa").init_continuous_batching(of, batching())
    assert type(error.value).__module__ == "hf_vq.errors"


def test_models_without_full_attention_are_refused() -> None:
    model = build("gemma3", layer_types=["sliding_attention"] * 2)
    with pytest.raises(VQCacheError, match="no layer of full attention"):
        model.generate_batch([[3, 4]], config_of("u4"), batching())


def test_models_whose_values_are_narrower_are_refused(caplog: Any) -> None:
    model = build("deepseek_v3")
    with pytest.raises(VQCacheError, match="head_dim"):
        model.generate_batch([[3, 4]], config_of("u4"), batching())


@pytest.mark.parametrize("known", [paged._SIGNATURES, paged._ATTRIBUTES], ids=["takes", "has no"])
def test_another_transformers_is_refused(known: Any, request: Any, monkeypatch: Any) -> None:
    name = "continuous_api.ContinuousBatchingManager"
    monkeypatch.setitem(known, name, "other")
    wrong = f"needs transformers {paged.NEEDED}.*BatchingManager {request.node.callspec.id}"
    paged.objection.cache_clear()
    try:
        with pytest.raises(VQCacheError, match=wrong):
            build("gqa").init_continuous_batching(config_of("u4"), batching())
    finally:
        paged.objection.cache_clear()


def test_the_attention_is_for_continuous_batching_only() -> None:
    paged_attention.register()
    model = build("gqa", "vq_paged")
    with pytest.raises(VQCacheError, match="vq_paged"):
        model(torch.tensor([[3, 4]]))
