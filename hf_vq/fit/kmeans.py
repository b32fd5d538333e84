"""k-means for learned codebooks, of one set of vectors or of many at once.

x > 1    k-means++ seeding, Lloyd rounds, repair of empty clusters
x = 1    Lloyd rounds over sorted numbers: a cluster is an interval, its mean a difference of
         prefix sums, so a round costs `entries` binary searches whatever the amount of data; an
         empty cluster takes half of the one with the largest error
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.nearest import nearest_in_groups

SAMPLES_PER_ENTRY = 64  # more vectors per entry change a codebook's error by under 1 %
SCALAR_ROUNDS = 100  # a round over sorted numbers is free
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
    return _cluster(vectors[None], entries, rounds, generator)[0]


def kmeans_in_groups(
    vectors: Tensor,
    entries: int,
    *,
    weights: Tensor | None = None,
    rounds: int = 20,
    seed: int = 0,
) -> Tensor:
    """A codebook of its own for each group of `vectors` [g, n, x]: [g, entries, x] float32.

    Codebooks of numbers (x = 1) ascend. With n <= entries the vectors are the codebook.

    Args:
        weights: [g, n], at least 0: how much the squared distance of each vector counts.
    """
    return _cluster(vectors, entries, rounds, torch.Generator().manual_seed(seed), weights)


def _cluster(
    vectors: Tensor,
    entries: int,
    rounds: int,
    generator: torch.Generator,
    weights: Tensor | None = None,
) -> Tensor:
    vectors = vectors.float().contiguous()
    spare = entries - vectors.shape[1]
    if spare >= 0:
        codebooks = torch.cat([vectors, vectors[:, -1:].expand(-1, spare, -1)], 1)
        return codebooks.sort(1).values if vectors.shape[2] == 1 else codebooks
    if vectors.shape[2] == 1:
        return _scalar(vectors[..., 0], entries, weights)[..., None]
    codebooks = _seed(vectors, entries, generator, weights)
    for _ in range(rounds):
        codebooks = lloyd(vectors, codebooks, weights)
    return codebooks


def _scalar(values: Tensor, entries: int, weights: Tensor | None) -> Tensor:
    """Ascending codebooks [g, entries] of `values` [g, n]."""
    groups, count = values.shape
    ordered, order = values.sort(1)
    weight = torch.ones_like(ordered) if weights is None else weights.gather(1, order)
    powers = torch.stack([torch.ones_like(ordered), ordered, ordered.square()]).double()
    moments = (powers * weight.double()).cumsum(2)
    moments = torch.nn.functional.pad(moments, (1, 0))  # sums of the first 0, 1, ... n
    # The best density of entries is between that of the data (quantiles) and an even one: p^(1/3).
    step = (torch.arange(entries, device=values.device) + 0.5) / entries
    low, high = ordered[:, :1], ordered[:, -1:]
    centres = (ordered[:, (step * count).long()] + low + step * (high - low)) / 2
    ends = torch.tensor([[0, count]], device=values.device).expand(groups, 2)
    for _ in range(SCALAR_ROUNDS):
        midpoints = (centres[:, 1:] + centres[:, :-1]) / 2
        edges = torch.searchsorted(ordered, midpoints)
        edges = torch.cat([ends[:, :1], edges, ends[:, 1:]], 1)
        size, *sums = moments.gather(2, edges.expand(3, -1, -1)).diff()
        mean, square = (total / size.clamp_min(1e-30) for total in sums)
        centres = _split(torch.where(size > 0, mean.float(), centres), size, square - mean.square())
    return centres


def _split(centres: Tensor, size: Tensor, variance: Tensor) -> Tensor:
    """Ascending centres [g, entries]; in each group one centre without numbers, if there is one,
    is now the half of the cluster with the largest error.

    Args:
        size: weight of each cluster.
        variance: theirs.
    """
    largest, worst = (size * variance).max(1, keepdim=True)
    empty, spare = (size == 0).max(1, keepdim=True)
    spread = variance.gather(1, worst).clamp_min(0).sqrt().float()
    middle = centres.gather(1, worst)
    split = centres.scatter(1, worst, middle - spread).scatter(1, spare, middle + spread)
    return torch.where(empty & (largest > 0), split, centres).sort(1).values


def _seed(
    vectors: Tensor, entries: int, generator: torch.Generator, weights: Tensor | None
) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii): each centre is drawn with probability ~ distance^2
    (times its weight)."""
    groups, count, _ = vectors.shape
    first = torch.randint(count, (groups,), generator=generator).to(vectors.device)
    every = torch.arange(groups, device=vectors.device)
    centres = vectors[every, first][:, None]
    distance = (vectors - centres).square().sum(2)
    step = -(-(entries - 1) // _SEED_ROUNDS)
    while centres.shape[1] < entries:
        weight = ((distance if weights is None else distance * weights) + 1e-20).cpu()
        drawing = min(step, entries - centres.shape[1])
        # Gumbel keys draw without replacement, from any number of vectors.
        noise = torch.empty_like(weight).exponential_(generator=generator)
        drawn = (weight / noise).topk(drawing, 1).indices.to(vectors.device)
        new = vectors[every[:, None], drawn]
        distance = torch.minimum(distance, _distance(vectors, new, nearest_in_groups(vectors, new)))
        centres = torch.cat([centres, new], 1)
    return centres


def lloyd(vectors: Tensor, codebooks: Tensor, weights: Tensor | None = None) -> Tensor:
    """One round for codebooks [g, entries, x] of `vectors` [g, n, x]: every entry moves to the
    mean of its vectors, weighted by `weights` [g, n]; an entry without vectors, or weight, moves to
    the vector that is worst served."""
    groups, entries, size = codebooks.shape
    index = nearest_in_groups(vectors, codebooks)
    flat = index + entries * torch.arange(groups, device=index.device)[:, None]
    weight = None if weights is None else weights.float().flatten()
    count = torch.bincount(flat.flatten(), weight, minlength=groups * entries)
    count = count.reshape(groups, entries, 1)
    total = torch.zeros(groups * entries, size, device=vectors.device)
    rows = vectors.flatten(0, 1) if weight is None else vectors.flatten(0, 1) * weight[:, None]
    total = total.index_add_(0, flat.flatten(), rows).reshape(codebooks.shape)
    moved = torch.where(count > 0, total / count.clamp_min(1e-30), codebooks)
    empty = count[..., 0] == 0
    if bool(empty.any()):
        distance = _distance(vectors, codebooks, index)
        distance = distance if weights is None else distance * weights
        most = min(int(empty.sum(1).max()), vectors.shape[1])
        worst = distance.topk(most, 1).indices
        group, entry = empty.nonzero().unbind(1)
        rank = (empty.cumsum(1) - 1)[group, entry].clamp_max(most - 1)
        moved[group, entry] = vectors[group, worst[group, rank]]
    return moved


def _distance(vectors: Tensor, codebooks: Tensor, index: Tensor) -> Tensor:
    """Squared distance [g, n] of each vector to the entry `index` [g, n] of its group."""
    chosen = codebooks.gather(1, index[..., None].expand(-1, -1, codebooks.shape[2]))
    return (vectors - chosen).square_().sum(2)
