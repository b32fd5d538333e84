"""Training of codes: vectors are trained as numbers and rounded to the nearest entry of the
codebook (straight-through estimator, Bengio et al., arXiv 1308.3432; PV-Tuning, arXiv 2405.14852,
section 3.1, uses it for codebooks).

    forward     the nearest entry          backward    gradient of the vector itself

A vector keeps its entry within half the distance from the entry to the nearest other one, so only
vectors that have moved further are searched. Supports universal codebooks with one code a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.nearest import NearestEntry, nearest_entries
from ..formats.packing import pack_bits, unpack_bits
from ..formats.scheme import VQScheme


def movable(scheme: VQScheme) -> bool:
    """True if codes of a scheme can be trained."""
    plain = scheme.streams == 1 and scheme.stages == "independent" and not scheme.lattice
    return plain and scheme.codebook == "universal"


class MovingCodes:
    """Trainable codes of one matrix, or of the stacked matrices of all experts.

    Args:
        packed: codes as stored, uint8 [..., rows, bytes].
        codebook: universal codebook [1, entries, x].
        columns: in_features.
        step: change of a vector's numbers, whose mean square is about 1, when `delta` changes by 1.

    Attributes:
        delta: trained parameter [..., rows, columns]: change of the vectors in units of `step`.
        packed: the current codes.
    """

    def __init__(
        self, packed: Tensor, codebook: Tensor, scheme: VQScheme, columns: int, step: float
    ) -> None:
        self.packed, self.scheme, self.step = packed, scheme, step
        self.codes = self.first = unpack_bits(
            packed, scheme.entry_bits, columns // scheme.vector_size
        ).long()
        self.search: NearestEntry = nearest_entries(codebook)[0]
        entries = self.search.codebook
        apart = torch.cdist(entries, entries).fill_diagonal_(torch.inf).amin(1)
        self.reach = (apart / 2).square()
        self.delta = torch.zeros(*packed.shape[:-1], columns, device=packed.device)
        self.delta.requires_grad_()

    def stored(self) -> dict[str, Tensor]:
        """`codes`, and `pull` [..., rows, columns]: zeros that carry the gradient to `delta`."""
        return {"codes": self.packed, "pull": self.step * (self.delta - self.delta.detach())}

    @torch.no_grad()
    def follow(self) -> None:
        """Update the codes to the entries nearest to the trained vectors."""
        moved = self.delta.unflatten(-1, (-1, self.scheme.vector_size)) * self.step
        target = self.search.codebook[self.first].add_(moved)
        away = (target - self.search.codebook[self.codes]).square_().sum(-1)
        far = away > self.reach[self.codes]
        codes = self.codes.clone()
        codes[far] = self.search.index(target[far])
        self.codes = codes
        self.packed = pack_bits(codes, self.scheme.entry_bits, check=False)
