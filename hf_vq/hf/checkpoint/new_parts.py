"""Parts of a model that its checkpoint cannot have: those of another class than was saved."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_outside(model: Any, name: str) -> bool:
    """True for a module or parameter behind the base model: a head."""
    return model.base_model is not model and not name.startswith(f"{model.base_model_prefix}.")


def is_new(model: Any, name: str) -> bool:
    """True if a module or parameter may be absent because the checkpoint is of another class.

    These are heads, and parts of the base model that some classes leave out, such as BERT's pooler:
    a child with linear layers, but without embeddings or repeated blocks.
    """
    named = model.config.architectures
    if isinstance(named, list) and type(model).__name__ in named:
        return False
    if is_outside(model, name):
        return True
    base = model.base_model
    inside = name if base is model else name.removeprefix(f"{model.base_model_prefix}.")
    part = getattr(base, inside.partition(".")[0], None)
    if not isinstance(part, nn.Module) or part is base:
        return False
    kinds = list(part.modules())
    repeated = any(isinstance(module, (nn.Embedding, nn.ModuleList)) for module in kinds)
    return not repeated and any(isinstance(module, nn.Linear) for module in kinds)
