"""`Arch`: the properties of a GPU that a plan depends on, by name or from the driver."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from ...errors import VQBackendError, shown

OLDEST = 80  # cp.async, bf16 and its conversions
RESERVED_BYTES = 1024  # of shared memory, that every block leaves to the system


@dataclass(frozen=True)
class Arch:
    """A GPU, as far as plans depend on it.

    Args:
        name: target of the compiler, e.g. `sm_90a`.
        sms: streaming multiprocessors.
        shared_per_block: bytes of shared memory that one block can have.
        shared_per_sm: bytes of shared memory of one multiprocessor.
        threads_per_sm: resident threads of one multiprocessor.
        dram_bytes_per_clock: of the memory's peak bandwidth, for one multiprocessor.
        registers_per_sm: 32-bit registers of one multiprocessor.
    """

    name: str
    sms: int
    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    dram_bytes_per_clock: float
    registers_per_sm: int = 65536

    @property
    def overlaps_launches(self) -> bool:
        """True if the GPU has programmatic dependent launch and clusters: from sm_90 on."""
        return int(re.sub(r"\D", "", self.name)) >= 90


def _named(
    name: str, sms: int, shared: int, threads: int, gb_per_second: int, ghz: float
) -> tuple[str, Arch]:
    """`shared`: KB of one multiprocessor, of which every block leaves one to the system."""
    per_clock = gb_per_second / ghz / sms
    return name, Arch(name, sms, (shared - 1) << 10, shared << 10, threads, per_clock)


# One GPU of each kind: A100 80 GB, RTX 3090, RTX 4090, H200, B200, RTX 5090 (their data sheets).
ARCHES: dict[str, Arch] = dict(
    (
        _named("sm_80", 108, 164, 2048, 2039, 1.41),
        _named("sm_86", 82, 100, 1536, 936, 1.70),
        _named("sm_89", 128, 100, 1536, 1008, 2.52),
        _named("sm_90a", 132, 228, 2048, 4800, 1.98),
        _named("sm_100", 148, 228, 2048, 8000, 1.92),
        _named("sm_120", 170, 100, 1536, 1792, 2.41),
    )
)


def named_arch(name: str) -> Arch:
    """The GPU that stands for a compiler target.

    Raises:
        VQBackendError: no such; the message lists those that there are.
    """
    if name not in ARCHES:
        raise VQBackendError(f"unknown architecture {shown(name)}; known: {', '.join(ARCHES)}.")
    return ARCHES[name]


def target(major: int, minor: int) -> str:
    """The compiler target of a compute capability; 9.0 with its own instructions (wgmma)."""
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


@functools.cache
def device_arch(ordinal: int) -> Arch:
    """The GPU with this CUDA ordinal.

    Raises:
        VQBackendError: the driver does not know it.
    """
    ask = functools.partial(driver_attribute, ordinal=ordinal)
    sms = ask("MULTIPROCESSOR_COUNT")
    clock = ask("CLOCK_RATE")  # kHz
    memory_clock = ask("MEMORY_CLOCK_RATE")
    memory_bytes = ask("GLOBAL_MEMORY_BUS_WIDTH") / 8
    dram = 2 * memory_clock * memory_bytes / max(clock, 1) / sms  # two transfers a clock
    return Arch(
        target(
            ask("COMPUTE_CAPABILITY_MAJOR"),
            ask("COMPUTE_CAPABILITY_MINOR"),
        ),
        sms,
        ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        ask("MAX_THREADS_PER_MULTIPROCESSOR"),
        # Drivers of GPUs that share the processor's memory may not know it.
        dram or min(arch.dram_bytes_per_clock for arch in ARCHES.values()),
        ask("MAX_REGISTERS_PER_MULTIPROCESSOR"),
    )


def driver_attribute(name: str, ordinal: int) -> int:
    """Query a driver attribute of a GPU (`CU_DEVICE_ATTRIBUTE_..`; clocks in kHz).

    Raises:
        VQBackendError: the driver does not know the GPU.
    """
    from cuda.bindings import driver

    checked(driver.cuInit(0))
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    (value,) = checked(driver.cuDeviceGetAttribute(attribute, ordinal))
    return int(value)


def checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Strip the status from the result of a cuda.bindings call.

    Raises:
        VQBackendError: the status is an error.
    """
    status, *values = result
    if int(status):
        raise VQBackendError(f"CUDA: {getattr(status, 'name', status)}.")
    return tuple(values)
