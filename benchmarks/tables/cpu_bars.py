"""What the CPU kernels were asked for, what the records hold, and what the machine would allow.

A ratio against a peer cannot exceed the peer's time over the time that one thread needs to read our
codes, or to compute on codes that are in a cache, whichever is longer, all of one run: the last
column of the table. No key is appended faster than it is copied. Two threads are at most as much
faster than one as they are at arithmetic in a cache, and no faster than two threads read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..bars import Bar, Rows, bars_table, pick

SUITES = ("cpu-attention", "cpu-attention-avx2", "cpu-linear", "cpu-generate")
CACHES = ("u4", "nomad-u4")  # of 4 bits, both
GROUPS = (1, 4)  # query heads
THREADS = 2


def table(records: Mapping[str, dict[str, Any]]) -> str:
    """The table, from the records `SUITES`."""
    rows = {name: record["results"]["rows"] for name, record in records.items()}
    bars = [
        *_scores(rows["cpu-attention"]), *_steps(rows["cpu-attention"]),
        *_appends(rows["cpu-attention"]), *_avx2(rows["cpu-attention-avx2"]),
        *_linear(rows["cpu-linear"]), *_generate(records["cpu-generate"]["results"]),
    ]  # fmt: skip
    return bars_table(bars, "ceiling")


def _scores(rows: Rows) -> Iterator[Bar]:
    for name in CACHES:
        (row,) = pick(rows, what="scores", name=name)
        best = min(("torch K q", "torch q K^T"), key=row["speedup"].__getitem__)
        for what, peer, least in (
            (f"scores at 16k, `{name}`, against torch fp32 (`{best}`)", best, 10),
            ("the same, against our own bf16 dot products", "dense bf16", 4.5),
        ):
            yield Bar(what, least, (row["speedup"][peer],), _ceilings([row], peer))
        share = row["of_bandwidth"]
        yield Bar(
            "the same, of the read bandwidth", 0.85, (share,), (share / _busy(row),), unit="%"
        )


def _steps(rows: Rows) -> Iterator[Bar]:
    for name in CACHES:
        what = f"whole step, `{name}`, {' and '.join(map(str, GROUPS))} query heads"
        found = [
            row
            for group in GROUPS
            for row in pick(rows, what="step", name=name, group=group, queries=1, threads=1)
        ]
        for peer, least in (
            ("torch bmm fp32", 10), ("torch SDPA fp32", 25), ("onnxruntime int8", 3),
        ):  # fmt: skip
            known = [row for row in found if peer in row["speedup"]]
            measured = tuple(row["speedup"][peer] for row in known)
            yield Bar(f"{what}, against {peer}", least, measured, _ceilings(known, peer))
        both = pick(rows, what="step", name=name, queries=1, threads=THREADS)
        alone = {
            row["group"]: row["scaling"]
            for row in pick(rows, what="step", name="arithmetic", queries=1, threads=THREADS)
        }
        yield Bar(
            f"{what}, {THREADS} threads against 1", 1.7,
            tuple(row["scaling"] for row in both),
            tuple(
                _scaling_ceiling(row["scaling"], row, alone.get(row["group"], THREADS))
                for row in both if "of_bandwidth" in row
            ),
        )  # fmt: skip


def _appends(rows: Rows) -> Iterator[Bar]:
    copied = pick(rows, what="append keys", name="dense fp32")
    for name, codes, least in (
        ("nomad-4", "d_sub 1", 0.1), ("nomad-u4", "d_sub 1, one codebook", 0.1),
        ("u4", "256 entries", 1.0),
    ):  # fmt: skip
        yield Bar(
            f"appending a key vector, `{name}` ({codes})", least,
            tuple(row["us"] for row in pick(rows, what="append keys", name=name)),
            tuple(row["us"] for row in copied), most=True, unit="us",
        )  # fmt: skip


def _avx2(rows: Rows) -> Iterator[Bar]:
    peer = "torch bmm fp32"
    (step,) = pick(rows, what="step", name="nomad-u4", group=1, queries=1, threads=1)
    yield Bar(
        f"AVX2 alone: whole step, `nomad-u4`, against {peer}", 7,
        (step["speedup"][peer],), _ceilings([step], peer),
    )  # fmt: skip


def _linear(rows: Rows) -> Iterator[Bar]:
    single = pick(rows, threads=1)
    for name, peer, label, least in (
        ("vq-4", "int4", "torch int4", 2.0), ("turboquant-4", "int4", "torch int4", 2.5),
        ("vq-4", "q4_K", "llama.cpp Q4_K", 1.5), ("turboquant-4", "q4_K", "llama.cpp Q4_K", 1.5),
        ("vq-2", "int4", "torch int4", 3), ("aqlm-2", "int4", "torch int4", 3),
        ("aqlm-3", "bf16", "torch bf16", 2), ("quip-sharp-2", "bf16", "torch bf16", 2),
    ):  # fmt: skip
        found = [row for row in pick(single, name=name) if peer in row["speedup"]]
        yield Bar(
            f"one token, `{name}`, {_shapes(found)}, against {label}", least,
            tuple(row["speedup"][peer] for row in found),
            _ceilings([row for row in found if "us_cached" in row], peer),
        )  # fmt: skip
    package = pick(single, name="aqlm")
    ours = pick(single, name="aqlm-2")
    yield Bar(
        f"one token, `aqlm-2`, {_shapes(package)}, against the package aqlm on the CPU", 30,
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
    yield Bar(
        f"one token, `vq-4`, {_shapes(one)}, {THREADS} threads against 1", 1.7, scaling,
        tuple(
            _scaling_ceiling(found, row, most)
            for found, row, most in zip(scaling, two, alone, strict=False) if "of_bandwidth" in row
        ),
    )  # fmt: skip


def _scaling(one: Rows, two: Rows) -> tuple[float, ...]:
    return tuple(a["us"] / b["us"] for a, b in zip(one, two, strict=False))


def _scaling_ceiling(scaling: float, together: dict[str, Any], most: float) -> float:
    """Of `scaling`, if the threads did nothing but read, or gained what arithmetic does: `most`."""
    return min(most, scaling / together["of_bandwidth"])


def _ceilings(rows: Rows, peer: str) -> tuple[float, ...]:
    return tuple(row["speedup"][peer] / busy for row in rows if (busy := _busy(row)))


def _busy(row: dict[str, Any]) -> float:
    """The share of its time that a kernel needs to read its codes, or to compute on them; 0 where
    neither is known."""
    return max(row.get("of_bandwidth", 0.0), row.get("us_cached", 0.0) / row["us"])


def _shapes(rows: Rows) -> str:
    return ", ".join(f"{row['out_features']} x {row['in_features']}" for row in rows)


def _generate(results: dict[str, Any]) -> Iterator[Bar]:
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
            for peers, label, least in (
                (exact, "llama.cpp's best setting" if context else "llama.cpp Q4_K_M",
                 3 if context else 1),
                (dense if context else [], "Transformers' best bf16", 20),
            ):  # fmt: skip
                if peers:
                    best = min(row["ms"] for row in peers)
                    yield Bar(
                        f"{what}, against {label}", least,
                        (best / ours["ms"],), (best / floor,) if floor else (),
                    )  # fmt: skip
