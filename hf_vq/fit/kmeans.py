"""k-means for learned codebooks: k-means++ seeding, Lloyd rounds, repair of empty clusters."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.nearest import NearestEntry

SAMPLES_PER_ENTRY = 64  # more vectors per entry change a codebook's error by under 1 %
_SEED_ROUNDS = 16  # D^2 sampling in rounds (k-means||): one pass over the data per round


def kmeans(vectors: Tensor, entries: int, *, rounds: int = 20, seed: int = 0) -> Tensor:
    """A codebook [entries, x] float32 of least squared distance to `vectors` [n, x].

    With n <= entries the vectors themselves are the codebook. At most SAMPLES_PER_ENTRY
    vectors per entry (a fixed sample) are used, so time and memory do not grow with the tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = SAMPLES_PER_ENTRY * entries
    if len(vectors) > limit:
        sample = torch.randperm(len(vectors), generator=generator)[:limit]
        vectors = vectors[sample.to(vectors.device)]
    vectors = vectors.float().contiguous()
    if len(vectors) <= entries:
        spare = vectors[-1:].expand(entries - len(vectors), -1)
        return torch.cat([vectors, spare])
    codebook = _seed(vectors, entries, generator)
    for _ in range(rounds):
        codebook = _lloyd(vectors, codebook)
    return codebook


def _seed(vectors: Tensor, entries: int, generator: torch.Generator) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii): each centre is drawn with probability ~ distance^2."""
    first = int(torch.randint(len(vectors), (1,), generator=generator))
    centres = vectors[first : first + 1]
    distance = (vectors - centres).square().sum(1)
    step = -(-(entries - 1) // _SEED_ROUNDS)
    while len(centres) < entries:
        weight = (distance + 1e-20).cpu()
        count = min(step, entries - len(centres))
        # Gumbel keys draw without replacement, from any number of vectors.
        noise = torch.empty_like(weight).exponential_(generator=generator)
        drawn = vectors[(weight / noise).topk(count).indices.to(vectors.device)]
        distance = torch.minimum(distance, NearestEntry(drawn, grid=False).distance(vectors))
        centres = torch.cat([centres, drawn])
    return centres


def _lloyd(vectors: Tensor, codebook: Tensor) -> Tensor:
    """One round: every entry moves to the mean of its vectors; an entry without vectors moves to
    the vector that is worst served."""
    search = NearestEntry(codebook, grid=False)
    index = search.index(vectors)
    count = torch.bincount(index, minlength=len(codebook))
    total = torch.zeros_like(codebook).index_add_(0, index, vectors)
    moved = torch.where(count[:, None] > 0, total / count.clamp_min(1)[:, None], codebook)
    empty = (count == 0).nonzero()[:, 0]
    if len(empty):
        distance = (vectors - codebook[index]).square().sum(1)
        moved[empty] = vectors[distance.topk(min(len(empty), len(vectors))).indices[: len(empty)]]
    return moved
