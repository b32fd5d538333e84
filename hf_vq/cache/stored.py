"""One safetensors file with one JSON description in its metadata: written whole, read with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import VQCacheError, VQFormatError
from ..formats.hidden import hidden_file


def write(path: Path, tensors: dict[str, Tensor], key: str, description: dict[str, Any]) -> None:
    """Write `path`: the old file stays whole until the new one is.

    Args:
        key: of the description in the metadata.

    Raises:
        VQCacheError: the file cannot be written.
    """
    try:
        with hidden_file(path) as temporary:
            temporary.touch(exist_ok=False)
            mode = temporary.stat().st_mode  # that of any new file; safetensors makes it private
            save_file(tensors, temporary, {key: json.dumps(description), "format": "pt"})
            temporary.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise VQCacheError(
            f"{path} cannot be written: {error}. The folder must exist and be writable."
        ) from error


def read(
    path: Path, key: str, version: int, what: str, writer: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors that `write` put into `path`.

    Args:
        version: the newest `format_version` of the description that is understood.
        what: the kind of file, for messages.
        writer: what writes such files, for messages.

    Raises:
        VQFormatError: the file is missing, damaged, of another kind or newer.
    """
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(key)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise VQFormatError(f"{path} cannot be read as {what}: {error}.") from None
    try:
        description = json.loads(text or "")
    except json.JSONDecodeError:
        raise VQFormatError(f"{path} was not written by {writer}.") from None
    found = description.get("format_version") if isinstance(description, dict) else None
    if type(found) is not int or found < 1:
        raise VQFormatError(f"{path}: format_version {found!r} is not a number of a version.")
    if found > version:
        raise VQFormatError(
            f"{path} has format_version {found}, this hf_vq reads up to {version}; upgrade hf_vq."
        )
    return description, tensors


def typed(description: dict[str, Any], name: str, kind: type) -> Any:
    """`description[name]`, if it is of exactly this type."""
    value = description[name]
    if type(value) is not kind:
        raise VQFormatError(f"{name} is {value!r}, expected {kind.__name__}")
    return value
