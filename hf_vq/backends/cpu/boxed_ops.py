"""Ops that run without Python: `hf_vq::cpu_linear` and `hf_vq::cuda_linear`, linear layers, and
`hf_vq::cpu_append` and `hf_vq::cpu_attention`, a token's part of a KV cache.

A call of `hf_vq::linear` passes through its formula for gradients, the dispatch table and ctypes,
all of it Python. These ops are registered through torch's C shim, by addresses that ctypes looks
up, and take only what the kernel reads as it is. `ops.linear` calls them where the table chose
their entry and nothing but the result is asked for.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch

from ...ops.library import library
from . import library as native

_FUNCTIONS = (
    "get_data_ptr", "get_dim", "get_numel", "get_sizes", "get_strides", "get_dtype",
    "is_contiguous", "empty_strided", "new_uninitialized_tensor", "delete_tensor_object",
)  # fmt: skip
_NUMBERS = (
    "dtype_float32", "dtype_float16", "dtype_bfloat16", "dtype_uint8", "dtype_int32",
    "device_type_cpu",
)  # fmt: skip
_REGISTRATION = ("library_init_impl", "library_impl")
_CUDA_FUNCTIONS = ("get_device_type", "get_device_index")
_CUDA_STREAM = "aoti_torch_get_current_cuda_stream"  # in torch's library for CUDA
_CUDA_DRIVER = ("cuLaunchKernel", "cuStreamIsCapturing")
_CUDA_NUMBERS = ("device_type_cuda", "dtype_int8", "dtype_int64")
_FILE = b"kernels/cpu/host/torch_shim.h"  # torch keeps its address

_SCHEMA = (
    "(Tensor x, Tensor codes, Tensor codebook, Tensor scale, Tensor rotation, Tensor bias, "
    "Tensor {}) -> Tensor"
)
_APPEND = (
    "(Tensor x, Tensor mean, Tensor smoothing, Tensor codebook, Tensor(a!) codes, "
    "Tensor(b!) scale, Tensor shape, Tensor rotary_mean, Tensor rotary_table, int at, "
    "int rotary_start) -> Tensor"
)
_ATTENTION = (
    "(Tensor query, Tensor sink_k, Tensor sink_v, Tensor k_codes, Tensor k_scale, Tensor k_mean, "
    "Tensor k_smoothing, Tensor v_codes, Tensor v_scale, Tensor tail_k, Tensor tail_v, "
    "Tensor codebook_k, Tensor codebook_v, Tensor k_shape, Tensor v_shape, Tensor rotary_mean, "
    "Tensor rotary_table, int tail_start, int window, int fresh, int coded, int k_first, "
    "int v_first, int rotary_start, float scaling, float softcap) -> Tensor"
)


class _Torch(ctypes.Structure):
    """struct hf_vq_torch of api.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in _FUNCTIONS] + [
        (name, ctypes.c_int32) for name in _NUMBERS
    ]


class _Cuda(ctypes.Structure):
    """struct hf_vq_cuda of api.h."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in (*_CUDA_FUNCTIONS, _CUDA_STREAM, *_CUDA_DRIVER)
    ] + [(name, ctypes.c_int32) for name in _CUDA_NUMBERS]


def number_of(dtype: torch.dtype) -> int:
    """torch's number of a type, where there is a C shim."""
    return int(getattr(native.torch_shim(), f"aoti_torch_dtype_{str(dtype)[6:]}")())


_registering = threading.Lock()  # threads may call their first layers at once


def cpu_linear() -> Any | None:
    """The op, registered at the first call; None without the library or torch's C shim.

    It gives None instead of y for tensors that the kernel does not read as they are.
    """
    with _registering:
        return _register("linear", _SCHEMA.format("matrix"))


def cpu_append() -> Any | None:
    """The op, as `cpu_linear`; it gives a tensor without elements, or None."""
    with _registering:
        return _register("append", _APPEND)


def cpu_attention() -> Any | None:
    """The op, as `cpu_linear`."""
    with _registering:
        return _register("attention", _ATTENTION)


def cuda_linear() -> Any | None:
    """The op, registered at the first call; None without the library, torch's C shim or CUDA.

    It gives None instead of y for tensors that the kernel does not read as they are, and while a
    graph is captured.
    """
    with _registering:
        return _register_cuda()


@cache
def _register(name: str, schema: str) -> Any | None:
    kernels, shim = native.load(), _share()
    if kernels is None or shim is None:
        return None
    return _op(shim, b"CPU", f"cpu_{name}", schema, getattr(kernels, f"hf_vq_torch_{name}"))


@cache
def _register_cuda() -> Any | None:
    kernels, shim = native.load(), _share()
    of_cuda, driver = native.torch_shim("cuda"), native.cuda_driver()
    if kernels is None or shim is None or of_cuda is None or driver is None:
        return None
    functions = (
        *_found(shim, _CUDA_FUNCTIONS), getattr(of_cuda, _CUDA_STREAM, None),
        *(getattr(driver, name, None) for name in _CUDA_DRIVER),
    )  # fmt: skip
    numbers = _found(shim, _CUDA_NUMBERS)
    if None in functions or None in numbers:
        return None
    addresses = (ctypes.cast(function, ctypes.c_void_p) for function in functions)
    kernels.hf_vq_use_cuda(ctypes.byref(_Cuda(*addresses, *(number() for number in numbers))))
    return _op(
        shim, b"CUDA", "cuda_linear", _SCHEMA.format("launch"), kernels.hf_vq_torch_cuda_linear
    )


def _share() -> ctypes.CDLL | None:
    """torch's C shim, after the library was told of it; None if it lacks something."""
    kernels, shim = native.load(), native.torch_shim()
    if kernels is None or shim is None or None in _found(shim, _REGISTRATION):
        return None
    functions, numbers = _found(shim, _FUNCTIONS), _found(shim, _NUMBERS)
    if None in functions or None in numbers:
        return None
    addresses = (ctypes.cast(function, ctypes.c_void_p) for function in functions)
    kernels.hf_vq_use_torch(ctypes.byref(_Torch(*addresses, *(number() for number in numbers))))
    return shim


def _found(shim: ctypes.CDLL, names: tuple[str, ...]) -> list[Any]:
    return [getattr(shim, f"aoti_torch_{name}", None) for name in names]


def _op(shim: ctypes.CDLL, key: bytes, name: str, schema: str, kernel: Any) -> Any | None:
    """The op `hf_vq::name` with a boxed kernel for tensors of a dispatch key."""
    registry = ctypes.c_void_p()  # never freed: that would take the kernel back
    if shim.aoti_torch_library_init_impl(
        b"hf_vq", key, _FILE, ctypes.c_uint32(1), ctypes.byref(registry)
    ):
        return None
    library.define(name + schema)
    address = ctypes.cast(kernel, ctypes.c_void_p)
    if shim.aoti_torch_library_impl(registry, name.encode(), address):
        return None
    return getattr(torch.ops.hf_vq, name).default
