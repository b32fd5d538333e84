"""What `VQConfig` must know of calibration: names, defaults and which schemes a layer may get.

Calibration itself is the room above (`hf_vq/calibration`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import VQConfigError, shown
from ..formats.catalog import LinearScheme, weight_scheme
from ..formats.qoq import QoQScheme

if TYPE_CHECKING:
    from .config import VQConfig

OWN_WORDS = "model"
"""Instead of a text: what the model writes by itself."""

MIN_CONTEXT = 16
"""Tokens of the shortest sequence."""

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


def choices(config: VQConfig, layer: str) -> list[LinearScheme]:
    """The schemes that a layer may get; none where nothing is to be chosen."""
    if layer in (config.layers or {}) and config.target_bits is not None:
        return [config.scheme_of(layer)]
    return [weight_scheme(name) for name in config.candidates or ()]
