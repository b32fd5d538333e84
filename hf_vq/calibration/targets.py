"""Dense tensors to encode: weights of linear layers, and fused tensors of experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..formats.catalog import LinearScheme
from ..formats.spec import TensorSpec
from ..formats.tensors import tensor_specs
from ..hf.checkpoint.headers import packaged
from ..nn.accelerate_hooks import hook_of
from ..nn.experts import VQExperts, holds_experts, projections_of
from ..nn.linear import VQLinear
from ..nn.replace import linear_class
from .offload import take_place


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
        dense = module.get_parameter(self.weight)
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
    """Replace one layer by a VQ module.

    Args:
        targets: all dense tensors of the layer.
        fitted: stored tensors of each dense tensor, by name; those of experts are stacked.
    """
    listed = list(targets)
    name = listed[0].layer
    dense = model.get_submodule(name)
    hook, device = hook_of(dense), dense.get_parameter(listed[0].weight).device
    new: VQLinear | VQExperts
    with torch.device("meta"):
        if holds_experts(dense):
            new = VQExperts(dense, scheme, seed=seed, where=name)
        else:
            new = linear_class(scheme).replacing(dense, scheme, seed=seed, where=name)
    for target in listed:
        if isinstance(new, VQExperts):
            new.assign(target.weight, fitted[target.name])
        else:
            new.assign(fitted[target.name], dense.bias)  # type: ignore[arg-type]
    new.train(dense.training)
    new.set_shared(packaged([new], seed))
    if hook is None:
        new.to(device)
    else:
        take_place(hook, new, [target.weight for target in listed])
    model.set_submodule(name, new)
