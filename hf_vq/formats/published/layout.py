"""`Layout`: storage of one linear layer by a published method, and its conversion.

    published tensors  --stored-->  tensors of a scheme            our kernels run it
                                    or the same tensors (`own`)     decoded at every call

A published tensor is known by its suffix: `X.codes` of a layer X has the suffix `codes`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import VQConfigError, VQFormatError, shown
from ..qoq import QoQScheme
from ..scheme import VQScheme
from ..spec import TensorSpec

CURE = "The checkpoint does not fit its config.json or is damaged; download it again."
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Layout(ABC):
    """One layer's layout. Its fields are JSON, so that a config.json can say it in full."""

    method: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]  # of every tensor that a layer may have
    codes: ClassVar[str]  # the suffix of the codes, which no layer is without
    scheme_keys: ClassVar[Mapping[str, str]] = MappingProxyType({})  # of a scheme, by suffix
    ranges: ClassVar[Mapping[str, tuple[int, int]]]  # least and most, of fields that are integers
    in_config: ClassVar[bool] = True  # whether config.json names the method; else convert only

    def __post_init__(self) -> None:
        """Check every field: a config.json may hold anything.

        Raises:
            VQConfigError: names the field, and what it may be.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "dtype":
                dtype_named(value)
            elif field.name in self.ranges:
                low, high = self.ranges[field.name]
                if type(value) is not int or not low <= value <= high:
                    raise VQConfigError(
                        f"{field.name} of a layout of {self.method} must be an integer in "
                        f"[{low}, {high}]; got {shown(value)}."
                    )
            elif type(value) is not bool:
                raise VQConfigError(
                    f"{field.name} of a layout of {self.method} must be true or false; "
                    f"got {shown(value)}."
                )

    @classmethod
    @abstractmethod
    def of(cls, config: Mapping[str, Any], where: str, found: Mapping[str, Tensor]) -> Layout:
        """The layout of layer `where`.

        Args:
            config: `quantization_config` of the checkpoint.
            found: the layer's tensors by suffix; shape and dtype are read, so meta tensors do.

        Raises:
            VQConfigError: a variant that is not known.
        """

    @abstractmethod
    def expected(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """Every published tensor of a [out_features, in_features] matrix, by suffix.

        Raises:
            VQFormatError: no such matrix can be stored.
        """

    @cached_property  # read for every tensor
    def stored_as(self) -> VQScheme | QoQScheme | None:
        """Cached result of `scheme`."""
        return self.scheme()

    @abstractmethod
    def scheme(self) -> VQScheme | QoQScheme | None:
        """The scheme that stores the same, if there is one."""

    @abstractmethod
    def stored(self, suffix: str, tensor: Tensor, where: str) -> Tensor:
        """One published tensor as the tensor `scheme_keys[suffix]` of `scheme()`.

        Args:
            where: name of the tensor, for errors.

        Raises:
            VQFormatError: a code that its codebook does not have.
        """

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensor:
        """The published formula: the dense weight [out_features, in_features] in float32, before
        the `rotation` of its rows is undone.

        Args:
            tensors: by suffix, as published.
        """

    def values(self, suffix: str, tensor: Tensor) -> Tensor:
        """A published tensor of floats, as the numbers that it stands for."""
        return tensor

    def rotation(self) -> VQScheme | None:
        """The scheme whose rotation of rows `decode` does not undo; None = there is none."""
        return None

    @abstractmethod
    def inspect(self, suffix: str, tensor: Tensor, where: str) -> None:
        """Check the values of a published tensor that is stored unchanged.

        Raises:
            VQFormatError: a code that its codebook does not have; names `where`.
        """

    def own(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """The tensors of a layer that no scheme stores, by key: as published, codes as `codes`."""
        found = self.expected(out_features, in_features)
        return {self.key(suffix): spec for suffix, spec in found.items()}

    def key(self, suffix: str) -> str:
        """Key in `own` of a published tensor."""
        return "codes" if suffix == self.codes else suffix.removesuffix(".weight")

    def check(self, found: Mapping[str, Tensor], size: tuple[int, int], where: str) -> None:
        """Compare a layer's tensors, which may be meta tensors, with what is expected.

        Raises:
            VQFormatError: names the first that is missing or wrong, and the cure.
        """
        expected = self.expected(*size)
        for suffix, spec in expected.items():
            if suffix not in found:
                raise VQFormatError(
                    f"the checkpoint lacks {where}.{suffix}: the layer would be random. {CURE}"
                )
            tensor = found[suffix]
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise VQFormatError(
                    f"{where}.{suffix} is {tensor.dtype} {list(tensor.shape)}, expected "
                    f"{spec.dtype} {list(spec.shape)} for a [{size[0]}, {size[1]}] layer of "
                    f"{self.name()}. {self.hint(suffix, tensor, spec)}{CURE}"
                )
        for suffix in found:
            if suffix not in expected:
                raise VQFormatError(
                    f"{where}.{suffix} is not part of a layer of {self.name()}. {CURE}"
                )

    def hint(self, suffix: str, tensor: Tensor, spec: TensorSpec) -> str:
        """Explanation for a tensor with a wrong shape or dtype, for an error; ends with a blank."""
        return ""

    @abstractmethod
    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """out_features and in_features of a layer whose `own` tensors have these shapes."""

    @abstractmethod
    def name(self) -> str:
        """The variant in the method's own words."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {"method": self.method, **asdict(self)}

    def spec(self) -> str:
        """All fields as a string, the same for layouts that are equal."""
        return json.dumps(self.to_dict(), sort_keys=True)


