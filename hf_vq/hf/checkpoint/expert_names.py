"""Experts that a checkpoint stores one by one, while Transformers fuses them into one tensor.

Transformers knows: its conversions of a Mixtral say that `experts.*.w1.weight` and
`experts.*.w3.weight` become `experts.gate_up_proj`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from ...nn.expert_list import Parts, VQExpertList
from ...nn.experts import holds_experts
from .conversions import renamer_to

_USUAL: Parts = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def part_names(conversions: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    """Names of one expert's matrices by fused tensor, as the conversions of a model have them."""
    found = dict(_USUAL)
    for conversion in conversions:
        if not isinstance(conversion, WeightConverter) or len(conversion.target_patterns) != 1:
            continue
        target = conversion._original_target_patterns
        target = target if isinstance(target, str) else target[0]
        sources = conversion._original_source_patterns
        names = [sources] if isinstance(sources, str) else list(sources)
        fused = target.rpartition(".")[2]
        if fused in _USUAL and all(".*." in name and name.endswith(".weight") for name in names):
            found[fused] = tuple(name.split(".")[-2] for name in names)
    return found


def listed_names(model: nn.Module, parts: Parts) -> dict[str, list[str]]:
    """Names that single experts' matrices would have, by the module that holds the experts."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if not holds_experts(module) or not hasattr(module, "num_experts"):
            continue
        used = [part for fused in _USUAL if hasattr(module, fused) for part in parts[fused]]
        count = int(module.num_experts)
        found[name] = [f"{name}.{index}.{part}" for index in range(count) for part in used]
    return found


def list_stored_experts(
    model: Any, stored: Iterable[str], make: Callable[[str, int, int], nn.Module]
) -> None:
    """Put a `VQExpertList` where a checkpoint of our format holds experts one by one.

    Args:
        stored: names in the checkpoint of tensors that are no floats.
        make: as `VQExpertList` takes it.
    """
    if not any(holds_experts(module) for module in model.modules()):
        return
    conversions = get_model_conversion_mapping(model)
    parts = part_names(conversions)
    lists = listed_names(model, parts)
    owners = {f"{one}.weight": name for name, listed in lists.items() for one in listed}
    rename = renamer_to(conversions, model, owners)
    for name in {owners.get(rename(one)) for one in stored} - {None}:
        assert name is not None
        with torch.device("meta"):
            experts = VQExpertList(model.get_submodule(name), parts, make, name)
        model.set_submodule(name, experts)
