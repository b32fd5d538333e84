"""Fused experts of vLLM with codes, on one of several ranks, and what they must compute."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import layer as fused

from hf_vq.nn.experts import VQExperts
from tests.fixtures.models.random_experts import (
    CHOSEN,
    EXPERTS,
    HIDDEN,
    INNER,
    exact,
    random_experts,
)
from tests.vllm.layers import quantization

OPTIONS: dict[str, dict[str, Any]] = {
    "mixtral": {"activation": "silu"},
    "gpt-oss": {"activation": "swigluoai", "has_bias": True},
}
_TOKENS = (1, 3, 40)


def layer(kind: str, scheme: str) -> Any:
    """The experts of a block, as vLLM's models make them."""
    context = get_current_vllm_config().compilation_config.static_forward_context
    context.clear()  # of layers with the same name
    return fused.FusedMoEFactory(
        EXPERTS, CHOSEN, HIDDEN, INNER, params_dtype=torch.float32, prefix="experts",
        quant_config=quantization(scheme, ["experts"]), **OPTIONS[kind],
    )  # fmt: skip


def load(made: Any, module: VQExperts) -> None:
    """Load stored tensors as vLLM does, and let the layer finish."""
    tensors = dict(module.state_dict())
    assert len(list(made.load_weights(tensors.items()))) == len(tensors)
    made.routed_experts.quant_method.process_weights_after_loading(made.routed_experts)


def compare(kind: str, scheme: str) -> None:
    """Check the sum of all ranks against hf_vq's own module."""
    torch.manual_seed(0)
    module = random_experts(kind, scheme)
    made = layer(kind, scheme)
    load(made, module)
    own = made.routed_experts
    for tokens in _TOKENS:
        x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, CHOSEN)
        index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)])
        true, wanted = exact(module, x, index, weights), module(x, index, weights)
        y = own.quant_method.apply(own, x, weights, index.int())
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(y)
        allowed = 2 * (wanted - true).abs().max() + 1e-5 * true.abs().max()
        error = (y - true).abs().max()
        assert error <= allowed, (kind, scheme, tokens, float(error), float(allowed))
