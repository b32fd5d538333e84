"""VPTQ (arXiv 2409.17066), as the package `vptq` and public checkpoints store it.

    X.indices                  int32 [groups, ceil(out / v), ceil(group_size * bits / 32)]
    X.centroids.weight         float [groups, centroids * v]
    X.res_centroids.weight     float [groups, residual centroids * v]
    X.outlier_indices          int16 [1, ceil(out / ov), outliers]      unsigned
    X.outlier_centroids.weight float [1, outlier centroids * ov]
    X.weight_scale, X.weight_bias   float [in]
    X.perm                     int16 [in]                               unsigned
    X.bias                     float [out]

Vectors run along the OUTPUT dimension: an entry is v rows of one column. A row of `indices` is one
stream of bits, least significant first; a code is the residual's above the main one's.

    stored = [ outliers | group 0 | group 1 | .. ]             columns in the order of `perm`
    stored[i v + r, column c of group g] = C[g][code][r] + R[g][residual code][r]
    W[:, perm[c]] = stored[:, c] * weight_scale[perm[c]] + weight_bias[perm[c]]

No VQScheme has such vectors, outliers or a permutation of columns, so tensors are stored unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import VQConfigError, VQFormatError, shown
from ..scheme import VQScheme
from ..spec import TensorSpec
from .layout import CURE, FLOATS, Layout, dtype_named, integer, name_of, part


@dataclass(frozen=True)
class VptqLayout(Layout):
    """VPTQ of one layer.

    Args:
        vector: rows of an entry.
        centroids: entries of a group's codebook.
        residual: entries of its residual codebook; 0 = none.
        groups: groups of columns, each with its own codebooks.
        group_size: columns of a group.
        outliers: columns that use the outliers' codebook; 0 = none.
        outlier_vector: rows of an outlier's entry.
        outlier_centroids: entries of the outliers' codebook.
        norm: True if columns have a scale and an offset.
        perm: True if columns are stored in another order.
        dtype: of the numbers.
    """

    vector: int
    centroids: int
    residual: int
    groups: int
    group_size: int
    outliers: int = 0
    outlier_vector: int = 0
    outlier_centroids: int = 0
    norm: bool = False
    perm: bool = False
    dtype: str = "float16"

    method = "vptq"
    suffixes = (
        "indices", "centroids.weight", "res_centroids.weight", "outlier_indices",
        "outlier_centroids.weight", "weight_scale", "weight_bias", "perm",
    )  # fmt: skip
    codes = "indices"

    ranges = MappingProxyType(
        {
            "vector": (1, 1 << 10),
            "centroids": (2, 1 << 16),
            "residual": (0, 1 << 16),
            "groups": (1, 1 << 16),
            "group_size": (1, 1 << 24),
            "outliers": (0, 1 << 16),
            "outlier_vector": (0, 1 << 10),
            "outlier_centroids": (0, 1 << 16),
        }
    )

    def __post_init__(self) -> None:
        """See `Layout`."""
        super().__post_init__()
        if self.residual == 1:
            raise VQConfigError("a residual codebook of one entry has codes of no bits.")
        if self.outliers and not (self.outlier_vector and self.outlier_centroids):
            raise VQConfigError(f"{self.outliers} outlier columns have no codebook.")

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str, found: Mapping[str, Tensor]) -> VptqLayout:
        """The layout that `config_for_layers` or `shared_layer_config` says."""
        about = part(config, "config_for_layers").get(where)
        if about is None:
            about = part(config, "shared_layer_config").get(where.rpartition(".")[2])
        if not isinstance(about, Mapping):
            raise VQConfigError(
                f"config_for_layers says nothing of {where}, which has codes. {CURE}"
            )
        if about.get("is_indice_packed") is not True:
            raise VQConfigError(
                "is_indice_packed must be true: indices that are not packed are not published."
            )
        outlier_vector, vector = _pair(about, "vector_lens")
        outlier_centroids, centroids = _pair(about, "num_centroids")
        _, residual = _pair(about, "num_res_centroids")
        has_outliers = outlier_vector > 1 and outlier_centroids > 0
        number = found["centroids.weight"].dtype if "centroids.weight" in found else torch.float16
        if number not in FLOATS:
            raise VQConfigError(f"{where}.centroids.weight are {number}; hf_vq reads 16, 32 bits.")
        return cls(
            vector=vector,
            centroids=centroids,
            residual=max(residual, 0),
            groups=integer(about, "group_num", *cls.ranges["groups"]),
            group_size=integer(about, "group_size", *cls.ranges["group_size"]),
            outliers=integer(about, "outlier_size", 1, 1 << 16) if has_outliers else 0,
            outlier_vector=outlier_vector if has_outliers else 0,
            outlier_centroids=outlier_centroids if has_outliers else 0,
            norm=about.get("enable_norm") is True,
            perm=about.get("enable_perm") is True,
            dtype=name_of(number),
        )

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of a main code, and of a residual's."""
        return _log2(self.centroids), _log2(self.residual)

    def expected(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """See `Layout.expected`."""
        if self.outliers + self.groups * self.group_size != in_features:
            raise VQFormatError(
                f"{self.outliers} outliers and {self.groups} groups of {self.group_size} columns "
                f"are not the {in_features} columns of the layer. {CURE}"
            )
        number = dtype_named(self.dtype)
        words = -(-self.group_size * sum(self.bits) // 32)
        vectors = -(-out_features // self.vector)
        found = {
            "indices": TensorSpec((self.groups, vectors, words), torch.int32),
            "centroids.weight": TensorSpec((self.groups, self.centroids * self.vector), number),
        }
        if self.residual:
            shape = self.groups, self.residual * self.vector
            found["res_centroids.weight"] = TensorSpec(shape, number)
        if self.outliers:
            vectors = -(-out_features // self.outlier_vector)
            found["outlier_indices"] = TensorSpec((1, vectors, self.outliers), torch.int16)
            shape = 1, self.outlier_centroids * self.outlier_vector
            found["outlier_centroids.weight"] = TensorSpec(shape, number)
        if self.norm:
            found["weight_scale"] = TensorSpec((in_features,), number)
            found["weight_bias"] = TensorSpec((in_features,), number)
        if self.perm:
            found["perm"] = TensorSpec((in_features,), torch.int16)
        return found

    def scheme(self) -> VQScheme | None:
        """None: see the module."""
        return None

    def stored(self, suffix: str, tensor: Tensor, where: str) -> Tensor:
        """Never called: there is no scheme."""
        raise NotImplementedError

    def inspect(self, suffix: str, tensor: Tensor, where: str) -> None:
        """See `Layout.inspect`."""
        if suffix == "indices":
            for count, codes in zip(
                (self.centroids, self.residual), self._codes(tensor), strict=True
            ):
                if codes is not None and count & (count - 1):
                    _check_below(codes, count, where)
        elif suffix == "outlier_indices":
            _check_below(_unsigned(tensor), self.outlier_centroids, where)
        elif suffix == "perm":
            order = _unsigned(tensor).sort().values
            if not torch.equal(order, torch.arange(len(order), device=order.device)):
                raise VQFormatError(f"{where} is no order of {len(order)} columns. {CURE}")

    def _codes(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Main and residual codes int64 [groups, vectors, group_size] of a stream of bits."""
        main, rest = self.bits
        words = torch.nn.functional.pad(indices.long() & 0xFFFFFFFF, (0, 1))
        first = torch.arange(self.group_size, device=indices.device) * (main + rest)
        word, shift = first >> 5, first & 31
        both = (words[..., word] >> shift) | (words[..., word + 1] << (32 - shift))
        codes = both & ((1 << main) - 1)
        return codes, (both >> main) & ((1 << rest) - 1) if rest else None

    def decode(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensor:
        """See `Layout.decode`."""
        codes, rest = self._codes(tensors["indices"])
        weight = _columns(tensors["centroids.weight"], codes, self.vector, out_features)
        if rest is not None:
            table = tensors["res_centroids.weight"]
            weight = weight + _columns(table, rest, self.vector, out_features)
        if self.outliers:
            codes = _unsigned(tensors["outlier_indices"])
            table = tensors["outlier_centroids.weight"]
            outliers = _columns(table, codes, self.outlier_vector, out_features)
            weight = torch.cat([outliers, weight], dim=1)
        if self.perm:
            weight = weight[:, _unsigned(tensors["perm"]).argsort()]
        if self.norm:
            weight = weight * tensors["weight_scale"].float() + tensors["weight_bias"].float()
        return weight

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """See `Layout.size`: rows are rounded up to whole vectors."""
        columns = self.outliers + self.groups * self.group_size
        return shapes["codes"][1] * self.vector, columns

    def name(self) -> str:
        """Name as in public checkpoints: v8-k65536-256."""
        return f"VPTQ v{self.vector}-k{self.centroids}-{self.residual}"


def _columns(table: Tensor, codes: Tensor, vector: int, out_features: int) -> Tensor:
    """Entries float32 [out, groups * columns] of codes [groups, vectors, columns]."""
    groups = [
        entries.float().reshape(-1, vector)[code].transpose(1, 2).flatten(0, 1)
        for entries, code in zip(table, codes, strict=True)
    ]
    return torch.cat(groups, dim=1)[:out_features]


def _unsigned(tensor: Tensor) -> Tensor:
    return tensor.long() & 0xFFFF


def _check_below(codes: Tensor, count: int, where: str) -> None:
    if codes.numel() and int(codes.max()) >= count:
        raise VQFormatError(
            f"{where} holds code {int(codes.max())}, which is outside of a codebook of {count} "
            f"entries. {CURE}"
        )


def _log2(count: int) -> int:
    return max(count - 1, 0).bit_length()


def _pair(config: Mapping[str, Any], key: str) -> tuple[int, int]:
    """[of outliers, of the rest] in a layer's config."""
    value = config.get(key)
    if not isinstance(value, (list, tuple)) or [type(v) for v in value] != [int, int]:
        raise VQConfigError(f"{key} must be two integers; got {shown(value)}.")
    return value[0], value[1]
