"""Fused experts of vLLM with codes, on one of several ranks, and what they must compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import layer as fused

from hf_vq.formats.catalog import linear_scheme
from hf_vq.hf.checkpoint.headers import packaged
from hf_vq.nn.experts import VQExperts
from tests.fixtures.random_weights import random_tensors
from tests.vllm.layers import quantization

EXPERTS, CHOSEN, HIDDEN, INNER = 8, 2, 256, 512
OPTIONS: dict[str, dict[str, Any]] = {
    "mixtral": {"activation": "silu"},
    "gpt-oss": {"activation": "swigluoai", "has_bias": True},
}
_TOKENS = (1, 3, 40)


def stored(kind: str, scheme: str) -> VQExperts:
    """Experts of Transformers with random codes."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    config = GptOssConfig(**sizes) if kind == "gpt-oss" else MixtralConfig(**sizes)
    dense = (GptOssExperts if kind == "gpt-oss" else MixtralExperts)(config).requires_grad_(False)
    for name, parameter in dense.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    module = VQExperts(dense, linear_scheme(scheme), where="experts")
    for name, part in module.projections.items():
        each = [
            random_tensors(module.scheme, part.out_features, part.in_features)
            for _ in range(EXPERTS)
        ]
        own = {k for k, a in part.attributes.items() if not module.specs[a].shared_name}
        module.assign(name, {key: torch.stack([one[key] for one in each]) for key in own})
    module.set_shared(packaged([module], 0))
    return module


def exact(module: VQExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What the experts compute, in float64."""
    matrices = [module.decoded(name, torch.float64) for name in module.projections]
    if module.is_transposed:
        matrices = [each.mT for each in matrices]
    biases = [
        module._parameters[f"{name}_bias"].double() if module.has_bias else torch.zeros(EXPERTS, 1)
        for name in module.projections
    ]
    found = torch.zeros(x.shape, dtype=torch.float64)
    for token, (chosen, given) in enumerate(zip(index.tolist(), weights.double(), strict=True)):
        for expert, weight in zip(chosen, given, strict=True):
            y = functional.linear(x[token].double(), matrices[0][expert]) + biases[0][expert]
            if module.has_bias:  # GPT-OSS
                gate, up = y[::2].clamp(max=7), y[1::2].clamp(-7, 7)
                y = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                gate, up = y.chunk(2)
                y = functional.silu(gate) * up
            found[token] += weight * (matrices[1][expert] @ y + biases[1][expert])
    return found


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
    module = stored(kind, scheme)
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
