"""What the CPU kernels reach, beside what the machine allows.

A ratio against a peer cannot exceed the peer's time over the time that one thread needs to read our
codes, or to compute on codes that are in a cache, whichever is longer, all of one run. No key is
appended faster than it is copied. Two threads are at most as much faster than one as they are at
arithmetic in a cache, and no faster than two threads read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .limits import Figure, Rows, limits_table, pick

SUITES = ("cpu-attention", "cpu-attention-avx2", "cpu-linear", "cpu-generate")
CACHES = ("u4", "nomad-u4")  # of 4 bits, both
GROUPS = (1, 4)  # query heads
THREADS = 2


def table(records: Mapping[str, dict[str, Any]]) -> str:
    """The table, from the records `SUITES`."""
    rows = {name: record["results"]["rows"] for name, record in records.items()}
    figures = [
        *_scores(rows["cpu-attention"]), *_steps(rows["cpu-attention"]),
        *_appends(rows["cpu-attention"]), *_avx2(rows["cpu-attention-avx2"]),
        *_linear(rows["cpu-linear"]), *_generate(records["cpu-generate"]["results"]),
    ]  # fmt: skip
    return limits_table(figures)


def _scores(rows: Rows) -> Iterator[Figure]:
    for name in CACHES:
        (row,) = pick(rows, what="scores", name=name)
        best = min(("torch K q", "torch q K^T"), key=row["speedup"].__getitem__)
        for what, peer in (
            (f"scores at 16k, `{name}`, against torch fp32 (`{best}`)", best),
            ("the same, against our own bf16 dot products", "dense bf16"),
        ):
            yield Figure(what, (row["speedup"][peer],), _limits([row], peer))
        share = row["of_bandwidth"]
        yield Figure("the same, of the read bandwidth", (share,), (share / _busy(row),), unit="%")


def _steps(rows: Rows) -> Iterator[Figure]:
    for name in CACHES:
        what = f"whole step, `{name}`, {' and '.join(map(str, GROUPS))} query heads"
        found = [
            row
            for group in GROUPS
            for row in pick(rows, what="step", name=name, group=group, queries=1, threads=1)
        ]
        for peer in ("torch bmm fp32", "torch SDPA fp32", "onnxruntime int8"):
            known = [row for row in found if peer in row["speedup"]]
            measured = tuple(row["speedup"][peer] for row in known)
            yield Figure(f"{what}, against {peer}", measured, _limits(known, peer))
        both = pick(rows, what="step", name=name, queries=1, threads=THREADS)
        alone = {
            row["group"]: row["scaling"]
            for row in pick(rows, what="step", name="arithmetic", queries=1, threads=THREADS)
        }
        yield Figure(
            f"{what}, {THREADS} threads against 1",
            tuple(row["scaling"] for row in both),
            tuple(
                _scaling_limit(row["scaling"], row, alone.get(row["group"], THREADS))
                for row in both if "of_bandwidth" in row
            ),
        )  # fmt: skip


def _appends(rows: Rows) -> Iterator[Figure]:
    copied = pick(rows, what="append keys", name="dense fp32")
    for name, codes in (
        ("nomad-4", "d_sub 1"), ("nomad-u4", "d_sub 1, one codebook"), ("u4", "256 entries"),
    ):  # fmt: skip
        yield Figure(
            f"appending a key vector, `{name}` ({codes})",
            tuple(row["us"] for row in pick(rows, what="append keys", name=name)),
            tuple(row["us"] for row in copied), unit="us",
        )  # fmt: skip


def _avx2(rows: Rows) -> Iterator[Figure]:
    peer = "torch bmm fp32"
    (step,) = pick(rows, what="step", name="nomad-u4", group=1, queries=1, threads=1)
    yield Figure(
        f"AVX2 alone: whole step, `nomad-u4`, against {peer}",
        (step["speedup"][peer],), _limits([step], peer),
    )  # fmt: skip


def _linear(rows: Rows) -> Iterator[Figure]:
    single = pick(rows, threads=1)
    for name, peer, label in (
        ("vq-4", "int4", "torch int4"), ("turboquant-4", "int4", "torch int4"),
        ("vq-4", "q4_K", "llama.cpp Q4_K"), ("turboquant-4", "q4_K", "llama.cpp Q4_K"),
        ("vq-2", "int4", "torch int4"), ("aqlm-2", "int4", "torch int4"),
        ("aqlm-3", "bf16", "torch bf16"), ("quip-sharp-2", "bf16", "torch bf16"),
    ):  # fmt: skip
        found = [row for row in pick(single, name=name) if peer in row["speedup"]]
        yield Figure(
            f"one token, `{name}`, {_shapes(found)}, against {label}",
            tuple(row["speedup"][peer] for row in found),
            _limits([row for row in found if "us_cached" in row], peer),
        )  # fmt: skip
    package = pick(single, name="aqlm")
    ours = pick(single, name="aqlm-2")
    yield Figure(
        f"one token, `aqlm-2`, {_shapes(package)}, against the package aqlm on the CPU",
        tuple(row["times_ours"] for row in package),
        tuple(
            theirs["us"] / (row["us"] * _busy(row))
            for row, theirs in zip(ours, package, strict=False) if "us_cached" in row
        ),
    )  # fmt: skip
    one, two, *arithmetic = (
        pick(rows, name=name, threads=count)
        for name in ("vq-4", "arithmetic") for count in (1, THREADS)
    )  # fmt: skip
    scaling, alone = _scaling(one, two), _scaling(*arithmetic) or (THREADS,) * len(two)
    yield Figure(
        f"one token, `vq-4`, {_shapes(one)}, {THREADS} threads against 1", scaling,
        tuple(
            _scaling_limit(found, row, most)
            for found, row, most in zip(scaling, two, alone, strict=False) if "of_bandwidth" in row
        ),
    )  # fmt: skip


def _scaling(one: Rows, two: Rows) -> tuple[float, ...]:
    return tuple(a["us"] / b["us"] for a, b in zip(one, two, strict=False))


def _scaling_limit(scaling: float, together: dict[str, Any], most: float) -> float:
    """Of `scaling`, if the threads did nothing but read, or gained what arithmetic does: `most`."""
    return min(most, scaling / together["of_bandwidth"])


def _limits(rows: Rows, peer: str) -> tuple[float, ...]:
    return tuple(row["speedup"][peer] / busy for row in rows if (busy := _busy(row)))


def _busy(row: dict[str, Any]) -> float:
    """The share of its time that a kernel needs to read its codes, or to compute on them; 0 where
    neither is known."""
    return max(row.get("of_bandwidth", 0.0), row.get("us_cached", 0.0) / row["us"])


def _shapes(rows: Rows) -> str:
    return ", ".join(f"{row['out_features']} x {row['in_features']}" for row in rows)


def _generate(results: dict[str, Any]) -> Iterator[Figure]:
    rows, bandwidth = results["rows"], results.get("gb_per_second")
    for heads, context in dict.fromkeys((row["kv_heads"], row["context"]) for row in rows):
        here = pick(rows, kv_heads=heads, context=context)
        llama = [row for row in here if row["name"].startswith("llama.cpp")]
        exact = [row for row in llama if context or "Q4_K_M" in row["name"]]
        dense = [row for row in here if row["name"].startswith("bf16")]
        for ours in (row for row in here if "+" in row["name"]):
            bytes_read = ours.get("bytes")
            floor = bytes_read / bandwidth / 1e6 if bytes_read and bandwidth else None
            what = f"a generated token, {heads} kv heads, context {context:,}, `{ours['name']}`"
            for peers, label in (
                (exact, "llama.cpp's best setting" if context else "llama.cpp Q4_K_M"),
                (dense if context else [], "Transformers' best bf16"),
            ):
                if peers:
                    best = min(row["ms"] for row in peers)
                    limit = (best / floor,) if floor else ()
                    yield Figure(f"{what}, against {label}", (best / ours["ms"],), limit)
