"""Tables for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first one left, the others right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [_aligned(head, widths), "  ".join("-" * width for width in widths)]
    return "\n".join([*lines, *(_aligned(row, widths) for row in rows)])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column left, the others right."""
    rule = "|---|" + "---:|" * (len(head) - 1)
    return "\n".join(["| " + " | ".join(head) + " |", rule, *(_piped(row) for row in rows)])


def significant(value: float | None, digits: int = 3) -> str:
    """A positive number with so many significant digits and no exponent; `-` for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    shown = f"{value:.{digits}g}"
    if "e" not in shown:
        # %g drops trailing zeros: .0300 must not read like .03
        missing = digits - len(shown.lstrip("-0.").replace(".", ""))
        if "." in shown and missing > 0:
            shown += "0" * missing
        return shown
    return f"{value:.0f}" if abs(value) >= 1 else f"{value:.{digits + 4}f}"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first = row[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join([first, *rest]).rstrip()


def _piped(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"
