"""The transforms of QoQ on a model, in their order, and the proof that it computes the same.

    rotate -> smooth_attention -> reorder -> smooth_outputs

The largest inputs are measured on text once, before the first transform. So the transforms depend
only on the weights and on these measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import VQCalibrationError
from ...hf.calibration_options import EQUIVALENT_TRANSFORMS
from .block_outputs import GROUP_EXPONENTS, ROW_EXPONENTS, reorder_down, smooth_down, smooth_values
from .rotate import rotate
from .smooth_attention import apply_smoothing
from .structure import structure_of

_PROBE = 64  # tokens on which the outputs are compared
# Largest relative change of the logits, by bytes of the dtype. A wrong transform is an error of
# order 1. Rounding every weight to 16 bits once more changes logits by some percent; to 32 bits,
# not at all.
_MOST = {2: 0.1, 4: 1e-3, 8: 1e-3}


def layers_to_record(model: Any, prefix: str, transforms: Mapping[str, bool]) -> list[str]:
    """Names of the layers whose largest inputs `apply_transforms` needs.

    Raises:
        VQCalibrationError: the model is unsupported, see `structure_of`.
    """
    if not any(transforms[name] for name in EQUIVALENT_TRANSFORMS if name != "smooth_attention"):
        return []
    blocks = structure_of(model, prefix).blocks
    down = transforms["reorder"] or transforms["smooth_outputs"]
    values = transforms["smooth_outputs"] and not transforms["rotate"]
    wanted = [("mlp.down_proj", down), ("self_attn.o_proj", values)]
    return [f"{block.name}.{layer}" for block in blocks for layer, needed in wanted if needed]


@torch.no_grad()
def apply_transforms(
    model: Any,
    prefix: str,
    transforms: Mapping[str, bool],
    largest: Mapping[str, Tensor],
    probe: Tensor,
    *,
    groups: bool,
) -> None:
    """Apply equivalent transforms to a model, in place; its outputs stay the same.

    Args:
        prefix: name of the list of its blocks.
        transforms: which of EQUIVALENT_TRANSFORMS to apply.
        largest: result of `largest_inputs` for the layers of `layers_to_record`.
        probe: token ids [tokens]; outputs are compared on the first ones.
        groups: True if a scale covers a group of columns, False if it covers a whole row.

    Raises:
        VQCalibrationError: the model is unsupported, or its outputs have changed.
    """
    ids = probe[None, :_PROBE].to(model.device)
    before = model(ids, use_cache=False).logits.double()
    plain = any(transforms[name] for name in EQUIVALENT_TRANSFORMS if name != "smooth_attention")
    structure = structure_of(model, prefix) if plain else None
    if structure is not None and transforms["rotate"]:
        rotate(model, structure)
    if transforms["smooth_attention"]:
        _smooth_attention(model, largest, probe)
    exponents = GROUP_EXPONENTS if groups else ROW_EXPONENTS
    for block in structure.blocks if structure is not None else ():
        down = largest.get(f"{block.name}.mlp.down_proj")
        if down is not None and transforms["reorder"]:
            down = down[reorder_down(block, down).cpu()]
        if down is not None and transforms["smooth_outputs"]:
            smooth_down(block, down, exponents)
        values = largest.get(f"{block.name}.self_attn.o_proj")
        if values is not None and transforms["smooth_outputs"] and not transforms["rotate"]:
            smooth_values(block, values, exponents)
    after = model(ids, use_cache=False).logits.double()
    _check(model, before, after)


def _smooth_attention(model: Any, largest: Mapping[str, Tensor], probe: Tensor) -> None:
    keys = {int(n.removeprefix("keys.")): k for n, k in largest.items() if n.startswith("keys.")}
    try:
        apply_smoothing(model, keys, probe)
    except VQCalibrationError as error:
        raise VQCalibrationError(
            f"{error} Or turn it off: VQConfig(calibration={{..., "
            '"transforms": {"smooth_attention": False}}).'
        ) from None


def _check(model: Any, before: Tensor, after: Tensor) -> None:
    allowed = _MOST[model.dtype.itemsize]
    moved = float((after - before).norm() / before.norm())
    if not moved <= allowed:  # also NaN
        raise VQCalibrationError(
            f"the transforms of QoQ changed the logits of {type(model).__name__} by {moved:.2g} of "
            f"their norm, where rounding to {model.dtype} explains {allowed:.2g}: it differs from "
            'Llama. Turn them off: VQConfig(calibration={..., "transforms": {"rotate": False, ...'
            "}})."
        )
