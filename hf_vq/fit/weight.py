"""Fit one weight matrix to a scheme: rotate, scale, assign, pack; with or without calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VQCalibrationError, VQConfigError, VQFormatError, shown
from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from ..formats.shared import second_universal_tensor, universal_tensor
from ..formats.stored_weight import rotation_of
from ..formats.tensors import tensor_specs
from ..ops import decode_weight, rotate_weight
from ..transforms import draw_signs, qr_matrix, signed_diagonal
from .frequency import by_frequency
from .joint import fit_jointly
from .ldlq import Feedback
from .learned import fit_tile_band, tensor_codebook
from .passes import split_codes
from .qoq import fit_qoq
from .qoq_calibrated import CLIPS
from .rows import SEARCHES, RowFitter

_CHUNK = 1 << 21  # weights held at once in float32


@dataclass(frozen=True)
class FittedWeight:
    """The stored tensors of one matrix.

    Args:
        tensors: keys of `formats.tensor_specs` without the shared ones, on the weight's device.
        relative_error: squared error over squared norm of the whole matrix.
        output_error: the same of the layer's outputs on the calibration text; nan without one.
    """

    tensors: dict[str, Tensor]
    relative_error: float
    output_error: float = math.nan


@torch.no_grad()
def fit_weight(
    weight: Tensor,
    scheme: LinearScheme,
    *,
    seed: int = 0,
    where: str = "weight",
    search: str = "search",
    feedback: Feedback | None = None,
    clips: tuple[float, ...] = CLIPS,
    in_turn: bool = True,
    input_scale: Tensor | None = None,
    fixed: Mapping[str, Tensor] | None = None,
) -> FittedWeight:
    """Codes, scales and (for learned codebooks) entries of `weight` [out, in].

    Args:
        weight: any float dtype, on CPU or CUDA; read in chunks of rows, not changed.
        seed: of the rotation and of k-means.
        where: name of the weight for errors.
        search: how a group's scale is found: `search`, `least_squares` or `norm`.
        feedback: what calibration says of the inputs; None fits without data.
        clips: with it, parts of a range that QoQ tries.
        in_turn: with it, whether weights of QoQ make up for the errors of those before them.
        input_scale: [in], positive, of a scaled scheme and of no other: what each input is divided
            by and its weights are multiplied by before they are rotated. Its geometric mean is
            taken out; what is left is stored in fp16 (`transforms.signed_diagonal`).
        fixed: what `fixed_tensors` would make, on the weight's device: those of a layer that is
            encoded again. Then `seed` is of k-means only, and `input_scale` is not wanted.

    Raises:
        VQSchemeError: the dimensions do not fit the scheme.
        VQCalibrationError: `input_scale` is missing, not wanted, or not [in] positive numbers.
        VQFormatError: the weight is not a finite matrix, or too large or small for fp16 scales.
        VQConfigError: unknown `search`.
    """
    if search not in SEARCHES:
        raise VQConfigError(f"search must be one of {', '.join(SEARCHES)}; got {shown(search)}.")
    if weight.ndim != 2 or not weight.is_floating_point() or not weight.numel():
        raise VQFormatError(
            f"{where} must be a float matrix [out, in]; got {weight.dtype} {list(weight.shape)}."
        )
    if fixed is None:
        _check_input_scale(input_scale, scheme, weight.shape[1], where)
    if isinstance(scheme, QoQScheme):
        return FittedWeight(*fit_qoq(weight, scheme, where, feedback, clips, in_turn))
    specs = tensor_specs(scheme, weight.shape[0], weight.shape[1], seed=seed, where=where)
    if fixed is None:
        fixed = fixed_tensors(scheme, weight.shape[1], seed, weight.device, input_scale)
    tensors = dict(fixed)
    nested = scheme.stages == "nested"
    coded = scheme.merged() if nested else scheme.first_pass()
    # Of two passes that add up only the last can make up for errors: those of the first are it.
    adds_up = scheme.two_passes and not nested
    fitter = RowFitter(coded, weight.shape[1], search, where)
    universal = tensors.get("codebook_2" if nested else "codebook")
    rotation = rotation_of(tensors)
    fitted = _fit(weight, rotation, universal, fitter, seed, None if adds_up else feedback)
    tensors.update(split_codes(fitted, scheme, weight.shape[1]) if nested else fitted)
    fitter.check(weight, tensors["scale"])
    if adds_up:
        tensors.update(_second_pass(weight, tensors, scheme, fitter, feedback))
    relative_error, output_error, cost = _errors(weight, tensors, scheme, feedback)
    vanished = bool(weight.any()) and not bool(tensors["scale"].any())
    if cost > 0.9 or vanished:  # squares of the smallest are nothing in float32
        raise VQFormatError(
            f"{where} has weights too small for fp16 scales. "
            "Add the module to VQConfig(modules_to_not_convert=[...])."
        )
    stored = {key: tensors[key] for key, spec in specs.items() if spec.shared_name is None}
    return FittedWeight(stored, relative_error, output_error)


def fixed_tensors(
    scheme: LinearScheme,
    in_features: int,
    seed: int,
    device: torch.device | str = "cpu",
    input_scale: Tensor | None = None,
) -> dict[str, Tensor]:
    """The tensors that no weight decides, by key: signs, diagonal or rotation, universal codebooks.

    Args:
        input_scale: as of `fit_weight`; without it, diagonals are left out.
    """
    tensors: dict[str, Tensor] = {}
    if isinstance(scheme, QoQScheme):
        return tensors
    for suffix, pass_seed in (("", seed), ("_2", seed + 1)):
        if suffix and scheme.stages != "rerotated":
            continue
        if scheme.rotation == "random_hadamard":
            tensors[f"signs{suffix}"] = draw_signs(in_features, pass_seed)
        elif scheme.is_scaled and input_scale is not None:
            tensors[f"diagonal{suffix}"] = signed_diagonal(input_scale, pass_seed)
        elif scheme.rotation == "qr":
            tensors[f"rotation{suffix}"] = qr_matrix(scheme.block(in_features), pass_seed)
    if scheme.codebook == "universal":
        tensors["codebook"] = universal_tensor(scheme)
    if scheme.two_passes:
        tensors["codebook_2"] = second_universal_tensor(scheme)
    for key, tensor in tensors.items():
        tensors[key] = tensor.to(device)
    return tensors


def _check_input_scale(
    input_scale: Tensor | None, scheme: LinearScheme, in_features: int, where: str
) -> None:
    wanted = scheme.is_scaled
    if (input_scale is not None) != wanted:
        raise VQCalibrationError(
            f"{where}: {scheme.spec()} needs statistics of the layer's inputs (input_scale of "
            "fit_weight); without them, choose the scheme's plain form."
            if wanted
            else f"{where}: {scheme.spec()} has no diagonal, so input_scale is not wanted; choose "
            "the scheme's scaled form."
        )
    if input_scale is None:
        return
    right = input_scale.is_floating_point() and tuple(input_scale.shape) == (in_features,)
    if not right or not bool((input_scale.isfinite() & (input_scale > 0)).all()):
        raise VQCalibrationError(
            f"{where}: input_scale must be {in_features} positive, finite floats; got "
            f"{input_scale.dtype} {list(input_scale.shape)}"
            + (f" from {input_scale.min():g} to {input_scale.max():g}." if right else ".")
        )


def _fit(
    weight: Tensor,
    rotation: Tensor | None,
    universal: Tensor | None,
    fitter: RowFitter,
    seed: int,
    feedback: Feedback | None,
) -> dict[str, Tensor]:
    """Codes and scales, and codebooks where no universal one is given, of the fitter's scheme."""
    scheme = fitter.scheme

    def rows(first: int, last: int) -> Tensor:
        return rotate_weight(weight[first:last].float(), rotation, scheme)

    if scheme.codebook == "tile":
        bands = (rows(i, i + scheme.tile[0]) for i in range(0, len(weight), scheme.tile[0]))
        if feedback is None:
            return _joined(fit_tile_band(band, fitter, seed) for band in bands)
        return _joined(fit_jointly(band, fitter, feedback, seed) for band in bands)
    learned = universal is None
    if learned and feedback is not None:
        stored = fit_jointly(rows(0, len(weight)), fitter, feedback, seed)
        return _ordered(stored, scheme, weight.shape[1])
    if universal is None:
        codebook, step = tensor_codebook(rows, weight.shape, fitter, seed)
    else:
        codebook, step = universal, 1.0
    # Feedback takes some launches for every vector of a row, whatever the number of rows.
    whole = feedback is not None and weight.is_cuda
    size = len(weight) if whole else _rows_at_once(weight, scheme)
    stored = _joined(
        fitter.fit(rows(i, i + size), codebook, step, feedback) for i in range(0, len(weight), size)
    )
    if learned:
        stored["codebook"] = codebook
        return _ordered(stored, scheme, weight.shape[1])
    return stored


