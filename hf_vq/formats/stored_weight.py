"""`StoredWeight`: one matrix as every op and kernel takes it.

    StoredWeight
      first      Pass(codes, codebook, scale, rotation)          what most schemes are
      residual   Residual(codes, codebook, scale, rotation)      the second pass of some, or None
      scheme, in_features

Ops of torch take tensors only: `flat` gives them in the order of `SCHEMA`, `of_flat` takes them
back. Both follow the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from .qoq import QoQScheme
from .scheme import VQScheme


class Pass(NamedTuple):
    """One pass of a matrix; shapes are those of `formats.tensors`.

    Args:
        codes: uint8 [..., bytes], a row for each output.
        codebook: of the codes.
        scale: fp16 [..., groups].
        rotation: uint8 packed signs, fp16 [in_features] a diagonal, or fp16 [block, block] the
            matrix of a QR rotation, as the scheme says; None without.
    """

    codes: Tensor
    codebook: Tensor
    scale: Tensor
    rotation: Tensor | None


class Residual(NamedTuple):
    """The second pass of a matrix; see `Pass`.

    Args:
        codebook: of a nested pass, that of both codes together.
        scale: None of a nested pass, which has the first one's.
        rotation: None where the first one's rotates both.
    """

    codes: Tensor
    codebook: Tensor
    scale: Tensor | None
    rotation: Tensor | None


class StoredWeight(NamedTuple):
    """A matrix [out_features, in_features], or other rows of `in_features` numbers, as codes."""

    first: Pass
    residual: Residual | None
    scheme: VQScheme
    in_features: int

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.first.codes.shape[0]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order of `SCHEMA`."""
        return (*self.first, *(self.residual or [None] * _COUNT))

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scheme: VQScheme, in_features: int) -> StoredWeight:
        """The weight of stored tensors by key (`formats.tensor_specs`)."""
        return cls.of_flat(flat(tensors), scheme, in_features)

    @classmethod
    def of_flat(
        cls, tensors: Sequence[Tensor | None], scheme: VQScheme, in_features: int
    ) -> StoredWeight:
        """The weight of tensors in the order of `SCHEMA`, or of the first pass alone."""
        first, second = tensors[:_COUNT], tensors[_COUNT:]
        residual = None if not second or second[0] is None else Residual(*second)  # type: ignore[arg-type]
        return cls(Pass(*first), residual, scheme, in_features)  # type: ignore[arg-type]


class W4A8Weight(NamedTuple):
    """A matrix of 4-bit integers (`formats.qoq`).

    Args:
        codes: uint8 [out_features, bytes].
        scale: [out_features, 1].
        zero: of rows, or of groups where there is a `step`.
        step: of groups; None where rows are one group.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    step: Tensor | None
    scheme: QoQScheme
    in_features: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The tensors, in the order of `W4A8_KEYS`."""
        return self[:4]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scheme: QoQScheme, in_features: int) -> W4A8Weight:
        """The weight of stored tensors by key."""
        return cls(
            tensors["codes"], tensors["scale"], tensors["zero"], tensors.get("step"),
            scheme, in_features,
        )  # fmt: skip

    @classmethod
    def of_flat(
        cls, tensors: Sequence[Tensor | None], scheme: QoQScheme, in_features: int
    ) -> W4A8Weight:
        """The weight of tensors in the order of `W4A8_SCHEMA`."""
        codes, scale, zero, step = tensors
        return cls(codes, scale, zero, step, scheme, in_features)  # type: ignore[arg-type]


def flat(tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Stored tensors by key, in the order of `SCHEMA`."""
    get = tensors.get  # every call of a layer of two passes comes here: no loop, no joined names
    return (
        tensors["codes"], tensors["codebook"], tensors["scale"], rotation_of(tensors),
        get("codes_2"), get("codebook_2"), get("scale_2"), rotation_of(tensors, "_2"),
    )  # fmt: skip


def rotation_of(tensors: Mapping[str, Tensor], suffix: str = "") -> Tensor | None:
    """The rotation of a pass: packed signs, a diagonal, a QR matrix, or None."""
    for key in _ROTATIONS[suffix]:
        if key in tensors:
            return tensors[key]
    return None


SUFFIXES = ("", "_2")
"""Of the keys of a pass."""

_ROTATIONS = {
    suffix: [f"{k}{suffix}" for k in ("signs", "diagonal", "rotation")] for suffix in SUFFIXES
}

_COUNT = len(Pass._fields)
_OPTIONAL = ("rotation", "step")


def _argument(field: str, suffix: str) -> str:
    optional = "?" if suffix or field in _OPTIONAL else ""
    return f"Tensor{optional} {field}{suffix}"


SCHEMA = ", ".join(_argument(field, suffix) for suffix in SUFFIXES for field in Pass._fields)
"""The arguments of an op that takes a weight: `Tensor codes, Tensor codebook, ..`."""

LISTS_SCHEMA = ", ".join(_argument(field, "").replace(" ", "[] ") for field in Pass._fields)
"""The arguments of an op that takes several weights of one pass: `Tensor[] codes, ..`."""

FLAT = len(SUFFIXES) * _COUNT
"""Tensors of a weight in `SCHEMA`."""

W4A8_KEYS = W4A8Weight._fields[:4]
"""Of the stored tensors of a `W4A8Weight`, in its order."""

W4A8_SCHEMA = ", ".join(_argument(field, "") for field in W4A8_KEYS)
"""The arguments of an op that takes a `W4A8Weight`."""

W4A8_LISTS_SCHEMA = ", ".join(_argument(field, "").replace(" ", "[] ") for field in W4A8_KEYS)
"""The arguments of an op that takes several."""
