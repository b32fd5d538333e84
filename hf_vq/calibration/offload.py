"""Blocks whose weights accelerate offloads: in memory during calibration, then offloaded again.

A `device_map` with a GPU and "cpu", or with "disk", leaves parameters on the meta device. A hook on
every module loads them for a forward pass and frees them after it. Calibration changes a block, so
the block must stay in memory meanwhile. Its codes replace its weights in the offloaded storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import VQCalibrationError
from ..nn.accelerate_hooks import hook_of


def weight_of(module: nn.Module, name: str) -> Tensor:
    """A parameter of one module; an offloaded one is read from its storage."""
    tensor, hook = module.get_parameter(name), hook_of(module)
    return hook.weights_map[name] if tensor.is_meta and hook is not None else tensor


def place_of(module: nn.Module) -> torch.device:
    """Device on which a module computes: that of its first parameter, once it is loaded."""
    for part in module.modules():
        for tensor in part.parameters(recurse=False):
            hook = hook_of(part)
            if not tensor.is_meta or hook is None:
                return tensor.device
            device = hook.execution_device
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("cpu")


@contextmanager
def in_memory(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Load the offloaded parameters of a block to a device, for the duration of the block.

    Changes of these parameters are dropped at the end: `take_place` stores the codes.
    """
    hooked = [(m, hook) for m in block.modules() if (hook := hook_of(m)) is not None]
    places = [hook.execution_device for _, hook in hooked]
    try:
        for module, hook in hooked:
            for name, tensor in list(module.named_parameters(recurse=False)):
                if tensor.is_meta:
                    value = hook.weights_map[name].to(device, copy=True)
                    module.register_parameter(name, nn.Parameter(value, requires_grad=False))
            hook.offload, hook.execution_device = False, device
        yield
    finally:
        for (module, hook), place in zip(hooked, places, strict=True):
            hook.offload, hook.execution_device = True, place
            for name, tensor in list(module.named_parameters(recurse=False)):
                empty = torch.empty_like(tensor, device="meta")
                module.register_parameter(name, nn.Parameter(empty, requires_grad=False))


def take_place(hook: Any, new: nn.Module, gone: list[str]) -> None:
    """Offload a module to the storage of the module that it replaces.

    Args:
        hook: accelerate's hook of the old module.
        new: the new module; its tensors are in memory, or offloaded already (a bias).
        gone: names of the old module's tensors to delete.

    Raises:
        VQCalibrationError: weights are on disk and there is no offload folder for the codes.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils.offload import PrefixedDataset, offload_weight

    store, prefix = hook.weights_map.dataset, hook.weights_map.prefix
    in_ram = store if isinstance(store, dict) else store.state_dict
    names = [f"{prefix}{name}" for name in gone]
    on_disk = not any(name in in_ram for name in names)
    if on_disk and store.save_folder is None:
        raise VQCalibrationError(
            "weights are offloaded to disk, and their codes need a place there: give "
            "from_pretrained an offload_folder."
        )
    for name in names:
        in_ram.pop(name, None)
    for name, tensor in new.named_parameters(recurse=False):
        key = f"{prefix}{name}"
        if tensor.is_meta:
            continue  # it is there already
        if on_disk:
            offload_weight(tensor.detach().cpu(), key, store.save_folder, store.index)
        else:
            in_ram[key] = tensor.detach().cpu()
    if not isinstance(store, dict):
        store.all_keys = list({**store.state_dict, **store.index})
    again = AlignDevicesHook(
        execution_device=hook.execution_device,
        offload=True,
        io_same_device=hook.io_same_device,
        weights_map=PrefixedDataset(store, prefix),
        skip_keys=hook.skip_keys,
    )
    add_hook_to_module(new, again)


def free_memory(device_map: Any) -> int | None:
    """Free bytes where `from_pretrained` puts a model; None if that cannot be known.

    Args:
        device_map: as given to `from_pretrained`. Of a map that names places of modules, nothing
            is said: its author has chosen.
    """
    places = device_map
    if isinstance(places, dict):
        if set(places) != {""}:
            return None
        places = places[""]
    if places in ("auto", "balanced", "balanced_low_0", "sequential"):
        if torch.cuda.is_available():
            return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
        places = "cpu"
    if places == "disk":
        return None
    place = torch.get_default_device() if places is None else torch.device(places)
    if place.type == "cuda":
        return torch.cuda.mem_get_info(place)[0]
    if place.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return 1024 * int(found["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
