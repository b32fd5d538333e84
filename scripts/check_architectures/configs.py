"""Tiny configs of models."""

from __future__ import annotations

import dataclasses
from typing import Any

from fields import FIELDS, SIZES, UNSET
from transformers import CONFIG_MAPPING, PreTrainedConfig, TimmBackboneConfig


def tiny_config(model: Any) -> PreTrainedConfig:
    """A tiny config for a model's class. Raises what its config does."""
    return tiny(model.config_class(), FIELDS.get(model.__name__, {}))


def tiny(config: Any, given: dict[str, Any]) -> PreTrainedConfig:
    """A config made anew from tiny fields, so that what it derives from them follows.

    Args:
        config: with the sizes that a model has by default.
        given: fields that win, also over those of its class in FIELDS.
    """
    kind = type(config)
    default = kind()
    given = {**FIELDS.get(kind.__name__, {}), **given}
    made: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(config) if field.name[0] != "_"):
        stored = config.attribute_map.get(name, name)
        value = vars(config).get(stored)
        if isinstance(value, TimmBackboneConfig):  # without timm
            value = CONFIG_MAPPING["resnet"](out_indices=value.out_indices)
        if isinstance(value, PreTrainedConfig):
            made[name] = tiny(value, given.pop(name, {}))
        elif (found := tiny_value(name, value)) is not None:
            made[name] = found
        elif value != vars(default).get(stored):
            made[name] = value  # as the config around this one set it
    made |= layers(config, made) | rotary(config)
    if made.get("kv_lora_rank"):  # every head has its own keys
        made["num_key_value_heads"] = made["num_attention_heads"]
    made |= given
    indices = getattr(config, "out_indices", None)
    if indices != getattr(default, "out_indices", None):  # of layers that are still there
        last = made.get("num_hidden_layers", max(indices))
        made["out_indices"] = sorted({min(index, last) for index in indices})
    return kind(**made)


def tiny_value(name: str, value: Any) -> int | None:
    """A field's tiny value; None if it stays unchanged."""
    if value is None and name in UNSET:
        return SIZES[name]
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if name.endswith(("token_id", "token_index")):
        return 150 + value % 8 if value >= 150 else None
    return min(value, SIZES[name]) if name in SIZES and value > 0 else None


def layers(config: Any, made: dict[str, Any]) -> dict[str, Any]:
    """Fields for one layer of each kind, in the model's order, at most four."""
    number = next((n for n in ("num_hidden_layers", "n_layer", "num_layers") if n in made), None)
    kinds = getattr(config, "layer_types", None)
    if number is None or not isinstance(kinds, list):
        return {}
    kept = list(dict.fromkeys(kinds))[:4]
    kept = kept if len(kept) > 1 else kinds[:2]
    found: dict[str, Any] = {number: len(kept)}
    listed = config.attribute_map.get("layer_types", "layer_types")
    if listed in {field.name for field in dataclasses.fields(config)}:
        found[listed] = kept
    feed_forward = getattr(config, "mlp_layer_types", None)
    if isinstance(feed_forward, list):
        found["mlp_layer_types"] = [feed_forward[0], *feed_forward[-1:] * len(kept)][: len(kept)]
    return found


def rotary(config: Any) -> dict[str, Any]:
    """Sections of rotary embeddings, if there are any, for heads of 16 numbers."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    return {"rope_parameters": {**rope, "mrope_section": [2, 3, 3]}}
