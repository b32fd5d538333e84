"""The folder that `hf-vq convert` reads: its files, and checks that they are really in it.

A folder is untrusted, and results are often pushed. So no link out of the folder is followed,
except into the Hub cache, where a snapshot consists of links to blobs. Of the files without weights
only configs, tokenizers and licences are copied, never code.
"""

from __future__ import annotations

import json
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..errors import VQConfigError, VQFormatError
from .pickled import NAMES

logger = logging.get_logger("hf_vq")

INDEX = "model.safetensors.index.json"
COPIED = (
    "*.json", "*.model", "tokenizer.model.*", "*.bpe", "*.vocab", "*.txt", "*.jinja", "*.tiktoken",
    "*.md", "LICENSE*", "NOTICE*",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".gguf")


def source_folder(source: str) -> Path:
    """The folder of a checkpoint; one of the Hub is downloaded.

    Raises:
        VQConfigError: it is neither, or has a file that is a link to somewhere else.
    """
    folder = Path(source) if os.path.isdir(source) else _downloaded(source)
    _check_links(folder)
    return folder


def _downloaded(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source, allow_patterns=["*.safetensors", *NAMES, *COPIED, f"{_TEMPLATES}/*.jinja"]
            )
        )
    except (OSError, ValueError) as error:
        raise VQConfigError(
            f"{source} is no directory, and was not found on the Hub: "
            f"{next(iter(str(error).splitlines()), type(error).__name__)}"
        ) from error


def _check_links(folder: Path) -> None:
    """Raise if a file of the folder is a link out of it: what it shows may be private."""
    from huggingface_hub.constants import HF_HUB_CACHE

    inside = folder.resolve()
    allowed = [inside, Path(HF_HUB_CACHE).resolve()]
    if inside.parent.name == "snapshots":  # of a Hub cache in another place
        allowed.append(inside.parent.parent / "blobs")
    for file in (*folder.iterdir(), *(folder / _TEMPLATES).glob("*.jinja")):
        if not file.is_file():
            continue
        target = file.resolve()
        if not any(target.is_relative_to(place) for place in allowed):
            raise VQConfigError(
                f"{file} is a link to {target}, outside of its folder and of the Hub cache, and is "
                "not followed: what it shows would be part of the result. Remove the link, or put "
                "the file itself in its place."
            )


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        VQFormatError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:  # the last: nested a thousand times
        raise VQFormatError(
            f"{path} cannot be read: {error}. Is this a checkpoint? Download it again."
        ) from error
    return found


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a folder, all of them.

    Raises:
        VQFormatError: one is missing, or the index names none, or one outside of the folder.
    """
    index = folder / INDEX
    names = ["model.safetensors"]
    if index.is_file():
        table = read_json(index).get("weight_map")
        named = list(table.values()) if isinstance(table, dict) else []
        if not named or not all(isinstance(n, str) and Path(n).name == n != "" for n in named):
            raise VQFormatError(
                f"{index} names no files, or some outside of its folder. Download the checkpoint "
                "again."
            )
        names = sorted(set(named))
    files = [str(folder / name) for name in names]
    if not all(os.path.isfile(file) for file in files):
        raise VQFormatError(
            f"{folder} lacks {next(f for f in files if not os.path.isfile(f))}: hf_vq reads "
            "safetensors files, all of them. Download the checkpoint again."
        )
    return files


def copy_others(folder: Path, to: Path, but: tuple[str, ...]) -> None:
    """Copy the files without weights; logs the names of files that are not copied.

    Args:
        but: names of files that are written anew.
    """
    left = []
    for template in sorted((folder / _TEMPLATES).glob("*.jinja")):
        (to / _TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(template, to / _TEMPLATES / template.name)
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.name.endswith(_WEIGHTS) or file.name in but:
            continue
        hidden = file.name.startswith(".")
        if hidden or not any(fnmatch(file.name, pattern) for pattern in COPIED):
            left.append(file.name)
            continue
        shutil.copyfile(file, to / file.name)
    if left:
        logger.warning(
            f"Not copied from {folder}: {', '.join(left)}. Only configs, tokenizers and licences "
            "are; look at other files, code above all, before you copy them yourself."
        )
