"""`hf_vq.quantize_model` and `hf_vq.dequantize`, for any module that is in memory."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ... import patches
from ...errors import VQConfigError, VQError
from ...nn.experts import holds_experts
from ...nn.replace import (
    candidates,
    convertible,
    restore_modules,
    set_activations_bits,
    shared_names,
    vq_modules,
)
from ...nn.trained import train
from ...progress import Progress
from ..checkpoint import headers as stored_files
from ..checkpoint.provenance import record
from ..config import QUANT_METHOD, VQConfig, quantization_of, quantized_part
from ..explain import warn_of_kernels
from ..fused_activations import fuse_inputs, separate_inputs
from ..left_dense import choose_layers, weights_read
from ..module_patterns import check_pass2
from ..quantizer import VQHfQuantizer
from ..residual import place_pass2
from .encode import (
    dense_dtype,
    encode_layers,
    leave_fast_path,
    leave_out_automatic,
    nothing_to_quantize,
    restore_fast_path,
)

Module = TypeVar("Module", bound=nn.Module)

# target_bits sets calibration, too: the error names what was given.
_NEED_A_LANGUAGE_MODEL = ("target_bits", "calibration", "activations", "embeddings")


def quantize_model(model: Module, config: VQConfig | None = None) -> Module:
    """Quantize the linear layers of a module that is in memory, in place.

    The result is that of `from_pretrained(..., quantization_config=config)`, bit for bit, without
    a file to load: for a model with a merged adapter, one that was read from a GGUF file, a model
    of timm, or a module of yours. Layers are encoded on the device where their weights are. After
    Ctrl-C, those before it are codes, and `dequantize` makes them dense again. Models of
    Transformers and diffusers keep their `save_pretrained`; others have `save_quantized`.

    Args:
        model: of Transformers, or any other module that holds linear layers.
        config: what to quantize and how; None is `VQConfig()`. `calibration`, `activations`,
            `target_bits` and `embeddings` need a model of Transformers; others are quantized
            without data.

    Returns:
        The model itself.

    Raises:
        VQConfigError: the model is quantized already, is not whole in memory, holds adapters, or
            has no layer to quantize; or the config needs another kind of model.
        VQSchemeError: no layer fits its scheme, or one that `layers` names does not.
        VQFormatError: a weight is not finite. The model is unchanged then.
    """
    config = VQConfig() if config is None else config
    if not isinstance(config, VQConfig):
        raise VQConfigError(
            f"quantize_model needs a VQConfig; got {type(config).__name__}. Write "
            'hf_vq.quantize_model(model, VQConfig("vq-4")).'
        )
    _check(model)
    patches.apply(patches.BACKEND)
    if isinstance(model, PreTrainedModel):
        with _evaluating(model):
            VQHfQuantizer(config, pre_quantized=False).quantize(model)
    elif is_of_diffusers(model):
        from .diffusers_quantizer import VQDiffusersQuantizer

        VQDiffusersQuantizer(config, pre_quantized=False).quantize(model)
    else:
        _quantize_module(model, copy.deepcopy(config))
    return model


def dequantize(model: Module, dtype: torch.dtype | None = None) -> Module:
    """Put dense layers back, in place.

    Args:
        dtype: of their weights; None is the model's.

    Returns:
        The model itself.

    Raises:
        VQConfigError: hf_vq did not quantize the model, or its codes are offloaded.
    """
    whole: Any = model
    if getattr(model, "hf_quantizer", None) is not None:
        if is_of_diffusers(model):  # its method takes no dtype
            whole.hf_quantizer.dense_dtype = dtype
            whole.dequantize()
        else:
            whole.dequantize(*([] if dtype is None else [dtype]))
        return model
    if not vq_modules(model):
        raise VQConfigError(f"{type(model).__name__} holds no layers of hf_vq.")
    if "quantization_config" not in vars(model) and quantized_part(model) is not None:
        quantization_of(model)
    for part in _parts_with_files(model).values():
        patches.restore(part, "save_pretrained")
    separate_inputs(model)
    restore_modules(model, dtype or dense_dtype(model))
    restore_fast_path(model)
    vars(model).pop("quantization_config", None)  # an interrupted model has none
    return model


def prepare(model: nn.Module, config: VQConfig) -> None:
    """Give a module whose layers hold all their tensors what it needs to run and to be saved."""
    leave_fast_path(model)
    fuse_inputs(model)
    warn_of_kernels(model)
    model.quantization_config = config
    for name, part in _parts_with_files(model).items():
        patches.override(part, "save_pretrained", partial(_refuse_to_save, name))


def _quantize_module(model: nn.Module, config: VQConfig) -> None:
    leave_out_automatic(config, f"{type(model).__name__} is no model of Transformers")
    for option in _NEED_A_LANGUAGE_MODEL:
        if getattr(config, option) is not None:
            raise VQConfigError(
                f"{option} needs a model of Transformers, and {type(model).__name__} is none: "
                f"leave it out."
            )
    if config.leaves_out_second_passes():
        raise VQConfigError('pass2="absent" is for loading: leave it out.')
    config.provenance = None
    wanted = choose_layers(model, config, [], [*_sharing(model), *weights_read(model)])
    if not wanted:
        raise nothing_to_quantize(model, config)
    names = model.state_dict(keep_vars=True)
    if taken := sorted(shared_names(model, wanted, config.seed) & set(names)):
        raise VQConfigError(
            f"{type(model).__name__}.{taken[0]} has the name of a tensor that codes share: rename "
            "it."
        )
    two = [name for name, scheme in wanted.items() if scheme.two_passes]
    check_pass2(config.pass2, two, model, config.scheme_name)
    kinds = Counter(next(model.get_submodule(name).parameters()).dtype for name in wanted)
    dtype = str(kinds.most_common(1)[0][0]).removeprefix("torch.")
    errors: dict[str, float] = {}
    shared = encode_layers(model, wanted, config, Progress("", 0), errors)
    stored_files.check_values(model)
    config.provenance = record(model, errors, shared, {"dtype": dtype})
    set_activations_bits(model, config.activations_bits)
    prepare(model, config)
    if config.pass2 is not None:
        place_pass2(model, config.pass2)
    train(vq_modules(model), config.trainable or ())


def _check(model: nn.Module) -> None:
    """Raise if a module cannot be quantized in place."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise VQConfigError(
            f"quantize_model needs an nn.Module; got {kind}. Of a pipeline, give one of its models."
        )
    loader = getattr(model, "hf_quantizer", None)
    found = getattr(getattr(loader, "quantization_config", None), "quant_method", QUANT_METHOD)
    method = str(getattr(found, "value", found))
    # Read from a GGUF file, a model is dense unless its layers are in `packed_modules`.
    if vq_modules(model) or (loader and (method != "gguf" or getattr(loader, "packed_modules", 0))):
        cure = "load the original, or dequantize it first"
        if method == "gguf":
            cure = "load it with quantization_config=GgufConfig(dequantize=True)"
        raise VQConfigError(f"{kind} is quantized already, by {method}: {cure}.")
    if convertible(model) or holds_experts(model):
        raise VQConfigError(
            f"{kind} is itself a layer, and cannot be replaced in place: give the module that "
            "holds it, for example torch.nn.Sequential(layer)."
        )
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None and any(isinstance(m, tuners.BaseTunerLayer) for m in model.modules()):
        raise VQConfigError(
            f"{kind} holds adapters of PEFT: merge them first (merge_and_unload), or quantize the "
            "model and add adapters then."
        )


