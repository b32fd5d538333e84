"""HIGGS (arXiv 2411.17525), as Transformers 4 saved it: weights packed by FLUTE for one GPU.

    X.weight     int16 [out * bits / 16, in]
    X.scales     float [out, in / group]
    X.tables     float [2^bits]                  entries of one weight; not used where p is 2
    X.tables2    float [2^bits, 2^bits, 2]       entries of two weights that follow each other
    X.bias       float [out]

    W H [o, 2j : 2j + 2] = scales[o, g] * tables2[ code[o, 2j], code[o, 2j + 1] ]

where H is a Hadamard transform of blocks of the input. That is a VQScheme: VQ<2, 2 bits, 1> with
the pairs as its codebook.

FLUTE packs the codes of two columns k, k + 1 and of 16 / bits rows together; rows that share a word
are `tile` apart. The tile is that of the kernel template that was fastest on the GPU that packed,
whose number is in `tune_metadata`; how many processors the GPU had does not change the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import VQConfigError, VQFormatError
from ..packing import pack_bits
from ..scheme import VQScheme
from ..spec import TensorSpec
from .layout import CURE, FLOATS, Layout, dtype_named, integer, name_of, part

# Of 3-bit codes in the order of their 96 bits: the row's place among the 16 that share six words.
# Of each, first that of column k + 1, then that of column k.
_ROWS_OF_3_BITS = (0, 3, 6, 9, 12, 1, 4, 7, 10, 13, 2, 5, 8, 11, 14, 15)


@dataclass(frozen=True)
class HiggsLayout(Layout):
    """HIGGS of one layer.

    Args:
        bits: of a weight's code.
        group: weights that share a scale.
        hadamard: block of the Hadamard transform.
        tile: rows between those that share a word.
        dtype: of scales and tables.
        viewed: whether tables2 are bfloat16 that say float16, as Transformers 4 saved them.
    """

    bits: int
    group: int
    hadamard: int
    tile: int
    dtype: str = "float16"
    viewed: bool = False

    method = "higgs"
    suffixes = ("weight", "scales", "tables2", "tables")
    codes = "weight"
    scheme_keys = MappingProxyType({"weight": "codes", "scales": "scale", "tables2": "codebook"})

    ranges = MappingProxyType(
        {"bits": (2, 4), "group": (16, 1 << 12), "hadamard": (16, 1 << 12), "tile": (1, 1 << 10)}
    )

    def __post_init__(self) -> None:
        """See `Layout`."""
        super().__post_init__()
        group, hadamard = self.group, self.hadamard
        if group & (group - 1) or hadamard & (hadamard - 1) or hadamard % group:
            raise VQConfigError(
                f"group_size {group} and hadamard_size {hadamard} must be powers of two, the "
                "second a multiple of the first."
            )

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str, found: Mapping[str, Tensor]) -> HiggsLayout:
        """The layout that config.json says; the tile is that of the layer's template."""
        bits = integer(config, "bits", *cls.ranges["bits"])
        group = integer(config, "group_size", *cls.ranges["group"])
        hadamard = integer(config, "hadamard_size", *cls.ranges["hadamard"])
        about = part(config, "tune_metadata").get(where)
        if not isinstance(about, Mapping):
            raise VQConfigError(
                f"tune_metadata says nothing of {where}: only it tells how FLUTE packed the codes. "
                f"{CURE}"
            )
        number = found["scales"].dtype if "scales" in found else torch.float16
        if number not in FLOATS:
            raise VQConfigError(f"{where}.scales are {number}; hf_vq reads 16 and 32 bits.")
        template = integer(about, "template_id", 0, 143, f".tune_metadata[{where!r}]")
        pairs = found["tables2"].dtype if "tables2" in found else number
        viewed = (number, pairs) == (torch.bfloat16, torch.float16)
        return cls(bits, group, hadamard, _tile(bits, template, where), name_of(number), viewed)

    def expected(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """See `Layout.expected`."""
        rows = self.tile * (16 if self.bits == 3 else 16 // self.bits)
        if in_features % self.hadamard or out_features % rows:
            raise VQFormatError(
                f"a [{out_features}, {in_features}] layer cannot be packed in blocks of {rows} x "
                f"{self.hadamard}: config.json belongs to another checkpoint."
            )
        number, entries = dtype_named(self.dtype), 1 << self.bits
        pairs = torch.float16 if self.viewed else number
        return {
            "weight": TensorSpec((out_features * self.bits // 16, in_features), torch.int16),
            "scales": TensorSpec((out_features, in_features // self.group), number),
            "tables2": TensorSpec((entries, entries, 2), pairs),
            "tables": TensorSpec((entries,), number),
        }

    def scheme(self) -> VQScheme | None:
        """VQ<2, 2 bits, 1> learned per tensor, in the space of the Hadamard transform."""
        return self.rotation() if self.dtype == "float16" else None

    def rotation(self) -> VQScheme:
        """See `Layout.rotation`."""
        return VQScheme(
            vector_size=2,
            entry_bits=2 * self.bits,
            codebook="tensor",
            scale_group=self.group,
            rotation="hadamard",
            rotation_block=self.hadamard,
        )

    def stored(self, suffix: str, tensor: Tensor, where: str) -> Tensor:
        """See `Layout.stored`."""
        if suffix == "weight":
            codes = self.unpacked(tensor)
            return pack_bits(codes[:, 0::2] << self.bits | codes[:, 1::2], 2 * self.bits)
        numbers = self.values(suffix, tensor)
        return (numbers.reshape(1, -1, 2) if suffix == "tables2" else numbers).half()

    def values(self, suffix: str, tensor: Tensor) -> Tensor:
        """See `Layout.values`."""
        return tensor.view(torch.bfloat16) if suffix == "tables2" and self.viewed else tensor

    def inspect(self, suffix: str, tensor: Tensor, where: str) -> None:
        """Every code of `bits` bits has an entry."""

    def unpacked(self, weight: Tensor) -> Tensor:
        """The logical codes int32 [out, in] of packed ones."""
        words = weight.to(torch.int32) & 0xFFFF
        columns = words.shape[1]
        parts = self._three(words) if self.bits == 3 else self._even(words)
        # [blocks of rows, place, tile, pairs of columns, column of a pair]
        return parts.flatten(0, 2).reshape(-1, columns)

    def _even(self, words: Tensor) -> Tensor:
        """Codes of 2 or 4 bits: half of the rows' places are in the word of column k."""
        places = 16 // self.bits
        # Of a word of column k + s, bits from the least: rows s places / 2 and on, k + 1 before k.
        split = words.unflatten(0, (-1, self.tile)).unflatten(2, (-1, 2))
        found = split.new_empty(len(split), places, *split.shape[1:])
        for place in range(places):
            half, rest = divmod(place, places // 2)
            for column in range(2):
                shift = self.bits * (2 * rest + 1 - column)
                found[:, place, :, :, column] = split[..., half] >> shift & ((1 << self.bits) - 1)
        return found

    def _three(self, words: Tensor) -> Tensor:
        """Codes of 3 bits: 32 of them, 96 bits, in six words; three of each of the two columns."""
        first = len(words) // 3
        one = words[:first].unflatten(0, (-1, 1, self.tile))
        two = words[first:].unflatten(0, (-1, 2, self.tile))
        split = torch.cat([one, two], dim=1).unflatten(3, (-1, 2))  # [blocks, 3, tile, pairs, 2]
        bits = _Bits()
        for word in range(3):
            bits.add(split[:, word, :, :, 0], 0, 16)
            bits.add(split[:, word, :, :, 1], 0, 14)
        for word in range(3):
            bits.add(split[:, word, :, :, 1], 14, 2)
        found = split.new_empty(split.shape[0], 16, *split.shape[2:])
        for index, place in enumerate(_ROWS_OF_3_BITS):
            found[:, place, :, :, 1] = bits.take(6 * index, 3)
            found[:, place, :, :, 0] = bits.take(6 * index + 3, 3)
        return found

    def decode(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensor:
        """See `Layout.decode`."""
        codes, scales, pairs = (tensors[key] for key in ("weight", "scales", "tables2"))
        pairs = self.values("tables2", pairs)
        logical = self.unpacked(codes)
        rows = pairs.float()[logical[:, 0::2], logical[:, 1::2]].flatten(1)
        grouped = rows.unflatten(1, (-1, self.group)) * scales.float()[..., None]
        return grouped.flatten(1)

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """See `Layout.size`."""
        rows, columns = shapes["codes"]
        return rows * 16 // self.bits, columns

    def name(self) -> str:
        """Bits and groups."""
        return f"HIGGS {self.bits} bits, groups of {self.group}, Hadamard {self.hadamard}"


class _Bits:
    """A stream of bits in words of 16, one stream for every place of a tensor."""

    def __init__(self) -> None:
        self.words: list[Tensor] = []
        self.length = 0

    def add(self, words: Tensor, first: int, count: int) -> None:
        """Append bits `first` to `first + count` of `words`."""
        value = words >> first & ((1 << count) - 1)
        index, shift = divmod(self.length, 16)
        while len(self.words) <= (self.length + count - 1) // 16:
            self.words.append(torch.zeros_like(words))
        self.words[index] = self.words[index] | (value << shift & 0xFFFF)
        if shift + count > 16:
            self.words[index + 1] = self.words[index + 1] | value >> (16 - shift)
        self.length += count

    def take(self, first: int, count: int) -> Tensor:
        """`count` bits from `first`."""
        index, shift = divmod(first, 16)
        value = self.words[index] >> shift
        if shift + count > 16:
            value = value | self.words[index + 1] << (16 - shift)
        return value & ((1 << count) - 1)


def _tile(bits: int, template: int, where: str) -> int:
    """Rows of a tile of one of FLUTE's kernel templates."""
    count, large = (48, 16) if bits == 4 else (12, 4)
    if template >= 3 * count:
        raise VQConfigError(f"{where}: FLUTE has no template {template} of {bits} bits.")
    tile = 64 if template % count < large else 32
    if bits == 3 and tile == 64:
        raise VQConfigError(f"{where}: FLUTE packs 3 bits for tiles of 32 only, not {template}.")
    return tile
