"""The table of the suite `cuda-peers`, from the rows of its record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .show import markdown_table

_Rows = Sequence[dict[str, Any]]


def peers(rows: _Rows) -> str:
    """Microseconds of peers and of ours, and the latency that is saved, at every shape."""
    rows = [row for row in rows if row["peer"] != "bf16"]
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    found = {
        (row["name"], row["peer"], row["tokens"], row["out_features"], row["in_features"]): row
        for row in rows
    }
    head = ["peer", "weights", "tokens", *(f"{n} x {k}" for n, k in shapes)]
    cells = []
    for name, peer, tokens in dict.fromkeys((r["name"], r["peer"], r["tokens"]) for r in rows):
        line = [peer, f"`{name}`", str(tokens)]
        for shape in shapes:
            key = (name, peer, tokens, *shape)
            row = found[key]
            saved = 1 - 1 / row["speedup"]
            line.append(f"{row['us']:.1f} / {row['ours_us']:.1f}, {saved:.1%}")
        cells.append(line)
    return markdown_table(head, cells)
