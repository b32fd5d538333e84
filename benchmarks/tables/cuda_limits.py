"""CUDA kernels of linear layers against their roofline.

The lower bound of a kernel is the time of its unavoidable work, measured in the same run. One
token: reading the codes. Few tokens: the longest part of its loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from .cuda import count
from .limits import Figure, Rows, limits_table, pick
from .ranges import percents

LINEAR_SUITES = ("cuda-linear", "cuda-generate", "cuda-parts")
FEW = (1, 16, 32, 64, 128)  # tokens


def linear_table(records: Mapping[str, dict[str, Any]]) -> str:
    """The share of the limit that few tokens reach at all sizes, and what the limit is, from the
    records of `LINEAR_SUITES`."""
    linear, parts = (records[name]["results"]["rows"] for name in ("cuda-linear", "cuda-parts"))
    cells = []
    for name in dict.fromkeys(row["name"] for row in linear if "of_reading" in row):
        read = [row["of_reading"] for row in pick(linear, name=name, tokens=1, what="linear")]
        longest = (_longest(parts, name, tokens) for tokens in FEW[1:])
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
        return "-"
    names = dict.fromkeys(row["what"].removeprefix("only ") for row in longest)
    return f"{percents(min(1.0, row['of whole']) for row in longest)} {', '.join(names)}"


def whole_table(records: Mapping[str, dict[str, Any]]) -> str:
    """Figures with their limits: the host, and a whole model; from the same records."""
    rows = {name: record["results"]["rows"] for name, record in records.items()}
    return limits_table([*_host(rows["cuda-linear"]), *_whole(rows["cuda-generate"])])


def _host(rows: Rows) -> Iterator[Figure]:
    host = {row["name"]: row["us"] for row in pick(rows, what="host")}
    calls = [us for name, us in host.items() if name not in ("bf16", "neg")]
    if calls and "neg" in host:
        what = "eager call, all schemes, median; `torch.neg`"
        yield Figure(what, (median(calls),), (host["neg"],), unit="us")


def _whole(generated: Rows) -> Iterator[Figure]:
    dense = pick(generated, name="bf16", cache="bf16")
    for name in ("vq-4", "vq-2"):
        for row in pick(generated, name=name, cache="bf16"):
            for key, how in (("generate_ms", "`generate`"), ("captured_ms", "captured")):
                if key in row["speedup"]:
                    what = f"tokens/s of a Llama-3-8B, `{name}`, {how}"
                    yield Figure(what, (row["speedup"][key],), _between_steps(row, dense, key))


def _between_steps(row: dict[str, Any], dense: Rows, key: str) -> tuple[float, ...]:
    """The ceiling of a step, with the time that the dense model loses between two of them."""
    if not dense or "ceiling" not in row:
        return ()
    token, step = dense[0][key], dense[0]["step_ms"]
    return (token / (step / row["ceiling"] + token - step),)
