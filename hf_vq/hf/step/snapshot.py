"""`Snapshot`: whether a model is still the one that was traced.

Asked at every token, so all loops are those of C: over dicts that modules own for their life, and
over the tensors and plain values in them.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_version, _forward = attrgetter("_version"), attrgetter("forward")
_address = Tensor.data_ptr
_PLAIN = (bool, int, float, str)


def problem(model: nn.Module) -> str | None:
    """Why a model cannot be traced, as long as it stays unchanged; or None."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("peft."):
            return f"{name} is an adapter of PEFT"
        if module is not model and "forward" in module.__dict__:
            return f"the forward of {name} was replaced"
        if module is not model and any(map(_does_something, _hooks_of(module))):
            return f"{name} has hooks"
        if module.training:
            return f"{name or 'the model'} is in training mode"
    if any(tensor.device.type != "cpu" for tensor in chain(model.parameters(), model.buffers())):
        return "parts of the model are not on the CPU"
    return None


def _hooks_of(module: nn.Module) -> list[Any]:
    return [hook for name in _HOOKS for hook in getattr(module, name).values()]


def _does_something(hook: Any) -> bool:
    """True if a hook is not Transformers' own, which stays after a call with hidden states."""
    return getattr(hook, "__name__", "") != "output_capturing_hook"


class Snapshot:
    """Modules, hooks, and the tensors of a model as they are now."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.modules())
        self._modules = modules[1:]  # the model itself would live as long as what it holds
        self._owners = [module.__dict__ for module in self._modules]
        self._hooks = [getattr(module, hooks) for module in self._modules for hooks in _HOOKS]
        self._hook_list = [*chain.from_iterable(map(dict.values, self._hooks))]
        self._children = [module._modules for module in modules]
        self._tensors_of: list[dict[str, Any]] = [
            d for m in modules for d in (m._parameters, m._buffers) if d
        ]
        self._child_list = [*chain.from_iterable(map(dict.values, self._children))]
        self._tensors: list[Any] = [*chain.from_iterable(map(dict.values, self._tensors_of))]
        present = {id(tensor): tensor for tensor in self._tensors if tensor is not None}
        self._present = list(present.values())
        self._versioned = [tensor for tensor in self._present if not tensor.is_inference()]
        self._versions = [*map(_version, self._versioned)]
        self._addresses = [*map(_address, self._present)]
        plain = [
            (owner, key, value)
            for owner in (*self._owners, vars(model.config))
            for key, value in owner.items()
            if type(value) in _PLAIN
        ]
        self._plain = [owner for owner, _, _ in plain], [key for _, key, _ in plain]
        self._values = [value for _, _, value in plain]
        self._kinds = [*{type(module): None for module in modules}]
        self._forwards = [*map(_forward, self._kinds)]

    def is_current(self) -> bool:
        """True if nothing was replaced, moved, written to, hooked or put into training mode."""
        tensors: list[Any] = [*chain.from_iterable(map(dict.values, self._tensors_of))]
        return (
            [*chain.from_iterable(map(dict.values, self._hooks))] == self._hook_list
            and not torch_module._global_forward_hooks
            and not torch_module._global_forward_pre_hooks
            and len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and [*chain.from_iterable(map(dict.values, self._children))] == self._child_list
            and [*map(_version, self._versioned)] == self._versions
            and [*map(_address, self._present)] == self._addresses
            and [*map(dict.get, *self._plain)] == self._values  # `training`, too
            and [*map(_forward, self._kinds)] == self._forwards
            and not any("forward" in owner for owner in self._owners)
        )
