"""The committed records of the suites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def read_record(suite: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The committed record of a suite, None if there is none."""
    path = folder / f"{suite}.json"
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record