def _ordered(stored: dict[str, Tensor], scheme: VQScheme, in_features: int) -> dict[str, Tensor]:
    """The same with the most frequent entries first."""
    codes, codebook = by_frequency(stored["codes"], stored["codebook"], scheme, in_features)
    return {**stored, "codes": codes, "codebook": codebook}


def _second_pass(
    weight: Tensor,
    tensors: dict[str, Tensor],
    scheme: VQScheme,
    fitter: RowFitter,
    feedback: Feedback | None,
) -> dict[str, Tensor]:
    """What the first pass leaves, under the second one's rotation (shared stages: the first's)."""
    first, parts = scheme.first_pass(), []
    again = RowFitter(scheme.second_pass(), weight.shape[1], fitter.search, fitter.where)
    rotation = rotation_of(tensors, "_2" if scheme.stages == "rerotated" else "")
    if feedback is not None and scheme.stages == "rerotated":
        feedback = feedback.turned_by(rotation)
    for chunk, stored in _chunks(weight, tensors, scheme):
        residual = chunk - decode_weight(_only_first(stored), first, weight.shape[1])
        rows = rotate_weight(residual, rotation, scheme)
        fitted = again.fit(rows, tensors["codebook_2"], feedback=feedback)
        parts.append({f"{key}_2": tensor for key, tensor in fitted.items()})
    return _joined(parts)


