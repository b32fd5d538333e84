"""`Snapshot`: whether a model is still the one that was traced.

Asked at every token, so all loops are those of C: over dicts that modules own for their life, and
over the tensors in them. Addresses and versions of all tensors are compared after each prompt; from
one token to the next those of some, which tell of a model that was moved, loaded or trained.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_version, _training = attrgetter("_version"), attrgetter("training")
_address = Tensor.data_ptr
_SOME = 16  # tensors


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

    def __init__(self, model: nn.Module) -> None:
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
        present = [tensor for tensor in self._tensors if tensor is not None]
        self._all = _Tensors(present)
        self._some = _Tensors(present[:: max(len(present) // _SOME, 1)])

    def is_current(self, whole: bool = True) -> bool:
        """True if nothing was replaced, moved, written to, hooked or put into training mode.

        Args:
            whole: look at what was written to in all tensors, not in some.
        """
        tensors: list[Any] = [*chain.from_iterable(map(dict.values, self._tensors_of))]
        return (
            [*chain.from_iterable(map(dict.values, self._hooks))] == self._hook_list
            and not torch_module._global_forward_hooks
            and not torch_module._global_forward_pre_hooks
            and len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and [*chain.from_iterable(map(dict.values, self._children))] == self._child_list
            and (self._all if whole else self._some).are_current()
            and not any(map(_training, self._modules))
            and not any("forward" in owner for owner in self._owners)
        )


class _Tensors:
    """Addresses and versions of tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = [*map(_version, self._versioned)]
        self._addresses = [*map(_address, self._tensors)]

    def are_current(self) -> bool:
        return [*map(_version, self._versioned)] == self._versions and (
            [*map(_address, self._tensors)] == self._addresses
        )
