"""The NVIDIA GPUs of this machine, as the dispatch table asks about them."""

from __future__ import annotations

import functools

import torch


@functools.cache
def available() -> str | None:
    """None if this machine has GPUs and a compiler for them, else the reason why not."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "no CUDA device"
    from ...codegen.jit import compiler, device

    reason = compiler.why_not()
    if reason:
        return reason
    for ordinal in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(ordinal)
        name = torch.cuda.get_device_name(ordinal)
        if 10 * major + minor < device.OLDEST:
            return f"{name} has compute capability {major}.{minor}, less than 8.0"
        if 10 * major + minor not in compiler.known_targets():
            version = ".".join(map(str, compiler.version()))
            return f"NVRTC {version} does not compile for {name}: install a newer one"
    return None


def several_kinds() -> str | None:
    """The reason to refuse where GPUs need kernels that are compiled differently, else None."""
    from ...codegen.jit.device import device_arch

    names = {device_arch(ordinal).name for ordinal in range(torch.cuda.device_count())}
    return "there are GPUs of several kinds" if len(names) > 1 else None
