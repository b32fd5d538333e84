"""Which transforms a calibration of QoQ makes: `VQConfig(calibration={"transforms": {...}})`."""

from __future__ import annotations

from ..errors import VQConfigError, shown
from ..formats.qoq import QoQScheme

FOLDS = ("rotate", "smooth_attention", "smooth_outputs", "reorder")
"""They change the model before its weights are rounded, not what it computes."""

TRANSFORMS = (*FOLDS, "clip", "feedback")
"""And how weights are rounded: ranges cut by what that costs outputs, errors fed back as in GPTQ
(`fit/qoq_calibrated.py`)."""


def checked_transforms(given: object, scheme: QoQScheme) -> dict[str, bool]:
    """All of TRANSFORMS, on or off; what is not given is as in DeepCompressor's recipes for QServe:
    on, but for the order of channels where a scale is one of a whole row.

    Raises:
        VQConfigError: not a dict of these names and booleans.
    """
    usual = {name: name != "reorder" or scheme.group > 0 for name in TRANSFORMS}
    if given is None:
        return usual
    example = 'Write e.g. {"rotate": False}.'
    if not isinstance(given, dict) or not all(isinstance(on, bool) for on in given.values()):
        raise VQConfigError(
            "calibration['transforms'] must be a dict of names and true or false; got "
            f"{shown(given)}. {example}"
        )
    if unknown := sorted(map(str, set(given) - set(TRANSFORMS))):
        raise VQConfigError(
            f"calibration['transforms'] has no {', '.join(map(repr, unknown))}. Known: "
            f"{', '.join(TRANSFORMS)}."
        )
    return {**usual, **given}
