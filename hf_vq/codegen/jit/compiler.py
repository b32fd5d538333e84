"""NVRTC through `cuda.bindings`: a template of kernels/cuda and a plan -> a cubin.

Needs no CUDA toolkit, no header of it and no GPU: NVRTC gets the templates' headers and the
rendered plan as named strings.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import paths
from ...errors import VQBackendError
from ..plan import Plan, render
from .device import checked
from .kernel_store import Store

FORMAT = 1  # of store entries; raised when options or launching change
OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
SERIALIZED = "wgmma.mma_async instructions are serialized"  # message of the assembler
_REGISTER_COUNT = b"\x04\x2f\x08\x00"  # EIATTR_REGCOUNT of two words, in .nv.info
_RESOURCES = {
    "registers": r"Used (\d+) registers",
    "shared": r"(\d+) bytes smem",
    "stack": r"(\d+) bytes stack frame",
    "spilled": r"(\d+) bytes spill stores",
}


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel as reported by the assembler.

    Args:
        registers: registers of a thread.
        shared: static shared memory of a block, in bytes.
        stack: stack frame of a thread, in bytes.
        spilled: spill stores of a thread, in bytes.
        serialized: every wgmma waits for the previous one."""

    registers: int
    shared: int
    stack: int
    spilled: int
    serialized: bool


def why_not() -> str:
    """Reason why NVRTC is unavailable, with the cure; empty if it is available."""
    try:
        version()
    except (ImportError, RuntimeError, VQBackendError) as error:
        # cuda.bindings raises RuntimeError when the shared library is missing.
        return f"NVRTC is missing ({error}): pip install 'hf-vq[cuda]'"
    return ""


@functools.cache
def version() -> tuple[int, int]:
    """Major and minor version of NVRTC."""
    from cuda.bindings import nvrtc

    major, minor = checked(nvrtc.nvrtcVersion())
    return int(major), int(minor)


@functools.cache
def known_targets() -> frozenset[int]:
    """Compute capabilities, as 90 for 9.0, that this NVRTC compiles for."""
    from cuda.bindings import nvrtc

    (numbers,) = checked(nvrtc.nvrtcGetSupportedArchs())
    return frozenset(map(int, numbers))


def cubin(plan: Plan, arch: str, store: Store) -> bytes:
    """The machine code of a plan's template for a compiler target, compiled or from the store.

    Raises:
        VQBackendError: it does not compile; the message has the compiler's log and the plan.
    """
    return store.fetch(key(plan, arch), lambda: compile_plan(plan, arch)[0])


def key(plan: Plan, arch: str) -> str:
    """sha256, in hex, of everything that determines the machine code."""
    parts = [str(FORMAT), arch, str(version()), *OPTIONS, plan.template, render(plan)]
    parts += [text for item in sorted(sources().items()) for text in item]
    parts += [template(plan)] if plan.template_folder else []
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def sources() -> dict[str, str]:
    """Text of every template and header of kernels/cuda, by its path there."""
    folder = paths.kernel_sources() / "cuda"
    found = (path for path in folder.rglob("*") if path.suffix in (".cu", ".cuh"))
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in found}


def template(plan: Plan) -> str:
    """Text of a plan's template: one of kernels/cuda, or of the folder that the plan names."""
    file = f"{plan.template}.cu"
    if plan.template_folder is None:
        return sources()[file]
    return (plan.template_folder / file).read_text(encoding="utf-8")


def compile_plan(plan: Plan, arch: str, macros: Sequence[str] = ()) -> tuple[bytes, Resources]:
    """The machine code of a plan, compiled now, and the resources that it takes.

    Args:
        macros: defined as 1, for templates that ask for them.

    Raises:
        VQBackendError: it does not compile; the message has the compiler's log and the plan.
    """
    header = render(plan)
    file = f"{plan.template}.cu"
    headers = {name: text for name, text in sources().items() if name.endswith(".cuh")}
    image, log = compile_source(
        template(plan),
        file,
        {**headers, "plan.cuh": header},
        arch,
        f"{plan}\n{header}",
        (*OPTIONS, *(f"--define-macro={name}=1" for name in macros)),
    )
    found = {}
    for name, pattern in _RESOURCES.items():
        match = re.search(pattern, log)
        found[name] = int(match[1]) if match else 0
    return image, Resources(**found, serialized=SERIALIZED in log)


def registers_of(image: bytes) -> int:
    """Registers of a thread, from machine code: a compiler that still knows its result logs none.

    Raises:
        VQBackendError: it does not say.
    """
    at = image.find(_REGISTER_COUNT)
    if at < 0:
        raise VQBackendError("machine code does not say how many registers it takes.")
    first = at + len(_REGISTER_COUNT) + 4  # after the function's number
    return int.from_bytes(image[first : first + 4], "little")


def compile_source(
    source: str,
    name: str,
    headers: dict[str, str],
    arch: str,
    what: str = "",
    options: Sequence[str] = OPTIONS,
) -> tuple[bytes, str]:
    """Machine code of `source`, and the compiler's log.

    Args:
        name: of the source, for the log.
        headers: text by the name under which it is included.
        what: told in an error, after the log.
        options: of NVRTC, besides the architecture.

    Raises:
        VQBackendError: it does not compile.
    """
    from cuda.bindings import nvrtc

    texts = [text.encode() for text in headers.values()]
    names = [header.encode() for header in headers]
    (program,) = checked(
        nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(texts), texts, names)
    )
    try:
        given = [option.encode() for option in (f"--gpu-architecture={arch}", *options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if int(status):
            raise VQBackendError(
                f"NVRTC {version()[0]}.{version()[1]} does not compile {name} for {arch}:\n"
                f"{log.decode(errors='replace')}\n{what}"
            )
        image = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return image, log.decode(errors="replace")


def _text(size_of: Any, get: Any, program: Any) -> bytes:
    (size,) = checked(size_of(program))
    buffer = bytes(size)  # written to by NVRTC, which is why no other bytes may share it
    checked(get(program, buffer))
    return buffer
