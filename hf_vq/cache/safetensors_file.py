"""One safetensors file with one JSON description in its metadata: written whole, read with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .. import env
from ..errors import VQCacheError, VQFormatError, shown
from ..formats import digests
from ..formats.hidden import hidden_file

_DIGESTS = "digests"  # in a description: the algorithm of those that the file carries


def write(path: Path, tensors: dict[str, Tensor], key: str, description: dict[str, Any]) -> None:
    """Write `path`: the old file stays whole until the new one is.

    Args:
        key: of the description in the metadata.

    Raises:
        VQCacheError: the file cannot be written.
    """
    text = json.dumps({**description, _DIGESTS: digests.ALGORITHM})
    try:
        with hidden_file(path) as temporary:
            temporary.touch(exist_ok=False)
            mode = temporary.stat().st_mode  # that of any new file; safetensors makes it private
            save_file(tensors, temporary, {key: text, "format": "pt", **digests.room(tensors)})
            digests.record([temporary])
            temporary.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise VQCacheError(
            f"{path} cannot be written: {error}. The folder must exist and be writable."
        ) from error


def says_digests(text: str | None) -> bool:
    """Whether a description, as its JSON, says that its file carries digests."""
    try:
        description = json.loads(text or "")
    except (ValueError, RecursionError):
        return False
    return isinstance(description, dict) and _DIGESTS in description


def read(
    path: Path, key: str, version: int, what: str, writer: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors that `write` put into `path`.

    Args:
        version: the newest `format_version` of the description that is understood.
        what: the kind of file, for messages.
        writer: what writes such files, for messages.

    Raises:
        VQFormatError: the file is missing, damaged, of another kind or newer; or a tensor, or the
            description, is not what was written.
    """
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(key)
            check = digests.Check([path], loaded=True) if env.VERIFY.get() else None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # RuntimeError, TypeError: of an empty tensor with sizes that no tensor of torch can have.
    except (SafetensorError, OSError, RuntimeError, TypeError) as error:
        raise VQFormatError(f"{path} cannot be read as {what}: {error}.") from None
    try:
        description = json.loads(text or "")
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        raise VQFormatError(f"{path} was not written by {writer}.") from None
    found = description.get("format_version") if isinstance(description, dict) else None
    if type(found) is not int or found < 1:
        raise VQFormatError(f"{path}: format_version {shown(found)} is not a number of a version.")
    if found > version:
        raise VQFormatError(
            f"{path} has format_version {shown(found)}, this hf_vq reads up to {version}; upgrade "
            "hf_vq."
        )
    if check is not None:
        check.finish(expected=_DIGESTS in description)
    return description, tensors


def typed(description: dict[str, Any], name: str, kind: type) -> Any:
    """`description[name]`, if it is of exactly this type."""
    value = description[name]
    if type(value) is not kind:
        raise VQFormatError(f"{name} is {shown(value)}, expected {kind.__name__}")
    return value
