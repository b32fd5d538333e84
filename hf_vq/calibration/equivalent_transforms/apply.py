"""The transforms of QoQ on a model, in their order, and the proof that it computes the same.

    rotate -> smooth_attention -> reorder -> smooth_outputs

What is found on text is found once, before the first of them, so that what they do follows from
the weights and from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import VQCalibrationError
from ...hf.calibration_options import FOLDS
from .block_outputs import GROUP_EXPONENTS, ROW_EXPONENTS, reorder_down, smooth_down, smooth_values
from .rotate import rotate
from .smooth_attention import fold_attention
from .structure import structure_of

_PROBE = 64  # tokens on which the model must be what it was
# How far logits may move, relative to their size. A wrong fold is an error of order 1; rounding
# every weight to 16 bits once more moves them by some percent, and to 32 bits not at all.
_MOST = {2: 0.1, 4: 1e-3, 8: 1e-3}


def listened(model: Any, prefix: str, folds: Mapping[str, bool]) -> list[str]:
    """The layers whose largest inputs `fold` will ask for.

    Raises:
        VQCalibrationError: as `structure_of`.
    """
    if not any(folds[name] for name in FOLDS if name != "smooth_attention"):
        return []
    blocks = structure_of(model, prefix).blocks
    down = folds["reorder"] or folds["smooth_outputs"]
    values = folds["smooth_outputs"] and not folds["rotate"]
    wanted = [("mlp.down_proj", down), ("self_attn.o_proj", values)]
    return [f"{block.name}.{layer}" for block in blocks for layer, asked in wanted if asked]


@torch.no_grad()
def fold(
    model: Any,
    prefix: str,
    folds: Mapping[str, bool],
    largest: Mapping[str, Tensor],
    probe: Tensor,
    *,
    groups: bool,
) -> None:
    """Change a model in place; it computes the same.

    Args:
        prefix: name of the list of its blocks.
        folds: which of FOLDS are asked for.
        largest: as `largest_inputs` found it in the layers that `listened` lists.
        probe: token ids [tokens] on whose start that is tried.
        groups: whether weights will have a scale for some columns, or for a whole row.

    Raises:
        VQCalibrationError: the model is not built so, or does not compute the same.
    """
    ids = probe[None, :_PROBE].to(model.device)
    before = model(ids, use_cache=False).logits.double()
    plain = any(folds[name] for name in FOLDS if name != "smooth_attention")
    structure = structure_of(model, prefix) if plain else None
    if structure is not None and folds["rotate"]:
        rotate(model, structure)
    if folds["smooth_attention"]:
        _smooth_attention(model, largest, probe)
    exponents = GROUP_EXPONENTS if groups else ROW_EXPONENTS
    for block in structure.blocks if structure is not None else ():
        down = largest.get(f"{block.name}.mlp.down_proj")
        if down is not None and folds["reorder"]:
            down = down[reorder_down(block, down).cpu()]
        if down is not None and folds["smooth_outputs"]:
            smooth_down(block, down, exponents)
        values = largest.get(f"{block.name}.self_attn.o_proj")
        if values is not None and folds["smooth_outputs"] and not folds["rotate"]:
            smooth_values(block, values, exponents)
    after = model(ids, use_cache=False).logits.double()
    _check(model, before, after)


def _smooth_attention(model: Any, largest: Mapping[str, Tensor], probe: Tensor) -> None:
    keys = {int(n.removeprefix("keys.")): k for n, k in largest.items() if n.startswith("keys.")}
    try:
        fold_attention(model, keys, probe)
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
            f"the transforms of QoQ changed what {type(model).__name__} predicts, by {moved:.2g} "
            f"of its size where {model.dtype} explains {allowed:.2g}: something in it is not as in "
            'Llama. Turn them off: VQConfig(calibration={..., "transforms": {"rotate": False, ...'
            "}})."
        )
