"""CUDA kernels of linear layers against their roofline.

The lower bound of a kernel is the time of its unavoidable work, measured in the same run. One
token: reading the codes. Few tokens: the longest part of its loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from .cuda import count
from .limits import Rows, pick
from .ranges import percents

LINEAR_SUITES = ("cuda-linear", "cuda-parts")
FEW = (1, 16, 32, 64, 128)  # tokens
_NONE = "-"  # not measured


def linear_table(records: Mapping[str, dict[str, Any]]) -> str:
    """The share of the limit that few tokens reach at all sizes, and what the limit is, from the
    records of `LINEAR_SUITES`; of schemes whose kernels were taken apart."""
    linear, parts = (records[name]["results"]["rows"] for name in ("cuda-linear", "cuda-parts"))
    cells = []
    for name in dict.fromkeys(row["name"] for row in linear if "of_reading" in row):
        read = [row["of_reading"] for row in pick(linear, name=name, tokens=1, what="linear")]
        longest = [_longest(parts, name, tokens) for tokens in FEW[1:]]
        if set(longest) != {_NONE}:
            cells.append([f"`{name}`", f"{percents(read)}", *longest])
    return markdown_table(["of the limit", f"{count(1)}, reading", *map(count, FEW[1:])], cells)


def _longest(parts: Rows, name: str, tokens: int) -> str:
    """The longest part of a kernel's loop, alone, as a share of the kernel's time at all sizes."""
    by_size: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in pick(parts, name=name, tokens=tokens):
        if row["what"].startswith("only "):
            by_size.setdefault((row["out_features"], row["in_features"]), []).append(row)
    longest = [max(rows, key=lambda row: float(row["us"])) for rows in by_size.values()]
    if not longest:
        return _NONE
    names = dict.fromkeys(row["what"].removeprefix("only ") for row in longest)
    return f"{percents(min(1.0, row['of whole']) for row in longest)} {', '.join(names)}"
