"""Layers of a model whose weights are in memory become codes, in order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import TransformerEncoderLayer

from ...errors import VQConfigError
from ...formats.catalog import LinearScheme
from ...nn.linear import VQLinear
from ...nn.quantized_module import QuantizedModule
from ...nn.replace import replacement, vq_modules
from ..config import VQConfig
from ..embeddings import put_module
from ..quantize_op import Progress, encode


@torch.no_grad()
def encode_layers(
    model: nn.Module,
    schemes: Mapping[str, LinearScheme],
    config: VQConfig,
    progress: Progress,
    errors: dict[str, float],
) -> None:
    """Encode layers where they are, and free each dense weight before the next.

    After an error or an interruption, the layers before it are codes, and the others are dense.
    Codes lack the tensors that layers share: see `QuantizedModule.set_shared`.

    Args:
        schemes: of the layers to encode, by name.
        errors: filled with the relative error of each quantized tensor, by name.

    Raises:
        VQConfigError: a weight is not in memory; nothing has changed then.
        VQFormatError: a weight is not finite; names the layer.
    """
    for name in schemes:
        _check_whole(model.get_submodule(name), name)
    progress.label = f"Quantizing to {config.scheme_name}"
    progress.total = len(schemes)
    try:
        for name, scheme in schemes.items():
            progress.start(name)
            encode_layer(model, name, scheme, config, errors)
            progress.done()
    finally:
        progress.close()


def encode_layer(
    model: nn.Module,
    name: str,
    scheme: LinearScheme,
    config: VQConfig,
    errors: dict[str, float],
) -> None:
    """Encode one layer; see `encode_layers`."""
    layer = model.get_submodule(name)
    dense = dict(layer._parameters)
    try:
        new = replacement(layer, scheme, seed=config.seed, where=name)
        for weight in new.weights():
            tensor = dense[weight]
            assert tensor is not None
            shown = name if isinstance(new, VQLinear) else f"{name}.{weight}"
            fitted, errors[shown] = encode(new, weight, tensor.detach(), config, shown)
            if isinstance(new, VQLinear):
                new.assign(fitted[0], layer.bias)  # type: ignore[arg-type]
            else:
                new.assign(weight, {key: _stack(fitted, key) for key in fitted[0]})
    except BaseException:
        layer._parameters.update(dense)  # experts give theirs up
        raise
    _go_where_codes_are(new)
    put_module(model, layer, new)
    new._is_hf_initialized = True  # type: ignore[assignment]


def share(model: nn.Module, shared: Mapping[str, Tensor]) -> None:
    """Put the tensors that layers share into all of them, where their codes are."""
    for module in vq_modules(model).values():
        _go_where_codes_are(module)
        module.set_shared(shared)


def _go_where_codes_are(module: QuantizedModule) -> None:
    home = module.get_parameter(next(iter(module.specs))).device
    for attribute in module.shared_names():
        module._buffers[attribute] = torch.empty(0, device=home)


def _stack(fitted: list[dict[str, Tensor]], key: str) -> Tensor:
    return torch.stack([tensors[key] for tensors in fitted])


def _check_whole(layer: nn.Module, name: str) -> None:
    """Raise if a weight of a layer is not here as one tensor of numbers."""
    for attribute, tensor in layer.named_parameters(recurse=False):
        if tensor.is_meta:
            raise VQConfigError(
                f"{name}.{attribute} is not in memory: the model is offloaded or was never loaded. "
                "Load it whole, or pass quantization_config to from_pretrained."
            )
        if type(tensor.data) is not torch.Tensor:
            raise VQConfigError(
                f"{name}.{attribute} is a {type(tensor.data).__name__}, which cannot be encoded: "
                "quantize the model before it is sharded or wrapped."
            )


def leave_fast_path(model: nn.Module) -> None:
    """Let PyTorch's own encoder layers call their linear layers, where these hold codes: in
    evaluation they would hand the weights to one kernel."""
    for module in model.modules():
        if isinstance(module, TransformerEncoderLayer) and any(
            isinstance(child, VQLinear) for child in module.children()
        ):
            module.activation_relu_or_gelu = 0


def nothing_to_quantize(model: nn.Module, config: VQConfig) -> VQConfigError:
    """The error of a model without a layer that becomes codes."""
    return VQConfigError(
        f"{type(model).__name__} has no layer to quantize: all are in "
        f"modules_to_not_convert={config.modules_to_not_convert} or of unknown kinds."
    )
