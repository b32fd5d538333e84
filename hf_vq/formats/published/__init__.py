"""Layouts of other projects' published checkpoints, decoded exactly. One file per format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import VQConfigError, shown
from .aqlm import AqlmLayout
from .higgs import HiggsLayout
from .layout import Layout, check_fields
from .qoq import QoqLayout
from .turboquant import TurboquantLayout
from .vptq import VptqLayout

LAYOUTS: dict[str, type[Layout]] = {
    layout.method: layout
    for layout in (AqlmLayout, VptqLayout, HiggsLayout, QoqLayout, TurboquantLayout)
}


def layout_from_dict(data: Mapping[str, Any]) -> Layout:
    """The layout of `Layout.to_dict()`.

    Raises:
        VQConfigError: an unknown method or other fields.
    """
    method = data.get("method") if isinstance(data, Mapping) else None
    if not isinstance(method, str) or method not in LAYOUTS:
        raise VQConfigError(
            f"{shown(method)} is not a published method; known: {', '.join(LAYOUTS)}. "
            "If config.json holds it, a newer hf_vq wrote the file: pip install -U hf_vq."
        )
    return LAYOUTS[method](**check_fields(LAYOUTS[method], data))


__all__ = [
    "LAYOUTS",
    "AqlmLayout",
    "HiggsLayout",
    "Layout",
    "QoqLayout",
    "TurboquantLayout",
    "VptqLayout",
    "layout_from_dict",
]
