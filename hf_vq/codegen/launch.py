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

    Raises:
        VQBackendError: it does not compile or does not load.
    """

    def __init__(
        self, plan: Plan, arguments: type[ctypes.Structure], device: int, store: Store
    ) -> None:
        from cuda.bindings import driver

        self.plan = plan
        self._launch = driver.cuLaunchKernel
        self._threads, self._shared = plan.threads, plan.shared_bytes
        self._values = arguments()
        self._names = [field[0] for field in arguments._fields_]
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._values))
        self._address = ctypes.addressof(self._pointers)
        # Launching lets other Python threads run, which must not change the arguments meanwhile.
        self._lock = threading.Lock()
        image = cubin(plan, device_arch(device).name, store)
        self._context = checked(driver.cuDevicePrimaryCtxRetain(device))[0]
        checked(driver.cuCtxPushCurrent(self._context))
        try:
            self._function = _load(image, plan)
        finally:
            checked(driver.cuCtxPopCurrent())

    def __call__(self, blocks: int, stream: int, *values: int | None) -> None:
        """Launch `blocks` blocks on a stream of the kernel's device.

        Args:
            values: of the fields of the arguments, in their order; addresses are numbers.

        Raises:
            VQBackendError: the driver refuses.
        """
        with self._lock:
            arguments = self._values
            for name, value in zip(self._names, values, strict=True):
                setattr(arguments, name, value)
            (status,) = self._start(blocks, stream)
            if int(status) == 201:  # no context yet: the first CUDA call of this thread
                from cuda.bindings import driver

                checked(driver.cuCtxSetCurrent(self._context))
                (status,) = self._start(blocks, stream)
        if int(status):
            raise VQBackendError(
                f"CUDA: {status.name} launching {blocks} blocks of {self._threads} threads and "
                f"{self._shared} bytes of shared memory for {self.plan}."
            )

    def _start(self, blocks: int, stream: int) -> Any:
        return self._launch(
            self._function, blocks, 1, 1, self._threads, 1, 1, self._shared, stream,
            self._address, 0,
        )  # fmt: skip


def _load(image: bytes, plan: Plan) -> Any:
    """The function of a module loaded into the current context, ready to be launched."""
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
        if plan.shared_bytes > _WITHOUT_OPT_IN:
            attribute = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, attribute, plan.shared_bytes))
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(mode))
    return function
