"""Blocks whose weights accelerate offloads: in memory during calibration, then offloaded again.

A `device_map` with a GPU and "cpu", or with "disk", leaves parameters on the meta device. A hook on
every module loads them for a forward pass and frees them after it. Calibration changes a block, so
the block must stay in memory meanwhile. Its codes replace its weights in the offloaded storage.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import VQCalibrationError
from ..nn.accelerate_hooks import hook_of

_NAMES = ("auto", "balanced", "balanced_low_0", "sequential")  # of ways to make a `device_map`
_FILES_2 = ("memory.max", "memory.current", "inactive_file")  # of control groups: limit, use, and
_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # files in it


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


def is_offloaded(device_map: Any) -> bool:
    """True for a `device_map` that keeps weights where they are not computed: on a disk, or in the
    memory of the CPU while other modules are on another device."""
    places = set(map(str, device_map.values() if isinstance(device_map, dict) else [device_map]))
    return "disk" in places or ("cpu" in places and len(places) > 1)


def shortage(model: nn.Module, device_map: Any, room: float) -> str | None:
    """Say why a dense model does not fit; None if it does, or that cannot be known.

    Args:
        device_map: as given to `from_pretrained`. Of a name such as "auto", nothing is said.
        room: bytes that a model needs to load and run, over those of its weights.
    """
    need: Counter[str] = Counter()
    for name, tensor in model.named_parameters():
        place = _place(name, device_map) if tensor.is_meta else str(tensor.device)
        if place is not None:
            size = tensor.numel() * tensor.element_size()
            need[place] += int(size * (room - (not tensor.is_meta)))
    for place, size in need.items():
        have = free_memory(place)
        if have is not None and size > have:
            return too_little(size, have)
    return None


def too_little(need: int, have: int) -> str:
    """The sentence about a dense model that does not fit into memory."""
    return (
        f"the dense model takes {need / 1e9:.1f} GB, and {have / 1e9:.1f} GB are free; quantize it "
        "once on a machine with more, and save it"
    )


def _place(name: str, device_map: Any) -> str | None:
    """Device of a parameter; None where it cannot be known."""
    if device_map is None:
        return str(torch.get_default_device())
    if not isinstance(device_map, dict):
        return None if device_map in _NAMES else str(device_map)
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    place = device_map.get(name)
    if isinstance(place, int):
        return f"cuda:{place}"
    return None if place is None or str(place) == "disk" else str(place)


def free_memory(place: str) -> int | None:
    """Free bytes of a device; None if that cannot be known. Processes of one machine share its
    memory."""
    device = torch.device(place)
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu":
        return None
    found = [size for size in (_available(), _of_control_groups()) if size is not None]
    return min(found) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if found else None


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return 1024 * int(found["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def _of_control_groups(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that containers and services leave this process; None without a limit.

    The limit of every group above counts: https://docs.kernel.org/admin-guide/cgroup-v2.html
    (memory.max), and cgroup-v1/memory.html.
    """
    found = []
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            top, (limit, used, cached) = root, _FILES_2
        elif "memory" in kinds.split(","):
            top, (limit, used, cached) = root / "memory", _FILES_1
        else:
            continue
        own = top / path.lstrip("/")
        for group in (own, *own.parents[: len(own.parts) - len(top.parts)]):
            try:
                most, now = (int((group / file).read_text()) for file in (limit, used))
                lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
                stat = dict(line.split() for line in lines)
            except (OSError, ValueError):  # "max": no limit
                continue
            found.append(max(0, most - now + int(stat.get(cached, 0))))  # files are given up
    return min(found, default=None)