def _only_first(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in stored.items() if not key.endswith("_2")}


def _errors(
    weight: Tensor, tensors: dict[str, Tensor], scheme: VQScheme, feedback: Feedback | None
) -> tuple[float, float, float]:
    """Squared error over squared norm: of the weights; of the outputs (nan without feedback), on
    held-out inputs if there are any; of what was minimised: squares of the weights as they are
    rotated without feedback, and both, on the inputs that were seen, as damped, with it."""
    diagonal = tensors.get("diagonal")
    # Of errors and weights: squares; outputs; squares as rotated; outputs of held-out inputs.
    sums = [[0.0] * 4, [0.0] * 4]
    for chunk, stored in _chunks(weight, tensors, scheme):
        decoded = decode_weight(stored, scheme, weight.shape[1])
        for found, values in zip(sums, (chunk - decoded, chunk), strict=True):
            found[0] += _energy(values)
            found[1] += 0.0 if feedback is None else feedback.energy(values)
            found[2] += 0.0 if diagonal is None else _energy(values / diagonal.float())
            if feedback is not None and feedback.unseen is not None:
                found[3] += feedback.reported_energy(values)
    (error, output, scaled, unseen), (energy, whole, most, all_unseen) = sums
    relative_error = error / energy if energy else 0.0
    if diagonal is None:
        scaled, most = error, energy
    if feedback is None:
        return relative_error, math.nan, scaled / most if most else 0.0
    scaled, most = output + feedback.ridge * scaled, whole + feedback.ridge * most
    if feedback.unseen is not None:
        output, whole = unseen, all_unseen
    return relative_error, output / whole if whole else 0.0, scaled / most if most else 0.0


def _energy(values: Tensor) -> float:
    return float(torch.linalg.vecdot(values, values).sum(dtype=torch.float64))


def _chunks(
    weight: Tensor, tensors: dict[str, Tensor], scheme: VQScheme
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Rows of the weight in float32, with the stored tensors of just these rows."""
    size = _rows_at_once(weight, scheme)
    for start in range(0, len(weight), size):
        part = {"codes", "scale", "codes_2", "scale_2"}
        stored = {k: t[start : start + size] if k in part else t for k, t in tensors.items()}
        if scheme.codebook == "tile":
            band = start // scheme.tile[0]
            stored["codebook"] = stored["codebook"][band : band + 1]
        yield weight[start : start + size].float(), stored


def _rows_at_once(weight: Tensor, scheme: VQScheme) -> int:
    if scheme.codebook == "tile":
        return scheme.tile[0]  # a chunk must begin with a tile
    return max(1, _CHUNK // weight.shape[1])


def _joined(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    listed = list(parts)
    return {key: torch.cat([part[key] for part in listed]) for key in listed[0]}
