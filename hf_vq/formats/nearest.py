"""The nearest entry of a codebook, exactly, on any device, in plain PyTorch.

Three searches, one answer (lowest squared distance; ties may fall to either entry):

    x = 1      sorted entries: `bucketize` on the midpoints
    x = 2      a 128 x 128 grid over the plane; most cells meet one Voronoi region, so one table
               read answers. Cells that meet several compare their few candidates.
    else       argmax_c <v, c> - |c|^2 / 2 by blocks of a matrix product that stay in the cache

`NearestEntry` searches one codebook many times, `nearest_in_groups` many codebooks at once.
"""

from __future__ import annotations

from functools import lru_cache
from operator import methodcaller

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_BLOCK = 4096  # vectors per matrix product on a CPU: 4096 x 256 scores are 4 MB
_GPU_SCORES = 1 << 25  # scores per matrix product on a GPU, 128 MB: a launch costs more than memory
_SCORES = 1 << 20  # scores per matrix product of several codebooks
_CELLS = 128
_FEW = 1 << 18  # vectors for which a GPU needs no grid, whose steps wait for it
_FEW_ON_CPU = 512  # vectors for which the grid's many small steps take longer than all entries
_MIN_GRID = 64  # a grid pays when the codebook will be searched often; learned ones are not


class NearestEntry:
    """Search over one codebook [entries, x] float32; build once, use for many vectors.

    Args:
        codebook: entries, on the device of the vectors that will come.
        grid: whether to build the plane's grid for x = 2 (a few milliseconds).
    """

    def __init__(self, codebook: Tensor, grid: bool = True) -> None:
        self.codebook = codebook.float().contiguous()
        entries, size = self.codebook.shape
        self._half_norm = self.codebook.square().sum(1) / 2
        self._transposed = self.codebook.T.contiguous()
        self._grid: _PlaneGrid | None = None
        if size == 1:
            ordered, self._order = self.codebook[:, 0].sort()
            self._midpoints = (ordered[1:] + ordered[:-1]) / 2
        elif size == 2 and grid and entries >= _MIN_GRID:
            self._grid = _PlaneGrid(self.codebook)

    def index(self, vectors: Tensor) -> Tensor:
        """Index int64 [n] of the entry nearest to each of `vectors` [n, x] float32."""
        if vectors.shape[1] == 1:
            return self._order[torch.bucketize(vectors[:, 0].contiguous(), self._midpoints)]
        if self._grid is not None:
            few = vectors.is_cuda and len(vectors) <= _FEW
            if few or (vectors.is_cuda and torch.cuda.is_current_stream_capturing()):
                return self._compare(vectors)
            if not vectors.is_cuda and len(vectors) <= _FEW_ON_CPU:
                return self._brute(vectors)
            inside = self._grid.index(vectors)
            outside = (inside < 0).nonzero()[:, 0]
            if len(outside):
                inside[outside] = self._brute(vectors[outside])
            return inside
        return self._brute(vectors)

    def distance(self, vectors: Tensor) -> Tensor:
        """Squared distance [n] to the nearest entry; cheaper than `index` for x > 2."""
        if vectors.shape[1] <= 2 and (self._grid is not None or vectors.shape[1] == 1):
            nearest = self.codebook.index_select(0, self.index(vectors))
            return (vectors - nearest).square_().sum(1)
        best, rows = torch.empty(len(vectors), device=vectors.device), self._rows(vectors)
        for start in range(0, len(vectors), rows):
            part = slice(start, start + rows)
            torch.amax(self._scores(vectors[part]), 1, out=best[part])
        return (vectors.square().sum(1) - 2 * best).clamp_min_(0)

    def top(self, vectors: Tensor, count: int) -> Tensor:
        """Indices int64 [n, count] of the nearest entries, nearest first."""
        parts = vectors.split(self._rows(vectors))
        blocks = [self._scores(part).topk(count, 1).indices for part in parts]
        return torch.cat(blocks)

    def _rows(self, vectors: Tensor) -> int:
        """Number of vectors compared in one step."""
        return max(_BLOCK, _GPU_SCORES // len(self.codebook)) if vectors.is_cuda else _BLOCK

    def _scores(self, vectors: Tensor) -> Tensor:
        return torch.addmm(self._half_norm, vectors, self._transposed, beta=-1)

    def _compare(self, vectors: Tensor) -> Tensor:
        """Same result as the grid's, by comparing all entries: no step waits for the GPU."""
        blocks = vectors.split(self._rows(vectors))
        return torch.cat(
            [(part[:, None] - self.codebook).square_().sum(2).argmin(1) for part in blocks]
        )

    def _brute(self, vectors: Tensor) -> Tensor:
        found = torch.empty(len(vectors), dtype=torch.int64, device=vectors.device)
        rows = self._rows(vectors)
        for start in range(0, len(vectors), rows):
            part = slice(start, start + rows)
            torch.argmax(self._scores(vectors[part]), 1, out=found[part])
        return found


def nearest_in_groups(vectors: Tensor, codebooks: Tensor) -> Tensor:
    """Index int64 [g, n] of the entry of `codebooks` [g, entries, x] nearest to each vector of the
    same group in `vectors` [g, n, x]; both float32. An entry is found for NaN too."""
    groups, count, size = vectors.shape
    if size == 1:
        ordered, order = codebooks[..., 0].sort(-1)
        midpoints = ((ordered[:, 1:] + ordered[:, :-1]) / 2).contiguous()
        return order.gather(1, torch.searchsorted(midpoints, vectors[..., 0].contiguous()))
    half_norm = codebooks.square().sum(-1)[:, None] / 2
    found = torch.empty(groups, count, dtype=torch.int64, device=vectors.device)
    entries = codebooks.shape[1]
    rows = max(1, min(count, _SCORES // entries))
    step = max(1, _SCORES // (rows * entries))
    for first in range(0, groups, step):
        some = slice(first, first + step)
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            scores = torch.baddbmm(
                half_norm[some], vectors[some, part], codebooks[some].mT, beta=-1
            )
            found[some, part] = scores.max(-1).indices  # argmax is slower, by up to a half
    return found


class _PlaneGrid:
    """Grid over a square around a 2-D codebook: the candidates for nearest entry of each cell."""

    def __init__(self, codebook: Tensor) -> None:
        self.codebook = codebook
        self.reach = float(codebook.abs().max()) * 1.25
        self.scale = _CELLS / (2 * self.reach)
        centre = (torch.arange(_CELLS, device=codebook.device) + 0.5) / self.scale - self.reach
        offset = (centre[:, None] - codebook.T[:, None]).abs()  # [2, cells, entries]
        half = 0.5001 / self.scale
        near, far = (offset - half).clamp_min(0).square(), (offset + half).square()
        lists = []
        for row in range(_CELLS):
            lower, upper = near[0, row] + near[1], far[0, row] + far[1]  # [cells, entries]
            lists.append(lower <= upper.amin(1, keepdim=True))
        possible = torch.cat(lists)
        count = possible.sum(1)
        cells, entries = possible.nonzero().unbind(1)  # by cell, then by entry
        rank = torch.arange(len(cells), device=codebook.device) - (count.cumsum(0) - count)[cells]
        table = entries[rank == 0].expand(int(count.max()), -1).clone()
        table[rank, cells] = entries
        self.table = table.to(torch.int32)  # [candidates, cells]
        self.count = count.to(torch.int32)
        self.x, self.y = codebook.T.contiguous()

    def index(self, vectors: Tensor) -> Tensor:
        x, y = vectors.T.contiguous()
        column = ((x + self.reach) * self.scale).floor_().to(torch.int32)
        row = ((y + self.reach) * self.scale).floor_().to(torch.int32)
        cell = column * _CELLS + row
        outside = (torch.minimum(column, row) < 0) | (torch.maximum(column, row) >= _CELLS)
        cell.masked_fill_(outside, 0)
        found = self.table[0].index_select(0, cell)
        count = self.count.index_select(0, cell)
        open_ = (count > 1).nonzero()[:, 0]
        x, y, cell, count = map(methodcaller("index_select", 0, open_), (x, y, cell, count))
        chosen = found.index_select(0, open_)
        best = self._distance(x, y, chosen)
        for k in range(1, len(self.table)):
            if k > 1:  # fewer and fewer cells have more candidates
                keep = (count > k).nonzero()[:, 0]
                found.index_copy_(0, open_, chosen)
                open_ = open_.index_select(0, keep)
                kept = map(methodcaller("index_select", 0, keep), (x, y, cell, count, chosen, best))
                x, y, cell, count, chosen, best = kept
            other = self.table[k].index_select(0, cell)
            distance = self._distance(x, y, other)
            closer = distance < best
            best, chosen = torch.where(closer, distance, best), torch.where(closer, other, chosen)
        found.index_copy_(0, open_, chosen)
        return found.masked_fill_(outside, -1).long()

    def _distance(self, x: Tensor, y: Tensor, entry: Tensor) -> Tensor:
        dx, dy = x - self.x.index_select(0, entry), y - self.y.index_select(0, entry)
        return dx.mul_(dx).addcmul_(dy, dy)


_of_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for callers outside inference mode
def _cached(data: bytes, shape: tuple[int, ...], device: str) -> NearestEntry:
    codebook = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
    return NearestEntry(codebook.to(device))


def nearest_entries(codebook: Tensor) -> list[NearestEntry]:
    """A `NearestEntry` for each stage of `codebook` [z, entries, x].

    They are kept as long as the tensor is, and equal codebooks share them, so a codebook must not
    be written to.
    """
    if codebook not in _of_tensor:
        _of_tensor[codebook] = [
            _cached(stage.numpy().tobytes(), tuple(stage.shape), str(codebook.device))
            for stage in codebook.detach().float().cpu().contiguous()
        ]
    return _of_tensor[codebook]
