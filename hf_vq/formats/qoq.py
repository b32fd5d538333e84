"""QoQ (QServe, arXiv 2405.04532, section 4.1): weights of 4 bits that are 8-bit integers to a
matrix product, whose other side is activations of 8 bits. The one element-wise format.

    qoq-w4a8         W[n, k] = q[n, k] * scale[n] - zero[n]
    qoq-w4a8-g128    W[n, k] = (q[n, k] * step[n, g] - zero[n, g]) * scale[n]        g = k // group

    codes   uint8 [out, ceil(in / 2)]   q = 0 .. 15, two in a byte, the first in its low half
    scale   fp16  [out, 1]
    step    uint8 [out, in / group]     0 .. 17
    zero    uint8 [out, in / group]     0 .. 127; without groups fp32 [out, 1]

A zero is stored multiplied, z * step or z * scale for the paper's z, because a kernel subtracts
after it multiplied: four products of a code and a step are one multiplication of 32 bits, since
15 * 17 is still a byte. What is left after the subtraction is an integer of 8 bits: a row's largest
weight is 119 scales ("protective range"), and half a step above it is at most 127. A zero need not
be a multiple of its step, and `encode` does not round it to one, which would lose a little more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import VQFormatError, VQSchemeError, shown
from .packing import pack_bits, packed_size, unpack_bits
from .spec import TensorSpec

GROUPS = (0, 32, 64, 128, 256)
LARGEST_CODE = 15
PROTECTIVE = 119  # largest integer of a row, before its codes round it
LARGEST_STEP = 17  # 15 * 17 = 255
LARGEST_ZERO = 127
_SPEC = re.compile(r"qoq-w4a8(-g(?P<group>[0-9]{1,3}))?")


@dataclass(frozen=True)
class QoQScheme:
    """Storage of one matrix as 4-bit codes, for a product with inputs rounded to 8 bits.

    Args:
        group: weights along in_features that share a step and a zero: 32, 64, 128 or 256, or 0 for
            the whole row. Where it does not divide a row, the largest power of two that does.

    Raises:
        VQSchemeError: another group.
    """

    two_passes: ClassVar[bool] = False

    group: int = 0

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group not in GROUPS:
            known = ", ".join(map(str, GROUPS))
            raise VQSchemeError(
                f"a group of QoQ must be one of {known} (0: the whole row); got "
                f"{shown(self.group)}."
            )

    def spec(self) -> str:
        """The scheme's name; `parse` is its exact inverse."""
        return f"qoq-w4a8-g{self.group}" if self.group else "qoq-w4a8"

    notation = spec

    @classmethod
    def parse(cls, spec: str) -> QoQScheme:
        """The scheme of a name.

        Raises:
            VQSchemeError: not a name of such a scheme.
        """
        match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
        if match is None:
            raise VQSchemeError(f"{shown(spec)} is not a scheme; write e.g. 'qoq-w4a8-g128'.")
        return cls(int(match["group"] or 0))

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {"format": "qoq-w4a8", "group": self.group}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QoQScheme:
        """The scheme of `to_dict()`.

        Raises:
            VQSchemeError: other fields or values.
        """
        if data.get("format") != "qoq-w4a8" or set(data) - {"format", "group"}:
            raise VQSchemeError(
                f"a scheme of QoQ has the fields 'format' ('qoq-w4a8') and 'group'; got "
                f"{shown(dict(data))}."
            )
        return cls(data.get("group", 0))

    def first_pass(self) -> QoQScheme:
        """Itself: there is one pass."""
        return self

    is_scaled = False  # nothing is rotated

    def scaled(self) -> QoQScheme:
        """Itself: see `VQScheme.scaled`."""
        return self

    unscaled = scaled

    def group_of(self, in_features: int, where: str = "the tensor") -> int:
        """Weights of a group in rows of `in_features`; the whole row without groups.

        Raises:
            VQSchemeError: a row cannot be cut into such groups; says what to do.
        """
        if not self.group:
            return in_features
        found = min(self.group, in_features & -in_features)
        if found < GROUPS[1]:
            raise VQSchemeError(
                f"{self.spec()} needs in_features divisible by {GROUPS[1]}; {where} has "
                f"{in_features}. Give it a scale for each row, "
                f"VQConfig(layers={{{where!r}: 'qoq-w4a8'}}), or leave it dense, "
                "VQConfig(modules_to_not_convert=[...])."
            )
        return found

    def bits(self, in_features: int | None = None, out_features: int | None = None) -> float:
        """Nominal bits per weight: codes, and steps and zeros of groups; of a given row also its
        scale and zero."""
        group = self.group and (self.group if in_features is None else self.group_of(in_features))
        grouped = 4 + 16 / group if group else 4.0
        return grouped + ((16 if group else 48) / in_features if in_features else 0.0)


