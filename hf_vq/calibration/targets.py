"""Dense tensors to encode: weights of linear layers, and fused tensors of experts. Encode them,
decode them in place, and put VQ modules into the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..fit import FittedWeight, fit_weight, fixed_tensors
from ..formats.catalog import LinearScheme
from ..formats.spec import TensorSpec
from ..formats.tensors import tensor_specs
from ..hf.checkpoint.headers import packaged
from ..nn.accelerate_hooks import hook_of
from ..nn.experts import VQExperts, holds_experts, projections_of
from ..nn.replace import replacement
from ..ops import decode_weight
from .offload import take_place

if TYPE_CHECKING:
    from ..hf.config import VQConfig


@dataclass(frozen=True)
class Target:
    """One dense tensor to encode.

    Args:
        name: name in records: the layer's name; for experts followed by the tensor's.
        layer: name of the module that holds the tensor.
        weight: name of the tensor in the module.
        count: number of matrices in the tensor.
        shape: [out, in] of a matrix.
        transposed: True if the module stores matrices as [in, out].
    """

    name: str
    layer: str
    weight: str
    count: int
    shape: tuple[int, int]
    transposed: bool

    @property
    def fused(self) -> bool:
        """True for a stack of experts, even of one expert."""
        return self.name != self.layer

    def matrices(self, module: nn.Module) -> list[Tensor]:
        """Views [out, in] of the tensor's matrices."""
        return self.matrices_of(module.get_parameter(self.weight))

    def matrices_of(self, dense: Tensor) -> list[Tensor]:
        """The same of another tensor of this kind."""
        listed = list(dense) if dense.ndim == 3 else [dense]
        return [matrix.T for matrix in listed] if self.transposed else listed

    def specs(self, scheme: LinearScheme, seed: int = 0) -> dict[str, TensorSpec]:
        """Specs of the tensors that store one matrix.

        Raises:
            VQSchemeError: the scheme cannot store the matrix; the message names it.
        """
        return tensor_specs(scheme, *self.shape, seed=seed, where=self.name)

    def bits(self, scheme: LinearScheme) -> int:
        """Stored bits of all matrices, without the tensors that all layers share."""
        own = [spec for spec in self.specs(scheme).values() if spec.shared_name is None]
        sizes = (8 * spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in own)
        return self.count * sum(sizes)

    @property
    def weights(self) -> int:
        """Numbers in the tensor."""
        return self.count * self.shape[0] * self.shape[1]


def targets_of(name: str, module: nn.Module) -> list[Target]:
    """List the dense tensors of one linear layer or of one module of fused experts.

    Raises:
        VQConfigError: the layout of the experts is unknown.
    """
    experts = holds_experts(module)
    weights = projections_of(module, name) if experts else ("weight",)
    found = []
    for weight in weights:
        dense = module.get_parameter(weight)
        rows, columns = dense.shape[-2:]
        transposed = bool(module.is_transposed) if experts else not isinstance(module, nn.Linear)
        found.append(
            Target(
                name=f"{name}.{weight}" if experts else name,
                layer=name,
                weight=weight,
                count=len(dense) if experts else 1,
                shape=(columns, rows) if transposed else (rows, columns),
                transposed=transposed,
            )
        )
    return found


def replace(
    model: nn.Module,
    targets: Iterable[Target],
    fitted: dict[str, dict[str, Tensor]],
    scheme: LinearScheme,
    seed: int,
) -> None:
    """Replace one layer by a VQ module, whole: an interruption leaves it dense.

    Args:
        targets: all dense tensors of the layer.
        fitted: stored tensors of each dense tensor, by name; those of experts are stacked.
    """
    listed = list(targets)
    name = listed[0].layer
    dense = model.get_submodule(name)
    hook, device = hook_of(dense), dense.get_parameter(listed[0].weight).device
    before = dict(dense._parameters)
    try:
        new = replacement(dense, scheme, seed=seed, where=name)
        for target in listed:
            if isinstance(new, VQExperts):
                new.assign(target.weight, fitted[target.name])
            else:
                new.assign(fitted[target.name], dense.bias)  # type: ignore[arg-type]
        shared = packaged([new], seed)
        if hook is not None:  # which moves a tensor of two names, as experts have, under one
            shared = {key: tensor.to(hook.execution_device) for key, tensor in shared.items()}
        new.set_shared(shared)
        if hook is None:
            new.to(device)
        else:
            take_place(hook, new, [target.weight for target in listed])
        model.set_submodule(name, new)
    except BaseException:
        dense._parameters.update(before)  # experts give theirs up
        raise


