"""The part of the provenance that grows with the number of layers: a file next to config.json.

    FOLDER/hf_vq_provenance.json   {"relative_error": {layer: error}, "calibration": {...}}

config.json keeps the rest, and the digest of the file. A model loads without it: only what it
records is lost then. Older versions wrote everything into config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from transformers.utils import cached_file, logging

from ... import env

logger = logging.get_logger("hf_vq")

FILE = "hf_vq_provenance.json"
DIGEST = "by_layer"  # in `provenance`: the digest of FILE

_ERRORS, _CALIBRATION = "relative_error", "calibration"
_OF_CALIBRATION = ("output_error", "fallbacks")


def short(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The part that config.json keeps; a save adds the digest of the file that it writes."""
    found = {key: value for key, value in provenance.items() if key not in (_ERRORS, DIGEST)}
    if isinstance(found.get(_CALIBRATION), dict):
        facts = found[_CALIBRATION].items()
        found[_CALIBRATION] = {key: value for key, value in facts if key not in _OF_CALIBRATION}
    return found


def write(folder: Path, provenance: Mapping[str, Any]) -> str:
    """Write the file; returns its digest."""
    found = {_ERRORS: provenance.get(_ERRORS, {})}
    facts = provenance.get(_CALIBRATION) or {}
    if named := {key: facts[key] for key in _OF_CALIBRATION if key in facts}:
        found[_CALIBRATION] = named
    text = (json.dumps(found, indent=2, sort_keys=True) + "\n").encode()
    (folder / FILE).write_bytes(text)
    return _digest(text)


def joined(provenance: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """The whole provenance, without the digest of the file.

    Args:
        provenance: of config.json.
        path: of the file; None where there is none. One that is not what was saved is left out, and
            the log says so.
    """
    found = {key: value for key, value in provenance.items() if key != DIGEST}
    if path is None or DIGEST not in provenance:
        return found
    if (why := problem(path, provenance)) is not None:
        logger.warning("hf_vq: %s: the errors of single layers are left out.", why)
        return found
    more = json.loads(path.read_bytes())
    if _CALIBRATION in more:
        found[_CALIBRATION] = {**(found.get(_CALIBRATION) or {}), **more[_CALIBRATION]}
    return {**found, _ERRORS: more[_ERRORS]}


def problem(path: Path, provenance: Mapping[str, Any]) -> str | None:
    """The fault of the file; None if it is what was saved, or never was."""
    if DIGEST not in provenance:
        return None
    try:
        text = path.read_bytes()
    except OSError:
        return f"{path} is missing"
    if env.VERIFY.get() and _digest(text) != provenance[DIGEST]:
        return f"{path} is not what was saved"
    try:
        found = json.loads(text)
        tables = [found[_ERRORS], found.get(_CALIBRATION, {})]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        tables = [None]
    return None if all(isinstance(one, dict) for one in tables) else f"{path} cannot be read"


def find(folder: Path, config: Any) -> Path | None:
    """Path of the file of a model that is being loaded; None if it has none.

    Args:
        folder: of its weights.
        config: of the model: from the Hub, the file may still have to be fetched.
    """
    if (folder / FILE).is_file():
        return folder / FILE
    source = getattr(config, "name_or_path", None) or ""
    if not source or Path(source).exists():
        return None
    missing = ("gated_repo", "missing_entries", "connection_errors")
    options = dict.fromkeys((f"_raise_exceptions_for_{what}" for what in missing), False)
    found = cached_file(source, FILE, revision=getattr(config, "_commit_hash", None), **options)
    return None if found is None else Path(found)


def _digest(text: bytes) -> str:
    return str(blake3(text).hexdigest(length=16))
