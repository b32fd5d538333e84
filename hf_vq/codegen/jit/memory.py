"""GPU memory outside of PyTorch's allocator, for addresses that CUDA graphs must not share."""

from __future__ import annotations

from .device import checked


def zeros(nbytes: int, device: int) -> int:
    """The address of `nbytes` bytes of zeros that are never freed, also while a graph is captured.

    Args:
        device: CUDA ordinal.

    Raises:
        VQBackendError: there is no memory.
    """
    from cuda.bindings import driver

    (context,) = checked(driver.cuDevicePrimaryCtxRetain(device))
    checked(driver.cuCtxPushCurrent(context))
    # This stream, or another, may be capturing: this is not part of a graph.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    (mode,) = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        (address,) = checked(driver.cuMemAlloc(nbytes))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        (stream,) = checked(driver.cuStreamCreate(flags))
        checked(driver.cuMemsetD8Async(address, 0, nbytes, stream))
        checked(driver.cuStreamSynchronize(stream))
        checked(driver.cuStreamDestroy(stream))
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(mode))
        checked(driver.cuCtxPopCurrent())
    return int(address)
