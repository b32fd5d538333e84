"""What was asked for, beside what the records hold: the form of such tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Bar:
    """One promise.

    Args:
        what: is measured.
        least: number that every one of `measured` must reach.
        measured: by the records.
        ceiling: the same numbers if nothing took time but reading the codes.
        most: whether `least` is a limit from above instead.
        unit: of the numbers.
        binds: what keeps a number from its bar, where one is not met.
    """

    what: str
    least: float
    measured: tuple[float, ...]
    ceiling: tuple[float, ...] = ()
    most: bool = False
    unit: str = "x"
    binds: str = ""

    @property
    def met(self) -> bool:
        """Whether every number keeps the bar."""
        return all(x <= self.least if self.most else x >= self.least for x in self.measured)


def bars_table(bars: Iterable[Bar], last: str) -> str:
    """A line for every bar that something was measured for.

    Args:
        last: head of the column of ceilings, under which assumption they hold; or of what binds.
    """
    cells = [
        [
            bar.what, f"{'at most' if bar.most else 'at least'} {_numbers((bar.least,), bar.unit)}",
            _numbers(bar.measured, bar.unit), "yes" if bar.met else "no",
            _numbers(bar.ceiling, bar.unit) if bar.ceiling else _binding(bar),
        ]
        for bar in bars if bar.measured
    ]  # fmt: skip
    return markdown_table(["what", "bar", "measured", "met", last], cells)


def pick(rows: Rows, **wanted: Any) -> list[dict[str, Any]]:
    """The rows that have all of these."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _binding(bar: Bar) -> str:
    return "-" if bar.met or not bar.binds else bar.binds


def _numbers(found: Sequence[float], unit: str) -> str:
    if unit == "%":
        return " / ".join(f"{100 * x:.0f} %" for x in found)
    written = " / ".join(f"{x:.3g}" for x in found)
    return f"{written} {unit}".strip()
