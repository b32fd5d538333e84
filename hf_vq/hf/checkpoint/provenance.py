"""Provenance of a quantized model: the part of config.json that says how it was made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...nn.quantized_module import digest
from .headers import storage

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def record(
    model: Any,
    errors: dict[str, float],
    shared: Mapping[str, Tensor],
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The provenance of a model that was just quantized.

    Args:
        errors: squared error over squared norm of each quantized tensor, by name.
        shared: the codebooks and rotations that layers share, by name.
        more: facts of a calibration or of a pass over activations, under its name, or the `dtype`
            of the weights.
    """
    from ... import __version__

    bits, weights = storage(model)
    found = {
        "hf_vq": __version__,
        "base_model": _repository(model),
        "bits_per_weight": round(bits / weights, 4),
        "relative_error": dict(errors),
        "codebooks": {name: digest(tensor) for name, tensor in sorted(shared.items())},
    }
    return {**found, **(more or {})}


def origin(model: Any, published: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of a model that another project quantized.

    Args:
        published: its `quantization_config`.
    """
    from ... import __version__

    about = {key: value for key, value in published.items() if _is_short(value)}
    return {"hf_vq": __version__, "base_model": _repository(model), "converted_from": about}


def _is_short(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _repository(model: Any) -> str | None:
    """The Hub's name of what a model was loaded from; None for a folder, or another module."""
    source = getattr(getattr(model, "config", None), "name_or_path", None) or ""
    is_repository = bool(_REPOSITORY.fullmatch(source)) and not os.path.exists(source)
    return source if is_repository else None
