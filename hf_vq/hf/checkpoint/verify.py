"""`hf-vq verify`: models, saved caches and KV codebooks against the digests in their files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from ...cache import codebooks, file, safetensors_file
from ...errors import VQConfigError, VQFormatError
from ...formats import digests
from ..config import QUANT_METHODS, VQConfig
from . import by_layer
from .integrity import RECORD, checkpoints, meanings

_INDEX = re.compile(r"model\.safetensors\.index(?:\.(?P<variant>.+))?\.json")


@dataclass
class Found:
    """Result of a comparison.

    Args:
        problems: tensors and files that differ from what was saved, one line each.
        without: files that carry no digests.
        files, tensors, nbytes: numbers of files, tensors and bytes that were compared.
    """

    problems: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class _Files:
    """Files that belong together; the fields are arguments of `digests.Check`."""

    paths: list[Path]
    meanings: Callable[[list[digests.Header]], Mapping[str, str]] = lambda headers: {}
    expected: bool = False
    recorded: str | None = None
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # of files without tensors


class Verification:
    """Comparison of the files at a path with their digests.

    Args:
        path: folder of a model, or a file that `VQCache.save` or `KVCodebooks.save` wrote.

    Raises:
        VQConfigError: neither of these.
        VQFormatError: config.json or a header cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._groups = list(_of_folder(path)) if path.is_dir() else [_of_file(path)]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for group in self._groups for path in group.paths)

    def run(self, done: Callable[[int], object] = lambda nbytes: None) -> Found:
        """Compare all tensors.

        Args:
            done: progress callback, called with the bytes of each tensor; calls do not overlap.
        """
        found = Found()
        for group in self._groups:
            found.problems += [f"{name} is missing" for name in group.missing]
            found.problems += group.problems
            if not group.paths:
                continue
            try:
                check = digests.Check(group.paths, group.meanings, done)
                problems = check.problems(group.expected, group.recorded)
            except VQFormatError as error:  # the other files are worth a look too
                found.problems.append(str(error))
                continue
            found.problems += problems
            if check.has_digests:
                found.files += len(check.headers)
                found.tensors += len(check.parts)
                found.nbytes += sum(part.nbytes for part in check.parts)
            elif not problems:
                found.without += [header.path for header in check.headers]
        return found


def _of_folder(folder: Path) -> Iterator[_Files]:
    quantization = _read(folder / CONFIG_NAME).get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") not in QUANT_METHODS:
        raise VQConfigError(f"{folder} is not the folder of a model that hf_vq quantized.")
    config = VQConfig.from_dict(quantization)
    recorded = (config.provenance or {}).get(RECORD)
    found = checkpoints(folder)
    named = _named(folder)
    if not found and not named:
        raise VQConfigError(f"{folder} holds no model.safetensors.")
    for variant in sorted({*found, *named}):
        paths = found.get(variant, [])
        lost = sorted(named.get(variant, set()) - {path.name for path in paths})
        yield _Files(
            paths,
            partial(meanings, config),
            expected=recorded is not None and not variant,
            recorded=None if variant else recorded,
            missing=tuple(f"{folder / name}" for name in lost),
        )
    if (why := by_layer.problem(folder / by_layer.FILE, config.provenance or {})) is not None:
        yield _Files([], problems=(why,))
    if (folder / codebooks.FILE_NAME).is_file():
        yield _of_file(folder / codebooks.FILE_NAME)


def _named(folder: Path) -> dict[str, set[str]]:
    """The files that indices name, by variant."""
    found = {}
    for path in folder.iterdir():
        if match := _INDEX.fullmatch(path.name):
            files = _read(path).get("weight_map")
            if not isinstance(files, dict) or not files:
                raise VQFormatError(f"{path} names no files. {digests.CURE}")
            found[match["variant"] or ""] = set(map(str, files.values()))
    return found


def _of_file(path: Path) -> _Files:
    metadata = digests.Header(path).metadata
    texts = [metadata[key] for key in (file.KEY, codebooks.KEY) if key in metadata]
    if not texts and path.name != codebooks.FILE_NAME:
        raise VQConfigError(
            f"{path} is neither a saved VQCache nor KV codebooks. Of a model, give the folder."
        )
    return _Files([path], expected=any(map(safetensors_file.says_digests, texts)))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise VQFormatError(f"{path} cannot be read: {error}. {digests.CURE}") from error
    if not isinstance(found, dict):
        raise VQFormatError(f"{path} is no JSON object. {digests.CURE}")
    return found
