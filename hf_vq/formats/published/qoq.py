"""QoQ (arXiv 2405.04532) in the order of QServe's kernels, as its converter and SGLang store it.

    X.qweight     int8 [out, in / 2]       two codes in a byte
    X.s1_scales   fp16 [out]
    X.s1_szeros   fp16 [out]               without groups: zero * scale
    X.s2_scales   int8 [in / 128, out]     with groups: steps
    X.s2_zeros    int8 [in / 128, out]     with groups: -zero * step
    X.bias        fp16 [out]

That is a `QoQScheme` in another order. A thread of a tensor core's product reads 16 bytes at once:
of a tile of 32 rows and 32 columns, row 16 b + 8 c + d and column 16 f + 4 g + h lie at

    byte [d, g, f, c, h], in the half b                 steps and zeros of the rows at [d, b, c]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import VQConfigError, VQFormatError, shown
from ..packing import pack_bits
from ..qoq import LARGEST_STEP, LARGEST_ZERO, QoQScheme, check
from ..qoq import decode as decode_stored
from ..spec import TensorSpec
from .layout import CURE, Layout, integer

_TILE = 32
_GROUP = 128


@dataclass(frozen=True)
class QoqLayout(Layout):
    """QoQ of one layer.

    Args:
        grouped: whether 128 weights share a step and a zero.
    """

    grouped: bool

    method = "qoq"
    suffixes = ("qweight", "s1_scales", "s1_szeros", "s2_scales", "s2_zeros")
    codes = "qweight"
    scheme_keys = MappingProxyType(
        {
            "qweight": "codes", "s1_scales": "scale", "s1_szeros": "zero",
            "s2_scales": "step", "s2_zeros": "zero",
        }
    )  # fmt: skip
    ranges = MappingProxyType({})

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str, found: Mapping[str, Tensor]) -> QoqLayout:
        """The layout that `wbits` and `group_size` say."""
        integer(config, "wbits", 4, 4)
        group = config.get("group_size")
        if type(group) is not int or group not in (-1, _GROUP):
            raise VQConfigError(
                f"quantization_config: group_size must be -1 or {_GROUP}; got {shown(group)}. "
                "hf_vq does not know this variant."
            )
        return cls(group == _GROUP)

    def expected(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """See `Layout.expected`."""
        columns = _GROUP if self.grouped else _TILE
        if out_features % _TILE or in_features % columns:
            raise VQFormatError(
                f"a [{out_features}, {in_features}] layer cannot be split into tiles of {_TILE} x "
                f"{columns}: config.json belongs to another checkpoint."
            )
        specs = {
            "qweight": TensorSpec((out_features, in_features // 2), torch.int8),
            "s1_scales": TensorSpec((out_features,), torch.float16),
        }
        if not self.grouped:
            return {**specs, "s1_szeros": TensorSpec((out_features,), torch.float16)}
        groups = TensorSpec((in_features // _GROUP, out_features), torch.int8)
        return {**specs, "s2_scales": groups, "s2_zeros": groups}

    def scheme(self) -> QoQScheme:
        """The same format, with its rows in order."""
        return QoQScheme(_GROUP if self.grouped else 0)

    def stored(self, suffix: str, tensor: Tensor, where: str) -> Tensor:
        """See `Layout.stored`."""
        if suffix == "qweight":
            return pack_bits(_codes(tensor), 4, check=False)
        if suffix in ("s1_scales", "s1_szeros"):
            return tensor[:, None] if suffix == "s1_scales" else tensor[:, None].float()
        numbers = _rows(tensor).to(torch.int16) * (-1 if suffix == "s2_zeros" else 1)
        least, most = (int(bound) for bound in torch.aminmax(numbers))
        limit = LARGEST_ZERO if suffix == "s2_zeros" else LARGEST_STEP
        if least < 0 or most > limit:
            raise VQFormatError(
                f"{where} holds {least if least < 0 else most}, where weights of 8 bits need 0 to "
                f"{limit}: its rows were not kept within [-119, 119]. {CURE}"
            )
        return numbers.to(torch.uint8)

    def inspect(self, suffix: str, tensor: Tensor, where: str) -> None:
        """See `Layout.inspect`: a scheme stores every layer, so none is kept."""

    def decode(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensor:
        """See `Layout.decode`.

        Raises:
            VQFormatError: an integer of more than 8 bits, of which QServe's kernels keep the last.
        """
        stored = {self.scheme_keys[s]: self.stored(s, t, s) for s, t in tensors.items()}
        check({key: key for key in stored}, stored.__getitem__, "qweight")
        return decode_stored(stored, self.scheme(), in_features)

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """See `Layout.size`."""
        rows, size = shapes["codes"]
        return rows, 2 * size

    def name(self) -> str:
        """Name as in public checkpoints."""
        return f"QoQ W4A8 ({'groups of 128' if self.grouped else 'per channel'})"


def _codes(packed: Tensor) -> Tensor:
    """Codes uint8 [out, in] of a `qweight` [out, in / 2]."""
    out, half = packed.shape
    tiles = packed.contiguous().view(torch.uint8).reshape(out // _TILE, -1, 8, 4, 2, 2, 4)
    codes = torch.stack([tiles & 15, tiles >> 4], -1)  # tile, tile, d, g, f, c, h, b
    return codes.permute(0, 7, 5, 2, 1, 4, 3, 6).reshape(out, 2 * half)


def _rows(numbers: Tensor) -> Tensor:
    """Steps or zeros [out, groups] of [groups, out]."""
    groups, out = numbers.shape
    tiles = numbers.reshape(groups, out // _TILE, 8, 4).transpose(2, 3)
    return tiles.reshape(groups, out).T
