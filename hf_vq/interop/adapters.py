"""PEFT's adapters on codes: what PEFT asks of a dense weight, a `VQLinear` decodes for it.

PEFT's layers compute in addition to the base layer, which needs nothing from here. Some also read
or change `base_layer.weight`, where they would find codes; 8-bit codes have a shape that they would
change:

    merge, unmerge                     change it
    making an adapter                  PiSSA, OLoRA change it, DoRA and LoHa read it
    forward, get_delta_weight          DoRA, LoHa, LoKr, .. read it

PEFT knows a quantized library by its name, and has no registry for others. So its adapters on our
layers get these methods from here; each calls PEFT's own while `dense_weight` is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..errors import VQBackendError
from ..nn.embedding import VQEmbedding, VQTiedHead
from ..nn.experts import VQExperts
from ..nn.linear import VQLinear
from ..nn.quantized_module import QuantizedModule
from ..nn.trained import unfreeze
from .dense_weight import Encoded, dense_weight, viewed

logger = logging.get_logger("hf_vq")

_CODED = (VQLinear, VQExperts, VQEmbedding, VQTiedHead)
_STATE = "_codes_before_merging"  # attribute of an adapter's layer
_collected: ContextVar[dict[str, Encoded] | None] = ContextVar("_collected", default=None)


@dataclass
class _Unmerged:
    """Codes of a layer from before adapters were merged into it.

    Args:
        tensors: parameters by attribute, and the bias.
        after: the codes that merging stored. If the layer has others, somebody else changed them.
    """

    tensors: dict[str, nn.Parameter]
    after: Tensor


def decoding_for_adapters(inject: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap PEFT's `BaseTuner.inject_adapter`, through which every adapter comes to a model: made,
    loaded, or added as a second one."""

    @wraps(inject)
    def inject_adapter(
        tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **options: Any
    ) -> Any:
        if not any(isinstance(module, _CODED) for module in model.modules()):
            return inject(tuner, model, adapter_name, *args, **options)
        _check(model, tuner.peft_config[adapter_name])
        names: dict[str, Callable[..., Any]] = {
            "merge_adapter": _merge_all,
            "merge_and_unload": _merge_all,
            "_create_and_replace": _made,
        }
        for name, function in names.items():
            if hasattr(type(tuner), name):
                tuner.__dict__[name] = partial(function, tuner, name)
        try:
            with _in_one_line("adapters were made"):
                found = inject(tuner, model, adapter_name, *args, **options)
            if not tuner.peft_config[adapter_name].inference_mode and unfreeze(model):
                logger.warning(
                    "Scales or codebooks train next to the adapter. PEFT's checkpoints hold the "
                    "adapter alone: model.unload().save_pretrained(...) saves the others. Without "
                    "the adapter, the model is not the one from before training."
                )
            return found
        finally:
            del tuner.__dict__["_create_and_replace"]

    return inject_adapter


def _check(model: nn.Module, config: Any) -> None:
    """Raise if a config asks to train what is stored as codes; PEFT would skip it without a word,
    or fail on its dtype."""
    if getattr(config, "init_lora_weights", None) == "loftq":
        raise VQBackendError(
            "init_lora_weights='loftq' quantizes a dense model itself, by bitsandbytes, and this "
            "model has codes. Make the adapter without it, then call "
            "hf_vq.replace_lora_weights_loftq(peft_model)."
        )
    tokens = getattr(config, "trainable_token_indices", None) or {}
    embeddings = [n for n, module in model.named_modules() if isinstance(module, VQEmbedding)]
    rows = list(tokens) if isinstance(tokens, dict) else embeddings
    requested = {
        "target_parameters": getattr(config, "target_parameters", None) or [],
        "modules_to_save": getattr(config, "modules_to_save", None) or [],
        "trainable_token_indices": rows if tokens else [],
    }
    for name, module in model.named_modules():
        if not isinstance(module, _CODED):
            continue
        weights = module.weights() if isinstance(module, QuantizedModule) else ["weight"]
        for option, entries in requested.items():
            ends = [f"{name}.{w}" for w in weights] if option == "target_parameters" else [name]
            found = [e for e in entries for end in ends if f".{end}".endswith(f".{e}")]
            if found and not (option == "trainable_token_indices" and isinstance(module, VQLinear)):
                last = name.rpartition(".")[2]
                cure = f"leave it dense: VQConfig(modules_to_not_convert=[{last!r}])"
                if isinstance(module, (VQEmbedding, VQTiedHead)):
                    cure = "quantize without embeddings"
                elif isinstance(module, VQLinear):
                    cure = f"use target_modules, or {cure}"
                raise VQBackendError(
                    f"{option} names codes ({ends[0]}), which do not train: {cure}."
                )


def _made(
    tuner: Any, name: str, config: Any, adapter: str, target: Any, place: str, parent: Any,
    *args: Any, **options: Any,
) -> None:  # fmt: skip
    """Call PEFT's `_create_and_replace` for one layer, then give the adapter our methods."""
    base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
    create = partial(
        getattr(type(tuner), name), tuner, config, adapter, target, place, parent, *args, **options
    )
    if not isinstance(base, (VQLinear, VQEmbedding, VQTiedHead)):
        create()
        return
    if not isinstance(base, VQLinear) or _needs_no_weight(config):
        create()
    else:
        with dense_weight(base, encode=True) as encoded:
            create()
        _report(base, encoded, "adapters were made")
    layer = getattr(parent, place)
    if not isinstance(base, VQLinear):
        layer.__dict__["merge"] = partial(_refuse, layer)
        return
    methods: dict[str, Callable[..., Any]] = {"merge": _merge, "unmerge": _unmerge}
    if getattr(layer, "lora_variant", None) != {}:  # LoRA as such computes without the weight
        methods |= {"forward": _read, "get_delta_weight": _read}
    for method, function in methods.items():
        if hasattr(type(layer), method):
            layer.__dict__[method] = partial(function, layer, method)


