"""Where the second pass of a layer is: beside the first, or in the CPU's memory (`slots`).

    resident       on the device of the first pass
    offload        in pinned memory; copied to the device whenever the layer computes
    prefill_only   the same, but a step of one token computes with the first pass alone
    absent         nowhere: the first pass alone is the layer

With `offload` the same kernel computes on the same bytes as with `resident`: equal results. Copies
may still wait in a queue when a forward has returned: `load_state_dict` waits for them, and whoever
else writes to offloaded tensors calls `torch.cuda.synchronize()` before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .offload_buffers import CudaTransfer, Served, Slots, Transfer

POLICIES = ("resident", "offload", "prefill_only", "absent")
OFFLOADED = ("codes_2", "scale_2")  # signs and codebooks are small, and shared by many layers

_pools: weakref.WeakValueDictionary[torch.device, Slots] = weakref.WeakValueDictionary()
_binding = threading.Lock()  # of layers to pools, by threads that call them


def transfer_to(device: torch.device) -> Transfer:
    """How bytes come to a device."""
    return CudaTransfer(device)


def pool_of(device: torch.device) -> Slots:
    """The slots of a device, which all models there share."""
    pool = _pools.get(device)
    if pool is None:
        pool = _pools[device] = Slots(transfer_to(device))
    return pool


def finish_copies() -> None:
    """Return when no copy waits in a queue any more: then pinned memory may be written to."""
    for pool in list(_pools.values()):
        pool.transfer.finish()


class SecondPass:
    """The second pass of one matrix that is offloaded.

    Args:
        prefill_only: leave it out where there is one token.
        expert: projection and number of an expert whose matrix this is.
    """

    def __init__(self, prefill_only: bool = False, expert: tuple[str, int] | None = None) -> None:
        self.prefill_only, self.expert = prefill_only, expert
        self._module: weakref.ref[Any] | None = None
        self._pool: Slots | None = None  # lives as long as one of its layers
        self._served = Served(self)  # by that pool
        self._pinned: list[int] = []  # where, so that nobody has to ask at every call
        self._experts: dict[tuple[str, int], SecondPass] = {}

    def __deepcopy__(self, memo: Any) -> SecondPass:
        return SecondPass(self.prefill_only, self.expert)  # of another module

    def __reduce__(self) -> Any:
        return SecondPass, (self.prefill_only, self.expert)

    def of_expert(self, name: str, index: int) -> SecondPass:
        """That of one matrix of a module of experts."""
        key = name, index
        if key not in self._experts:
            self._experts[key] = SecondPass(self.prefill_only, key)
        return self._experts[key]

    def left_out(self, x: Tensor) -> bool:
        """Whether an input [.., tokens, in_features] is computed with the first pass alone."""
        return self.prefill_only and (x.ndim < 2 or x.shape[-2] == 1)

    @contextmanager
    def lent(self, module: Any, x: Tensor) -> Iterator[dict[str, Tensor]]:
        """The stored tensors of a layer by key, all on the device of its codes, for what is
        launched within.

        Args:
            module: that owns them.
            x: its input.
        """
        tensors = self._tensors(module)
        away = self._away(module, tensors)
        if not away:
            yield tensors
            return
        device = tensors["codes"].device
        pool, served = self._bind(module, device)
        trains = x.requires_grad or any(tensor.requires_grad for tensor in tensors.values())
        if trains and torch.is_grad_enabled():
            # Kept for the backward pass, when a slot has other bytes.
            yield {**tensors, **{key: tensor.to(device) for key, tensor in away.items()}}
            return
        place = pool.lend(served, list(away.values()), ordered=self.expert is None)
        try:
            tensors.update(zip(away, place.views, strict=True))
            yield tensors
        finally:
            pool.give_back(place)

    def _tensors(self, module: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = module.tensors(*(self.expert or ()))
        return found

    def _away(self, module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those that have to be copied before something computes with them on the device of the
        codes: for a GPU, they are in pinned memory from then on."""
        device = tensors["codes"].device
        away = {
            key: tensors[key]
            for key in OFFLOADED
            if key in tensors and is_away(tensors[key], device)
        }
        if device.type == "cuda" and self._pinned != [t.data_ptr() for t in away.values()]:
            pin(module)
            tensors.update(self._tensors(module))
            away = {key: tensors[key] for key in away}
            self._pinned = [tensor.data_ptr() for tensor in away.values()]
        return away

    def _bind(self, module: Any, device: torch.device) -> tuple[Slots, Served]:
        """Serve a layer on a device: its slots, and what they know of it."""
        with _binding:
            if self._module is None or self._module() is not module:
                self._module = weakref.ref(module)
            if self._pool is None or _pools.get(device) is not self._pool:
                self._pool, self._served = pool_of(device), Served(self)
            return self._pool, self._served

    def sources(self) -> list[Tensor] | None:
        """What has to be copied for the next call of the layer; of experts, nobody knows."""
        module = None if self._module is None else self._module()
        if module is None or self.expert is not None:
            return None
        tensors = self._tensors(module)
        codes = tensors["codes"]
        if codes.is_meta or _pools.get(codes.device) is not self._pool:
            return None
        return list(self._away(module, tensors).values()) or None


def is_away(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor has to be copied before something on a device computes with it."""
    return tensor.device != device


def first_only(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors of the first pass, by key."""
    return {key: tensor for key, tensor in tensors.items() if not key.endswith("_2")}


def at_home(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors, all on the device of the codes, whatever is offloaded."""
    home = tensors["codes"].device
    return {key: tensor.to(home) for key, tensor in tensors.items()}


def pin(module: Any) -> None:
    """Keep what is offloaded of a module in pinned memory, which a GPU reads beside its work."""
    for name in offloaded(module):
        parameter = module._parameters[name]
        if parameter.device.type == "cpu" and not parameter.is_pinned():
            with torch.inference_mode(False):  # writes to it are to be counted
                pinned = nn.Parameter(parameter.detach().pin_memory(), requires_grad=False)
            module._parameters[name] = pinned


def offloaded(module: Any) -> list[str]:
    """Names of the parameters of a module that may be offloaded."""
    return [name for name in module.specs if name.endswith(OFFLOADED)]


def place(modules: Sequence[Any], policies: Sequence[str]) -> None:
    """Put the second passes of `VQLinear`s and `VQExperts`, in the order in which they run, where
    policies say (not `absent`).

    What accelerate offloads is left where it is: its hooks bring all of a layer.
    """
    order: dict[Slots, list[Served]] = {}
    for module, policy in zip(modules, policies, strict=True):
        away = policy in ("offload", "prefill_only")
        codes = next(name for name in module.specs if name.endswith(("weight", "codes")))
        home = module._parameters[codes].device
        for name in offloaded(module):
            parameter = module._parameters[name]
            if not parameter.is_meta and not module._parameters[codes].is_meta:
                moved = parameter.detach().to("cpu" if away else home)
                module._parameters[name] = nn.Parameter(moved, requires_grad=False)
        module.second = SecondPass(policy == "prefill_only") if away else None
        if away and home.type == "cuda" and not hasattr(module, "num_experts"):
            pool, served = module.second._bind(module, home)
            order.setdefault(pool, []).append(served)
    for pool, layers in order.items():
        pool.expect(layers)
