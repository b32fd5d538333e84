"""Several numbers in one cell: the least and the greatest."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def span(values: Iterable[float], show: Callable[[float], str]) -> str:
    """`2.48-2.91`: the least and the greatest of `values`; one number where both look alike."""
    found = sorted(values)
    if not found:
        return "-"
    least, greatest = show(found[0]), show(found[-1])
    return least if least == greatest else f"{least}-{greatest}"


def ratios(values: Iterable[float]) -> str:
    """The range of `values` with two decimals."""
    return span(values, "{:.2f}".format)


def percents(values: Iterable[float]) -> str:
    """The range of `values`, which are fractions, in percent."""
    found = span((100 * value for value in values), "{:.0f}".format)
    return found if found == "-" else f"{found}%"
