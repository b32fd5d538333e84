"""Tables of the suites `quality-passes`, `cuda-passes` and `cuda-offload`, from their records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table, significant

from ..bars import Bar, bars_table, pick

SUITES = ("quality-passes", "cuda-passes", "cuda-offload")
KLD = {"turboquant-4+4": 3e-4, "turboquant-4+2": 3e-3}  # at most, of tinybooks-17m
HIDDEN, PROMPT = 0.80, 2048  # of the copies, from so many tokens on
OF_BUS = 0.90  # that copies reach
NESTED, TIMES_BF16, TIMES_CUDA, FEWEST = "turboquant-4+4", 1.6, 1.5, 16

_Rows = Sequence[dict[str, Any]]


def quality(rows: _Rows) -> str:
    """What two passes lose, and the first one alone."""
    head = ["weights", "bits per weight", "KLD", "99th percentile", "perplexity, %"]
    cells = []
    for row in rows:
        first = row["name"].removeprefix("first pass of ")
        name = f"`{first}`" if first == row["name"] else f"`{first}`, the first pass alone"
        cells.append([
            name, f"{row['bits_per_weight']:.3f}", significant(row["kld"]),
            significant(row["kld_p99"]), f"{row['change']:+.2f}",
        ])  # fmt: skip
    return markdown_table(head, cells)


def kernels(rows: _Rows) -> str:
    """Microseconds of every kernel of two nested passes."""
    head = ["weights", "out x in", "tokens", "bf16, us", "CUDA, us", "times bf16", "Triton, us",
            "cuTile, us", "reading alone, us"]  # fmt: skip
    cells = [
        [
            f"`{row['name']}`", f"{row['out_features']} x {row['in_features']}",
            str(row["tokens"]), f"{row['bf16_us']:.1f}", f"{row['cuda_us']:.1f}",
            f"{row['bf16_us'] / row['cuda_us']:.2f}", f"{row['triton_us']:.1f}",
            *(f"{row[of]:.1f}" if of in row else "" for of in ("cutile_us", "read_us")),
        ]
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells)


def offload(rows: _Rows) -> str:
    """Second passes in the CPU's memory against those on the GPU."""
    head = ["weights", "tokens", "resident, ms", "offloaded, ms", "of it launching, ms",
            "copies alone, ms", "hidden", "equal logits"]  # fmt: skip
    cells = [
        [
            f"`{row['name']}`", f"{row['tokens']:,}", f"{row['resident_ms']:.2f}",
            f"{row['offload_ms']:.2f}", f"{row['offload_host_ms']:.2f}",
            f"{row['copies_ms']:.2f}", f"{max(row['hidden'], 0.0):.0%}",
            "yes" if row["same_logits"] else "no",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells) + "\n\n" + "\n".join(_memory(rows))


def _memory(rows: _Rows) -> Iterator[str]:
    """What is copied, how fast, and what is left on the GPU."""
    for row in {row["name"]: row for row in rows}.values():
        yield (
            f"`{row['name']}`: {row['copied_mb']:,.0f} MB are copied at "
            f"{row['gb_per_second']:.1f} GB/s, one large copy has {row['bus_gb_per_second']:.1f}; "
            f"of {row['copied_mb']:,.0f} MB on the GPU {row['slots_mb']:,.0f} are left, two slots "
            f"of {row['largest_mb']:,.0f}."
        )


def bars(records: Mapping[str, dict[str, Any] | None]) -> str:
    """What was asked for, from those of the records `SUITES` that there are."""
    rows = {name: record["results"]["rows"] for name, record in records.items() if record}
    found = [*_quality_bars(rows.get("quality-passes", ()))]
    found += _kernel_bars(rows.get("cuda-passes", ()))
    return bars_table([*found, *_offload_bars(rows.get("cuda-offload", ()))], "what binds")


def _quality_bars(rows: _Rows) -> Iterator[Bar]:
    for name, most in KLD.items():
        kld = tuple(row["kld"] for row in pick(rows, name=name))
        yield Bar(f"`{name}`, KLD", most, kld, most=True, unit="")


def _kernel_bars(rows: _Rows) -> Iterator[Bar]:
    """Of `turboquant-4+4`, at the shapes of the record, one after the other."""
    found = pick(rows, name=NESTED)
    alone = [row for row in found if row["tokens"] == 1]
    yield Bar(
        f"`{NESTED}`, 1 token, times bf16", TIMES_BF16,
        tuple(row["bf16_us"] / row["cuda_us"] for row in alone), binds=_binds_one(alone),
    )  # fmt: skip
    for count in sorted({row["tokens"] for row in found if row["tokens"] >= FEWEST}):
        yield Bar(
            f"`{NESTED}`, {count} tokens, Triton's time, times that of CUDA", TIMES_CUDA,
            tuple(row["triton_us"] / row["cuda_us"] for row in pick(found, tokens=count)),
            most=True,
            binds="lookups in a table that Triton writes to shared memory anew for every 128 "
            "columns, and launches of their own for the rotation and the sums of parts",
        )  # fmt: skip


def _binds_one(rows: _Rows) -> str:
    """What a layer of one token waits for where it misses the bar."""
    found = [
        "waiting for codes and lookups: no unit of a multiprocessor is busy for two thirds of the "
        "time"
    ]
    found += [
        f"{row['out_features']} x {row['in_features']} would have "
        f"{row['bf16_us'] / row['filled_us'] * row['filled_rows'] / row['out_features']:.3g} x "
        f"with as many tiles of rows for every team of warps"
        for row in rows
        if "filled_us" in row and row["bf16_us"] < TIMES_BF16 * row["cuda_us"]
    ]
    return "; ".join(found)


def _offload_bars(rows: _Rows) -> Iterator[Bar]:
    for row in rows:
        if row["tokens"] >= PROMPT:
            yield Bar(
                f"`{row['name']}` offloaded, {row['tokens']:,} tokens, copies that are hidden",
                HIDDEN, (max(row["hidden"], 0.0),), unit="%", binds=_binds(row),
            )  # fmt: skip
    for name in dict.fromkeys(row["name"] for row in rows):
        of_bus = tuple(row["of_bus"] for row in pick(rows, name=name))
        yield Bar(f"`{name}`, copies, of the bus", OF_BUS, (min(of_bus),), unit="%")


def _binds(row: dict[str, Any]) -> str:
    """What keeps copies from being hidden."""
    if row["offload_host_ms"] > max(row["resident_ms"], row["copies_ms"]):
        return "the host, which launches more slowly than the GPU computes"
    return f"the GPU computes for {row['resident_ms']:.1f} ms, copies take {row['copies_ms']:.1f}"
