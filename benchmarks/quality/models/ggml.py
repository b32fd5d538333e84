"""llama.cpp's types of weights, by its own library: ggml_quantize_chunk and the type's to_float.

Types of 256 weights a block take no row that 256 does not divide. llama.cpp then falls back to a
larger type (`FALLBACK`). A row of the suite that ends in `-joined` codes such rows joined to a
multiple of 256 instead, which llama.cpp cannot, so that the type itself is measured.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from hf_vq.errors import VQError

TYPES = {
    "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10, "q3_k": 11, "q4_k": 12,
    "q5_k": 13, "q6_k": 14, "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq4_nl": 20, "iq3_s": 21,
    "iq2_s": 22, "iq4_xs": 23,
}  # fmt: skip
"""ggml_type of each."""
FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Type of rows that 256 does not divide, as llama.cpp's quantizer has it; iq4_nl for the others."""
BLOCK = 256


class _Traits(ctypes.Structure):
    _fields_ = (
        ("type_name", c_char_p), ("blck_size", c_int64), ("blck_size_interleave", c_int64),
        ("type_size", c_size_t), ("is_quantized", c_bool), ("to_float", c_void_p),
        ("from_float_ref", c_void_p),
    )  # fmt: skip


class Ggml:
    """The library libggml-base of a build of llama.cpp.

    Args:
        folder: that holds it.

    Raises:
        VQError: it is not there.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "libggml-base.so"
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise VQError(f"cannot load libggml-base.so of --ggml: {error}.") from None
        traits = self._library.ggml_get_type_traits
        traits.restype, traits.argtypes = ctypes.POINTER(_Traits), (c_int,)
        self._quantize = self._library.ggml_quantize_chunk
        self._quantize.restype = c_size_t
        self._quantize.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)

    def round_trip(
        self, weight: Tensor, name: str, importance: Tensor | None, joined: bool
    ) -> tuple[Tensor, int, str]:
        """Code and decode a weight [out, in].

        Args:
            name: type, of TYPES.
            importance: E x_i^2 of the inputs [in], as an imatrix holds it.
            joined: join rows that 256 does not divide instead of falling back.

        Returns:
            The decoded weight, its stored bytes, and the type that was used.
        """
        columns, join = weight.shape[1], 1
        wide = self._traits(name).blck_size == BLOCK
        if wide and columns % BLOCK:
            join = BLOCK // math.gcd(columns, BLOCK)
            if not joined or len(weight) % join:
                name, join = FALLBACK.get(name, "iq4_nl"), 1
        kind, traits = TYPES[name], self._traits(name)
        if columns * join % traits.blck_size:
            raise VQError(f"{name} takes no rows of {columns} weights.")
        rows = weight.float().reshape(-1, columns * join).contiguous().cpu()
        per_row = traits.type_size * rows.shape[1] // traits.blck_size
        codes = torch.empty(len(rows) * per_row, dtype=torch.uint8)
        matrix = None
        if importance is not None:
            matrix = importance.float().cpu().repeat(join).contiguous()
        written = self._quantize(
            kind, rows.data_ptr(), codes.data_ptr(), 0, len(rows), rows.shape[1],
            None if matrix is None else matrix.data_ptr(),
        )  # fmt: skip
        if written != codes.numel():
            raise VQError(f"llama.cpp wrote {written} bytes of {name}, not {codes.numel()}.")
        decode = ctypes.CFUNCTYPE(None, c_void_p, ctypes.POINTER(c_float), c_int64)(traits.to_float)
        decoded = torch.empty_like(rows)
        pointer = ctypes.cast(decoded.data_ptr(), ctypes.POINTER(c_float))
        decode(codes.data_ptr(), pointer, rows.numel())
        return decoded.reshape(weight.shape).to(weight.device), codes.numel(), name

    def _traits(self, name: str) -> _Traits:
        found: _Traits = self._library.ggml_get_type_traits(TYPES[name]).contents
        return found
