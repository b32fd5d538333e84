"""Records whose sources have changed since they were measured.

A record names the revision that it was measured at. It may be stale when a file of the package or
of the kernels that its kind of suite runs has been edited since; moving a file changes nothing.
Only a person can tell whether an edit moves a figure, so this is a list to look at and no check.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from hf_vq.evaluation.record import read
from hf_vq.evaluation.text_tables import text_table

from .records import RESULTS

_QUALITY = (
    "hf_vq/formats/", "hf_vq/fit/", "hf_vq/transforms/", "hf_vq/cache/", "hf_vq/calibration/",
)  # fmt: skip
SOURCES: dict[str, tuple[str, ...]] = {
    "cpu": ("kernels/cpu/", "hf_vq/backends/cpu/", "hf_vq/ops/"),
    "cuda": ("kernels/cuda/", "hf_vq/backends/cuda/", "hf_vq/codegen/"),
    "quality": _QUALITY,
    "models": _QUALITY,
    "serving": ("kernels/", "hf_vq/backends/", "hf_vq/cache/", "hf_vq/serving/"),
    "reliability": ("hf_vq/", "kernels/", "scripts/"),
}  # fmt: skip
"""By folder of `results`: how the paths of files begin on which its records depend."""
_IGNORED = re.compile(r"/tests/|\.md$")
_SHOWN = 3  # files of a record


def table(root: Path, folder: Path = RESULTS) -> str:
    """A line for each record that may be stale: the revision, and files that were edited since."""
    lines = []
    for path in sorted(folder.glob("*/*.jsonl")):
        record = read(path)
        found = edited(root, record["revision"], SOURCES[path.parent.name])
        if found is None:
            lines.append([path.stem, record["date"], _revision(record), "-", "revision unknown"])
        elif found:
            more = ", .." if len(found) > _SHOWN else ""
            shown = ", ".join(found[:_SHOWN]) + more
            lines.append([path.stem, record["date"], _revision(record), str(len(found)), shown])
    return text_table(["record", "date", "revision", "files", "edited since"], lines)


def edited(root: Path, revision: str | None, sources: tuple[str, ...]) -> list[str] | None:
    """Files below `sources` that are not what they were at a revision; None if it is unknown.

    Args:
        root: of a git checkout.
        revision: to compare the files on disk with.
        sources: how the paths of files begin.
    """
    if revision is None:
        return None
    command = ["git", "-C", str(root), "diff", "--name-status", "-M", "--diff-filter=MRAD"]
    done = subprocess.run(
        [*command, revision, "--"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        return None
    changes = [line.split("\t") for line in done.stdout.splitlines()]
    return [
        names[-1]
        for status, *names in changes
        if status != "R100" and names[-1].startswith(sources) and not _IGNORED.search(names[-1])
    ]


def _revision(record: dict[str, Any]) -> str:
    return record["revision"] or "-"
