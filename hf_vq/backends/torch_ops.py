"""`hf_vq::cpu_linear`: the kernel of the row `cpu.linear` as an op that runs without Python.

A call of `hf_vq::linear` passes through its formula for gradients, the dispatch table and ctypes,
all of it Python. This op is registered through torch's C shim, by addresses that ctypes looks up,
and takes only what the kernel reads as it is. `ops.linear` calls it where the table chose
`cpu.linear` and nothing but the result is asked for.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch

from ..ops.library import library
from . import native

_FUNCTIONS = (
    "get_data_ptr", "get_dim", "get_numel", "get_sizes", "get_dtype", "is_contiguous",
    "empty_strided", "new_uninitialized_tensor", "delete_tensor_object",
)  # fmt: skip
_NUMBERS = (
    "dtype_float32", "dtype_float16", "dtype_bfloat16", "dtype_uint8", "dtype_int32",
    "device_type_cpu",
)  # fmt: skip
_REGISTRATION = ("library_init_impl", "library_impl")
_FILE = b"kernels/cpu/torch_ops.cpp"  # torch keeps its address

SCHEMA = (
    "cpu_linear(Tensor x, Tensor codes, Tensor codebook, Tensor scale, Tensor signs, Tensor bias, "
    "Tensor matrix) -> Tensor"
)


class _Torch(ctypes.Structure):
    """struct hf_vq_torch of api.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in _FUNCTIONS] + [
        (name, ctypes.c_int32) for name in _NUMBERS
    ]


_registering = threading.Lock()  # threads may call their first layers at once


def cpu_linear() -> Any | None:
    """The op, registered at the first call; None without the library or torch's C shim.

    It gives None instead of y for tensors that the kernel does not read as they are.
    """
    with _registering:
        return _register()


@cache
def _register() -> Any | None:
    kernels, shim = native.load(), native.torch_shim()
    names = [f"aoti_torch_{name}" for name in (*_FUNCTIONS, *_NUMBERS, *_REGISTRATION)]
    if kernels is None or shim is None or not all(hasattr(shim, name) for name in names):
        return None
    found = {name: getattr(shim, f"aoti_torch_{name}") for name in (*_FUNCTIONS, *_NUMBERS)}
    functions = _Torch(
        *(ctypes.cast(found[name], ctypes.c_void_p) for name in _FUNCTIONS),
        *(found[name]() for name in _NUMBERS),
    )
    kernels.hf_vq_use_torch(ctypes.byref(functions))
    kernel = ctypes.cast(kernels.hf_vq_torch_linear, ctypes.c_void_p)
    registry = ctypes.c_void_p()  # never freed: that would take the kernel back
    if shim.aoti_torch_library_init_impl(
        b"hf_vq", b"CPU", _FILE, ctypes.c_uint32(1), ctypes.byref(registry)
    ):
        return None
    library.define(SCHEMA)
    if shim.aoti_torch_library_impl(registry, b"cpu_linear", kernel):
        return None
    return torch.ops.hf_vq.cpu_linear.default
