"""The name of the argument by which a model takes a cache."""

from __future__ import annotations

import inspect
from typing import Any

from transformers.generation.utils import ALL_CACHE_NAMES

CACHE: str = ALL_CACHE_NAMES[0]
"""`cache` since Transformers 5.24, `past_key_values` before; also the field of an output."""

OLD_CACHE = "past_key_values"
"""The older name, which Transformers' own models still take."""


def cache_argument(model: Any) -> str:
    """The argument of `model`, which may have code of its own with the older name."""
    return OLD_CACHE if OLD_CACHE in inspect.signature(model.forward).parameters else CACHE
