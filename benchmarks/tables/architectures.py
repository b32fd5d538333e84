"""The table of `scripts/check_architectures`: which classes of Transformers work."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from ..records import read_record
from .provenance import source


def table() -> str:
    """Classes by the Auto class that makes them, and those that do not work."""
    record = read_record("architectures")
    if record is None:
        return "Not measured yet: `scripts/check_architectures --out RECORD`."
    rows: list[dict[str, Any]] = record["results"]["rows"]
    groups = {auto: [r for r in rows if auto in r["auto"]] for r in rows for auto in r["auto"]}
    shown = {f"`{auto}`": some for auto, some in groups.items()} | {"all": rows}
    head = ["made by", "classes", "built", "run", "stored", "no linear layer", "fail"]
    lines = [[name, *map(str, _counts(some))] for name, some in shown.items()]
    failed = [r for r in rows if r["outcome"].startswith("failed")]
    bad = "; ".join(f"`{r['class']}` ({r['outcome']}: {r['why'].split(':')[0]})" for r in failed)
    notes = [f"Those that fail: {bad}." if bad else "None fails.", source(record)]
    return f"{markdown_table(head, lines)}\n\n{' '.join(notes)}"


def _counts(rows: list[dict[str, Any]]) -> list[int]:
    """Classes, those that were built, and the outcomes of these."""
    found = Counter(row["outcome"].partition(":")[0] for row in rows)
    built = len(rows) - found["not built"]
    outcomes = (found[key] for key in ("run", "stored", "no linear layer", "failed"))
    return [len(rows), built, *outcomes]
