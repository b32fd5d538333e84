"""Machine code loaded into one device's context, and launches that are prepared once.

A launch from Python takes longer than many kernels run, so it allocates nothing: the arguments are
one structure, passed by value, in which only changed fields are overwritten (`Prepared`). Works
under CUDA graph capture.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import Any

from ...errors import VQBackendError
from ..plan import Plan
from .compiler import cubin
from .device import checked, device_arch
from .kernel_store import Store

_WITHOUT_OPT_IN = 48 << 10  # bytes of shared memory without opt-in


class LoadedKernel:
    """A plan's kernel on one GPU.

    Args:
        plan: plan of the kernel.
        arguments: the kernel's `struct Arguments`, field by field.
        device: CUDA ordinal.
        store: store of its machine code; compiled into it if missing.

    Attributes:
        local_bytes: local memory (spills) of a thread, in bytes.

    Raises:
        VQBackendError: the kernel does not compile or does not load.
    """

    def __init__(
        self,
        plan: Plan,
        arguments: type[ctypes.Structure],
        device: int,
        store: Store,
    ) -> None:
        from cuda.bindings import driver

        self.plan, self.arguments = plan, arguments
        self.shared = plan.shared_bytes
        arch = device_arch(device)
        self.overlaps = arch.overlaps_launches
        image = cubin(plan, arch.name, store)
        self.context = checked(driver.cuDevicePrimaryCtxRetain(device))[0]
        checked(driver.cuCtxPushCurrent(self.context))
        try:
            self.function, self.local_bytes = _load(image, plan, self.shared)
        finally:
            checked(driver.cuCtxPopCurrent())
        self._any = Prepared(self, 1)

    def prepare(self, blocks: int, /, **values: int | None) -> Prepared:
        """Prepare a launch of `blocks` blocks with the known arguments."""
        return Prepared(self, blocks, **values)

    def __call__(
        self, blocks: int, stream: int, *values: float | None, dependent: bool = False
    ) -> None:
        """Launch once: `blocks` blocks with all arguments, in their order; see `Prepared.start`."""
        with self._any.lock:
            for field, value in zip(self.arguments._fields_, values, strict=True):
                setattr(self._any.arguments, field[0], value)
            self._any.start(stream, dependent, blocks)


class Prepared:
    """A prepared launch of a kernel that is repeated with few changed arguments.

    Args:
        kernel: the loaded kernel.
        blocks: blocks of the grid.
        values: values of its arguments; addresses are numbers.

    Attributes:
        arguments: of the kernel, whose fields may be overwritten.
        lock: to be held from then until `start` has ended: launching lets other Python threads run,
            which must not change the arguments meanwhile.
    """

    def __init__(self, kernel: LoadedKernel, blocks: int, /, **values: int | None) -> None:
        from cuda.bindings import driver

        self.arguments: Any = kernel.arguments(**values)
        self.lock = threading.Lock()
        self._kernel, self._blocks = kernel, blocks
        self._function, self._launch = kernel.function, driver.cuLaunchKernelEx
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        self._address = ctypes.addressof(self._pointers)
        self._config = _config(blocks, kernel.plan.threads, kernel.shared)
        self._stream, self._dependent = 0, False

    def start(self, stream: int, dependent: bool, blocks: int | None = None) -> None:
        """Launch on a stream of the kernel's device.

        Args:
            dependent: let it begin while the kernel before it runs (pdl.cuh).
            blocks: other than before; of none the driver makes an error.

        Raises:
            VQBackendError: the driver refuses.
        """
        if stream != self._stream:
            self._config.hStream = self._stream = stream
        if dependent != self._dependent:
            self._config.numAttrs = int(dependent and self._kernel.overlaps)
            self._dependent = dependent
        if blocks is not None and blocks != self._blocks:
            self._config.gridDimX = self._blocks = blocks
        (status,) = self._launch(self._config, self._function, self._address, 0)
        if status:
            self._again(status)

    def _again(self, status: Any) -> None:
        """After a launch that failed: once more if this thread had no context."""
        from cuda.bindings import driver

        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # its first call of CUDA
            checked(driver.cuCtxSetCurrent(self._kernel.context))
            (status,) = self._launch(self._config, self._function, self._address, 0)
        if status:
            plan, shared = self._kernel.plan, self._kernel.shared
            raise VQBackendError(
                f"CUDA: {status.name} launching {self._blocks} blocks of {plan.threads} threads "
                f"and {shared} bytes of shared memory for {plan}."
            )


def _config(blocks: int, threads: int, shared: int) -> Any:
    """Launch configuration for `cuLaunchKernelEx`. Its attribute enables programmatic dependent
    launch."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    kinds = driver.CUlaunchAttributeID
    attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = [attribute], 0
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
        (function,) = checked(driver.cuModuleGetFunction(module, plan.kernel.encode()))
        # The query also forces the driver to load the function, which is lazy otherwise.
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
