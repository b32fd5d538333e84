"""Fused experts of vLLM whose weights are codes.

vLLM's router chooses experts. A `VQExperts`, the module of Transformers, computes their products;
it has this rank's part of the stored tensors:

    vq_gate_up_proj_*   [experts, 2 intermediate, ..]   a part of the rows | whole experts
    vq_down_proj_*      [experts, hidden, ..]           a part of each row | whole experts
                                                        tensor parallel    | expert parallel
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.utils.torch_utils import direct_register_custom_op

from ..errors import VQConfigError, VQFormatError
from ..hf.checkpoint.headers import CURE, check_values
from ..hf.config import VQConfig
from ..nn.experts import VQExperts
from ..nn.replace import linear_class
from .linear import shared_tensors
from .matrix import Ranks, part_of_rank, pieces

_BIASES = {"w13_bias": 0, "w2_bias": 1}
"""vLLM's names of the biases of the two projections."""


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """GPT-OSS's, with the constants that vLLM's own kernel has."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_GATES: dict[MoEActivation, Callable[[Tensor, Tensor], Tensor]] = {
    MoEActivation.SILU: lambda gate, up: functional.silu(gate) * up,
    MoEActivation.GELU: lambda gate, up: functional.gelu(gate) * up,
    MoEActivation.GELU_TANH: lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    MoEActivation.SWIGLUOAI: _swiglu_oai,
}
_ACTIVATIONS: dict[MoEActivation, Callable[[Tensor], Tensor]] = {
    MoEActivation.SILU_NO_MUL: functional.silu,
    MoEActivation.GELU_NO_MUL: functional.gelu,
    MoEActivation.GELU_TANH_NO_MUL: partial(functional.gelu, approximate="tanh"),
    MoEActivation.RELU2_NO_MUL: lambda x: functional.relu(x).square(),
}


class DenseExperts(nn.Module):
    """The module that a `VQExperts` replaces: sizes, flags and the gate of a layer of vLLM, as
    Transformers has them. Weights are on the meta device; biases are not a number until they are
    loaded.

    Args:
        moe: vLLM's config of the layer.
        num_experts: experts that are held.
        intermediate: features between the two projections that are held.
        dtype: of the biases.
        where: name of the layer, for errors.

    Raises:
        VQConfigError: an activation that is not known here.
    """

    is_transposed = False

    def __init__(
        self, moe: Any, num_experts: int, intermediate: int, dtype: torch.dtype, where: str
    ) -> None:
        super().__init__()
        self.activation: MoEActivation = moe.activation
        limited = moe.activation is MoEActivation.SILU and moe.swiglu_limit is not None
        if moe.activation not in (*_GATES, *_ACTIVATIONS) or limited:
            raise VQConfigError(
                f"{where}: experts with codes do not know vLLM's activation "
                f"{moe.activation.value!r}{' with a limit' if limited else ''}. Serve the model "
                "with Transformers."
            )
        self.num_experts, self.has_bias = num_experts, bool(moe.has_bias)
        self.has_gate = moe.activation in _GATES
        self.is_concatenated = moe.activation is not MoEActivation.SWIGLUOAI
        first, rows = ("gate_up_proj", 2 * intermediate) if self.has_gate else ("up_proj", None)
        hidden, rows = moe.hidden_dim, rows or intermediate
        shapes = {first: (rows, hidden), "down_proj": (hidden, intermediate)}
        for name, shape in shapes.items():
            empty = torch.empty(num_experts, *shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty))
            if self.has_bias:
                bias = torch.full((num_experts, shape[0]), torch.nan, dtype=dtype)
                self.register_parameter(f"{name}_bias", nn.Parameter(bias, requires_grad=False))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """[.., 2 intermediate] -> [.., intermediate]."""
        gate, up = (
            gate_up.chunk(2, -1)
            if self.is_concatenated
            else (gate_up[..., ::2], gate_up[..., 1::2])
        )
        return _GATES[self.activation](gate, up)

    def act_fn(self, x: Tensor) -> Tensor:
        """The activation of experts without a gate."""
        return _ACTIVATIONS[self.activation](x)


class VQExpertsMethod(FusedMoEMethodBase):
    """Loads and runs the experts of one layer; each layer has a separate method.

    Args:
        layer: of vLLM.
        config: gives the scheme of the layer.
        name: of the stored layer.

    Raises:
        VQConfigError: vLLM asks for what codes cannot do.
    """

    def __init__(self, layer: Any, config: VQConfig, name: str) -> None:
        super().__init__(layer.moe_config)
        self.config, self.name = config, name
        self.dummy = get_current_vllm_config().load_config.load_format == "dummy"
        refused = {
            "LoRA adapters": self.moe.is_lora_enabled,
            "routing weights on the inputs": layer.apply_router_weight_on_input,
        }
        for what in (what for what, is_requested in refused.items() if is_requested):
            raise VQConfigError(
                f"{name}: experts with codes cannot have {what} in vLLM. Serve the model with "
                "Transformers, or leave the experts dense."
            )

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any
    ) -> tuple[int, int]:
        """See `FusedMoEMethodBase`: codes are not padded."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """See `FusedMoEMethodBase`: no kernel of vLLM runs."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make an empty module, and parameters without elements by the names of stored tensors.

        Raises:
            VQConfigError: the codes cannot be split over the ranks.
        """
        moe, own = self.moe, intermediate_size_per_partition
        module = self._module(num_experts, own, params_dtype)
        with torch.device("meta"):
            self.whole = self._module(moe.num_experts, moe.intermediate_size, params_dtype)
        local = layer.expert_map  # index on this rank of each expert, or -1
        self.local = None if local is None else torch.argsort(local.cpu())[-num_experts:]
        self.names = tuple(module.projections)
        self.ranks = {name: Ranks(moe.tp_rank, moe.tp_size, name == "down_proj")
                      for name in self.names}  # fmt: skip
        for name, ranks in self.ranks.items() if own != moe.intermediate_size else ():
            ranks.check(self._matrix(name), f"{self.name}.{name}", _CURE)
        fused = 2 if module.has_gate and module._source[0].is_concatenated else 1
        rows = module.projections[self.names[0]].out_features
        total = self.whole.projections[self.names[0]].out_features
        sizes, totals = [rows // fused] * fused, [total // fused] * fused
        self.rows = pieces(sizes, totals, self.ranks[self.names[0]])
        layer.vq_experts = module
        self.missing = {name for name in module._parameters if name in module.specs}
        for attribute in module._parameters:
            if attribute in self.missing:
                like: Tensor = getattr(module, attribute)
                empty: Any = nn.Parameter(like.new_empty(0), requires_grad=False)
            else:  # vLLM's GPT-OSS itself splits and copies biases
                empty = module._parameters[attribute]
            empty.weight_loader = partial(self._load, layer, attribute)
            layer.register_parameter(_of_vllm(attribute), empty)
        layer.load_weights = partial(self._load_all, layer)

    def _module(self, experts: int, intermediate: int, dtype: torch.dtype) -> VQExperts:
        dense = DenseExperts(self.moe, experts, intermediate, dtype, self.name)
        scheme = self.config.stored_scheme(self.name)
        return VQExperts(dense, scheme, seed=self.config.seed, where=self.name)

    def _matrix(self, name: str) -> nn.Linear:
        """One expert's matrix of a projection, whole, on the meta device."""
        size, scheme = self.whole.projections[name], self.whole.scheme
        with torch.device("meta"):
            return linear_class(scheme)(size.in_features, size.out_features, False, scheme)

    def _load_all(self, layer: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Load stored tensors, as `RoutedExperts.load_weights` loads dense ones."""
        for name, stored in weights:
            attribute = name.rpartition(".")[2]
            if attribute in _BIASES:
                attribute = f"{self.names[_BIASES[attribute]]}_bias"
            self._load(layer, attribute, None, stored)
            yield _of_vllm(attribute)

    def _load(self, layer: Any, attribute: str, _: Any, stored: Tensor, *__: Any) -> None:
        """Copy this rank's part of a stored tensor.

        Raises:
            VQFormatError: the scheme has no such tensor, or of another shape or dtype.
        """
        own: Any = layer.vq_experts._parameters.get(attribute)
        whole: Any = self.whole._parameters.get(attribute)
        casts = own is not None and attribute not in layer.vq_experts.specs
        if own is None or stored.shape != whole.shape or not (casts or stored.dtype == own.dtype):
            found = "no such tensor" if own is None else f"{own.dtype} {list(whole.shape)}"
            raise VQFormatError(
                f"{self.name}.{attribute} is {stored.dtype} {list(stored.shape)}; its scheme has "
                f"{found}. {CURE}"
            )
        if self.local is not None:
            stored = stored[self.local]
        projection = next(name for name in self.names if name in attribute)
        shape = (len(stored), *whole.shape[1:])
        own.data.copy_(part_of_rank(stored, own.shape, shape, self.rows, self.ranks[projection]))
        self.missing.discard(attribute)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded, and add the tensors that layers share.

        Raises:
            VQFormatError: a tensor is missing, or not finite.
        """
        module = layer.vq_experts
        biases = {name for name in module._parameters if name not in module.specs}
        lacking = {name for name in biases if not bool(module._parameters[name].isfinite().all())}
        if (lacking | self.missing) and not self.dummy:
            raise VQFormatError(
                f"the checkpoint lacks {', '.join(sorted(lacking | self.missing))} of "
                f"{self.name}, or they are not finite. {CURE}"
            )
        for attribute in (*module._parameters, *_BIASES):
            layer._parameters.pop(attribute, None)
        self.missing = set()
        module.set_shared(shared_tensors([module], self.config))
        self.finish_biases(module)
        if not self.dummy:
            check_values(module, self.name)

    def finish_biases(self, module: VQExperts) -> None:
        """Keep the bias of what ranks add up on the first of them."""
        if self.moe.tp_rank and module.has_bias:
            module.get_parameter("down_proj_bias").data.zero_()

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum [tokens, hidden] of the chosen experts that this rank holds; of each, a part
        where ranks split it.

        Args:
            x: [tokens, hidden].
            topk_weights: [tokens, k].
            topk_ids: [tokens, k] experts of all ranks.
        """
        if torch.compiler.is_compiling():  # vLLM on a CPU traces this; on a GPU it has an op
            y: Tensor = torch.ops.vllm.hf_vq_experts(x, topk_weights, topk_ids, layer.layer_name)
            return y
        return compute(layer, self.moe, x, topk_weights, topk_ids)


_CURE = "Serve it with --enable-expert-parallel, which gives each rank whole experts."


def compute(layer: Any, moe: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """See `VQExpertsMethod.apply`."""
    module: VQExperts = layer.vq_experts
    if layer.expert_map is not None:
        ids = layer.expert_map[topk_ids.long()]
        topk_ids = torch.where(ids < 0, module.num_experts, ids)
    # A CUDA graph may be captured of so many tokens.
    captured = x.is_cuda and len(x) <= (moe.max_capture_size or 0)
    run = module.forward_unsynchronized if captured else module.forward
    return run(x, topk_ids, topk_weights)


def _of_vllm(attribute: str) -> str:
    """vLLM's name of a bias; other tensors keep theirs."""
    if not attribute.endswith("_bias"):
        return attribute
    return "w2_bias" if attribute.startswith("down_proj") else "w13_bias"


def _experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer_name: str) -> Tensor:
    layer: Any = get_forward_context().no_compile_layers[layer_name]
    layer = layer.routed_experts
    return compute(layer, layer.moe_config, x, topk_weights, topk_ids)


def _fake_experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer_name: str) -> Tensor:
    return torch.empty_like(x)


direct_register_custom_op("hf_vq_experts", _experts, fake_impl=_fake_experts)
