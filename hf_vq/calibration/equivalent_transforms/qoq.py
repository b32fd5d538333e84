"""Calibration of QoQ: equivalent transforms before rounding, and clipping ranges of q_proj and
k_proj chosen by the output error of their block (QServe, section 4.3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, device, nn

from ...fit import FittedWeight
from ...fit.qoq_calibrated import CLIPS
from ...formats.catalog import LinearScheme
from ...hf.calibration_options import EQUIVALENT_TRANSFORMS
from ..blocks import Blocks
from ..resume import ResumeFolder
from .apply import apply_transforms, layers_to_record
from .largest_inputs import largest_inputs

BY_BLOCK = ("q_proj", "k_proj")
"""Layers in front of a softmax: the least error of their outputs is not that of attention."""

_BLOCK_CLIPS = (CLIPS, (1.0,), (0.95,), (0.9,))  # the best of each group, or one for the layer
_TOKENS = 4096  # on which the output error of a block is measured


def transform_model(
    model: Any,
    prefix: str,
    transforms: Mapping[str, bool],
    schemes: Mapping[str, LinearScheme],
    sequences: Tensor,
    work: ResumeFolder,
) -> None:
    """Apply the requested equivalent transforms to a model; its outputs stay the same.

    Raises:
        VQCalibrationError: the model is unsupported, see `apply_transforms`.
    """
    if not any(transforms[name] for name in EQUIVALENT_TRANSFORMS):
        return
    keys, layers = transforms["smooth_attention"], layers_to_record(model, prefix, transforms)
    found = work.largest(
        lambda: largest_inputs(model, sequences, layers, keys) if keys or layers else {}
    )
    groups = any(getattr(scheme, "group", 0) for scheme in schemes.values())
    apply_transforms(model, prefix, transforms, found, sequences[0], groups=groups)


class Trial:
    """A block, and its outputs before its layers are rounded.

    Args:
        place: device of the block.
    """

    def __init__(self, blocks: Blocks, index: int, place: device) -> None:
        self.blocks, self.index, self.place = blocks, index, place
        count = max(1, _TOKENS // blocks.hidden[0].shape[1])
        self.hidden = blocks.hidden[:count]
        self.returned = [blocks.run(index, hidden, place) for hidden in self.hidden]

    def best(
        self,
        layer: nn.Linear,
        fit: Callable[[tuple[float, ...]], FittedWeight],
        decode: Callable[[FittedWeight], None],
    ) -> FittedWeight:
        """Find the clips of one layer with the least output error of the block.

        Layers of the block that are encoded already count with their codes. The layer ends up with
        its decoded weight.

        Args:
            fit: function from clips to the layer's codes.
            decode: function that writes decoded codes into the layer.

        Returns:
            The codes with the best clips.
        """
        dense, found = layer.weight.detach().clone(), list[tuple[float, FittedWeight]]()
        for clips in _BLOCK_CLIPS:
            fitted = fit(clips)
            decode(fitted)
            found.append((self._error(), fitted))
            layer.weight.copy_(dense)
        best = min(found, key=lambda one: one[0])[1]
        decode(best)
        return best

    def _error(self) -> float:
        both = zip(self.hidden, self.returned, strict=True)
        return sum(
            float((self.blocks.run(self.index, x, self.place) - y).float().square().sum())
            for x, y in both
        )
