"""`VQExpertList`: experts whose matrices are stored one by one, each with codebooks of its own.

Transformers 5 fuses the experts of a layer, and the gate with the up projection. A checkpoint whose
codebooks were learned per matrix cannot be fused: codes of one matrix mean nothing in the codebook
of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..errors import VQConfigError
from .experts import projections_of

Parts = Mapping[str, tuple[str, ...]]
"""Names of the matrices of one expert that a fused tensor is made of, one below the other."""


class VQExpertList(nn.Module):
    """Experts `0`, `1`, ..., each of linear layers such as `gate_proj`, `up_proj`, `down_proj`.

    Args:
        experts: the module to replace, of fused tensors; its gating function is used.
        parts: of its two projections.
        make: the layer of a name, out_features and in_features.
        where: name of the module.

    Raises:
        VQConfigError: the layout of the module is not known.
    """

    def __init__(
        self,
        experts: nn.Module,
        parts: Parts,
        make: Callable[[str, int, int], nn.Module],
        where: str,
    ) -> None:
        super().__init__()
        self.projections = projections_of(experts, where)
        if experts.has_bias or experts.is_transposed or not experts.is_concatenated:
            raise VQConfigError(
                f"{where} ({type(experts).__name__}) has biases or another order of its weights: "
                "experts that are stored one by one are not known for it."
            )
        self.num_experts = int(experts.num_experts)  # type: ignore[arg-type]
        self.parts = {name: parts[name] for name in self.projections}
        shapes = {name: getattr(experts, name).shape for name in self.projections}
        for index in range(self.num_experts):
            expert = nn.Module()
            for projection, names in self.parts.items():
                out_features, in_features = shapes[projection][1:]
                for name in names:
                    path = f"{where}.{index}.{name}"
                    expert.add_module(name, make(path, out_features // len(names), in_features))
            self.add_module(str(index), expert)
        # Not a submodule: only its code is used.
        for name in self.projections:
            del experts._parameters[name]
        self._source = [experts]
        self._buffers.update(experts._buffers)
        self._modules.update(experts._modules)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum over the chosen experts (`VQExperts.forward`)."""
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            token, position = torch.where(top_k_index == expert)
            y = self.expert(expert, hidden_states[token])
            weighted = y * top_k_weights[token, position, None]
            result.index_add_(0, token, weighted.to(result.dtype))
        return result

    def expert(self, index: int, x: Tensor) -> Tensor:
        """One expert's output [tokens, hidden] for its tokens `x` [tokens, hidden]."""
        source, layers = self._source[0], self._modules[str(index)]
        assert layers is not None
        first, last = self.parts.values()
        y = torch.cat([layers.get_submodule(name)(x) for name in first], dim=-1)
        y = source._apply_gate(y) if source.has_gate else source.act_fn(y)  # type: ignore[operator]
        y = layers.get_submodule(last[0])(y)
        if getattr(source, "has_post_expert_norm", False):
            y = source.post_expert_norm(y)  # type: ignore[operator]
        return y
