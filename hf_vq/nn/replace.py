"""Replacement of a model's layers by empty VQ modules, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from .experts import VQExperts, holds_experts
from .linear import VQLinear
from .w4a8_linear import W4A8Linear


def convertible(module: nn.Module) -> bool:
    """Whether `module` is a linear layer: `nn.Linear` with its own forward, or GPT-2's `Conv1D`."""
    if isinstance(module, nn.Linear):
        # A subclass with a forward of its own, or one that other code reads, may do anything.
        return type(module) is nn.Linear or (
            type(module).forward is nn.Linear.forward
            and not isinstance(module, VQLinear)
            and not type(module).__module__.startswith("torch.")
        )
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of everything in `model` that can be stored as codes."""
    for name, module in model.named_modules():
        if name and (convertible(module) or holds_experts(module)):
            yield name, module


def linear_class(scheme: LinearScheme) -> type[VQLinear]:
    """The class of a linear layer that is stored by a scheme."""
    return W4A8Linear if isinstance(scheme, QoQScheme) else VQLinear


def replace_modules(
    model: nn.Module,
    scheme_of: Callable[[str], LinearScheme | None],
    *,
    seed: int = 0,
    keep_dense: bool = False,
) -> dict[str, VQLinear | VQExperts]:
    """Put empty VQ modules, on the meta device, where `scheme_of(name)` is not None.

    Args:
        scheme_of: how a layer is stored, by its name.
        keep_dense: leave the dense parameters where they are, until each is quantized.

    Returns:
        The new modules by name.

    Raises:
        VQSchemeError: a layer's size does not fit the scheme; the message names the layer.
        VQConfigError: experts in an unknown layout.
    """
    replaced: dict[str, VQLinear | VQExperts] = {}
    for name, module in list(candidates(model)):
        scheme = scheme_of(name)
        if scheme is None:
            continue
        new: VQLinear | VQExperts
        dense = dict(module._parameters)
        with torch.device("meta"):
            if holds_experts(module):
                new = VQExperts(module, scheme, seed=seed, where=name)
            else:
                new = linear_class(scheme).replacing(module, scheme, seed=seed, where=name)
        if keep_dense:
            for weight in new.weights():
                new.register_parameter(weight, dense[weight])
        new.train(module.training)
        model.set_submodule(name, new)
        replaced[name] = new
    return replaced


def vq_modules(model: nn.Module) -> dict[str, VQLinear | VQExperts]:
    """The VQ modules of a model by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (VQLinear, VQExperts))
    }


def restore_modules(model: nn.Module, dtype: torch.dtype) -> None:
    """Put dense modules back, of the classes that were replaced."""
    for name, module in vq_modules(model).items():
        model.set_submodule(name, module.restored(dtype))