def qoq_specs(
    scheme: QoQScheme, out_features: int, in_features: int, where: str = "the tensor"
) -> dict[str, TensorSpec]:
    """Every tensor of a stored [out_features, in_features] matrix, by key (see the module).

    Raises:
        VQSchemeError: no such matrix can be stored.
    """
    specs = {
        "codes": TensorSpec((out_features, packed_size(in_features, 4)), torch.uint8),
        "scale": TensorSpec((out_features, 1), torch.float16),
    }
    if not scheme.group:
        return {**specs, "zero": TensorSpec((out_features, 1), torch.float32)}
    shape = out_features, in_features // scheme.group_of(in_features, where)
    return {
        **specs,
        "step": TensorSpec(shape, torch.uint8, largest=LARGEST_STEP),
        "zero": TensorSpec(shape, torch.uint8, largest=LARGEST_ZERO),
    }


@dataclass(frozen=True)
class Grid:
    """The sixteen values that each weight of a matrix may take: (q * step - zero) * scale.

    Args:
        scheme: what it is stored by.
        group: weights of a group.
        scale: float32 [out, 1], numbers of fp16.
        step: float32 [out, groups], integers; 1 without groups.
        zero: float32 [out, groups], in scales: integers, unless scales were trained.
    """

    scheme: QoQScheme
    group: int
    scale: Tensor
    step: Tensor
    zero: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scheme: QoQScheme, in_features: int) -> Grid:
        """The grid of stored tensors, by key."""
        scale = tensors["scale"].float()
        if not scheme.group:
            zero = tensors["zero"] / scale.clamp_min(1e-30)  # no integer after scales were trained
            return cls(scheme, in_features, scale, torch.ones_like(scale), zero)
        step, zero = tensors["step"].float(), tensors["zero"].float()
        return cls(scheme, scheme.group_of(in_features), scale, step, zero)

    def codes(self, weight: Tensor, dither: Tensor | None = None) -> Tensor:
        """Codes of the values nearest to `weight` float32 [out, in], uint8 of its shape.

        Args:
            dither: uniform random numbers of its shape, from 0 to 1, for stochastic rounding.
        """
        level = _in_scales(weight, self.scale).unflatten(1, (-1, self.group))
        level = (level + self.zero[..., None]) / self.step[..., None]
        if dither is None:
            level = level.round()
        else:
            level = (level + dither.unflatten(1, (-1, self.group))).floor()
        return level.clamp(0, LARGEST_CODE).to(torch.uint8).flatten(1)

    def stored(self, codes: Tensor) -> dict[str, Tensor]:
        """The stored tensors of a matrix with the codes uint8 [out, in] (see the module)."""
        found = {"codes": pack_bits(codes, 4, check=False), "scale": self.scale.half()}
        if not self.scheme.group:
            return {**found, "zero": self.zero * self.scale}
        return {**found, "step": self.step.to(torch.uint8), "zero": self.zero.to(torch.uint8)}


