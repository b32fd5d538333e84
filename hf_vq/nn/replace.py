"""Replacement of a model's layers by empty VQ modules, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional

from ..errors import VQConfigError, VQSchemeError
from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from ..formats.tensors import tensor_specs
from .experts import VQExperts, expert_class, holds_experts
from .linear import VQLinear
from .w4a8_linear import W4A8Linear

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARTS = ("_parameters", "_buffers", "_modules")


def convertible(module: nn.Module) -> bool:
    """Whether `module` is a linear layer: an `nn.Linear` that computes x W^T + b, or GPT-2's
    `Conv1D`."""
    kind = type(module)
    if not isinstance(module, nn.Linear):
        return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    if kind is nn.Linear:
        return True
    # Other code may read the weight of PyTorch's own subclasses.
    if isinstance(module, VQLinear) or kind.__module__.startswith("torch."):
        return False
    return kind.forward is nn.Linear.forward or _computes_product(module)


def _computes_product(layer: nn.Linear) -> bool:
    """Whether the forward of a subclass, such as Falcon's, is x W^T + b: try it on a small copy."""
    if set(layer._parameters) != {"weight", "bias"} or layer._buffers or layer._modules:
        return False
    small = copy.copy(layer)
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")
        for shape in ((2, 4, 5), (3, 5), (3,))
    )
    given = bias if layer.bias is not None else None
    small.__dict__ |= {"in_features": 5, "out_features": 3, "training": False}
    small._parameters = {"weight": nn.Parameter(weight), "bias": None}
    if given is not None:
        small._parameters["bias"] = nn.Parameter(given)
    try:
        with torch.no_grad():
            for size in (1e-3, 1.0, 1e3):  # a layer that clips or rounds its inputs is found
                found = type(layer).forward(small, x * size)
                torch.testing.assert_close(found, functional.linear(x * size, weight, given))
    except Exception:  # whatever it needs, it is no plain product
        return False
    return True


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of everything in `model` that can be stored as codes."""
    for name, module in model.named_modules():
        if name and (convertible(module) or holds_experts(module)):
            yield name, module


def linear_class(scheme: LinearScheme) -> type[VQLinear]:
    """The class of a linear layer that is stored by a scheme."""
    return W4A8Linear if isinstance(scheme, QoQScheme) else VQLinear


def left_out(module: nn.Module) -> str | None:
    """What a VQ module in the place of a candidate would leave out without a word; None if nothing.

    accelerate's hook moves to the new module, and is none of these.
    """
    own, kept = vars(module), {"weight", "bias"}
    if any(own[kind] for kind in _HOOKS):
        return "hooks"
    if "forward" in own and "_hf_hook" not in own:
        return "a replaced forward"
    if holds_experts(module):
        return None
    more = [name for part in _PARTS for name in own[part] if name not in kept]
    if more:
        return f"{more[0]!r} beside its weight and bias"
    return None if "weight" in module._parameters else "a weight that is computed"


def weight_names(module: nn.Module, where: str) -> list[str]:
    """Names of the parameters of a candidate that become codes.

    Raises:
        VQConfigError: experts in an unknown layout.
    """
    if not holds_experts(module):
        return ["weight"]
    return list(expert_class(module).layout_of(module, where).names)


def check_fits(module: nn.Module, scheme: LinearScheme, *, where: str) -> None:
    """Raise if a scheme cannot store a candidate, or codes are not all that it is.

    Raises:
        VQSchemeError: a size does not fit the scheme.
        VQConfigError: experts in an unknown layout, or a layer with hooks or parts of its own.
    """
    if (what := left_out(module)) is not None:
        raise VQConfigError(
            f"{where} has {what}, which codes in its place would lose. Quantize first and add it "
            "then, or leave the layer in modules_to_not_convert."
        )
    for name, (out_features, in_features) in _sizes(module, where).items():
        if not out_features * in_features:
            raise VQSchemeError(f"{name} has no weights. Add it to modules_to_not_convert.")
        tensor_specs(scheme, out_features, in_features, seed=0, where=name)


def shared_names(model: nn.Module, schemes: Mapping[str, LinearScheme], seed: int) -> set[str]:
    """Names in a checkpoint of the tensors that layers with these schemes share."""
    return {
        spec.shared_name
        for layer, scheme in schemes.items()
        for name, (rows, columns) in _sizes(model.get_submodule(layer), layer).items()
        for spec in tensor_specs(scheme, rows, columns, seed=seed, where=name).values()
        if spec.shared_name is not None
    }


def _sizes(module: nn.Module, where: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matrix of a candidate, by name."""
    if not holds_experts(module):
        rows, columns = module.weight.shape  # type: ignore[misc]
        return {where: (rows, columns) if isinstance(module, nn.Linear) else (columns, rows)}
    layout, sizes = expert_class(module).layout_of(module, where), {}
    for name in layout.names:
        rows, columns = getattr(module, name).shape[-2:]
        sizes[f"{where}.{name}"] = (columns, rows) if layout.is_transposed else (rows, columns)
    return sizes


def replacement(
    module: nn.Module, scheme: LinearScheme, *, seed: int = 0, where: str
) -> VQLinear | VQExperts:
    """An empty VQ module, on the meta device, for a candidate; experts give up their parameters.

    Raises:
        VQSchemeError: a size does not fit the scheme; the message names the layer.
        VQConfigError: experts in an unknown layout.
    """
    new: VQLinear | VQExperts
    with torch.device("meta"):
        if holds_experts(module):
            new = expert_class(module)(module, scheme, seed=seed, where=where)
        else:
            new = linear_class(scheme).replacing(module, scheme, seed=seed, where=where)
    return new.train(module.training)


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
        dense = dict(module._parameters)
        new = replacement(module, scheme, seed=seed, where=name)
        if keep_dense:
            for weight in new.weights():
                new.register_parameter(weight, dense[weight])
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


def set_activations_bits(model: nn.Module, bits: int | None) -> None:
    """Let the layers of codes compute with inputs of 8 bits where a kernel does (docs/cuda.md), or
    of 16 again; what is stored stays as it is.

    Args:
        bits: 8 or 16; None changes nothing.

    Raises:
        VQSchemeError: other bits.
    """
    if bits is not None:
        for module in vq_modules(model).values():
            module.set_activations_bits(bits)


def check_in_memory(modules: Mapping[str, nn.Module]) -> None:
    """Raise if the codes of a module, by name, are not in memory and so cannot be decoded."""
    for name, module in modules.items():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            raise VQConfigError(
                f"cannot dequantize {name}: its codes are offloaded. Load the model without "
                "offloading first."
            )


def restore_modules(model: nn.Module, dtype: torch.dtype) -> None:
    """Put dense modules back, of the classes that were replaced."""
    for name, module in vq_modules(model).items():
        model.set_submodule(name, module.restored(dtype))