def fit_target(
    target: Target,
    module: nn.Module,
    scheme: LinearScheme,
    config: VQConfig,
    known_of: Callable[[Tensor, int], Mapping[str, Any]],
    **options: Any,
) -> FittedWeight:
    """Encode one dense tensor of a layer; codes of experts are stacked.

    Args:
        known_of: arguments of `fit_weight` that say what is known of the inputs of a matrix [out,
            in] and its index: `feedback`, `input_scale`.
        options: more arguments of `fit_weight`.
    """
    found = []
    for index, matrix in enumerate(target.matrices(module)):
        known = known_of(matrix, index)
        fitted = fit_weight(
            matrix,
            scheme,
            seed=config.seed,
            where=target.name,
            search=config.search,
            **known,
            **options,
        )
        if not target.fused:
            return fitted
        norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float32)) ** 2
        feedback = known.get("feedback")
        energy = 0.0 if feedback is None else feedback.reported_energy(matrix)
        found.append((fitted, norm, energy))
    return _stacked(found)


def decoded(
    target: Target,
    module: nn.Module,
    fitted: FittedWeight,
    scheme: LinearScheme,
    seed: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A dense tensor with the numbers that its codes stand for, as the module stores it; in the
    module's dtype if `dtype` is None."""
    new = torch.empty_like(module.get_parameter(target.weight), dtype=dtype)
    _decode(target, target.matrices_of(new), fitted, scheme, seed)
    return new


def decode_target(
    target: Target, module: nn.Module, fitted: FittedWeight, scheme: LinearScheme, seed: int
) -> None:
    """Overwrite the matrices of a dense tensor with their decoded values."""
    _decode(target, target.matrices(module), fitted, scheme, seed)


def _decode(
    target: Target, matrices: list[Tensor], fitted: FittedWeight, scheme: LinearScheme, seed: int
) -> None:
    for index, matrix in enumerate(matrices):
        fixed = fixed_tensors(scheme, target.shape[1], seed, matrix.device)
        own = fitted.tensors
        if target.fused:
            own = {key: tensor[index] for key, tensor in own.items()}
        here = {key: tensor.to(matrix.device) for key, tensor in own.items()}
        matrix.copy_(decode_weight({**fixed, **here}, scheme, target.shape[1]))


def replace_layers(
    model: Any,
    targets: Iterable[Target],
    fitted: Mapping[str, FittedWeight],
    schemes: Mapping[str, LinearScheme],
    seed: int,
) -> None:
    """Replace layers by VQ modules.

    Args:
        targets: all dense tensors of these layers.
        fitted: codes of each, by name.
        schemes: scheme of each layer, by name.
    """
    layers: dict[str, list[Target]] = {}
    for target in targets:
        layers.setdefault(target.layer, []).append(target)
    tensors = {name: one.tensors for name, one in fitted.items()}
    for layer, listed in layers.items():
        replace(model, listed, tensors, schemes[layer], seed)


def _stacked(found: list[tuple[FittedWeight, float, float]]) -> FittedWeight:
    """Stack the codes of experts.

    Args:
        found: codes, squared norm of the weights and of the outputs of each expert.
    """
    fitted, norms, energies = zip(*found, strict=True)
    tensors = {key: torch.stack([f.tensors[key] for f in fitted]) for key in fitted[0].tensors}
    relative = sum(f.relative_error * norm for f, norm in zip(fitted, norms, strict=True))
    output = sum(f.output_error * each for f, each in zip(fitted, energies, strict=True))
    whole, total_energy = sum(norms), sum(energies)
    return FittedWeight(
        tensors,
        relative / whole if whole else 0.0,
        output / total_energy if total_energy else math.nan,
    )
