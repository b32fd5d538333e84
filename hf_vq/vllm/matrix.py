"""One stored matrix on its way into a layer of vLLM: a rank's part of it; joining neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import VQConfigError, VQFormatError
from ..formats.scheme import VQScheme
from ..hf.checkpoint.headers import CURE
from ..hf.tensor_parallel import check_split, whole_everywhere
from ..nn.linear import VQLinear
from ..nn.published import PublishedLinear
from ..nn.replace import linear_class

CURE_OF_SPLIT = (
    "Serve it with fewer ranks (--tensor-parallel-size), or with --pipeline-parallel-size."
)


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a layer.

    Args:
        rank: this one.
        size: how many there are.
        by_column: whether they split the input's features, not the output's.
    """

    rank: int
    size: int
    by_column: bool

    def check(self, whole: nn.Linear, name: str, cure: str = CURE_OF_SPLIT) -> None:
        """Raise if codes cannot be split like that.

        Args:
            whole: the layer before it is split.
            name: of the layer, for errors.
            cure: what to do instead.

        Raises:
            VQConfigError: says what does not divide.
        """
        if self.size == 1 or not isinstance(whole, VQLinear):
            return
        if isinstance(whole, PublishedLinear):
            raise VQConfigError(
                f"{name}: a layer of {whole.layout.name()} cannot be split over {self.size} ranks."
            )
        check_split(whole, name, "rowwise" if self.by_column else "colwise", self.size, cure)


@dataclass
class StoredMatrix:
    """A matrix of the checkpoint, and the module that computes this rank's part of it.

    Args:
        name: of the stored layer.
        module: this rank's part.
        whole: the same module for the whole matrix, on the meta device.
        rows: first row and number of rows of each piece that this rank holds, where rows are
            split; a checkpoint may have stacked several matrices in one.
        ranks: how the layer is split.
    """

    name: str
    module: nn.Linear
    whole: nn.Linear
    rows: Sequence[tuple[int, int]]
    ranks: Ranks
    missing: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = {key for key, value in self.module._parameters.items() if value is not None}

    def take(self, attribute: str, stored: Tensor) -> None:
        """Copy this rank's part of a stored tensor.

        Raises:
            VQFormatError: the scheme has no such tensor, or of another shape.
        """
        own: Any = getattr(self.module, attribute, None)
        whole: Any = getattr(self.whole, attribute, None)
        if stored.ndim == 2 and stored.stride(0) == 1 < stored.stride(1):
            stored = stored.T  # vLLM transposes what it takes for weights of GPT-2's Conv1D
        # vLLM's dtype is the user's choice; that of codes and scales is the file's.
        casts = not isinstance(self.module, VQLinear) and stored.is_floating_point()
        if own is None or stored.shape != whole.shape or not (casts or stored.dtype == own.dtype):
            found = "no such tensor" if own is None else f"{own.dtype} {list(whole.shape)}"
            raise VQFormatError(
                f"{self.name}.{attribute} is {stored.dtype} {list(stored.shape)}; its scheme has "
                f"{found}. {CURE}"
            )
        own.data.copy_(part_of_rank(stored, own.shape, whole.shape, self.rows, self.ranks))
        self.missing.discard(attribute)


def part_of_rank(
    stored: Tensor,
    own: Sequence[int],
    whole: Sequence[int],
    rows: Sequence[tuple[int, int]],
    ranks: Ranks,
) -> Tensor:
    """One rank's part of a stored tensor, in the dimensions where its shape is another.

    Args:
        stored: of the shape `whole`.
        own: shape on this rank.
        rows: see `StoredMatrix`.
        ranks: how it is split.
    """
    for dim in (d for d, size in enumerate(own) if size != whole[d]):
        if ranks.by_column:
            stored = stored.narrow(dim, ranks.rank * own[dim], own[dim])
        else:
            stored = torch.cat([stored.narrow(dim, *piece) for piece in rows], dim)
    return stored


def pieces(own: Sequence[int], whole: Sequence[int], ranks: Ranks) -> list[tuple[int, int]]:
    """First row and number of rows that a rank holds of each of several stacked matrices.

    Args:
        own: rows of each matrix on one rank.
        whole: rows of each matrix; fewer than `own` times the ranks where several hold the same
            rows, as heads of keys.
        ranks: how they are split.
    """
    found, start = [], 0
    for size, total in zip(own, whole, strict=True):
        copies = size * ranks.size // total
        found.append((start + ranks.rank // copies * size, size))
        start += total
    return found


def join(parts: Sequence[nn.Linear], shared: Mapping[str, Tensor], seed: int) -> list[nn.Linear]:
    """The parts, neighbours that differ in their rows only as one."""
    joined: list[list[nn.Linear]] = []
    for part in parts:
        if joined and _agree(joined[-1][0], part):
            joined[-1].append(part)
        else:
            joined.append([part])
    return [group[0] if len(group) == 1 else _stacked(group, shared, seed) for group in joined]


def _agree(one: nn.Linear, other: nn.Linear) -> bool:
    """True if rows of both can be rows of one matrix: one scheme, one rotation, one codebook."""
    if not (isinstance(one, VQLinear) and isinstance(other, VQLinear)):
        return False
    if isinstance(one, PublishedLinear) or isinstance(other, PublishedLinear):
        return False
    by_tile = isinstance(one.scheme, VQScheme) and one.scheme.codebook == "tile"
    if one.spec != other.spec or by_tile:
        return False
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in one.attributes.values()
        if name in one._parameters and whole_everywhere(one, name, "colwise")
    )


def _stacked(group: Sequence[Any], shared: Mapping[str, Tensor], seed: int) -> VQLinear:
    first = group[0]
    rows = sum(part.out_features for part in group)
    with torch.device("meta"):
        module = linear_class(first.scheme)(
            first.in_features, rows, False, first.scheme, seed=seed, where=first.where
        )
    tensors = {}
    for key, name in first.attributes.items():
        if name in first._parameters:
            each = [part._parameters[name] for part in group]
            rows_at = each[0].ndim - 2 if key == "codes" else 0
            alike = whole_everywhere(first, name, "colwise")
            tensors[key] = each[0] if alike else torch.cat(each, rows_at)
        else:
            module._buffers[name] = first._buffers[name]
    module.assign(tensors, None)
    module.input_parts = first.input_parts
    return module