def is_of_diffusers(model: nn.Module) -> bool:
    """True for a model of diffusers."""
    library = sys.modules.get("diffusers.models.modeling_utils")
    return library is not None and isinstance(model, library.ModelMixin)


def _sharing(model: nn.Module) -> list[str]:
    """Names of the linear layers whose weight other modules have, too, such as a tied head."""
    owners = Counter(
        id(parameter)
        for module in model.modules()  # each once, under however many names
        for parameter in {id(p): p for p in module._parameters.values()}.values()
        if parameter is not None
    )
    return [
        name
        for name, layer in candidates(model)
        if any(
            owners[id(parameter)] > 1
            for key, parameter in layer._parameters.items()
            if key != "bias" and parameter is not None
        )
    ]


def _parts_with_files(model: nn.Module) -> dict[str, nn.Module]:
    """The modules inside of one, and itself, that hold codes and have a `save_pretrained`, which
    would not know what layers share."""
    return {
        name: part
        for name, part in model.named_modules()
        if callable(getattr(type(part), "save_pretrained", None)) and vq_modules(part)
    }


def _refuse_to_save(name: str, *arguments: Any, **options: Any) -> None:
    if not name:
        raise VQError("save_pretrained of this class does not know codes: hf_vq.save_quantized.")
    steps = (f".{step}" if step.isidentifier() else f"[{step}]" for step in name.split("."))
    raise VQError(
        f"{name} was quantized as a part of another module, and its config.json would not say so: "
        "save the whole with hf_vq.save_quantized, or quantize the part by itself: "
        f"hf_vq.quantize_model(model{''.join(steps)})."
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model without dropout, and leave its modules in the mode that they had."""
    modes = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
