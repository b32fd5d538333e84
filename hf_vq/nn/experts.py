"""`VQExperts`: the fused expert tensors of a mixture-of-experts layer, stored as codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import VQConfigError
from ..formats import qoq
from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from ..formats.tensors import tensor_specs
from .quantized_module import QuantizedModule, mark_initialized
from .residual_offload import at_home, first_only
from .trained import moved

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""What Transformers' `use_experts_implementation` says about a class of experts."""


@dataclass(frozen=True)
class Projection:
    """One fused tensor: the attribute of each of its stored tensors, and one expert's sizes."""

    out_features: int
    in_features: int
    attributes: dict[str, str]


@dataclass(frozen=True)
class ExpertLayout:
    """How a module of Transformers keeps its experts: names of the two fused tensors, and flags."""

    names: tuple[str, str]
    has_gate: bool
    has_bias: bool
    is_transposed: bool


class VQExperts(QuantizedModule):
    """Experts whose `[experts, out, in]` (transposed: `[experts, in, out]`) tensors are codes.

    Each expert's matrix is stored on its own and computed on its own, so that memory never holds
    more than one decoded expert. The gating function, its constants and the biases are those of
    the module that is replaced. Stored names start with `vq_`: a name that starts with an original
    parameter's name would be split by some versions of Transformers when saving.

    Args:
        experts: the module to replace; it gives up its parameters.
        scheme: how each expert's matrices are stored.
        seed: seed of the rotation.
        where: name of the module, for errors.

    Raises:
        VQConfigError: the layout of the module is not known.
        VQSchemeError: the scheme cannot store matrices of this size.
    """

    def __init__(
        self, experts: nn.Module, scheme: LinearScheme, *, seed: int = 0, where: str = "the experts"
    ) -> None:
        super().__init__()
        layout = self.layout_of(experts, where)
        self.scheme, self.spec = scheme, scheme.spec()
        self.op = "w4a8_linear" if isinstance(scheme, QoQScheme) else "linear"
        self.specs = {}
        self.num_experts = int(experts.num_experts)  # type: ignore[arg-type]
        self.has_gate, self.has_bias = layout.has_gate, layout.has_bias
        self.is_transposed = layout.is_transposed
        self.projections: dict[str, Projection] = {}
        for name in layout.names:
            weight = experts._parameters.pop(name)
            assert weight is not None
            rows, columns = weight.shape[-2:]
            out_features, in_features = (columns, rows) if self.is_transposed else (rows, columns)
            specs = tensor_specs(
                scheme, out_features, in_features, seed=seed, where=f"{where}.{name}"
            )
            attributes = {key: f"vq_{name}_{key}" for key in specs}
            for key, spec in specs.items():
                self.register(attributes[key], spec, (self.num_experts,))
            self.projections[name] = Projection(out_features, in_features, attributes)
        # Not a submodule: its tensors live here under the same names, so only its code is used.
        self._source: list[Any] = [experts]
        self._parameters.update(experts._parameters)
        self._buffers.update(experts._buffers)
        self._modules.update(experts._modules)

    @classmethod
    def layout_of(cls, experts: nn.Module, where: str) -> ExpertLayout:
        """The layout of the module to replace.

        Raises:
            VQConfigError: it is not known.
        """
        names = projections_of(experts, where)
        has_gate, has_bias, is_transposed, _ = (bool(getattr(experts, flag)) for flag in FLAGS)
        return ExpertLayout(names, has_gate, has_bias, is_transposed)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum over the chosen experts.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: [tokens, k] experts of each token; `num_experts` and more mean none.
            top_k_weights: [tokens, k].
        """
        one_token = len(hidden_states) == 1
        expert = partial(self.expert, one_token=one_token)
        return routed(hidden_states, top_k_index, top_k_weights, self.num_experts, expert)

    def forward_unsynchronized(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """`forward` by kernels that only shapes decide, for CUDA graphs.

        Few tokens copy the codes of each chosen expert; else all experts compute all tokens.
        """
        known = top_k_index < self.num_experts
        index = torch.where(known, top_k_index, 0)
        weights = torch.where(known, top_k_weights, 0)
        if index.numel() < self.num_experts:
            slots = [
                self.expert(expert, x[None], one_token=len(index) == 1)
                for x, chosen in zip(hidden_states, index, strict=True)
                for expert in chosen.split(1)
            ]
            y = torch.cat(slots).view(*index.shape, -1) * weights[..., None]
            # The output of an expert that a token did not choose may be infinite.
            return torch.where(known[..., None], y, 0).to(hidden_states.dtype).sum(1)
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            weight = torch.where(index == expert, weights, 0).sum(-1, keepdim=True)
            weighted = self.expert(expert, hidden_states, len(index) == 1) * weight
            result += torch.where(weight != 0, weighted, 0).to(result.dtype)
        return result

    def expert(self, index: int | Tensor, x: Tensor, one_token: bool = False) -> Tensor:
        """One expert's output [tokens, hidden] for its tokens `x` [tokens, hidden].

        Args:
            index: of the expert, or a tensor [1] of it, which is not read on the host.
            one_token: all experts together have one token.
        """
        project = partial(self.project, one_token=one_token)
        return expert_output(self._source[0], tuple(self.projections), index, x, project)

    def project(self, name: str, index: Any, x: Tensor, one_token: bool = False) -> Tensor:
        """x W^T + b of one expert and one projection."""
        bias = _of_expert(getattr(self, f"{name}_bias"), index) if self.has_bias else None
        if self.second is None:
            multiply = ops.w4a8_linear if self.op == "w4a8_linear" else ops.linear
            return multiply(x, self.tensors(name, index), bias, self.spec)
        if self.second.prefill_only and one_token:
            first = first_only(self.tensors(name, index))
            return ops.linear(x, first, bias, self.scheme.first_pass().spec())
        with self.second.of_expert(name, index).lent(self, x) as tensors:
            return ops.linear(x, tensors, bias, self.spec)

    def tensors(self, name: str, index: int | Tensor) -> dict[str, Tensor]:
        """The stored tensors of one expert's matrix by key (`formats.tensor_specs`)."""
        found = {
            key: tensor if self.specs[attribute].shared_name else _of_expert(tensor, index)
            for key, attribute in self.projections[name].attributes.items()
            if (tensor := getattr(self, attribute)) is not None
        }
        if self.deltas:
            for key, attribute in self.projections[name].attributes.items():
                if attribute in self.deltas:
                    change = _of_expert(getattr(self, self.deltas[attribute]), index)
                    found[key] = moved(found[key], change, attribute)
        return found

    def decoded(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense tensor of one projection, in the layout of the replaced module."""
        size = self.projections[name].in_features
        matrices = [
            ops.decode_weight(at_home(self.tensors(name, index)), self.scheme, size, dtype)
            for index in range(self.num_experts)
        ]
        return torch.stack([matrix.T if self.is_transposed else matrix for matrix in matrices])

    def restored(self, dtype: torch.dtype) -> nn.Module:
        """The replaced module with dense weights."""
        source = self._source[0]
        for name in self.projections:
            source.register_parameter(name, nn.Parameter(self.decoded(name, dtype)))
        stored = {*self.specs, *self.deltas.values()}
        for name, parameter in self._parameters.items():
            if name not in stored and parameter is not None:
                dense = nn.Parameter(parameter.detach().to(dtype))
                source.register_parameter(name, dense)
        restored: nn.Module = source.train(self.training)
        return restored

    def check_codes(self, read: Callable[[str], Tensor], where: str) -> None:
        """See `QuantizedModule`."""
        if isinstance(self.scheme, QoQScheme):
            for name, projection in self.projections.items():
                qoq.check(projection.attributes, read, f"{where}.{name}")

    def weights(self) -> list[str]:
        """Names of the dense parameters that the codes replace."""
        return list(self.projections)

    def matrices(self, weight: str, dense: Tensor) -> list[Tensor]:
        """The matrix [out, in] of every expert in a fused tensor."""
        return [matrix.T if self.is_transposed else matrix for matrix in dense]

    def begin_load(self, weight: str, fitted: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Drop the dense parameter; return the experts' stored tensors by attribute."""
        del self._parameters[weight]
        attributes = self.projections[weight].attributes
        return {
            attributes[key]: torch.stack([tensors[key] for tensors in fitted]) for key in fitted[0]
        }

    def assign(self, weight: str, fitted: Mapping[str, Tensor]) -> None:
        """Take what was fitted to the matrices of one fused tensor, outside of a loader: stored
        tensors by key, the experts' one after the other."""
        for key, tensor in fitted.items():
            stored = mark_initialized(nn.Parameter(tensor.contiguous(), requires_grad=False))
            self._parameters[self.projections[weight].attributes[key]] = stored  # type: ignore[assignment]

    def weight_count(self) -> int:
        """Weights of all experts."""
        sizes = (p.out_features * p.in_features for p in self.projections.values())
        return self.num_experts * sum(sizes)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.num_experts} experts, {self.scheme.spec()}"


