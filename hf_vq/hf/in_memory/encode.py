"""Layers of a model whose weights are in memory become codes, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import TransformerEncoder, TransformerEncoderLayer

from ...errors import VQConfigError
from ...fit.rows import not_finite
from ...formats.catalog import LinearScheme
from ...nn.linear import VQLinear
from ...nn.quantized_module import QuantizedModule
from ...nn.replace import replacement, vq_modules, weight_names
from ...progress import Progress
from ..calibration_options import AUTO, leave_out_activations
from ..checkpoint import headers as stored_files
from ..config import VQConfig, quantization_of
from ..embeddings import put_module
from ..quantize_op import advice, encode

# Attributes of PyTorch's encoders that keep what `leave_fast_path` replaced.
_ACTIVATION, _NESTED = "_vq_activation_relu_or_gelu", "_vq_use_nested_tensor"


@torch.no_grad()
def encode_layers(
    model: nn.Module,
    schemes: Mapping[str, LinearScheme],
    config: VQConfig,
    progress: Progress,
    errors: dict[str, float],
) -> dict[str, Tensor]:
    """Encode layers where they are, and free each dense weight before the next.

    After an interruption, the layers before it are codes, the others are dense, and all run.

    Args:
        schemes: of the layers to encode, by name.
        errors: filled with the relative error of each quantized tensor, by name.

    Returns:
        The tensors that layers share, by name.

    Raises:
        VQConfigError: a weight is not in memory; nothing has changed then.
        VQFormatError: a weight is not finite; names it, and nothing has changed then.
    """
    check_weights(model, schemes)
    progress.label = f"Quantizing to {config.scheme_name}"
    sizes = {name: _weights(model.get_submodule(name), name) for name in schemes}
    progress.total, progress.advice = sum(sizes.values()), advice(schemes.values())
    shared: dict[str, Tensor] = {}
    try:
        for name, scheme in schemes.items():
            progress.start(name, sizes[name])
            encode_layer(model, name, scheme, config, errors, shared)
            progress.done()
    finally:
        progress.close()
    return shared


def encode_layer(
    model: nn.Module,
    name: str,
    scheme: LinearScheme,
    config: VQConfig,
    errors: dict[str, float],
    shared: dict[str, Tensor],
) -> None:
    """Encode one layer, whole: an error leaves it dense. See `encode_layers`.

    Args:
        shared: filled with the tensors that layers share, by name.
    """
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
        shared.update(stored_files.packaged([new], config.seed, shared))
        _go_where_codes_are(new)
        new.set_shared(shared)
        new._is_hf_initialized = True  # type: ignore[assignment]
        put_module(model, layer, new)
    except BaseException:
        layer._parameters.update(dense)  # experts give theirs up
        raise


def share(model: nn.Module, shared: Mapping[str, Tensor]) -> None:
    """Put the tensors that layers share into all of them, where their codes are."""
    for module in vq_modules(model).values():
        _go_where_codes_are(module)
        module.set_shared(shared)


def _go_where_codes_are(module: QuantizedModule) -> None:
    home = module.get_parameter(next(iter(module.specs))).device
    for attribute in module.shared_names():
        module._buffers[attribute] = torch.empty(0, device=home)


def _weights(layer: nn.Module, where: str) -> int:
    return sum(layer.get_parameter(name).numel() for name in weight_names(layer, where))


def _stack(fitted: list[dict[str, Tensor]], key: str) -> Tensor:
    return torch.stack([tensors[key] for tensors in fitted])


def check_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Raise if weights of layers are not here as tensors of finite numbers.

    Raises:
        VQConfigError: one is not in memory, or no plain tensor.
        VQFormatError: one is not finite.
    """
    layers = {name: model.get_submodule(name) for name in names}
    for name, layer in layers.items():
        for attribute, tensor in layer.named_parameters(recurse=False):
            if tensor.is_meta:
                raise VQConfigError(
                    f"{name}.{attribute} is not in memory: the model is offloaded or was never "
                    "loaded. Load it whole, or pass quantization_config to from_pretrained."
                )
            if type(tensor.data) is not torch.Tensor:
                raise VQConfigError(
                    f"{name}.{attribute} is a {type(tensor.data).__name__}, which cannot be "
                    "encoded: quantize the model before it is sharded or wrapped."
                )
    for name, layer in layers.items():
        for attribute in weight_names(layer, name):
            weight = layer.get_parameter(attribute).detach()
            weight = weight if weight.dtype.itemsize > 1 else weight.float()
            extremes = torch.stack(weight.aminmax())
            if not bool(extremes.isfinite().all()):  # they are NaN where one number is
                raise not_finite(name if attribute == "weight" else f"{name}.{attribute}")


def leave_fast_path(model: nn.Module) -> None:
    """Let PyTorch's own encoder layers call their linear layers, where these hold codes: in
    evaluation they would hand the weights to one kernel, padded inputs as a nested tensor."""
    for module in model.modules():
        if isinstance(module, TransformerEncoderLayer) and _has_codes(module):
            vars(module).setdefault(_ACTIVATION, module.activation_relu_or_gelu)
            module.activation_relu_or_gelu = 0
        elif isinstance(module, TransformerEncoder) and any(map(_has_codes, module.layers)):
            vars(module).setdefault(_NESTED, module.use_nested_tensor)
            module.use_nested_tensor = False


def restore_fast_path(model: nn.Module) -> None:
    """Undo `leave_fast_path`."""
    for module in model.modules():
        for kept, name in (
            (_ACTIVATION, "activation_relu_or_gelu"),
            (_NESTED, "use_nested_tensor"),
        ):
            if kept in vars(module):
                setattr(module, name, vars(module).pop(kept))


def _has_codes(layer: nn.Module) -> bool:
    return any(isinstance(child, VQLinear) for child in layer.children())


def dense_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that most of a quantized model's dense numbers have; where it has none, that of the
    weights that became codes."""
    counts: Counter[torch.dtype] = Counter()
    for module in model.modules():
        specs = module.specs if isinstance(module, QuantizedModule) else {}
        for name, tensor in module.named_parameters(recurse=False):
            if name not in specs and tensor.is_floating_point():
                counts[tensor.dtype] += tensor.numel()
    if counts:
        return counts.most_common(1)[0][0]
    try:
        found = getattr(torch, str((quantization_of(model).provenance or {}).get("dtype")), None)
    except VQConfigError:  # encoding was interrupted
        found = None
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32


def leave_out_automatic(config: VQConfig, why: str) -> None:
    """Quantize without activations, for a reason, unless somebody asked for them."""
    if config.activations == AUTO:
        leave_out_activations(config, why, once=True)


def nothing_to_quantize(model: nn.Module, config: VQConfig) -> VQConfigError:
    """The error of a model without a layer that becomes codes."""
    return VQConfigError(
        f"{type(model).__name__} has no layer to quantize: all are in "
        f"modules_to_not_convert={config.modules_to_not_convert} or of unknown kinds."
    )
