"""`Snapshot`: whether a model is still the one that was traced.

Asked at every token, so all loops are those of C: over dicts that modules own for their life, and
over the tensors and values in them. What is written into a tensor does not matter: programs read
tensors where they lie, at every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_forward = attrgetter("forward")
_address = Tensor.data_ptr
_PLAIN = (bool, int, float, str)
_OBJECTS = (type(None), torch.dtype, PreTrainedConfig)  # the same one, or another
_OURS = __name__.partition(".")[0] + "."


def problem(model: nn.Module) -> str | None:
    """Why a model cannot be traced, as long as it stays unchanged; or None."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "all modules have hooks"
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("peft."):
            return f"{name} is an adapter of PEFT"
        if module is not model and "forward" in module.__dict__:
            return f"the forward of {name} was replaced"
        if module is not model and has_hooks(module):
            return f"{name} has hooks"
        if module.training:
            return f"{name or 'the model'} is in training mode"
    if any(tensor.device.type != "cpu" for tensor in chain(model.parameters(), model.buffers())):
        return "parts of the model are not on the CPU"
    return None


def has_hooks(module: nn.Module) -> bool:
    """True if a module has hooks that are not Transformers' own."""
    return any(map(_does_something, _hooks_of(module)))


def package_of(function: Any) -> str:
    """The package in which a function was written, whatever name `functools.wraps` gave it."""
    function = getattr(function, "func", function)  # a partial
    function = getattr(function, "__func__", function)  # a bound method
    module = getattr(function, "__globals__", {}).get("__name__")
    return str(module or getattr(function, "__module__", "")).partition(".")[0]


def _hooks_of(module: nn.Module) -> list[Any]:
    return [hook for name in _HOOKS for hook in getattr(module, name).values()]


def _does_something(hook: Any) -> bool:
    """True if a hook is not Transformers' own, which stays after a call with hidden states."""
    return getattr(hook, "__name__", "") != "output_capturing_hook"


class Snapshot:
    """Modules, hooks, tensors, attributes and configs of a model as they are now."""

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
        self._addresses = [*map(_address, self._present)]
        self._configs = [*_configs_of(modules)]
        found = [
            (vars(owner), name, value)
            for owner in (*self._modules, *self._configs)
            for name, value in _attributes(owner)
        ]
        plain = [each for each in found if type(each[2]) in _PLAIN]
        fixed = [each for each in found if type(each[2]) not in _PLAIN]
        self._plain = [owner for owner, _, _ in plain], [name for _, name, _ in plain]
        self._values = [value for _, _, value in plain]
        self._fixed = [owner for owner, _, _ in fixed], [name for _, name, _ in fixed]
        self._objects = [value for _, _, value in fixed]
        self._nested = [value for value in self._objects if type(value) in (list, tuple, dict)]
        self._contents = deepcopy(self._nested)
        self._own = {
            name: deepcopy(value)
            for name, value in _attributes(model)
            if type(value) in _PLAIN or value is None or _is_nested(value)
        }
        self._kinds = [*{type(module): None for module in modules}]
        self._forwards = [*map(_forward, self._kinds)]

    def is_current(self, model: PreTrainedModel) -> bool:
        """True if nothing was replaced, moved, hooked or put into training mode.

        Args:
            model: of which this is.
        """
        tensors: list[Any] = [*chain.from_iterable(map(dict.values, self._tensors_of))]
        return (
            [*chain.from_iterable(map(dict.values, self._hooks))] == self._hook_list
            and not torch_module._global_forward_hooks
            and not torch_module._global_forward_pre_hooks
            and len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and [*chain.from_iterable(map(dict.values, self._children))] == self._child_list
            and [*map(_address, self._present)] == self._addresses
            and [*map(dict.get, *self._plain)] == self._values  # `training`, too
            and all(map(is_, map(dict.get, *self._fixed), self._objects))
            and self._nested == self._contents
            and self._own == {name: vars(model).get(name) for name in self._own}
            and [*map(_forward, self._kinds)] == self._forwards
            and not any("forward" in owner for owner in self._owners)
        )


def _configs_of(modules: list[nn.Module]) -> Iterator[PreTrainedConfig]:
    """The configs of modules, and those inside of them, each once."""
    left = [value for m in modules for value in vars(m).values()]
    known: set[int] = set()
    while left:
        config = left.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in known:
            known.add(id(config))
            yield config
            left += vars(config).values()


def _attributes(owner: nn.Module | PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Attributes that a forward may read of a module or a config, next to tensors and modules."""
    if type(owner).__module__.startswith(_OURS):  # all else in it is as it was made
        yield "training", owner.training
        yield "second", vars(owner).get("second")  # a second pass is placed later
        return
    for name, value in vars(owner).items():
        if name.startswith("_") and isinstance(owner, nn.Module):
            continue
        plain = type(value) in _PLAIN or isinstance(value, _OBJECTS)
        if plain or callable(value) or _is_nested(value):
            yield name, value


def _is_nested(value: Any) -> bool:
    """True of lists and dicts of plain values."""
    if isinstance(value, (list, tuple)):
        return all(x is None or type(x) in _PLAIN or _is_nested(x) for x in value)
    return isinstance(value, dict) and _is_nested([*value.keys(), *value.values()])
