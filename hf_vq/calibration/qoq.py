"""What the calibration of QoQ does besides feedback: folds before it, and for queries and keys a
choice of their clips by what their block returns (QServe, section 4.3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, device, nn

from ..fit import FittedWeight
from ..fit.qoq_calibrated import CLIPS
from ..formats.catalog import LinearScheme
from ..hf.calibration_options import FOLDS
from .blocks import Blocks
from .equivalent_transforms.apply import fold, listened
from .equivalent_transforms.largest_inputs import largest_inputs
from .resume import Unfinished

BY_BLOCK = ("q_proj", "k_proj")
"""Their outputs count through a softmax: a least error of them is not one of attention."""

_BLOCK_CLIPS = (CLIPS, (1.0,), (0.95,), (0.9,))  # the best of each group, or one for the layer
_TOKENS = 4096  # on which a block is tried


def fold_model(
    model: Any,
    prefix: str,
    transforms: Mapping[str, bool],
    schemes: Mapping[str, LinearScheme],
    sequences: Tensor,
    work: Unfinished,
) -> None:
    """Change a model before its weights are rounded; it computes the same.

    Raises:
        VQCalibrationError: as `folds.fold`.
    """
    if not any(transforms[name] for name in FOLDS):
        return
    keys, layers = transforms["smooth_attention"], listened(model, prefix, transforms)
    found = work.largest(
        lambda: largest_inputs(model, sequences, layers, keys) if keys or layers else {}
    )
    groups = any(getattr(scheme, "group", 0) for scheme in schemes.values())
    fold(model, prefix, transforms, found, sequences[0], groups=groups)


class Trial:
    """A block before its layers are rounded, and what it returns.

    Args:
        place: where the block is.
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
        """What is closest to what the block returned, with layers as they are by now.

        Args:
            fit: given clips to try, the layer's codes; of its weight as it is.
            decode: puts what they decode to into the layer, where the best stay.
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
