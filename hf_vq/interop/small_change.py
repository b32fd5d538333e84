"""Codes of a weight that changed by little, such that the change is not lost.

    W, decoded  --- + D --->  W'          D = B A of an adapter, smaller than the step of a code

Rounded to the nearest, nearly every weight of W' gets the code that it had, and D is gone. With the
errors fed back (`ldlq.py`) and D^T D as the moments, later columns make up for what an error does
to the inputs that D reads: some codes move by a whole step, so that their sum over such an input is
that of D. Scales and codebooks stay as they are given.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..fit.ldlq import Feedback, ldlq_rows
from ..fit.passes import split_codes
from ..fit.qoq import fit_qoq
from ..fit.rows import RowFitter
from ..formats import qoq
from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from ..formats.stored_weight import rotation_of
from ..ops import decode_weight, rotate_weight

_CHUNK = 1 << 21  # weights held at once in float32


def part_left(found: Tensor, before: Tensor, wanted: Tensor) -> float:
    """<found - before, D> / <D, D> with D = wanted - before: 1 if all of a change is left, 0 if
    each weight was rounded to the code that it had."""
    change = (wanted - before).double()
    return float(((found - before).double() * change).sum() / change.square().sum())


def fit_small_change(
    weight: Tensor,
    change: Tensor,
    tensors: Mapping[str, Tensor],
    scheme: LinearScheme,
    where: str = "the layer",
) -> dict[str, Tensor]:
    """Codes, by key, that take the place of those in `tensors`; with their scales where a scheme
    does not keep these.

    Args:
        weight: W' [out, in], float.
        change: D [out, in].
        tensors: all stored tensors by key, fitted to W' without feedback.
    """
    change = change.float()
    rotation = None if isinstance(scheme, QoQScheme) else rotation_of(dict(tensors))
    feedback = Feedback(change.T @ change, scheme, rotation, where=where)
    if isinstance(scheme, QoQScheme):
        # Every part of a range but the whole one would move all weights.
        return fit_qoq(weight, scheme, where, feedback, clips=(1.0,))[0]
    adds_up = scheme.two_passes and scheme.stages != "nested"
    if adds_up and scheme.stages == "rerotated":
        feedback = feedback.turned_by(rotation_of(dict(tensors), "_2"))
    height = scheme.tile[0] if scheme.codebook == "tile" else len(weight)
    if not weight.is_cuda and scheme.codebook != "tile":
        height = max(1, _CHUNK // weight.shape[1])
    parts = []
    for first in range(0, len(weight), height):
        part = slice(first, first + height)
        own = {k: t[part] if k.startswith(("codes", "scale")) else t for k, t in tensors.items()}
        if scheme.codebook == "tile":
            own["codebook"] = own["codebook"][first // height]
        rows = _second if adds_up else _only
        parts.append(rows(weight[part].float(), own, scheme, feedback, where))
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _only(
    rows: Tensor, tensors: dict[str, Tensor], scheme: VQScheme, feedback: Feedback, where: str
) -> dict[str, Tensor]:
    """Codes of one pass, or of two nested ones."""
    nested = scheme.stages == "nested"
    coded = scheme.merged() if nested else scheme.first_pass()
    book = tensors["codebook_2" if nested else "codebook"]
    rotated = rotate_weight(rows, rotation_of(tensors), scheme)
    codes, _ = ldlq_rows(rotated, book, coded, feedback, scales=tensors["scale"])
    packed = RowFitter(coded, rows.shape[1], "norm", where).pack(codes, tensors["scale"])
    return split_codes(packed, scheme, rows.shape[1]) if nested else packed


def _second(
    rows: Tensor, tensors: dict[str, Tensor], scheme: VQScheme, feedback: Feedback, where: str
) -> dict[str, Tensor]:
    """Codes of the second of two passes that add up; those of the first stay."""
    first = {key: tensor for key, tensor in tensors.items() if not key.endswith("_2")}
    rest = rows - decode_weight(first, scheme.first_pass(), rows.shape[1])
    rotation = rotation_of(tensors, "_2" if scheme.stages == "rerotated" else "")
    coded, scales = scheme.second_pass(), tensors["scale_2"]
    rotated = rotate_weight(rest, rotation, scheme)
    codes, _ = ldlq_rows(rotated, tensors["codebook_2"], coded, feedback, scales=scales)
    packed = RowFitter(coded, rows.shape[1], "norm", where).pack(codes, scales)
    return {f"{key}_2": tensor for key, tensor in packed.items()}


def decoded(tensors: Mapping[str, Tensor], scheme: LinearScheme, in_features: int) -> Tensor:
    """The matrix [out, in] float32 of stored tensors by key."""
    if isinstance(scheme, QoQScheme):
        return qoq.decode(dict(tensors), scheme, in_features)
    return decode_weight(dict(tensors), scheme, in_features)
