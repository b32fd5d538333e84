"""Tensor parallelism: how the stored tensors of a layer are split over ranks.

colwise   out_features are split: rows of codes and scales; everything else is whole everywhere
rowwise   in_features are split: a slice of every row's codes, scales and signs or diagonal. It must
          hold whole bytes, whole scale groups and whole rotation blocks.
"""

from __future__ import annotations

from typing import Any

from transformers.quantizers import HfQuantizer

from ..errors import VQConfigError, VQSchemeError
from ..formats.catalog import LinearScheme
from ..formats.packing import packed_size
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from ..nn.experts import VQExperts
from ..nn.linear import VQLinear
from ..nn.published import PublishedLinear
from ..nn.replace import vq_modules

CAN_SPLIT = hasattr(HfQuantizer, "update_parallel_plan")
"""Whether this Transformers asks how the stored tensors are split: 5.23 and later."""

_SPLIT_BY_ROW = ("weight", "vq_scale", "vq_codes_2", "vq_scale_2", "vq_step", "vq_zero", "bias")
_COLWISE = ("colwise", "colwise_rep", "colwise_gather_output")
_ROWWISE = ("rowwise", "rowwise_rep", "rowwise_split_input")
_CURE = 'Load it with device_map="auto", or on one device.'


def ranks(model: Any) -> int:
    """Number of devices that will share each layer."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    return int(getattr(config, "tp_size", None) or 1)


def split_plan(model: Any, plan: dict[str, str]) -> None:
    """Add the styles of the stored tensors to a tensor-parallel `plan`, in place.

    Raises:
        VQConfigError: a layer cannot be split; only where there are ranks to split it over.
    """
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    size = ranks(model)
    for name, module in vq_modules(model).items():
        key = replace_layer_number_by_wildcard(name)
        style = plan.get(key)
        expert_styles = [plan.get(f"{key}.{weight}") for weight in module.weights()]
        if isinstance(module, VQExperts):
            if size > 1 and (style or any(expert_styles)):
                raise VQConfigError(
                    f"{name}: quantized experts cannot be split over {size} devices. {_CURE}"
                )
            continue
        if style is None:
            continue
        if isinstance(module, PublishedLinear):
            if size > 1:
                raise VQConfigError(
                    f"{name}: a layer of {module.layout.name()} cannot be split over {size} "
                    f"devices. {_CURE}"
                )
            continue
        if size > 1:
            check_split(module, name, style, size)
            module.input_parts = size if style in _ROWWISE else 1
        # Its op reads plain tensors, not DTensors.
        module._hf_quantized_needs_local_tp = True  # type: ignore[assignment]
        for attribute in module._parameters:
            whole = whole_everywhere(module, attribute, style)
            if whole:
                plan[f"{key}.{attribute}"] = "replicate"


def whole_everywhere(module: VQLinear, attribute: str, style: str) -> bool:
    """True if every rank keeps all of a stored tensor."""
    if style in _COLWISE:
        return attribute not in _SPLIT_BY_ROW
    if isinstance(module.scheme, QoQScheme):  # a row's scale, and its zero
        return attribute == "vq_scale" or (attribute == "vq_zero" and not module.scheme.group)
    if attribute.startswith("vq_scale"):
        return module.scheme.scale_group == 0
    return attribute.startswith("vq_codebook") or attribute == "vq_rotation"


def check_split(module: VQLinear, name: str, style: str, size: int, cure: str = _CURE) -> None:
    """Raise if `size` ranks cannot each hold their part of a layer.

    Args:
        cure: what to do instead, for the error.

    Raises:
        VQConfigError: says what does not divide.
    """
    scheme = module.scheme
    problem = None
    if style not in (*_COLWISE, *_ROWWISE):
        problem = f"the style {style!r} is not supported"
    elif isinstance(scheme, VQScheme) and scheme.codebook == "tile":
        problem = "its codebooks belong to tiles of the whole matrix"
    elif style in _ROWWISE:
        problem = _rowwise_problem(scheme, module.in_features, size)
    if problem:
        raise VQConfigError(f"{name} cannot be split over {size} devices: {problem}. {cure}")


def _rowwise_problem(scheme: LinearScheme, whole: int, size: int) -> str | None:
    if whole % size:
        return f"in_features={whole} does not divide by {size}"
    part = whole // size
    if isinstance(scheme, QoQScheme):
        return _element_problem(scheme, whole, part)
    if scheme.streams > 1:
        return "its residual stages store their codes in consecutive streams"
    try:
        same_group = scheme.group(part) == scheme.group(whole) or scheme.scale_group == 0
        same_block = scheme.block(part) == scheme.block(whole)
    except VQSchemeError:
        return f"{part} input features do not fit the scheme"
    if not same_group:
        return f"{part} input features do not hold whole scale groups of {scheme.group(whole)}"
    if not same_block:
        return f"{part} input features do not hold whole rotation blocks of {scheme.block(whole)}"
    bytes_of = packed_size(part // scheme.vector_size, scheme.entry_bits)
    if bytes_of * size != packed_size(whole // scheme.vector_size, scheme.entry_bits) or part % 8:
        return f"{part} input features do not hold whole bytes"
    return None


def _element_problem(scheme: QoQScheme, whole: int, part: int) -> str | None:
    """Each rank rounds its part of a token separately, with its own scale."""
    group = scheme.group_of(whole)
    if scheme.group and part % group:
        return f"{part} input features do not hold whole groups of {group}"
    return f"{part} input features do not hold whole bytes" if part % 2 else None
