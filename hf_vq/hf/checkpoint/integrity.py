"""Integrity of a model's files: digests of the tensors and of the specs that give them meaning.

`config.json` says what codes mean, so a digest covers the spec of the tensor's layer too. Saving
and loading both look up the spec by the names in the file, in the config.json of the same folder.
Neither the model class's renaming of tensors nor a later change of the config changes a digest.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from ...formats import digests
from ...formats.catalog import LinearScheme
from ...formats.qoq import QoQScheme
from ..config import VQConfig
from . import by_layer

RECORD = "digests"  # in `provenance`: the digest of all digests


def meanings(config: VQConfig, headers: Iterable[digests.Header]) -> dict[str, str]:
    """Spec of each coded tensor of a checkpoint, by name; dense tensors have none.

    Names of layers in a config may have one prefix more or less than those in the file. Entries of
    layers that are not in the file count for all layers of the config's default scheme.

    Args:
        config: the config in the checkpoint's config.json.
        headers: headers of the checkpoint's files.
    """
    parts = [part for header in headers for part in header.parts.values()]
    owners = {part.name: part.name.rpartition(".")[0] for part in parts}
    coded = {owner for name, owner in owners.items() if _attribute(name).startswith("vq_")}
    table = _Table(config)
    said = {owner: table.of(owner) for owner in coded}
    usual = _described(config.vq_scheme, config.seed) + table.unused()
    found = {}
    for part in parts:
        owner, attribute = owners[part.name], _attribute(part.name)
        is_codes = attribute == "weight" and not part.dtype.startswith(("F", "BF"))
        if owner in coded and (is_codes or attribute.startswith("vq_")):
            found[part.name] = said[owner] or usual
        elif is_codes:
            found[part.name] = f"embeddings {config.embeddings}"
    return found


def _attribute(name: str) -> str:
    return name.rpartition(".")[2]


def _described(scheme: LinearScheme, seed: int) -> str:
    """A scheme's spec; a seed says which rotation a QR rotation is."""
    drawn = not isinstance(scheme, QoQScheme) and scheme.rotation == "qr"
    return f"scheme {scheme.spec()}" + (f" with seed {seed}" if drawn else "")


class _Table:
    """A config's entries for single layers: other schemes, and layouts of other projects."""

    def __init__(self, config: VQConfig) -> None:
        schemes = {n: _described(config.stored_scheme(n), config.seed) for n in config.layers or {}}
        layouts = {n: f"layout {one.spec()}" for n, one in config.published_layouts.items()}
        self.entries = {**schemes, **layouts}
        self._ends: dict[str, list[str]] = defaultdict(list)
        for name in self.entries:
            for end in _ends(name):
                self._ends[end].append(name)
        self._used: set[str] = set()

    def of(self, owner: str) -> str:
        """The entries for one layer of the file, joined; empty if there are none."""
        names = set(self._ends.get(owner, ()))
        names |= {end for end in _ends(owner) if end in self.entries}
        if owner in self.entries:
            names = {owner}
        self._used |= names
        return ", ".join(sorted({self.entries[name] for name in names}))

    def unused(self) -> str:
        """The entries that no call of `of` used, joined."""
        rest = sorted(set(self.entries) - self._used)
        return "".join(f"; {name}: {self.entries[name]}" for name in rest)


def _ends(name: str) -> list[str]:
    """A name, and what is left of it without the first parts: a.b.c, b.c, c."""
    parts = name.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def record(
    folder: Path, variant: str | None = None, provenance: Mapping[str, Any] | None = None
) -> None:
    """Write the digests of a model that was just saved: of its tensors into its files of weights,
    and that of all digests into its config.json. Write what the provenance has for each layer.

    Args:
        provenance: of the model, whole; None leaves that file alone.
        variant: `save_pretrained`'s. Files of several share a config.json, which then says nothing.
    """
    files = checkpoints(folder).get(variant or "", [])
    path = folder / CONFIG_NAME
    if not files or not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    quantization = config["quantization_config"]
    root = digests.record(files, partial(meanings, VQConfig.from_dict(quantization)))
    stored = dict(quantization.get("provenance") or {})
    stored.pop(RECORD, None)
    if not variant:
        stored[RECORD] = root
    if provenance is not None:
        stored[by_layer.DIGEST] = by_layer.write(folder, provenance)
    quantization["provenance"] = stored
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_WEIGHTS = re.compile(r"model(?:\.(?P<variant>.+?))?(?:-\d{5}-of-\d{5})?\.safetensors")


def checkpoints(folder: Path) -> dict[str, list[Path]]:
    """The files of weights in a folder by variant; the usual one is ""."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        if match := _WEIGHTS.fullmatch(path.name):
            found[match["variant"] or ""].append(path)
    return found


def is_variant(file: str | Path) -> bool:
    """True for the weight files of a variant, which config.json does not describe."""
    match = _WEIGHTS.fullmatch(Path(file).name)
    return match is not None and match["variant"] is not None


def check(config: VQConfig, files: Iterable[str | Path], **options: Any) -> digests.Check:
    """The comparison of a checkpoint's files with their digests.

    Args:
        config: of its config.json.
        options: more arguments of `Check`.

    Raises:
        VQFormatError: a header cannot be read.
    """
    return digests.Check(files, partial(meanings, config), **options)


def take_record(config: VQConfig) -> str | None:
    """Take the digest of all digests out of a config: it is of the files that are being loaded,
    and not of those that a later save writes."""
    provenance: Mapping[str, Any] = config.provenance or {}
    found = provenance.get(RECORD)
    if found is not None:
        config.provenance = {key: value for key, value in provenance.items() if key != RECORD}
    return found if isinstance(found, str) else None
