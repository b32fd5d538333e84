"""What the CPU kernels were asked for, what the records hold, and what memory would allow.

A ratio against a peer cannot exceed the peer's time over the time that one thread needs to read our
codes or, for linear layers, to compute on codes that are in a cache, whichever is longer, all of
one run: the last column of the table. Two threads are at most twice as fast as one, and no faster
than two threads read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .bars import Bar, Rows, bars_table, pick

SUITES = ("cpu-attention", "cpu-attention-avx2", "cpu-linear", "cpu-generate")
STEP_CEILING = 2.0  # a step reads keys and values, scores keys alone
THREADS = 2


def table(records: Mapping[str, dict[str, Any]]) -> str:
    """The table, from the records `SUITES`."""
    rows = {name: record["results"]["rows"] for name, record in records.items()}
    bars = [
        *_attention(rows["cpu-attention"]), *_avx2(rows["cpu-attention-avx2"]),
        *_linear(rows["cpu-linear"]), *_generate(records["cpu-generate"]["results"]),
    ]  # fmt: skip
    return bars_table(bars, "ceiling")


def _attention(rows: Rows) -> Iterator[Bar]:
    (scores,) = pick(rows, what="scores", name="u4")
    (read,) = pick(rows, what="scores", name="read")
    faster = scores["speedup"]
    share = scores["of_bandwidth"]
    best = min(("torch K q", "torch q K^T"), key=faster.__getitem__)
    for what, peer, least in (
        (f"scores at 16k, `u4`, against torch fp32 (`{best}`)", best, 10),
        ("the same, against our own bf16 dot products", "dense bf16", 4.5),
    ):
        yield Bar(what, least, (faster[peer],), (faster[peer] / share,))
    yield Bar("the same, of the read bandwidth", 0.85, (share,), (1.0,), unit="%")
    groups = (1, 4)
    steps = {
        (group, row["name"]): row
        for group in groups
        for row in pick(rows, what="step", group=group, queries=1, threads=1)
    }
    least_us = STEP_CEILING * read["us"]
    for peer, least in (
        ("torch bmm fp32", 10), ("torch SDPA fp32", 25), ("onnxruntime int8", 3),
    ):  # fmt: skip
        known = [group for group in groups if (group, peer) in steps]
        yield Bar(
            f"whole step, `u4`, 1 and 4 query heads, against {peer}",
            least,
            tuple(steps[group, "u4"]["speedup"][peer] for group in known),
            tuple(steps[group, peer]["us"] / least_us for group in known),
        )
    for name, codes, least in (("nomad-4", "d_sub 1", 0.1), ("u4", "256 entries", 1.0)):
        yield Bar(
            f"appending a key vector, `{name}` ({codes})", least,
            tuple(row["us"] for row in pick(rows, what="append keys", name=name)),
            most=True, unit="us",
        )  # fmt: skip
    both = pick(rows, what="step", name="u4", queries=1, threads=THREADS)
    yield Bar(
        f"whole step, `u4`, 1 and 4 query heads, {THREADS} threads against 1", 1.7,
        tuple(row["scaling"] for row in both),
        tuple(_scaling_ceiling(row["scaling"], row) for row in both if "of_bandwidth" in row),
    )  # fmt: skip


def _avx2(rows: Rows) -> Iterator[Bar]:
    (step,) = pick(rows, what="step", name="nomad-u4", group=1, queries=1, threads=1)
    (read,) = pick(rows, what="scores", name="read")
    (peer,) = pick(rows, what="step", name="torch bmm fp32", group=1, queries=1, threads=1)
    yield Bar(
        "AVX2 alone: whole step, `nomad-u4`, against torch bmm fp32", 7,
        (step["speedup"]["torch bmm fp32"],), (peer["us"] / (STEP_CEILING * read["us"]),),
    )  # fmt: skip


def _linear(rows: Rows) -> Iterator[Bar]:
    single = pick(rows, threads=1)
    for name, peer, label, least in (
        ("vq-4", "int4", "torch int4", 2.0), ("turboquant-4", "int4", "torch int4", 2.5),
        ("vq-2", "int4", "torch int4", 3), ("aqlm-2", "int4", "torch int4", 3),
        ("aqlm-3", "bf16", "torch bf16", 2), ("quip-sharp-2", "bf16", "torch bf16", 2),
    ):  # fmt: skip
        found = pick(single, name=name)
        yield Bar(
            f"one token, `{name}`, {_shapes(found)}, against {label}", least,
            tuple(row["speedup"][peer] for row in found),
            tuple(row["speedup"][peer] / _busy(row) for row in found if "us_cached" in row),
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
    both = [pick(rows, name="vq-4", threads=count) for count in (1, THREADS)]
    scaling = tuple(one["us"] / two["us"] for one, two in zip(*both, strict=False))
    yield Bar(
        f"one token, `vq-4`, {_shapes(both[0])}, {THREADS} threads against 1", 1.7, scaling,
        tuple(
            _scaling_ceiling(found, two)
            for found, two in zip(scaling, both[1], strict=False) if "of_bandwidth" in two
        ),
    )  # fmt: skip


def _scaling_ceiling(scaling: float, together: dict[str, Any]) -> float:
    """Of `scaling`, if the threads did nothing but read, or shared all the work of one."""
    return min(float(THREADS), scaling / together["of_bandwidth"])


def _busy(row: dict[str, Any]) -> float:
    """The share of its time that a kernel needs to read its codes, or to compute on them."""
    return max(row["of_bandwidth"], row["us_cached"] / row["us"])


def _shapes(rows: Rows) -> str:
    return ", ".join(f"{row['out_features']} x {row['in_features']}" for row in rows)


def _generate(results: dict[str, Any]) -> Iterator[Bar]:
    rows, bandwidth = results["rows"], results.get("gb_per_second")
    for heads, context in dict.fromkeys((row["kv_heads"], row["context"]) for row in rows):
        here = pick(rows, kv_heads=heads, context=context)
        (ours,) = (row for row in here if "+" in row["name"])
        bytes_read = ours.get("bytes")
        floor = bytes_read / bandwidth / 1e6 if bytes_read and bandwidth else None
        llama = [row for row in here if row["name"].startswith("llama.cpp")]
        exact = [row for row in llama if context or "Q4_K_M" in row["name"]]
        dense = [row for row in here if row["name"].startswith("bf16")]
        setting = f"{heads} kv heads, context {context:,}"
        for peers, label, least in (
            (exact, "llama.cpp's best setting" if context else "llama.cpp Q4_K_M",
             3 if context else 1),
            (dense if context else [], "Transformers' best bf16", 20),
        ):  # fmt: skip
            if peers:
                best = min(row["ms"] for row in peers)
                yield Bar(
                    f"a generated token, {setting}, against {label}", least,
                    (best / ours["ms"],), (best / floor,) if floor else (),
                )  # fmt: skip