class VQSortedExperts(VQExperts):
    """Experts that get all tokens of the first expert, then all of the second, as in Llama 4.

    The router multiplies the inputs of experts that a token did not choose by zero. They are left
    out: without biases, their outputs are zero.
    """

    @classmethod
    def layout_of(cls, experts: nn.Module, where: str) -> ExpertLayout:
        """See `VQExperts`."""
        return ExpertLayout(("gate_up_proj", "down_proj"), True, False, True)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """[experts * tokens, hidden] -> [experts * tokens, hidden]."""
        x = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        result = torch.zeros_like(x)
        for index, own in enumerate(x):
            chosen = (own != 0).any(-1).nonzero()[:, 0]
            if len(chosen):
                result[index, chosen] = self.expert(index, own[chosen], len(own) == 1)
        return result.view_as(hidden_states)

    def expert(self, index: int | Tensor, x: Tensor, one_token: bool = False) -> Tensor:
        """See `VQExperts`."""
        gate, up = self.project("gate_up_proj", index, x, one_token).chunk(2, dim=-1)
        return self.project("down_proj", index, up * self._source[0].act_fn(gate), one_token)


def expert_class(experts: nn.Module) -> type[VQExperts]:
    """The class that replaces a module for which `holds_experts` is true."""
    return VQSortedExperts if type(experts).__name__ == "Llama4TextExperts" else VQExperts


