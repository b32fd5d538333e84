"""What a quantized model's config.json says about how it was made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..nn.stored import digest
from .checkpoint import storage

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def record(
    model: Any,
    errors: dict[str, float],
    shared: Mapping[str, Tensor],
    calibrated: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The provenance of a model that was just quantized.

    Args:
        errors: squared error over squared norm of each quantized tensor, by name.
        shared: the codebooks and rotations that layers share, by name.
        calibrated: facts of a calibration (`WeightCalibration.run`).
    """
    from .. import __version__

    bits, weights = storage(model)
    source = getattr(model.config, "name_or_path", None) or ""
    is_repository = bool(_REPOSITORY.fullmatch(source)) and not os.path.exists(source)
    found = {
        "hf_vq": __version__,
        "base_model": source if is_repository else None,
        "bits_per_weight": round(bits / weights, 4),
        "relative_error": dict(errors),
        "codebooks": {name: digest(tensor) for name, tensor in sorted(shared.items())},
    }
    return found if calibrated is None else {**found, "calibration": calibrated}
