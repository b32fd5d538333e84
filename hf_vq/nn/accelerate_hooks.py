"""Hooks of accelerate: what brings a module's offloaded tensors for a forward pass."""

from __future__ import annotations

from typing import Any

from torch import nn


def hook_of(module: nn.Module) -> Any:
    """The hook of accelerate that brings the offloaded tensors of one module; None if none does."""
    hook = getattr(module, "_hf_hook", None)
    parts = getattr(hook, "hooks", [hook])
    return next((p for p in parts if getattr(p, "weights_map", None) is not None), None)
