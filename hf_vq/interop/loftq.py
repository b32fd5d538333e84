"""LoftQ for adapters on codes (Li et al., arXiv 2310.08659): what the codes lost begins in the
adapter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..errors import VQBackendError, VQFormatError
from ..nn.linear import VQLinear
from ..nn.replace import check_in_memory, vq_modules
from ..progress import Progress

_OVERSAMPLED, _ITERATIONS = 8, 4  # of the randomized SVD
_LARGEST = 0.5  # relative squared error: one bit a weight loses 1 - 2 / pi = .36


@torch.no_grad()
def replace_lora_weights_loftq(
    peft_model: nn.Module,
    model_path: str | os.PathLike[str] | None = None,
    adapter_name: str = "default",
    callback: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Let an adapter begin with the largest part of what the codes lost (LoftQ), in place.

        model = get_peft_model(quantized, LoraConfig(target_modules="all-linear"))
        hf_vq.replace_lora_weights_loftq(model)

    For W of the dense model and Q of the codes, the adapter's product is nearly the best of its
    rank for W - Q (a randomized SVD). This is PEFT's function of the same name for models of codes.
    It loads the dense model on the CPU, and is called before training. Merging into codes loses
    what they could not hold before.

    Args:
        peft_model: whose LoRA layers are on layers of codes; others stay unchanged.
        model_path: of the dense model that was encoded, without transforms (`rotate`, `smooth`);
            None: where the quantized one was read, if that is dense.
        adapter_name: of the adapter that changes.
        callback: gets the model and the name of the layer that just changed; if it returns False,
            the layer gets its adapter from before.

    Raises:
        VQBackendError: no such layer; an adapter that is merged, or is more than LoRA; no path of a
            dense model.
        VQFormatError: the dense model has no such weight, or another one than was encoded.
    """
    base: Any = peft_model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    layers = dict(_layers(base, adapter_name))
    if not layers:
        raise VQBackendError(
            f"no layer of codes has a LoRA adapter {adapter_name!r}. Make one with peft's "
            "get_peft_model first."
        )
    check_in_memory(vq_modules(base))
    dense = _dense_model(base, model_path)
    progress = Progress("LoftQ", len(layers))
    try:
        for name, layer in layers.items():
            progress.start(name)
            residual = _residual(dense, name, layer.get_base_layer())
            _replace(peft_model, name, layer, adapter_name, residual, callback)
            progress.done()
    finally:
        progress.close()


def _layers(base: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    for name, layer in base.named_modules():
        if adapter not in getattr(layer, "lora_A", ()):
            continue
        if not isinstance(layer.get_base_layer(), VQLinear):
            continue
        if layer.merged:
            raise VQBackendError(f"an adapter is merged into {name}: call unmerge_adapter first.")
        variants = getattr(layer, "lora_variant", {})
        if adapter in variants or not isinstance(layer.lora_A, nn.ModuleDict):
            kind = type(variants.get(adapter, layer)).__name__
            raise VQBackendError(
                f"the adapter of {name} is {kind}, which is more than LoRA: LoftQ is for LoRA as "
                "such, without use_dora and the like."
            )
        yield name, layer


def _dense_model(base: Any, path: str | os.PathLike[str] | None) -> nn.Module:
    path = path or getattr(base.config, "_name_or_path", "")
    if not path:
        raise VQBackendError("nobody knows where the dense model is: give its model_path.")
    if "quantization_config" in PreTrainedConfig.get_config_dict(path)[0]:
        raise VQBackendError(f"the model in {path} is quantized: give model_path of the dense one.")
    dense: nn.Module = type(base).from_pretrained(path, dtype="auto")
    return dense


def _residual(dense: nn.Module, name: str, base: VQLinear) -> Tensor:
    """W - Q of a layer [out, in], float32."""
    try:
        weight = dense.get_parameter(f"{name}.weight")
    except AttributeError:
        raise VQFormatError(f"the dense model has no {name}.weight.") from None
    rows: Tensor = weight.T if base.transposed else weight
    if rows.shape != (base.out_features, base.in_features):
        raise VQFormatError(
            f"{name}.weight of the dense model is {list(rows.shape)}, the codes say "
            f"{[base.out_features, base.in_features]}."
        )
    rows = rows.to(base.weight.device, torch.float32)
    residual = rows - base.decoded()
    if residual.square().sum() > _LARGEST * rows.square().sum():
        raise VQFormatError(
            f"{name}.weight of the dense model is not what the codes store: another model, or one "
            "that calibration transformed (rotate, smooth). Give model_path of the one that was "
            "encoded."
        )
    return residual


def _replace(
    model: nn.Module,
    name: str,
    layer: Any,
    adapter: str,
    residual: Tensor,
    callback: Callable[[nn.Module, str], bool] | None,
) -> None:
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    before = (a.clone(), b.clone()) if callback else None
    devices = [a.device] if a.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        rank = len(a)
        searched = min(rank + _OVERSAMPLED, *residual.shape)
        left, sizes, right = torch.svd_lowrank(residual, searched, _ITERATIONS)
    roots = sizes[:rank].sqrt()
    a.zero_()[: len(roots)] = roots[:, None] * right.T[:rank]
    b.zero_()[:, : len(roots)] = left[:, :rank] * roots / layer.scaling[adapter]
    if before is not None and callback is not None and not callback(model, name):
        a.copy_(before[0])
        b.copy_(before[1])
