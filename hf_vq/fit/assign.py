"""Codes of unit vectors: nearest entry, or a beam over residual stages."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import lattice
from ..formats.nearest import NearestEntry, nearest_entries
from ..formats.scheme import VQScheme

BEAM = 8  # first-stage candidates that are followed; more gains under 1 % on Gaussian data
_CHUNK = 1 << 13  # vectors followed at once


class Assigner:
    """Finds codes for vectors under one codebook [z, entries, x] (E8P: [z, 257, 8]).

    Args:
        codebook: the stored codebook, on the device of the vectors.
        scheme: says how its stages are to be read.
        learned: the codebook serves one tensor, so nothing is kept for the next one.
    """

    def __init__(self, codebook: Tensor, scheme: VQScheme, learned: bool = False) -> None:
        self.codebook, self.vector_size = codebook, scheme.vector_size
        self.lattice = scheme.lattice is not None
        self.searches: list[NearestEntry] = []
        if not self.lattice:
            once = [NearestEntry(stage, grid=False) for stage in codebook] if learned else None
            self.searches = once or nearest_entries(codebook)

    def codes(self, vectors: Tensor) -> Tensor:
        """Codes int64 [n, z] of `vectors` [n, x] float32."""
        if self.lattice:
            return self._greedy(vectors)
        if len(self.searches) == 1:
            return self.searches[0].index(vectors)[:, None]
        return torch.cat([self._beam(part) for part in vectors.split(_CHUNK)])

    def distance(self, vectors: Tensor) -> Tensor:
        """Squared distance [n] of `vectors` [n, x] to what their codes give (with several stages
        of entries, to what the first one gives: following them all would take too long)."""
        if self.lattice:
            return (vectors - self.entries(self.codes(vectors))).square().sum(1)
        return self.searches[0].distance(vectors)

    def entries(self, codes: Tensor) -> Tensor:
        """The sum of the entries of `codes` [n, z]: [n, x] float32."""
        stages = []
        for stage, index in zip(self.codebook, codes.unbind(1), strict=True):
            decoded = lattice.e8p_decode(index, stage) if self.lattice else stage.float()[index]
            stages.append(decoded)
        return torch.stack(stages).sum(0)

    def _greedy(self, vectors: Tensor) -> Tensor:
        codes, rest = [], vectors
        for stage in self.codebook:
            codes.append(lattice.e8p_encode(rest, stage))
            rest = rest - lattice.e8p_decode(codes[-1], stage)
        return torch.stack(codes, 1)

    def _beam(self, vectors: Tensor) -> Tensor:
        """Keep the BEAM best partial sums of every stage."""
        first = self.searches[0]
        width = min(BEAM, len(first.codebook))
        codes = first.top(vectors, width)[..., None]  # [n, beam, stages so far]
        rest = vectors[:, None] - first.codebook[codes[..., 0]]
        for stage, search in enumerate(self.searches[1:], 2):
            n, beam, size = rest.shape
            # Of the last stage only the best entry of a partial sum can be the best of all.
            step = 1 if stage == len(self.searches) else min(BEAM, len(search.codebook))
            found = search.top(rest.reshape(-1, size), step).reshape(n, beam, step)
            new_rest = rest[:, :, None] - search.codebook[found]
            error = new_rest.square().sum(-1).reshape(n, -1)
            keep = error.topk(min(BEAM, error.shape[1]), 1, largest=False).indices
            path = codes[:, :, None].expand(-1, -1, step, -1).reshape(n, beam * step, -1)
            path = torch.cat([path, found.reshape(n, -1, 1)], 2)
            codes = path.gather(1, keep[..., None].expand(-1, -1, path.shape[2]))
            flat = new_rest.reshape(n, -1, size)
            rest = flat.gather(1, keep[..., None].expand(-1, -1, size))
        return codes[:, 0]
