"""AQLM (arXiv 2401.06118) and PV-Tuning, as the package `aqlm` and public checkpoints store it.

    X.codes       int8 or int16 [out / out_group, in / in_group, codebooks]   two's complement
    X.codebooks   float [codebooks, 2^bits, out_group, in_group]
    X.scales      float [out / out_group, 1, 1, 1]
    X.bias        float [out]

    W[i out_group + r, j in_group + c] = scale[i] * sum_k codebook[k][code[i, j, k]][r, c]

With out_group 1 that is a VQScheme: VQ<in_group, bits, codebooks>, learned per tensor, one scale
per row, no rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import VQConfigError, VQFormatError, VQSchemeError
from ..packing import pack_bits
from ..scheme import VQScheme
from ..spec import TensorSpec
from .layout import FLOATS, Layout, dtype_named, integer, name_of, unsigned

_WORDS = 1 << 20  # codes of two codebooks that are de-interleaved in one step
_ROWS = 1 << 22  # codes decoded in one step: bounds the work space


@dataclass(frozen=True)
class AqlmLayout(Layout):
    """AQLM of one layer.

    Args:
        codebooks: codebooks whose entries are added.
        bits: log2 of the entries of one codebook.
        in_group: columns of an entry.
        out_group: rows of an entry.
        dtype: of codebooks and scales.
    """

    codebooks: int
    bits: int
    in_group: int = 8
    out_group: int = 1
    dtype: str = "float16"

    method = "aqlm"
    suffixes = ("codes", "codebooks", "scales")
    codes = "codes"
    scheme_keys = MappingProxyType({"codes": "codes", "codebooks": "codebook", "scales": "scale"})

    ranges = MappingProxyType(
        {"codebooks": (1, 64), "bits": (1, 16), "in_group": (1, 1 << 12), "out_group": (1, 1 << 12)}
    )

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str, found: Mapping[str, Tensor]) -> AqlmLayout:
        """The layout that config.json says; the dtype is that of the codebooks."""
        dtype = found["codebooks"].dtype if "codebooks" in found else torch.float16
        if dtype not in FLOATS:
            raise VQConfigError(
                f"{where}.codebooks are {dtype}; known: float16, bfloat16, float32."
            )
        return cls(
            codebooks=integer(config, "num_codebooks", *cls.ranges["codebooks"]),
            bits=integer(config, "nbits_per_codebook", *cls.ranges["bits"]),
            in_group=integer(config, "in_group_size", *cls.ranges["in_group"]),
            out_group=integer(config, "out_group_size", *cls.ranges["out_group"]),
            dtype=name_of(dtype),
        )

    def expected(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """See `Layout.expected`."""
        if out_features % self.out_group or in_features % self.in_group:
            raise VQFormatError(
                f"a [{out_features}, {in_features}] layer cannot be split into groups of "
                f"{self.out_group} x {self.in_group}: config.json belongs to another checkpoint."
            )
        rows, columns = out_features // self.out_group, in_features // self.in_group
        code, number = torch.int8 if self.bits <= 8 else torch.int16, dtype_named(self.dtype)
        entry = (self.out_group, self.in_group)
        return {
            "codes": TensorSpec((rows, columns, self.codebooks), code),
            "codebooks": TensorSpec((self.codebooks, 1 << self.bits, *entry), number),
            "scales": TensorSpec((rows, 1, 1, 1), number),
        }

    def scheme(self) -> VQScheme | None:
        """VQ<in_group, bits, codebooks>, where an entry is part of one row and of float16."""
        if self.out_group > 1 or self.dtype != "float16":
            return None
        try:
            return VQScheme(
                vector_size=self.in_group,
                entry_bits=self.bits,
                residuals=self.codebooks,
                codebook="tensor",
                scale_group=0,
                rotation="none",
            )
        except VQSchemeError:  # more codebooks, or longer vectors
            return None

    def stored(self, suffix: str, tensor: Tensor, where: str) -> Tensor:
        """See `Layout.stored`."""
        if suffix == "codes":
            return self._streams(tensor, where)
        return (tensor.squeeze(2) if suffix == "codebooks" else tensor.flatten(1)).half()

    def inspect(self, suffix: str, tensor: Tensor, where: str) -> None:
        """See `Layout.inspect`."""
        if suffix == "codes":
            unsigned(tensor, self.bits, where)

    def _streams(self, codes: Tensor, where: str) -> Tensor:
        """codes [out, in / in_group, codebooks] as uint8 [out, codebooks * bytes]."""
        codes = _codebooks_first(codes) if self.codebooks > 1 else codes.transpose(1, 2)
        if self.bits == 8 * codes.element_size():
            return codes.reshape(-1).view(torch.uint8).reshape(len(codes), -1)
        return pack_bits(unsigned(codes, self.bits, where), self.bits).flatten(1)

    def decode(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensor:
        """See `Layout.decode`."""
        codes, codebooks = tensors["codes"], tensors["codebooks"].float()
        rows, columns = codes.shape[:2]
        weight = codebooks.new_empty(rows, columns, self.out_group, self.in_group)
        step = max(1, _ROWS // max(1, columns))
        for first in range(0, rows, step):
            part = codes[first : first + step].to(torch.int32) & ((1 << self.bits) - 1)
            total = codebooks[0][part[..., 0]]
            for k in range(1, self.codebooks):
                total += codebooks[k][part[..., k]]
            weight[first : first + step] = total
        weight *= tensors["scales"].float()
        return weight.transpose(1, 2).reshape(out_features, in_features)

    def hint(self, suffix: str, tensor: Tensor, spec: TensorSpec) -> str:
        """See `Layout.hint`."""
        rows, columns, books = spec.shape if suffix == "codes" else (0, 0, 0)
        if suffix == "codes" and tuple(tensor.shape) == (columns, rows, books) != spec.shape:
            return (
                "Rows and columns are swapped: it was saved after the package aqlm had run it on a "
                "CPU. "
            )
        return ""

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """See `Layout.size`."""
        rows, columns, _ = shapes["codes"]
        return rows * self.out_group, columns * self.in_group

    def name(self) -> str:
        """Name as in public checkpoints: 2x8."""
        groups = f" of {self.out_group} x {self.in_group} weights"
        return f"AQLM {self.codebooks}x{self.bits}{groups}"


def _codebooks_first(codes: Tensor) -> Tensor:
    """[rows, columns, books] -> [rows, books, columns], contiguous.

    Both bytes of a 16-bit word are extracted together: PyTorch's strided copy of bytes is slow. The
    rows are processed in chunks, so that the words stay in the cache.
    """
    rows, columns, books = codes.shape
    if books == 2 and codes.element_size() == 1 and codes.is_contiguous():
        words = codes.view(torch.int16).squeeze(2)
        swapped = codes.new_empty(rows, books, columns)
        step = max(1, _WORDS // max(columns, 1))
        for first in range(0, rows, step):
            some, part = slice(first, first + step), words[first : first + step]
            swapped[some, 0].copy_(part)  # the low byte: it wraps
            swapped[some, 1].copy_(part >> 8)
        return swapped
    return codes.transpose(1, 2).contiguous()