def grid_of(weight: Tensor, scheme: QoQScheme, where: str = "the tensor") -> Grid:
    """The grid from the least to the largest weight of each group, or row; zero is within it.

    Args:
        weight: [out, in], any float dtype.

    Raises:
        VQSchemeError: the dimensions do not fit.
        VQFormatError: weights are not finite, or too large for fp16 scales.
    """
    rows = weight.float()
    group = scheme.group_of(rows.shape[1], where)
    groups = rows.unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = None
    if scheme.group:
        scale = (rows.abs().amax(1, keepdim=True) / PROTECTIVE).half().float()
    scale, step, zero = spread(low, high, scale)
    if not bool(scale.isfinite().all()):
        raise VQFormatError(
            f"{where} holds NaN, infinity or weights too large for fp16 scales. Leave it dense: "
            "VQConfig(modules_to_not_convert=[...])."
        )
    return Grid(scheme, group, scale, step, zero)


def spread(low: Tensor, high: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, step and zero of sixteen values from `low`, at most 0, to `high`, at least 0.

    Args:
        scale: of the rows, numbers of fp16 in float32, for values that are integers of 8 bits; None
            = one that makes the step 1.
    """
    if scale is None:
        scale = ((high - low) / LARGEST_CODE).half().float()
        zero = _in_scales(-low, scale).round().clamp_max(LARGEST_CODE)
        return scale, torch.ones_like(scale), zero
    low, high = _in_scales(low, scale), _in_scales(high, scale)
    return scale, ((high - low) / LARGEST_CODE).round().clamp_min(1), (-low).round()


def encode(weight: Tensor, scheme: QoQScheme, where: str = "the tensor") -> dict[str, Tensor]:
    """The stored tensors of `weight` [out, in], rounded to the nearest values of `grid_of`.

    Raises:
        VQSchemeError, VQFormatError: as in `grid_of`.
    """
    grid = grid_of(weight, scheme, where)
    return grid.stored(grid.codes(weight.float()))


def decode(tensors: Mapping[str, Tensor], scheme: QoQScheme, in_features: int) -> Tensor:
    """The dense weight float32 [out, in] of stored tensors, by key."""
    codes = unpack_bits(tensors["codes"], 4, in_features)
    if not scheme.group:
        return codes * tensors["scale"].float() - tensors["zero"]
    return levels(codes, tensors) * tensors["scale"].float()


def levels(codes: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The integers q * step - zero, int32 [out, in], of codes [out, in] that have groups."""
    step, zero = tensors["step"].to(torch.int32), tensors["zero"].to(torch.int32)
    grouped = codes.to(torch.int32).unflatten(1, (step.shape[1], -1))
    return (grouped * step[..., None] - zero[..., None]).flatten(1)


def check(attributes: Mapping[str, str], read: Callable[[str], Tensor], where: str) -> None:
    """Look whether every weight is an integer of 8 bits: kernels would read another.

    Only codes of groups that could have others are read: few of a matrix that `encode` made.

    Args:
        attributes: names of the stored tensors, by key.
        read: gives the tensor of a name, [.., out, n].

    Raises:
        VQFormatError: a weight is not; names `where`.
    """
    if "step" not in attributes:
        return
    step, zero = (read(attributes[key]).flatten(0, -2).int() for key in ("step", "zero"))
    if step.is_meta:
        return  # offloaded: there are no numbers here
    row, group = torch.where(LARGEST_CODE * step - zero > 127)
    if not len(row):
        return
    codes = read(attributes["codes"])
    packed = codes.reshape(len(step), step.shape[1], -1)[row, group]
    most = unpack_bits(packed, 4, 2 * packed.shape[1]).amax(1) * step[row, group]
    most = most - zero[row, group]
    if bool((most > 127).any()):
        worst = int(most.argmax())
        raise VQFormatError(
            f"{where}: group {int(group[worst])} of row {int(row[worst])} holds the integer "
            f"{int(most[worst])}, which is not one of 8 bits. The checkpoint is corrupted; "
            "download it again."
        )


def _in_scales(rows: Tensor, scale: Tensor) -> Tensor:
    """Rows divided by their scales; a row of zeros stays one. Scales of fp16 are rounded, so that
    the largest weight may be a little more than its share: it is cut off."""
    return (rows / scale.clamp_min(1e-30)).clamp(-PROTECTIVE, PROTECTIVE)