def _needs_no_weight(config: Any) -> bool:
    """True if it is LoRA as such, which is made without a look at the weight."""
    kind = getattr(config, "peft_type", None)
    if str(getattr(kind, "value", kind)) != "LORA" or not is_dataclass(config):
        return False
    variants = [field.name for field in fields(config) if field.metadata.get("is_lora_variant")]
    if any(getattr(config, name, None) for name in ["use_dora", *variants]):
        return False
    return getattr(config, "init_lora_weights", None) in (True, False, "gaussian")


def _read(layer: Any, method: str, *args: Any, **options: Any) -> Any:
    """`forward` or `get_delta_weight` of PEFT's class, with the dense weight at hand."""
    found, dtype = getattr(type(layer), method), torch.float32
    if method == "forward":
        dtype = args[0].dtype  # of the input: PEFT multiplies both
        if layer.disable_adapters or layer.merged:
            return found(layer, *args, **options)
    with dense_weight(layer.get_base_layer(), dtype=dtype):
        return found(layer, *args, **options)


def _merge(
    layer: Any, method: str, safe_merge: bool = False, adapter_names: list[str] | None = None
) -> None:
    """PEFT's `merge`, then encode the sum. Those merged before are merged again from the codes
    without them, so that nothing is rounded twice."""
    base, merge = layer.get_base_layer(), type(layer).merge
    before = list(layer.merged_adapters)
    wanted = layer.active_adapters if adapter_names is None else adapter_names
    # The first: within another method of PEFT, whose end encodes.
    if viewed(base) or set(wanted) <= set(before):
        merge(layer, safe_merge=safe_merge, adapter_names=adapter_names)
        return
    then = _taken(base)
    state: _Unmerged | None = layer.__dict__.get(_STATE)
    if not before:
        state = _Unmerged(then, base._parameters["weight"])
    elif _is_last(state, base) and set(before) <= set(layer._get_available_adapters()):
        assert state is not None
        _restore(base, state.tensors)
        layer.merged_adapters.clear()
        wanted = before + [name for name in wanted if name not in before]
    else:  # what is there now cannot be made again
        state = None
    try:
        with dense_weight(base, encode=True) as encoded:
            merge(layer, safe_merge=safe_merge, adapter_names=wanted)
    except BaseException:
        layer.merged_adapters[:] = before
        _restore(base, then)
        raise
    if state is not None:
        state.after = base._parameters["weight"]
        layer.__dict__[_STATE] = state
    _report(base, encoded, "adapters were merged")


def _unmerge(layer: Any, method: str) -> None:
    """PEFT's `unmerge`, and the very codes from before."""
    base, unmerge = layer.get_base_layer(), type(layer).unmerge
    if viewed(base):
        unmerge(layer)
        return
    state: _Unmerged | None = layer.__dict__.pop(_STATE, None)
    exact = _is_last(state, base)
    with dense_weight(base, encode=not exact) as encoded:
        unmerge(layer)
    if exact:
        assert state is not None
        _restore(base, state.tensors)
    _report(base, encoded, "adapters were taken out")


def _is_last(state: _Unmerged | None, base: VQLinear) -> bool:
    return state is not None and base._parameters["weight"] is state.after


def _taken(base: VQLinear) -> dict[str, Any]:
    """The parameters of a layer. Merging replaces those of codes, but changes a bias in place."""
    taken: dict[str, Any] = dict(base._parameters)
    if taken.get("bias") is not None:
        taken["bias"] = taken["bias"].detach().clone()
    return taken


def _restore(base: VQLinear, taken: dict[str, Any]) -> None:
    device = base._parameters["weight"].device  # type: ignore[union-attr]
    for name, tensor in taken.items():
        if name == "bias":
            if tensor is not None:
                base._parameters["bias"].data = tensor.to(device)  # type: ignore[union-attr]
            continue
        if tensor is not None and tensor.device != device:  # the model was moved since
            trains = tensor.requires_grad
            tensor = nn.Parameter(tensor.detach().to(device), requires_grad=trains)
        base._parameters[name] = tensor


def _refuse(layer: Any, *args: Any, **options: Any) -> None:
    raise VQBackendError(
        f"no adapter is merged into {type(layer.get_base_layer()).__name__}, whose rows are "
        "quantized. Keep the adapter unmerged, or quantize without `embeddings`."
    )


def _merge_all(tuner: Any, method: str, *args: Any, **options: Any) -> Any:
    """`merge_adapter` or `merge_and_unload` of PEFT's class, with one line for all layers."""
    with _in_one_line("adapters were merged"):
        return getattr(type(tuner), method)(tuner, *args, **options)


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Collect what `_report` gets within, and log it at the end."""
    if _collected.get() is not None:
        yield
        return
    found: dict[str, Encoded] = {}
    token = _collected.set(found)
    try:
        yield
    finally:
        _collected.reset(token)
    if found:
        worst = max(found, key=lambda where: found[where].error)
        logger.warning(
            "hf_vq: %s, and their layers encoded again (%d). Relative squared error: %.2e on "
            "average, %.2e at most (%s). Left of the change: %.0f %% on average.",
            what, len(found), fmean(one.error for one in found.values()), found[worst].error, worst,
            100 * fmean(one.kept for one in found.values()),
        )  # fmt: skip


def _report(base: VQLinear, encoded: list[Encoded], what: str) -> None:
    with _in_one_line(what):
        found = _collected.get()
        assert found is not None
        found.update((base.where, one) for one in encoded)
