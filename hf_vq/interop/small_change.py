"""Codes of a weight that changed by little, such that the change is not lost.

    W, decoded  --- + D --->  W'          D = B A of an adapter, smaller than the step of a code

Rounded to the nearest, nearly every weight of W' gets the code that it had, and D is gone. So codes
are rounded at random (stochastic rounding): a code moves to its neighbour in the direction of D,
with the probability that keeps D on average. Errors of different rows are independent, so they do
not add up, while D, a sum of few products, does. (Feeding errors back along the inputs that D
reads, as LDLQ does, keeps D as well; but rows of D are multiples of each other, so codes move alike
in all of them, and the errors point where D does.)

Scales and codebooks stay.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from ..fit.passes import split_codes
from ..formats import qoq
from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from ..formats.stored_weight import rotation_of
from ..ops import decode_weight, rotate_weight
from ..ops.reference.encode_weight import Assigner, packed

_CHUNK = 1 << 21  # weights held at once in float32
_OF_ROWS = ("codes", "scale", "step", "zero")  # keys, without suffixes, of what each row has
_REACHES = (2.0, 4.0, 8.0)
"""How far from an entry to look for its neighbour, in root mean square errors of a number."""


def part_left(found: Tensor, before: Tensor, wanted: Tensor) -> float:
    """<found - before, D> / <D, D> with D = wanted - before: 1 if all of a change is left, 0 if
    each weight was rounded to the code that it had."""
    change = (wanted - before).double()
    return float(((found - before).double() * change).sum() / change.square().sum())


def fit_small_change(
    weight: Tensor, tensors: Mapping[str, Tensor], scheme: LinearScheme, where: str = "the layer"
) -> dict[str, Tensor]:
    """The codes, by key, that take the place of those in `tensors`. Equal arguments give equal
    codes on one kind of device.

    Args:
        weight: W' [out, in], float.
        tensors: all stored tensors by key, of W.
        where: name of the layer; rounding is not the same in two of them.
    """
    codes = tensors["codes"].cpu().numpy().tobytes()  # a second change is rounded in another way
    generator = Generator(weight.device).manual_seed(zlib.crc32(codes, zlib.crc32(where.encode())))
    height, tiled = max(1, _CHUNK // weight.shape[1]), False
    if isinstance(scheme, VQScheme) and scheme.codebook == "tile":
        height, tiled = scheme.tile[0], True
    parts = []
    for first in range(0, len(weight), height):
        part = slice(first, first + height)
        rows = weight[part].float()
        own = {k: t[part] if k.startswith(_OF_ROWS) else t for k, t in tensors.items()}
        if tiled:
            own["codebook"] = own["codebook"][first // height]
        if isinstance(scheme, QoQScheme):
            parts.append(_integers(rows, own, scheme, generator))
        elif scheme.two_passes and scheme.stages != "nested":
            parts.append(_second(rows, own, scheme, generator))
        else:
            parts.append(_only(rows, own, scheme, generator))
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _integers(
    rows: Tensor, tensors: dict[str, Tensor], scheme: QoQScheme, generator: Generator
) -> dict[str, Tensor]:
    grid = qoq.Grid.of(tensors, scheme, rows.shape[1])
    dither = torch.rand(rows.shape, generator=generator, device=rows.device)
    return {"codes": grid.stored(grid.codes(rows, dither))["codes"]}


def _only(
    rows: Tensor, tensors: dict[str, Tensor], scheme: VQScheme, generator: Generator
) -> dict[str, Tensor]:
    """Codes of one pass, or of two nested ones."""
    nested = scheme.stages == "nested"
    coded = scheme.merged() if nested else scheme.first_pass()
    book = tensors["codebook_2" if nested else "codebook"]
    rotated = rotate_weight(rows, rotation_of(tensors), scheme)
    codes = _codes(rotated, book, tensors["scale"], coded, generator)
    found = {"codes": packed(codes, coded)}
    return split_codes(found, scheme, rows.shape[1]) if nested else found


def _second(
    rows: Tensor, tensors: dict[str, Tensor], scheme: VQScheme, generator: Generator
) -> dict[str, Tensor]:
    """Codes of the second of two passes that add up; those of the first stay."""
    first = {key: tensor for key, tensor in tensors.items() if not key.endswith("_2")}
    rest = rows - decode_weight(first, scheme.first_pass(), rows.shape[1])
    rotation = rotation_of(tensors, "_2" if scheme.stages == "rerotated" else "")
    coded, scales = scheme.second_pass(), tensors["scale_2"]
    rotated = rotate_weight(rest, rotation, scheme)
    codes = _codes(rotated, tensors["codebook_2"], scales, coded, generator)
    return {"codes_2": packed(codes, coded)}


def _codes(
    rotated: Tensor, book: Tensor, scales: Tensor, scheme: VQScheme, generator: Generator
) -> Tensor:
    """Codes [n, vectors, z] of rotated rows [n, in], rounded at random."""
    tiled = scheme.codebook == "tile"
    size = scheme.group(rotated.shape[1])
    scale = scales.float().repeat_interleave(size, 1)
    unit = torch.where(scale == 0, 0, rotated / scale)  # nothing is stored where a scale is 0
    width = scheme.tile[1] if tiled else unit.shape[1]
    columns = zip(unit.split(width, 1), scale.split(width, 1), strict=True)
    found = []
    for (part, scaled), entries in zip(
        columns, book[:, None] if tiled else book[None], strict=True
    ):
        vectors = part.reshape(-1, scheme.vector_size)
        weights = scaled.reshape(vectors.shape)[:, 0].square()
        codes = _rounded(vectors, weights, Assigner(entries, scheme), generator)
        found.append(codes.unflatten(0, (len(part), -1)))
    return torch.cat(found, 1)


def _rounded(vectors: Tensor, weights: Tensor, assigner: Assigner, generator: Generator) -> Tensor:
    """Codes [n, z] of `vectors` [n, x]: of the nearest entry e, or of its neighbour e + v towards
    the vector e + d, with probability |d|^2 / <d, v>; then <d, error> is 0 on average. Outer
    entries have no neighbour on one side: what they lose, the probabilities of the others add.

    Args:
        weights: squared scales [n].
    """
    like = torch.randn(1024, vectors.shape[1], generator=generator, device=vectors.device)
    error = (like - assigner.entries(assigner.codes(like))).square().mean().sqrt()
    codes = assigner.codes(vectors)
    entries = assigner.entries(codes)
    rest = vectors - entries
    energy = rest.square().sum(1)
    direction = rest / energy.sqrt().clamp_min(1e-30)[:, None]
    others, along = codes.clone(), torch.zeros_like(energy)
    left = torch.arange(len(vectors), device=vectors.device)  # whose neighbour is not yet found
    for reach in _REACHES:
        found = assigner.codes(entries[left] + reach * error * direction[left])
        are_new = (found != codes[left]).any(1)
        step = assigner.entries(found[are_new]) - entries[left[are_new]]
        others[left[are_new]] = found[are_new]
        along[left[are_new]] = (step * rest[left[are_new]]).sum(1)
        left = left[~are_new]
    can_move = along > 0
    change = energy * weights
    kept = change[can_move].sum() / change.sum().clamp_min(1e-30)
    drawn = torch.rand(len(vectors), generator=generator, device=vectors.device)
    moves = can_move & (drawn * along * kept < energy)
    return torch.where(moves[:, None], others, codes)


def decoded(tensors: Mapping[str, Tensor], scheme: LinearScheme, in_features: int) -> Tensor:
    """The matrix [out, in] float32 of stored tensors by key."""
    if isinstance(scheme, QoQScheme):
        return qoq.decode(dict(tensors), scheme, in_features)
    return decode_weight(dict(tensors), scheme, in_features)
