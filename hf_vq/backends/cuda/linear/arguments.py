"""What linear.cu and linear_wgmma.cu are called with."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


class LinearArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/linear/linear.cu; linear_wgmma.cu has all but the last."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("diagonal", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
    ]


class RotateInt8Arguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/linear/rotate_int8.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("diagonal", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("tokens", ctypes.c_int32),
        ("rows", ctypes.c_int32),
    ]


@functools.cache
def grouped_arguments(matrices: int, nested: bool) -> type[ctypes.Structure]:
    """struct Together of so many matrices, flat: fields of the second one are `codes_1`, ..

    Args:
        nested: a second pass has codes of its own (`second`).
    """
    own = [("second", ctypes.c_void_p), *_FIELDS] if nested else _FIELDS
    fields = [(field_of(name, i), kind) for i in range(matrices) for name, kind in own]
    return type("Together", (ctypes.Structure,), {"_fields_": fields})


_FIELDS: list[tuple[str, Any]] = [(name, kind) for name, kind, *_ in LinearArguments._fields_]


def field_of(name: str, matrix: int) -> str:
    """A field of one of several matrices."""
    return f"{name}_{matrix}" if matrix else name
