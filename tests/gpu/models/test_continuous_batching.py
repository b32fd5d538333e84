"""Continuous batching over pages of codes on a GPU says what plain decoding of the same codes says.

Kernels read tables, and steps of one token are CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from hf_vq.backends.cuda import w4a8_inputs
from hf_vq.errors import VQCacheError
from hf_vq.hf import VQConfig, enable_cache_backend
from hf_vq.serving import continuous_batching as paged
from tests.fixtures.continuous_batching import Decoded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(paged.objection() is not None, reason=str(paged.objection())),
]
enable_cache_backend()
NEW = 40


def model_of(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=256, intermediate_size=256, num_hidden_layers=2, head_dim=64,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", dtype).eval()


def config_of(scheme: str) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0,
        cache_implementation="quantized", cache_config={"backend": "vq", "scheme": scheme},
    )  # fmt: skip


def prompts_of(*lengths: int) -> list[list[int]]:
    return [torch.randint(3, 199, (n,)).tolist() for n in lengths]


def serve(
    model: Any,
    prompts: list[list[int]],
    of: GenerationConfig,
    later: list[list[int]] | None = None,
    **fields: Any,
) -> tuple[list[Any], Any]:
    """Results of all prompts, in order, those of forks last; `later` ones come when there is an
    answer to the first. And what computed them, which has ended."""
    fields = {"num_blocks": 60, "max_batch_tokens": 256, "return_logprobs": True, **fields}
    context = model.continuous_batching_context_manager(
        generation_config=of, continuous_batching_config=ContinuousBatchingConfig(**fields)
    )
    results: dict[str, Any] = {}
    with context as manager:
        names = manager.add_requests(prompts)
        while len(results) < len(names) * manager.num_return_sequences:
            result = manager.get_result(timeout=120)
            assert result is not None, manager.background_thread_status.fatal_error
            results[result.request_id] = result
            if later:
                names, later = [*names, *manager.add_requests(later)], None
        processor = manager.batch_processor
    children = [name for name in results if name not in names]
    return [results[name] for name in [*names, *children]], processor


def check(model: Any, prompt: list[int], result: Any, scheme: str, cache: Any) -> None:
    """The probabilities of a request's tokens are those of plain decoding of the same codes, and
    no other token is likelier by more than both may differ."""
    assert result.error is None and len(result.generated_tokens) == NEW
    whole = torch.tensor([prompt + result.generated_tokens], device="cuda")
    with torch.no_grad():
        logits = model(whole, past_key_values=Decoded(model.config, scheme, cache.layers)).logits
    expected = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    chosen = expected.gather(1, whole[0, len(prompt) :, None])[:, 0]
    assert (torch.tensor(result.logprobs) - chosen.cpu()).abs().max() < 0.05
    assert (expected.amax(-1) - chosen).max() < 0.1


@pytest.mark.parametrize("page", [64, 256, 48])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_async_batching": False},
        {"use_cuda_graph": False},
        {"use_cuda_graph": False, "use_async_batching": True},
        {"max_blocks_per_request": 0},
        {"max_blocks_per_request": 4, "max_requests_per_batch": 3},
    ],
)
@pytest.mark.parametrize("scheme", ["u4", "u2", "qserve-kv4"])
def test_a_model_generates(scheme: str, fields: dict[str, Any], page: int) -> None:
    model = model_of()
    tables = page != 48
    if fields and (not tables or scheme == "u2"):
        pytest.skip("one of them is enough")
    prompts = prompts_of(5, 700, 64, 1, 300, 2)
    found, processor = serve(
        model, prompts, config_of(scheme), page_size=page, num_blocks=60, **fields
    )
    cache, runner = processor.cache, processor.model_runner
    assert (cache.max_decode_fast_path_length > 0) == (
        tables and fields.get("max_blocks_per_request") != 0
    )
    graphs = cache.max_decode_fast_path_length > 0 and fields.get("use_cuda_graph") is None
    assert runner.use_cuda_graph_decode == graphs
    for prompt, result in zip(prompts, found, strict=True):
        check(model, prompt, result, scheme, cache)


def test_the_first_batch_waits_for_its_inputs(monkeypatch: Any) -> None:
    """They are filled with zeros on a stream that may have much to do before."""
    plain = ContinuousBatchingIOs._setup_static_tensors

    def late(self: Any, *arguments: Any, **options: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(1_000_000_000)  # clocks: half a second
        plain(self, *arguments, **options)

    monkeypatch.setattr(ContinuousBatchingIOs, "_setup_static_tensors", late)
    model, prompts = model_of(), prompts_of(5, 64)
    found, processor = serve(
        model, prompts, config_of("u4"), page_size=64, use_async_batching=True, use_cuda_graph=False
    )
    for prompt, result in zip(prompts, found, strict=True):
        check(model, prompt, result, "u4", processor.cache)


@pytest.mark.parametrize("graph", [None, False])
@pytest.mark.parametrize("scheme", ["u4", "qserve-kv4"])
def test_a_prefix_is_shared(scheme: str, graph: bool | None, monkeypatch: Any) -> None:
    """Pages are read that another request wrote, also while it goes on."""
    hits, search = [], PagedAttentionCache.search_prefix_match

    def counted(self: Any, *arguments: Any) -> int:
        hits.append(search(self, *arguments))
        return hits[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", counted)
    model, (prefix,) = model_of(), prompts_of(3 * 64 + 2)
    prompts = [prefix + more for more in prompts_of(4, 90, 1)]
    fields = {} if graph is None else {"use_cuda_graph": graph}
    found, processor = serve(model, [prefix], config_of(scheme), prompts, page_size=64, **fields)
    assert sorted(hits) == [0, 192, 192, 192]
    for prompt, result in zip([prefix, *prompts], found, strict=True):
        check(model, prompt, result, scheme, processor.cache)


@pytest.mark.parametrize("graph", [None, False])
@pytest.mark.parametrize("scheme", ["u4", "qserve-kv4"])
def test_requests_that_do_not_fit_are_evicted(
    scheme: str, graph: bool | None, monkeypatch: Any
) -> None:
    """Their pages become those of others, and they are computed again on others."""
    from transformers.generation.continuous_batching.requests import RequestState

    evicted, again = [], RequestState.create_equivalent_initial_request

    def counted(state: Any) -> Any:
        evicted.append(state.request_id)
        return again(state)

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", counted)
    model, prompts = model_of(), prompts_of(120, 112, 104, 128)
    fields = {} if graph is None else {"use_cuda_graph": graph}
    found, processor = serve(
        model, prompts, config_of(scheme), page_size=64, num_blocks=9, **fields
    )
    assert evicted and processor.cache.num_blocks == 9
    for prompt, result in zip(prompts, found, strict=True):
        check(model, prompt, result, scheme, processor.cache)


def test_forks_copy_the_page_that_is_not_full() -> None:
    of, model, prompts = config_of("u4"), model_of(), prompts_of(2 * 64 + 3)
    of.num_return_sequences = 3
    found, processor = serve(model, prompts, of, page_size=64)
    assert len(found) == 3
    for result in found:
        check(model, prompts[0], result, "u4", processor.cache)


@pytest.mark.parametrize("graph", [None, False])
def test_weights_of_4_bits_and_inputs_of_8(
    graph: bool | None, monkeypatch: Any, tmp_path: Any
) -> None:
    """Norms and gated products round for the layers behind them, also in graphs."""
    model_of().save_pretrained(tmp_path)
    config = VQConfig("qoq-w4a8-g128")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.bfloat16, device_map="cuda"
    ).eval()
    made, plain = [], w4a8_inputs.rounded

    def counted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        made.append(kernel.plan.source.value)
        return plain(kernel, *arguments, **options)

    monkeypatch.setattr(w4a8_inputs, "rounded", counted)
    prompts = prompts_of(5, 300, 64)
    fields = {} if graph is None else {"use_cuda_graph": graph}
    of = config_of("qserve-kv4")
    found, processor = serve(model, prompts, of, page_size=64, **fields)
    assert processor.model_runner.use_cuda_graph_decode == (graph is None)
    assert made.count("norm") == 2 * made.count("gated") > 0
    assert made.count("tokens") <= made.count("gated")  # for output projections
    for prompt, result in zip(prompts, found, strict=True):
        check(model, prompt, result, "qserve-kv4", processor.cache)


@pytest.mark.parametrize(
    ("page", "graph"), [(256, True), (256, (True, False)), (48, (False, True))]
)
def test_graphs_that_there_cannot_be_are_refused(page: int, graph: Any) -> None:
    settings = ContinuousBatchingConfig(page_size=page, use_cuda_graph=graph)
    with pytest.raises(VQCacheError, match="use_cuda_graph"):
        model_of().generate_batch([[3, 4]], config_of("u4"), settings)
