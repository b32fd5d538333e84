"""Committed records of the suites: JSON Lines in `results`, one folder per kind of suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_vq.evaluation.record import read

RESULTS = Path(__file__).with_name("results")
_FOLDERS = (
    "cpu",
    "cuda",
    "quality",
)  # by the first word of a suite; "serve" and "serve-vllm" are in "serving"


def path_of(suite: str) -> Path:
    """Path of the record of a suite of `python -m benchmarks`."""
    first = suite.partition("-")[0]
    return RESULTS / (first if first in _FOLDERS else "serving") / f"{suite}.jsonl"


def read_record(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The committed record of a name, that of its suite unless it is a second one of that suite;
    None if there is none."""
    path = next(folder.glob(f"*/{name}.jsonl"), None)
    return None if path is None else read(path)


def read_records(suite: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The committed records of a suite that writes one for each subject, by name of the file."""
    return [read(path) for path in sorted(folder.glob(f"*/{suite}-*.jsonl"))]
