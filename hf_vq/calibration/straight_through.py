"""Codes that move by gradients: every vector of entries moves as numbers, and is stored as the
entry that is nearest (straight-through estimator, Bengio et al., arXiv 1308.3432; PV-Tuning, arXiv
2405.14852, section 3.1, has it for codebooks).

    forward     the nearest entry          backward    as if it were the vector itself

An entry is nearest to all that lies within half the distance to its own neighbour, so only the
others are searched. Of universal codebooks with one code for a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.nearest import NearestEntry, nearest_entries
from ..formats.packing import pack_bits, unpack_bits
from ..formats.scheme import VQScheme


def movable(scheme: VQScheme) -> bool:
    """Whether codes of a scheme can move."""
    plain = scheme.streams == 1 and scheme.stages == "independent" and not scheme.lattice
    return plain and scheme.codebook == "universal"


class MovingCodes:
    """Codes of one matrix, or of those of all experts.

    Args:
        packed: codes as stored, uint8 [..., rows, bytes].
        codebook: [1, entries, x], universal.
        columns: in_features.
        step: what a change of `delta` by 1 changes an entry by, whose numbers have a mean square
            of about 1.

    Attributes:
        delta: what a step moves, [..., rows, columns]: entries, in units of `step`.
        packed: the codes of now.
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
        """`codes`, and the zeros `pull` [..., rows, columns] that entries get their gradient by."""
        return {"codes": self.packed, "pull": self.step * (self.delta - self.delta.detach())}

    @torch.no_grad()
    def follow(self) -> None:
        """Take the entries nearest to what moved."""
        moved = self.delta.unflatten(-1, (-1, self.scheme.vector_size)) * self.step
        target = self.search.codebook[self.first].add_(moved)
        away = (target - self.search.codebook[self.codes]).square_().sum(-1)
        far = away > self.reach[self.codes]
        codes = self.codes.clone()
        codes[far] = self.search.index(target[far])
        self.codes = codes
        self.packed = pack_bits(codes, self.scheme.entry_bits, check=False)
