"""Fit one weight matrix to a scheme, without data: rotate, scale, assign, pack."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import VQConfigError, VQFormatError
from ..formats.scheme import VQScheme
from ..formats.shared import universal_tensor
from ..formats.tensors import tensor_specs
from ..ops import decode_weight
from ..transforms import draw_signs, qr_matrix, rotate
from .assign import Assigner
from .learned import fit_tensor_codebook, fit_tile_codebooks
from .passes import nested_codes, one_pass, rerotated
from .rows import SEARCHES, RowFitter

_CHUNK = 1 << 21  # weights held at once in float32


@dataclass(frozen=True)
class FittedWeight:
    """The stored tensors of one matrix.

    Args:
        tensors: keys of `formats.tensor_specs` without the shared ones, on the weight's device.
        relative_error: squared error over squared norm of the whole matrix.
    """

    tensors: dict[str, Tensor]
    relative_error: float


@torch.no_grad()
def fit_weight(
    weight: Tensor,
    scheme: VQScheme,
    *,
    seed: int = 0,
    where: str = "weight",
    search: str = "search",
) -> FittedWeight:
    """Codes, scales and (for learned codebooks) entries of `weight` [out, in], without data.

    Args:
        weight: any float dtype, on CPU or CUDA; read in chunks of rows, not changed.
        seed: of the rotation and of k-means.
        where: name of the weight for errors.
        search: how a group's scale is found: `search`, `least_squares` or `norm`.

    Raises:
        VQSchemeError: the dimensions do not fit the scheme.
        VQFormatError: the weight is not a finite matrix, or too large for fp16 scales.
        VQConfigError: unknown `search`.
    """
    if search not in SEARCHES:
        raise VQConfigError(f"search must be one of {', '.join(SEARCHES)}; got {search!r}.")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise VQFormatError(
            f"{where} must be a float matrix [out, in]; got {weight.dtype} {list(weight.shape)}."
        )
    specs = tensor_specs(scheme, weight.shape[0], weight.shape[1], seed=seed, where=where)
    tensors = fixed_tensors(scheme, weight.shape[1], seed, weight.device)
    fitter = RowFitter(scheme, weight.shape[1], search, where)
    tensors.update(_first_pass(weight, tensors, fitter, seed))
    if scheme.stages == "nested":
        tensors["codes_2"] = _refine(weight, tensors, scheme)
    elif scheme.stages == "rerotated":
        residual = weight.float() - decode_weight(tensors, one_pass(scheme), weight.shape[1])
        tensors.update(
            rerotated(
                residual,
                scheme,
                lambda rest, single: (
                    fit_weight(rest, single, seed=seed + 1, where=where, search=search).tensors
                ),
            )
        )
    stored = {key: tensors[key] for key, spec in specs.items() if spec.shared_name is None}
    return FittedWeight(stored, _relative_error(weight, tensors, scheme))


def fixed_tensors(
    scheme: VQScheme, in_features: int, seed: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """The tensors that no weight decides, by key: signs or rotation, universal codebooks."""
    tensors: dict[str, Tensor] = {}
    for suffix, pass_seed in (("", seed), ("_2", seed + 1)):
        if suffix and scheme.stages != "rerotated":
            continue
        if scheme.rotation == "random_hadamard":
            tensors[f"signs{suffix}"] = draw_signs(in_features, pass_seed)
        elif scheme.rotation == "qr":
            tensors[f"rotation{suffix}"] = qr_matrix(scheme.block(in_features), pass_seed)
    if scheme.codebook == "universal":
        tensors["codebook"] = universal_tensor(scheme)
    if scheme.stages == "nested":
        tensors["codebook_2"] = universal_tensor(scheme, refined=True)
    return {key: tensor.to(device) for key, tensor in tensors.items()}


def _rotation(tensors: dict[str, Tensor]) -> Tensor | None:
    return tensors.get("signs", tensors.get("rotation"))


def _first_pass(
    weight: Tensor, tensors: dict[str, Tensor], fitter: RowFitter, seed: int
) -> dict[str, Tensor]:
    scheme, rotation = fitter.scheme, _rotation(tensors)
    if scheme.codebook == "tensor":
        return fit_tensor_codebook(rotate(weight.float(), scheme, rotation), fitter, seed)
    if scheme.codebook == "tile":
        return fit_tile_codebooks(rotate(weight.float(), scheme, rotation), fitter, seed)
    assigner = Assigner(tensors["codebook"], scheme)
    parts = [
        fitter.fit(rotate(chunk.float(), scheme, rotation), assigner)
        for chunk in weight.split(_rows(weight))
    ]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _refine(weight: Tensor, tensors: dict[str, Tensor], scheme: VQScheme) -> Tensor:
    parts = []
    for start in _starts(weight):
        part = slice(start, start + _rows(weight))
        rows = rotate(weight[part].float(), scheme, _rotation(tensors))
        codes, scale = tensors["codes"][part], tensors["scale"][part]
        parts.append(nested_codes(rows, codes, scale, tensors["codebook_2"], scheme))
    return torch.cat(parts)


def _relative_error(weight: Tensor, tensors: dict[str, Tensor], scheme: VQScheme) -> float:
    error = energy = 0.0
    by_row = ("codes", "scale", "codes_2", "scale_2")
    whole = scheme.codebook == "tile"  # a chunk of rows would start in the wrong tile
    for start in [0] if whole else _starts(weight):
        part = slice(None) if whole else slice(start, start + _rows(weight))
        chunk = {key: t[part] if key in by_row else t for key, t in tensors.items()}
        exact = weight[part].float()
        decoded = decode_weight(chunk, scheme, weight.shape[1])
        error += float((exact - decoded).square().sum(dtype=torch.float64))
        energy += float(exact.square().sum(dtype=torch.float64))
    return error / energy if energy else 0.0


def _rows(weight: Tensor) -> int:
    return max(1, _CHUNK // weight.shape[1])


def _starts(weight: Tensor) -> range:
    return range(0, weight.shape[0], _rows(weight))
