"""Format of tables that compare measured figures with a limit of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from .ranges import percents, span

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """One line of a table.

    Args:
        what: was measured.
        measured: by the records; one number for each size, shown as a range.
        limit: the same numbers if nothing took time but what cannot be left out.
        unit: of the numbers.
    """

    what: str
    measured: tuple[float, ...]
    limit: tuple[float, ...]
    unit: str = "x"


def limits_table(figures: Iterable[Figure]) -> str:
    """A line for every figure that was measured and whose limit is known."""
    cells = [
        [one.what, _numbers(one.measured, one.unit), _numbers(one.limit, one.unit)]
        for one in figures
        if one.measured and one.limit
    ]
    return markdown_table(["what", "measured", "limit"], cells)


def pick(rows: Rows, **wanted: Any) -> list[dict[str, Any]]:
    """The rows that have all of these."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _numbers(found: Sequence[float], unit: str) -> str:
    if unit == "%":
        return percents(found)
    return f"{span(found, lambda x: f'{x:.3g}' if x < 1000 else f'{x:.0f}')} {unit}"
