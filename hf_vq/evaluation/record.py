"""The record of a run: its settings, machine, versions and results.

A record names the processor and the versions, never the host, the user or a path. It is one JSON
object, or, in a file that is named `.jsonl`, JSON Lines:

    {"format": .., "suite": .., "command": .., .., "results": {..}, "rows": 3}    all but the rows
    {..}                                                                          one row a line

`rows` is the number of rows; it is missing if the results have none. While a suite runs, its rows
are saved in the same folder (`Recorder`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

FORMAT = 2  # 1 did not say `complete`: all were
UNFINISHED = ".unfinished"  # after the name of a record: the rows of a run that has not ended


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor and cores that may be used, and the GPU if `device` is one that is there."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": _usable_cores(),
        "threads": torch.get_num_threads(),
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def versions() -> dict[str, str]:
    """Versions of what computes."""
    from importlib.metadata import version

    from .. import __version__

    found = {"python": platform.python_version(), "hf-vq": __version__}
    return {**found, "torch": torch.__version__, "transformers": version("transformers")}


def today() -> str:
    """The date, in UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def command_line(
    start: str, parser: argparse.ArgumentParser, args: argparse.Namespace, names: dict[str, str]
) -> str:
    """The command that repeats a run: `start` and the options that differ from their defaults.

    Args:
        start: program, verb and positional arguments.
        parser: has the defaults.
        args: what it parsed.
        names: options by their name in `args`, with what stands for a value that can be a path of
            this machine (as MODEL_DIR), "" to show the value itself.
    """
    parts = [start]
    for name, shown in names.items():
        value = getattr(args, name)
        if value in (parser.get_default(name), None, False):
            continue
        parts.append("--" + name.replace("_", "-"))
        if value is not True:
            values = value if isinstance(value, list) else [value]
            parts.append(shown or " ".join(map(str, values)))
    return " ".join(parts)


def make_record(
    suite: str,
    command: str,
    settings: dict[str, Any],
    results: Any,
    revision: str | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """The record of one run.

    Args:
        suite: its name.
        command: as `command_line` gives it, without paths of this machine.
        settings: what was measured.
        results: what came out, unrounded.
        revision: of the source; None asks git.
        device: that computed.
    """
    return {
        "format": FORMAT,
        "suite": suite,
        "complete": True,
        "command": command,
        "date": today(),
        "revision": revision or _revision(),
        "machine": machine(device),
        "versions": versions(),
        "settings": settings,
        "results": results,
    }


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record, whole or not at all: as JSON, or as JSON Lines where the path ends so."""
    temporary = path.with_name(path.name + ".partial")
    lines = path.name.removesuffix(UNFINISHED).endswith(".jsonl")
    text = _lines(record) if lines else json.dumps(record, indent=1, allow_nan=False) + "\n"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> dict[str, Any]:
    """The record in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no record, or rows are missing.
    """
    text = path.read_text(encoding="utf-8")
    if not path.name.removesuffix(UNFINISHED).endswith(".jsonl"):
        whole: dict[str, Any] = json.loads(text)
        return whole
    head, *rows = map(json.loads, text.splitlines())
    count = head.pop("rows", None)
    if len(rows) != (count or 0):
        raise ValueError(f"{path.name} has {len(rows)} rows and should have {count}.")
    if count is not None:
        head["results"]["rows"] = rows
    return dict(head)


def _lines(record: dict[str, Any]) -> str:
    """A record as JSON Lines: all but the rows, then a line for each row."""
    if "results" not in record:  # what a verb of hf-vq found is no record of a suite
        return json.dumps(record, allow_nan=False) + "\n"
    results = dict(record["results"])
    rows = results.pop("rows", None)
    count = {} if rows is None else {"rows": len(rows)}
    lines = [{**record, "results": results, **count}, *(rows or ())]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


class Recorder:
    """Keeps the rows of a run on disk, however it ends.

    After every row, PATH.unfinished is a record with the rows so far, which says that it is not
    complete. The record at PATH is replaced when the run has ended, and only by
    a complete one, so that the tables are always those of whole runs.

    Args:
        path: of the record.
        suite, command, revision, device: see `make_record`.
        settings: settings that are known before the run.
    """

    def __init__(
        self,
        path: Path,
        suite: str,
        command: str,
        revision: str | None = None,
        device: str = "cpu",
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.unfinished = unfinished(path)
        self.record = make_record(suite, command, settings or {}, {"rows": []}, revision, device)
        self.record["complete"] = False

    def kept(self) -> list[dict[str, Any]]:
        """Rows of a run that was stopped, if it had the same settings, versions and revision."""
        try:
            found = read(self.unfinished)
        except (OSError, ValueError):
            return []
        same = ("suite", "settings", "versions", "revision")
        return found["results"]["rows"] if all(found.get(k) == self.record[k] for k in same) else []

    def take_up(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """The same, for settings that were not known before."""
        self.record["settings"] = settings
        return self.kept()

    def add(self, row: dict[str, Any]) -> None:
        """Keep one more row, which does not change any more."""
        self.record["results"]["rows"].append(row)
        write_record(self.record, self.unfinished)

    def finish(self, settings: dict[str, Any], results: Any) -> dict[str, Any]:
        """Write the complete record, and return it."""
        record = {**self.record, "complete": True, "settings": settings, "results": results}
        write_record(record, self.path)
        self.unfinished.unlink(missing_ok=True)
        return record


def unfinished(path: Path) -> Path:
    """Path of the file for the rows of a run until its record is complete."""
    return path.with_name(path.name + UNFINISHED)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    """The commit of the checkout this package runs from, None outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    call = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
