"""Codebooks that are learned together with codes and scales, under what the inputs say.

    min over C, codes, s   tr( (W - Q) H (W - Q)^T ),      Q = s * sum_z C_z[code_z]

1. Codebooks by k-means, stage after stage, in which an error e of vector b of a row costs
   |s e U_bb^-1|^2: what it costs once the vectors behind it have made up for it (`ldlq.py`).
2. Codes from left to right with feedback, each by the same measure. Codebooks per tile are learned
   on the way, from what feedback has left of the tile's weights (GPTVQ, arXiv 2402.15319,
   algorithm 1; its EM initialization is section 3.2).
3. TURNS times: codebooks, then scales, by least squares; then every vector of a row once more,
   with the rest fixed, by a beam over stages (AQLM, arXiv 2401.06118, section 3; it moves codebooks
   by Adam, GPTVQ's section 3.3 by gradients).

No step of a turn makes the cost larger, but for the rounding of scales to fp16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.nearest import nearest_in_groups
from ..ops.reference.encode_weight import Assigner
from .kmeans import SAMPLES_PER_ENTRY, kmeans
from .ldlq import Feedback
from .learned import as_stored, integer_step
from .rows import RowFitter

TURNS = 3
_KMEANS_ROUNDS = 10  # in the measure of step 1, after as many in the plain one
_SOLVED = 1e-10  # of the squared residual: what is left are rounding errors
_CONJUGATE_STEPS = 8  # preconditioned by the blocks of H; more gain under 0.1 % of the cost
_PANEL = 128  # columns between two matrix products that pass errors on


def fit_jointly(
    rows: Tensor, fitter: RowFitter, feedback: Feedback, seed: int
) -> dict[str, Tensor]:
    """Stored `codebook`, `codes` and `scale` of rotated rows that share codebooks.

    Args:
        rows: [n, in] float32: of the matrix, or of a band of tiles.
        feedback: H and U of their inputs.
    """
    fit = _JointFit(rows, fitter, feedback, seed)
    fit.start()
    for _ in range(TURNS):
        fit.improve()
    return fit.stored()


class _JointFit:
    """Attributes: `books` [tiles, z, entries, x] float32, `codes` [n, vectors, z], `scale` [n,
    groups] float32 that holds numbers of fp16."""

    def __init__(self, rows: Tensor, fitter: RowFitter, feedback: Feedback, seed: int) -> None:
        self.rows, self.fitter, self.scheme, self.seed = rows, fitter, fitter.scheme, seed
        self.size, self.group = self.scheme.vector_size, fitter.group
        n, columns = rows.shape
        stored = fitter.norm_scale(fitter.groups(rows)).reshape(n, -1)
        fitter.check(rows, stored)
        self.scale = stored.float()
        self.moments, self.upper = feedback.damped, feedback.upper
        # An error e of vector b costs |s e F_b|^2: with feedback behind it, and without.
        eye = torch.eye(self.size, device=rows.device)
        blocks = _diagonal_blocks(self.upper, self.size)
        self.with_feedback = torch.linalg.solve_triangular(
            blocks, eye.expand_as(blocks), upper=True
        )
        self.alone = torch.linalg.cholesky(_diagonal_blocks(self.moments, self.size))
        tiled = self.scheme.codebook == "tile"
        self.tile = self.scheme.tile[1] if tiled else columns
        self.tiles = [slice(i, min(i + self.tile, columns)) for i in range(0, columns, self.tile)]
        x, entries, stages = self.size, self.scheme.entries, self.scheme.streams
        self.books = rows.new_zeros(len(self.tiles), stages, entries, x)
        self.codes = torch.zeros(n, columns // x, stages, dtype=torch.int64, device=rows.device)
        self.panel = max(_PANEL // x, 1) * x
        tile = torch.arange(columns // x, device=rows.device) // (self.tile // x)
        stage = torch.arange(stages, device=rows.device)
        self.offset = (tile[:, None] * stages + stage) * entries  # [vectors, z]

    def start(self) -> None:
        """Steps 1 and 2."""
        if self.scheme.codebook == "tensor":
            self.books[0] = self._learned(self.rows, self.tiles[0])
        left = self.rows.clone()
        for tile, columns in enumerate(self.tiles):
            if self.scheme.codebook == "tile":
                self.books[tile] = self._learned(left, columns)
            self._with_feedback(left, tile, columns)

    def improve(self) -> None:
        """Step 3, once."""
        self._refit_books()
        if self.fitter.search != "norm":
            self._refit_scale()
        self._sweep()

    def stored(self) -> dict[str, Tensor]:
        """As `formats.tensor_specs` has it, of a band of tiles or of the matrix."""
        if self.scheme.largest_entry:
            self._round_books()
        else:
            self._refit_books()
        books = as_stored(self.books, self.scheme)
        books = books[:, 0][None] if self.scheme.codebook == "tile" else books[0]
        return {"codebook": books, **self.fitter.pack(self.codes, self.scale.half())}

    def _round_books(self) -> None:
        """To integers, which scales and codes then make up for."""
        entries = self.books.reshape(-1, self.size)
        used = torch.bincount((self.codes + self.offset).flatten(), minlength=len(entries))
        step = integer_step(entries, used, self.scheme)
        self.books = as_stored(self.books / step, self.scheme).float()
        self.scale = (self.scale * step).half().float()
        self._sweep()
        if self.fitter.search != "norm":
            self._refit_scale()

    def entries(self) -> Tensor:
        """What the codes stand for, before scales: [n, in]."""
        return self._look_up(self.books)

    def _look_up(self, books: Tensor) -> Tensor:
        flat = books.reshape(-1, self.size)
        found = [flat[index] for index in (self.codes + self.offset).unbind(2)]
        return torch.stack(found).sum(0).flatten(1)

    def _scaled(self, entries: Tensor, squared: bool = False) -> Tensor:
        scale = self.scale.square() if squared else self.scale
        return (entries.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)

    def _unit(self, rows: Tensor, columns: slice) -> Tensor:
        """Columns of rows over their scales; zero where the scale is: [n, columns]."""
        scale = self.scale.repeat_interleave(self.group, 1)[:, columns]
        return torch.where(scale > 0, rows[:, columns] / scale, 0)

    # Step 1.

    def _learned(self, rows: Tensor, columns: slice) -> Tensor:
        """Codebooks [z, entries, x] of some columns."""
        vectors = slice(columns.start // self.size, columns.stop // self.size)
        wanted = -(-SAMPLES_PER_ENTRY * self.scheme.entries // (vectors.stop - vectors.start))
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(rows), generator=generator)[:wanted].sort().values
        chosen = chosen.to(rows.device)
        rest = self._unit(rows, columns)[chosen].unflatten(1, (-1, self.size)).transpose(0, 1)
        scale = self.scale.repeat_interleave(self.group // self.size, 1)[chosen, vectors]
        stages = []
        for stage in range(self.scheme.streams):
            book = self._kmeans(rest, scale.T.square(), vectors, self.seed + stage)
            factor = self.with_feedback[vectors]
            rest = rest - book[nearest_in_groups(rest @ factor, book @ factor)]
            stages.append(book)
        return torch.stack(stages)

    def _kmeans(self, rest: Tensor, weight: Tensor, vectors: slice, seed: int) -> Tensor:
        """A codebook [entries, x] of `rest` [vectors, n, x], each weighed by `weight` [vectors, n]
        and the measure of its place in a row."""
        flat = rest.reshape(-1, self.size)
        book = kmeans(flat, self.scheme.entries, rounds=_KMEANS_ROUNDS, seed=seed)
        if len(flat) <= self.scheme.entries:
            return book
        factor = self.with_feedback[vectors]
        metric = factor @ factor.mT
        pulled = (weight[..., None] * (rest @ metric)).reshape(-1, self.size)
        place = torch.arange(len(factor), device=rest.device)[:, None]
        for _ in range(_KMEANS_ROUNDS):
            index = nearest_in_groups(rest @ factor, book @ factor)
            often = weight.new_zeros(len(factor) * len(book))
            often.index_add_(0, (index + place * len(book)).flatten(), weight.flatten())
            blocks = _weighted(often.reshape(len(factor), -1).T, metric)
            total = torch.zeros_like(book).index_add_(0, index.flatten(), pulled)
            book = torch.where(
                often.reshape(len(factor), -1).sum(0)[:, None] > 0, _solve(blocks, total), book
            )
        return book

    # Step 2.

    def _with_feedback(self, left: Tensor, tile: int, columns: slice) -> None:
        """Codes of a tile; `left` [n, in] passes the errors on."""
        for start in range(columns.start, columns.stop, self.panel):
            panel = slice(start, min(start + self.panel, columns.stop))
            errors = torch.empty_like(left[:, panel])
            for first in range(panel.start, panel.stop, self.size):
                block, later = slice(first, first + self.size), slice(first + self.size, panel.stop)
                vector = first // self.size
                factor = self.with_feedback[vector]
                found = self._nearest(self._unit(left, block) @ factor, tile, factor)
                self.codes[:, vector] = found
                wrong = left[:, block] - self._block_of(found, tile) * self._scale_at(first)
                error = wrong @ factor
                errors[:, first - start : first - start + self.size] = error
                left[:, later].addmm_(error, self.upper[block, later], alpha=-1)
            rest = slice(panel.stop, None)
            left[:, rest].addmm_(errors, self.upper[panel, rest], alpha=-1)

    def _nearest(self, target: Tensor, tile: int, factor: Tensor) -> Tensor:
        """Codes [n, z] whose entries, times `factor`, are nearest to `target` [n, x]."""
        return Assigner(self.books[tile] @ factor, self.scheme, learned=True).codes(target)

    def _block_of(self, codes: Tensor, tile: int) -> Tensor:
        """The sum of entries [n, x] of `codes` [n, z]."""
        return torch.stack(
            [book[index] for book, index in zip(self.books[tile], codes.unbind(1), strict=True)]
        ).sum(0)

    def _scale_at(self, column: int) -> Tensor:
        group = column // self.group
        return self.scale[:, group : group + 1]

    # Step 3.

    def _refit_books(self) -> None:
        """Conjugate gradients for  D^T(D(C) H) = D^T(W H),  D looks entries up and scales them;
        the blocks of H on the diagonal precondition it."""
        wrong = self.rows - self._scaled(self.entries())
        residual = self._gathered(wrong @ self.moments)
        metric = self.alone @ self.alone.mT
        inverse = self._inverse_blocks(metric)
        step = conjugate = torch.einsum("exy,ey->ex", inverse, residual)
        now = start = (residual * step).sum()
        books = self.books.reshape(-1, self.size).clone()
        for _ in range(_CONJUGATE_STEPS):
            if not bool(now > _SOLVED * start):
                break
            applied = self._gathered(self._scaled(self._look_up(conjugate)) @ self.moments)
            length = now / (conjugate * applied).sum().clamp_min(1e-30)
            books += length * conjugate
            residual = residual - length * applied
            step = torch.einsum("exy,ey->ex", inverse, residual)
            before, now = now, (residual * step).sum()
            conjugate = step + now / before * conjugate
        self.books = books.reshape(self.books.shape)

    def _gathered(self, gradient: Tensor) -> Tensor:
        """D^T: the sum over vectors of s * gradient [n, in] for every entry: [all entries, x]."""
        vectors = self._scaled(gradient).reshape(-1, self.size)
        total = vectors.new_zeros(self.books.numel() // self.size, self.size)
        for index in (self.codes + self.offset).unbind(2):
            total.index_add_(0, index.flatten(), vectors)
        return total

    def _inverse_blocks(self, metric: Tensor) -> Tensor:
        """The inverse of what D^T(D( ) H) is for one entry alone: [all entries, x, x]."""
        count, vectors = self.books.numel() // self.size, len(metric)
        often = metric.new_zeros(count * vectors)
        weight = self.scale.square().repeat_interleave(self.group // self.size, 1).flatten()
        place = torch.arange(vectors, device=metric.device)
        for index in (self.codes + self.offset).unbind(2):
            often.index_add_(0, (index * vectors + place).flatten(), weight)
        blocks = _weighted(often.reshape(count, vectors), metric)
        return _solve(blocks, torch.eye(self.size, device=metric.device).expand_as(blocks))

    def _refit_scale(self) -> None:
        """Least squares of one scale of a row after the other, as stored."""
        entries = self.entries()
        pull = (self.rows - self._scaled(entries)) @ self.moments
        for group in range(self.scale.shape[1]):
            part = slice(group * self.group, (group + 1) * self.group)
            chosen, old = entries[:, part], self.scale[:, group]
            weighed = chosen @ self.moments[part]
            energy = (weighed[:, part] * chosen).sum(1)
            fitted = old + (pull[:, part] * chosen).sum(1) / energy.clamp_min(1e-30)
            fitted = torch.where((fitted > 0) & (energy > 0), fitted, old).half().float()
            fitted = torch.where(fitted.isfinite(), fitted, old)
            pull -= (fitted - old)[:, None] * weighed
            self.scale[:, group] = fitted

    def _sweep(self) -> None:
        """Every vector once more, from left to right, with all others as they are."""
        pull = (self.rows - self._scaled(self.entries())) @ self.moments
        for tile, columns in enumerate(self.tiles):
            for start in range(columns.start, columns.stop, self.panel):
                self._sweep_panel(pull, tile, slice(start, min(start + self.panel, columns.stop)))

    def _sweep_panel(self, pull: Tensor, tile: int, panel: slice) -> None:
        moved = torch.zeros_like(pull[:, panel])
        for first in range(panel.start, panel.stop, self.size):
            block, later = slice(first, first + self.size), slice(first + self.size, panel.stop)
            vector, scale = first // self.size, self._scale_at(first)
            factor, old = self.alone[vector], self.codes[:, vector]
            before = self._block_of(old, tile)
            # The best entries would be those of now, plus pull H_bb^-1 over the scale.
            best = torch.cholesky_solve(pull[:, block].T, factor).T
            best = before + torch.where(scale > 0, best / scale, 0)
            new = self._nearest(best @ factor, tile, factor)
            after = self._block_of(new, tile)
            better = _norm((best - after) @ factor) < _norm((best - before) @ factor)
            self.codes[:, vector] = torch.where(better[:, None], new, old)
            change = torch.where(better[:, None], (after - before) * scale, 0)
            moved[:, first - panel.start : first - panel.start + self.size] = change
            pull[:, later].addmm_(change, self.moments[block, later], alpha=-1)
        rest = slice(panel.stop, None)
        pull[:, rest].addmm_(moved, self.moments[panel, rest], alpha=-1)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """[n, n] -> [n / size, size, size]."""
    blocks = matrix.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def _weighted(weights: Tensor, blocks: Tensor) -> Tensor:
    """Sums of `blocks` [n, x, x], with `weights` [entries, n]: [entries, x, x]."""
    return (weights @ blocks.flatten(1)).unflatten(1, blocks.shape[1:])


def _solve(blocks: Tensor, right: Tensor) -> Tensor:
    """blocks^-1 right, for blocks [n, x, x] that may be zero, and right [n, x] or [n, x, x]."""
    trace = blocks.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    eye = torch.eye(blocks.shape[1], device=blocks.device)
    safe = blocks + torch.where(trace > 0, 1e-6 * trace, 1) * eye
    vector = right.ndim == 2
    solved: Tensor = torch.linalg.solve(safe, right[..., None] if vector else right)
    return solved[..., 0] if vector else solved


def _norm(vectors: Tensor) -> Tensor:
    return vectors.square().sum(1)
