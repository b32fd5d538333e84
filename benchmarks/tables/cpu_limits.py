"""CPU kernels against their roofline.

The lower bound of a kernel is the longer of two times of one thread, measured in the same run:
reading its codes, and computing on codes in cache. The bound of an append is a copy of the key. The
scaling of two threads is bounded by the scaling of arithmetic in cache, and by the bandwidth of two
threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .cpu import busy
from .limits import Figure, Rows, limits_table, pick

SUITES = ("cpu-attention", "cpu-attention-avx2", "cpu-linear")
CACHES = ("u4", "nomad-u4")  # of 4 bits, both
GROUPS = (1, 4)  # query heads
THREADS = 2


def table(records: Mapping[str, dict[str, Any]]) -> str:
    """The table, from the records `SUITES`."""
    rows = {name: record["results"]["rows"] for name, record in records.items()}
    figures = [
        *_scores(rows["cpu-attention"]), *_steps(rows["cpu-attention"]),
        *_appends(rows["cpu-attention"]), *_avx2(rows["cpu-attention-avx2"]),
        *_linear(rows["cpu-linear"]),
    ]  # fmt: skip
    return limits_table(figures)


def _scores(rows: Rows) -> Iterator[Figure]:
    for name in CACHES:
        (row,) = pick(rows, what="scores", name=name)
        best = min(("torch K q", "torch q K^T"), key=row["speedup"].__getitem__)
        ratio = row["speedup"][best]
        what = f"scores at 16k, `{name}`, against torch fp32"
        yield Figure(what, (ratio,), (ratio / busy(row),))


def _steps(rows: Rows) -> Iterator[Figure]:
    for name in CACHES:
        for group in GROUPS:
            found = pick(rows, what="step", name=name, group=group, queries=1, threads=1)
            yield _time(f"whole step, `{name}`, {group} query head{'s' * (group > 1)}", found)
        both = pick(rows, what="step", name=name, queries=1, threads=THREADS)
        arithmetic_scaling = {
            row["group"]: row["scaling"]
            for row in pick(rows, what="step", name="arithmetic", queries=1, threads=THREADS)
        }
        yield Figure(
            f"whole step, `{name}`, {THREADS} threads against 1",
            tuple(row["scaling"] for row in both),
            tuple(
                _scaling_limit(row["scaling"], row, arithmetic_scaling.get(row["group"], THREADS))
                for row in both if "of_bandwidth" in row
            ),
        )  # fmt: skip


def _appends(rows: Rows) -> Iterator[Figure]:
    copied = pick(rows, what="append keys", name="dense fp32")
    for name, codes in (
        ("nomad-u4", "d_sub 1, one codebook"), ("u4", "256 entries"),
    ):  # fmt: skip
        yield Figure(
            f"appending a key vector, `{name}` ({codes})",
            tuple(row["us"] for row in pick(rows, what="append keys", name=name)),
            tuple(row["us"] for row in copied), unit="us",
        )  # fmt: skip


def _avx2(rows: Rows) -> Iterator[Figure]:
    for group in GROUPS:
        found = pick(rows, what="step", name="nomad-u4", group=group, queries=1, threads=1)
        yield _time(f"AVX2: whole step, `nomad-u4`, {group} query head{'s' * (group > 1)}", found)


def _linear(rows: Rows) -> Iterator[Figure]:
    one, two, *arithmetic = (
        pick(rows, name=name, threads=count)
        for name in ("vq-4", "arithmetic") for count in (1, THREADS)
    )  # fmt: skip
    scaling, arithmetic_scaling = _scaling(one, two), _scaling(*arithmetic) or (THREADS,) * len(two)
    yield Figure(
        f"1 token, `vq-4`, all sizes, {THREADS} threads against 1", scaling,
        tuple(
            _scaling_limit(found, row, most)
            for found, row, most in zip(scaling, two, arithmetic_scaling, strict=False)
            if "of_bandwidth" in row
        ),
    )  # fmt: skip


def _scaling(one: Rows, two: Rows) -> tuple[float, ...]:
    return tuple(a["us"] / b["us"] for a, b in zip(one, two, strict=False))


def _scaling_limit(scaling: float, together: dict[str, Any], most: float) -> float:
    """Upper bound of `scaling`: read bandwidth of both threads, or `most`, that of arithmetic."""
    return min(most, scaling / together["of_bandwidth"])


def _time(what: str, rows: Rows) -> Figure:
    """Microseconds, and those of reading the codes or of computing on them."""
    known = [row for row in rows if busy(row)]
    measured = tuple(row["us"] for row in known)
    return Figure(what, measured, tuple(row["us"] * busy(row) for row in known), unit="us")
