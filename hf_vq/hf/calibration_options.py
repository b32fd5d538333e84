"""Calibration options of `VQConfig`: names, defaults and the candidate schemes of a layer.

The calibration itself is in `hf_vq/calibration`, a layer above this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import VQConfigError, shown
from ..formats.catalog import LinearScheme, weight_scheme
from ..formats.qoq import QoQScheme

if TYPE_CHECKING:
    from .config import VQConfig

OWN_WORDS = "model"
"""Value of `text` that means: calibrate on text that the model generates."""

SHIPPED = "default"
"""Value of `text` that means: calibrate on the text that is shipped with the package."""

TOKENS, CPU_TOKENS = 1 << 17, 1 << 14
"""Default of `tokens`: on a GPU, and on a CPU, where more take hours."""

MIN_CONTEXT = 16
"""Smallest `context`, in tokens of a sequence."""

EQUIVALENT_TRANSFORMS = ("rotate", "smooth_attention", "smooth_outputs", "reorder")
"""Equivalent transforms: they change the weights before rounding, not the model's outputs."""

TRANSFORMS = (*EQUIVALENT_TRANSFORMS, "clip", "feedback")
"""All transforms. `clip` searches clipping ranges by output error, `feedback` feeds rounding errors
back as GPTQ does (`fit/qoq_calibrated.py`)."""


def checked_transforms(given: object, scheme: QoQScheme) -> dict[str, bool]:
    """Complete `calibration["transforms"]`: a bool for each name of TRANSFORMS.

    Defaults are those of DeepCompressor's recipes for QServe: all on, except `reorder` where one
    scale covers a whole row.

    Raises:
        VQConfigError: `given` is not a dict of these names and booleans.
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
    """List the candidate schemes of a layer; empty if `config` chooses no schemes."""
    if layer in (config.layers or {}) and config.target_bits is not None:
        return [config.scheme_of(layer)]
    return [weight_scheme(name) for name in config.candidates or ()]
