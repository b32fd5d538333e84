"""Continuous batching over pages of codes on a GPU says what plain decoding of the same codes says.

Kernels read tables, and steps of one token are CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_paged import Decoded
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from hf_vq.errors import VQCacheError
from hf_vq.hf import paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(paged.objection() is not None, reason=str(paged.objection())),
]
paged.register()
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
    prompts = [torch.randint(3, 199, (n,)).tolist() for n in (5, 700, 64, 1, 300, 2)]
    settings = ContinuousBatchingConfig(
        num_blocks=60, page_size=page, max_batch_tokens=256, return_logprobs=True, **fields
    )
    context = model.continuous_batching_context_manager(
        generation_config=config_of(scheme), continuous_batching_config=settings
    )
    with context as manager:
        names = manager.add_requests(prompts)
        results: dict[str, Any] = {}
        while len(results) < len(prompts):
            result = manager.get_result(timeout=120)
            assert result is not None, manager.background_thread_status.fatal_error
            results[result.request_id] = result
        cache, runner = manager.batch_processor.cache, manager.batch_processor.model_runner
        assert (cache.max_decode_fast_path_length > 0) == (
            tables and fields.get("max_blocks_per_request") != 0
        )
        graphs = cache.max_decode_fast_path_length > 0 and fields.get("use_cuda_graph") is None
        assert runner.use_cuda_graph_decode == graphs
        means = {index: layer.mean for index, layer in cache.layers.items()}
    for name, prompt in zip(names, prompts, strict=True):
        result = results[name]
        assert result.error is None and len(result.generated_tokens) == NEW
        whole = torch.tensor([prompt + result.generated_tokens], device="cuda")
        with torch.no_grad():
            logits = model(whole, past_key_values=Decoded(model.config, scheme, means)).logits
        expected = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = expected.gather(1, whole[0, len(prompt) :, None])[:, 0].cpu()
        assert (torch.tensor(result.logprobs) - expected).abs().max() < 0.05


@pytest.mark.parametrize(
    ("page", "graph"), [(256, True), (256, (True, False)), (48, (False, True))]
)
def test_graphs_that_there_cannot_be_are_refused(page: int, graph: Any) -> None:
    settings = ContinuousBatchingConfig(page_size=page, use_cuda_graph=graph)
    with pytest.raises(VQCacheError, match="use_cuda_graph"):
        model_of().generate_batch([[3, 4]], config_of("u4"), settings)