def routed(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    num_experts: int,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """The weighted sum of `expert(index, its tokens)`: see `VQExperts.forward`."""
    result = torch.zeros_like(hidden_states)
    for index in top_k_index.unique().tolist():
        if index >= num_experts:
            continue
        token, position = torch.where(top_k_index == index)
        weighted = expert(index, hidden_states[token]) * top_k_weights[token, position, None]
        result.index_add_(0, token, weighted.to(result.dtype))
    return result


def _of_expert(tensor: Tensor, index: int | Tensor) -> Tensor:
    return tensor.index_select(0, index)[0] if isinstance(index, Tensor) else tensor[index]


def expert_output(
    experts: Any,
    names: tuple[str, ...],
    index: Any,
    x: Tensor,
    project: Callable[[str, Any, Tensor], Tensor],
) -> Tensor:
    """One expert of a module of Transformers: its gate, activation and norm between two
    projections, `project(name, index, x)`."""
    y = project(names[0], index, x)
    y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
    y = project(names[1], index, y)
    if getattr(experts, "has_post_expert_norm", False):
        y = experts.post_expert_norm(y)
    return y


def projections_of(experts: nn.Module, where: str) -> tuple[str, str]:
    """Names of the two fused tensors of `experts`.

    Raises:
        VQConfigError: they are not laid out as `use_experts_implementation` says.
    """
    names = ("gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj")
    shapes = [getattr(experts, name, torch.empty(0)).shape for name in names]
    known = all(hasattr(experts, flag) for flag in FLAGS)
    if known and all(len(shape) == 3 and shape[0] == experts.num_experts for shape in shapes):
        return names
    raise VQConfigError(
        f"{where} ({type(experts).__name__}) keeps expert weights in a layout that hf_vq does not "
        f"know. Leave it dense: VQConfig(modules_to_not_convert=[{where!r}])."
    )


def holds_experts(module: nn.Module) -> bool:
    """Whether a module itself owns fused expert tensors, in a layout that is known or not."""
    if isinstance(module, (VQExperts, nn.Linear, nn.Embedding)):
        return False
    names = ("gate_up_proj", "up_proj", "down_proj")
    named = "Expert" in type(module).__name__
    return any(
        (parameter.ndim == 3 and (named or name in names))
        # Some keep the experts' matrices one below the other.
        or (named and parameter.ndim == 2 and min(parameter.shape) > 1 and "bias" not in name)
        for name, parameter in module._parameters.items()
        if parameter is not None
    )