def check_fields(cls: type[Layout], data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a layout in a dict that `to_dict` made.

    Raises:
        VQConfigError: one is missing or unknown.
    """
    known, given = {field.name for field in fields(cls)}, set(data) - {"method"}
    if known != given:
        wrong = ", ".join(sorted(map(str, known ^ given)))
        raise VQConfigError(f"a layout of {cls.method} has other fields ({wrong} differ).")
    return {
        name: tuple(value) if isinstance(value := data[name], list) else value for name in known
    }


def part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Section `key` of a published config; empty if it is missing.

    Raises:
        VQConfigError: the section is no mapping.
    """
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise VQConfigError(f"quantization_config: {key} must be a mapping; got {shown(found)}.")
    return found


def integer(config: Mapping[str, Any], key: str, low: int, high: int, where: str = "") -> int:
    """An integer of a published config.

    Raises:
        VQConfigError: it is missing, no integer or out of range.
    """
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise VQConfigError(
            f"quantization_config{where}: {key} must be an integer in [{low}, {high}]; "
            f"got {shown(value)}. hf_vq does not know this variant."
        )
    return value


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as "float16".

    Raises:
        VQConfigError: not one of `FLOATS`.
    """
    for dtype in FLOATS:
        if name_of(dtype) == name:
            return dtype
    raise VQConfigError(f"{shown(name)} is not a dtype of codebooks.")


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype: "float16"."""
    return str(dtype).removeprefix("torch.")


def unsigned(codes: Tensor, bits: int, where: str) -> Tensor:
    """Two's complement codes of `bits` bits, in an integer that may be wider, as 0..2^bits - 1.

    Raises:
        VQFormatError: a code that does not fit `bits` bits.
    """
    if codes.dtype.itemsize * 8 > bits and codes.numel():
        half = 1 << (bits - 1)
        low, high = (int(bound) for bound in torch.aminmax(codes))
        if low < -half or high >= half:
            raise VQFormatError(
                f"{where} holds code {low if low < -half else high}, which is outside of a "
                f"codebook of 2^{bits} entries (codes are signed: {-half} to {half - 1}). {CURE}"
            )
    return codes.to(torch.int32) & ((1 << bits) - 1)
