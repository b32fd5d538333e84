"""`Kernel`: machine code loaded into one device's context, and the launch prepared once.

A launch from Python costs more than many kernels run, so nothing is made for it: arguments are one
structure, passed by value, whose fields are overwritten. Works under CUDA graph capture.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import Any

from ..errors import VQBackendError
from .compiler import cubin
from .device import checked, device_arch
from .plan import Plan
from .store import Store

_WITHOUT_OPT_IN = 48 << 10  # bytes of shared memory that any kernel may ask for


class Kernel:
    """A plan's kernel on one GPU.

    Args:
        plan: of the kernel.
        arguments: the kernel's `struct Arguments`, field by field.
        device: CUDA ordinal.
        store: where its machine code is, or will be.
        shared: bytes of shared memory of a block, of kernels whose problem decides them.

    Attributes:
        local_bytes: what a thread spills.

    Raises:
        VQBackendError: it does not compile or does not load.
    """

    def __init__(
        self,
        plan: Plan,
        arguments: type[ctypes.Structure],
        device: int,
        store: Store,
        shared: int | None = None,
    ) -> None:
        from cuda.bindings import driver

        self.plan = plan
        self._launch = driver.cuLaunchKernel
        self._launch_dependent = driver.cuLaunchKernelEx
        self._stream = driver.CUstream
        self._threads = plan.threads
        self._shared = plan.shared_bytes if shared is None else shared
        self._values = arguments()
        self._names = [field[0] for field in arguments._fields_]
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._values))
        self._address = ctypes.addressof(self._pointers)
        # Launching lets other Python threads run, which must not change the arguments meanwhile.
        self._lock = threading.Lock()
        self._blocks, self._last_stream = 1, 0
        self._config = _dependent_config(self._threads, self._shared)
        arch = device_arch(device)
        self._overlaps = arch.overlaps_launches
        image = cubin(plan, arch.name, store)
        self._context = checked(driver.cuDevicePrimaryCtxRetain(device))[0]
        checked(driver.cuCtxPushCurrent(self._context))
        try:
            self._function, self.local_bytes = _load(image, plan, self._shared)
        finally:
            checked(driver.cuCtxPopCurrent())

    def __call__(
        self, blocks: int, stream: int, *values: int | None, dependent: bool = False
    ) -> None:
        """Launch `blocks` blocks on a stream of the kernel's device.

        Args:
            values: of the fields of the arguments, in their order; addresses are numbers.
            dependent: let it begin while the kernel before it runs (kernels/cuda/grids.cuh).

        Raises:
            VQBackendError: the driver refuses.
        """
        with self._lock:
            arguments = self._values
            for name, value in zip(self._names, values, strict=True):
                setattr(arguments, name, value)
            (status,) = self._start(blocks, stream, dependent)
            if int(status) == 201:  # no context yet: the first CUDA call of this thread
                from cuda.bindings import driver

                checked(driver.cuCtxSetCurrent(self._context))
                (status,) = self._start(blocks, stream, dependent)
        if int(status):
            raise VQBackendError(
                f"CUDA: {status.name} launching {blocks} blocks of {self._threads} threads and "
                f"{self._shared} bytes of shared memory for {self.plan}."
            )

    def _start(self, blocks: int, stream: int, dependent: bool) -> Any:
        if dependent and self._overlaps:
            config = self._config
            if blocks != self._blocks:
                config.gridDimX = self._blocks = blocks
            if stream != self._last_stream:
                config.hStream, self._last_stream = self._stream(stream), stream
            return self._launch_dependent(config, self._function, self._address, 0)
        return self._launch(
            self._function, blocks, 1, 1, self._threads, 1, 1, self._shared, stream,
            self._address, 0,
        )  # fmt: skip


def _dependent_config(threads: int, shared: int) -> Any:
    """What `cuLaunchKernelEx` needs to let a kernel begin before the one before it has ended."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    kinds = driver.CUlaunchAttributeID
    attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _load(image: bytes, plan: Plan, shared: int) -> tuple[Any, int]:
    """The function of a module loaded into the current context, and bytes that a thread spills."""
    from cuda.bindings import driver

    names = driver.CUfunction_attribute
    # Another stream, or this one, may be capturing: loading is not part of a graph.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    (mode,) = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        (module,) = checked(driver.cuModuleLoadData(image))
        (function,) = checked(driver.cuModuleGetFunction(module, plan.template.encode()))
        # Also makes the driver load the function, which it may otherwise put off.
        attribute = names.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        (local,) = checked(driver.cuFuncGetAttribute(attribute, function))
        if local:
            warnings.warn(
                f"{plan} spills {local} bytes per thread: right, but slow. Please report it.",
                RuntimeWarning,
                stacklevel=2,
            )
        if shared > _WITHOUT_OPT_IN:
            attribute = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, attribute, shared))
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(mode))
    return function, int(local)
