"""Layers of the project `turboquant-model` (version 0.1.0): scalar codes of rotated groups.

    X.indices          uint8 [out, in / 2]       byte = code[2 j] | code[2 j + 1] << 4
    X.norms            float [out, in / group]   [out] where a row is one group
    X.codebook         float32 [2^bits]          one in a file, for all layers
    X.pass2_indices, X.pass2_norms, X.pass2_codebook      of what the first pass leaves

    W[o, g] = norms[o, g] * ( codebook[code[o, g]] / sqrt(group) ) R_g  +  the same of pass 2

R_g is drawn from the seed of its pass plus the group's first column, by torch's generator on a CPU:
Q of the QR decomposition of a Gaussian matrix, columns times the signs of R's diagonal; or H D /
sqrt(group) with H of Walsh and Hadamard and D of random signs. Codes of 1 to 3 bits take 4 too.

No scheme stores it: a QR matrix for each group, norms and codebooks in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import VQConfigError, VQFormatError, shown
from ..scheme import VQScheme
from ..spec import TensorSpec
from .layout import CURE, Layout, dtype_named, integer, name_of

LAYERS_APART = 10007  # between the seeds of layers that have their own
_CODE_BITS = 4
_KEPT = 512  # matrices: those of two passes of a layer, 64 KB each at a group of 128


@dataclass(frozen=True)
class TurboquantLayout(Layout):
    """One layer.

    Args:
        bits: of a code.
        residual: bits of a code of the second pass; 0 = there is none.
        group: weights that share a norm and a rotation.
        hadamard: how they are rotated; else by QR.
        seed: of the rotations.
        residual_seed: of those of the second pass.
        dtype: of the norms; those of the second pass are always float32.
    """

    bits: int
    residual: int
    group: int
    hadamard: bool
    seed: int
    residual_seed: int
    dtype: str = "float32"

    method = "turboquant-model"
    in_config = False
    suffixes = (
        "indices", "norms", "codebook", "pass2_indices", "pass2_norms", "pass2_codebook"
    )  # fmt: skip
    codes = "indices"
    ranges = MappingProxyType(
        {
            "bits": (3, 4),  # with 1 and 2 that project fails
            "residual": (0, 4),
            "group": (2, 1 << 24),
            "seed": (0, 1 << 39),
            "residual_seed": (0, 1 << 39),
        }
    )

    def __post_init__(self) -> None:
        """See `Layout`."""
        super().__post_init__()
        if self.hadamard and self.group & (self.group - 1):
            raise VQConfigError(f"a Hadamard rotation of {self.group} weights: no power of two.")

    @classmethod
    def of(
        cls, config: Mapping[str, Any], where: str, found: Mapping[str, Tensor]
    ) -> TurboquantLayout:
        """The layout that turboquant_config.json says, with `layers`: numbers of layers by name."""
        residual = 0
        if config.get("residual_bit_width") is not None:
            residual = integer(config, "residual_bit_width", 1, 4)
        group = config.get("group_size")
        if group is None:  # a row
            group = 2 * found["indices"].shape[1] if "indices" in found else 0
        group = integer({"group_size": group}, "group_size", *cls.ranges["group"])
        rotation, strategy = config.get("rotation"), config.get("rotation_strategy")
        if rotation not in ("qr", "hadamard"):
            raise VQConfigError(f"rotation {shown(rotation)} is not known to hf_vq.")
        if strategy not in ("different", "alternating", "shared", "per_layer"):
            raise VQConfigError(f"rotation_strategy {shown(strategy)} is not known to hf_vq.")
        seed = integer(config, "seed", 0, 1 << 32)
        second = seed if strategy == "shared" else integer(config, "residual_seed", 0, 1 << 32)
        if strategy == "per_layer":
            apart = LAYERS_APART * config["layers"][where]
            seed, second = seed + apart, second + apart
        number = found["norms"].dtype if "norms" in found else torch.float32
        if number not in (torch.float16, torch.float32):
            raise VQConfigError(f"{where}.norms are {number}; float16 and float32 are known.")
        return cls(
            bits=integer(config, "bit_width", *cls.ranges["bits"]),
            residual=residual,
            group=group,
            hadamard=rotation == "hadamard",
            seed=seed,
            residual_seed=second if residual else 0,
            dtype=name_of(number),
        )

    def expected(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """See `Layout.expected`."""
        if in_features % self.group or in_features % 2:
            raise VQFormatError(
                f"groups of {self.group} do not divide {in_features} columns: what "
                "turboquant-model computes of such layers is wrong, or nothing. hf_vq does not "
                "read them."
            )
        groups = in_features // self.group
        norms = (out_features, groups) if groups > 1 else (out_features,)
        indices = TensorSpec((out_features, in_features // 2), torch.uint8)
        found = {
            "indices": indices,
            "norms": TensorSpec(norms, dtype_named(self.dtype)),
            "codebook": TensorSpec((1 << self.bits,), torch.float32),
        }
        if self.residual:
            found["pass2_indices"] = indices
            found["pass2_norms"] = TensorSpec(norms, torch.float32)
            found["pass2_codebook"] = TensorSpec((1 << self.residual,), torch.float32)
        return found

    def scheme(self) -> VQScheme | None:
        """None: see the module."""
        return None

    def stored(self, suffix: str, tensor: Tensor, where: str) -> Tensor:
        """Never called: there is no scheme."""
        raise NotImplementedError

    def inspect(self, suffix: str, tensor: Tensor, where: str) -> None:
        """See `Layout.inspect`."""
        if not suffix.endswith("indices") or not tensor.numel():
            return
        bits = self.residual if suffix.startswith("pass2") else self.bits
        largest = int(_nibbles(tensor).max())
        if largest >= 1 << bits:
            raise VQFormatError(
                f"{where} holds code {largest}, which is outside of a codebook of {1 << bits} "
                f"entries. {CURE}"
            )
        if largest == 0:
            raise VQFormatError(
                f"{where} holds zeros only: turboquant-model saves no codes of other sizes than 4 "
                "bits that its quantize_model_advanced made. Quantize the model again."
            )

    def decode(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensor:
        """See `Layout.decode`."""
        weight = self._pass(tensors, "", self.seed)
        if self.residual:
            weight = weight + self._pass(tensors, "pass2_", self.residual_seed)
        return weight

    def _pass(self, tensors: Mapping[str, Tensor], prefix: str, seed: int) -> Tensor:
        codes = _nibbles(tensors[f"{prefix}indices"]).unflatten(1, (-1, self.group))
        codebook, norms = tensors[f"{prefix}codebook"].float(), tensors[f"{prefix}norms"].float()
        groups = (codebook / math.sqrt(self.group))[codes.int()].unbind(1)
        rotate = _unhadamard if self.hadamard else _unqr
        rotated = [rotate(y, seed + self.group * g) for g, y in enumerate(groups)]
        return (torch.stack(rotated, 1) * norms.reshape(len(codes), -1, 1)).flatten(1)

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """See `Layout.size`."""
        rows, packed = shapes["codes"]
        return rows, 2 * packed

    def name(self) -> str:
        """Bits, groups and rotation."""
        bits = f"{self.bits}+{self.residual}" if self.residual else f"{self.bits}"
        rotation = "Hadamard" if self.hadamard else "QR"
        return f"turboquant-model {bits} bits, groups of {self.group}, {rotation}"


def _nibbles(indices: Tensor) -> Tensor:
    """Codes uint8 [out, in]."""
    return torch.stack([indices & 15, indices >> _CODE_BITS], -1).flatten(-2)


def _unqr(rows: Tensor, seed: int) -> Tensor:
    """Rows [n, d] times the matrix of a seed."""
    make = _matrix if rows.shape[1] <= _KEPT else _matrix.__wrapped__
    return rows @ make(rows.shape[1], seed).to(rows.device)


def _unhadamard(rows: Tensor, seed: int) -> Tensor:
    """Rows [n, d] times H / sqrt(d), then times the signs of a seed."""
    size = rows.shape[1]
    drawn = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    rotated = rows
    for half in (1 << step for step in range(size.bit_length() - 1)):
        one, other = rotated.reshape(len(rows), -1, 2, half).unbind(2)
        rotated = torch.stack([one + other, one - other], 2)
    signs = (2 * drawn - 1).to(rows.device, rows.dtype)
    return rotated.reshape(rows.shape) / math.sqrt(size) * signs


@lru_cache(maxsize=_KEPT)
@torch.inference_mode(False)  # kept for callers that will want gradients
def _matrix(size: int, seed: int) -> Tensor:
    gaussian = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), device="cpu")
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()
