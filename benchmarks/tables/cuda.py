"""Tables of the suites that run on a GPU, from their records.

Ranges are over the sizes of a suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table
from hf_vq.formats.catalog import weight_scheme

from .ranges import ratios, span

_Rows = Sequence[dict[str, Any]]


def peers(rows: _Rows) -> str:
    """Speedup over the open-source kernels of each format."""
    rows = [row for row in rows if row["peer"] != "bf16"]
    counts = sorted({row["tokens"] for row in rows})
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        here = found.setdefault((row["peer"], row["name"]), {})
        here.setdefault(row["tokens"], []).append(row["speedup"])
    cells = [
        [peer, f"`{name}`", *(ratios(here.get(tokens, ())) for tokens in counts)]
        for (peer, name), here in found.items()
    ]
    return markdown_table(["peer", "weights", *map(count, counts)], cells)


_ABLATIONS = (
    *("O4 without registers", "O4 without split", "O1, renumbered"),
    "O1, renumbered, overlapping launches",
)


def rungs(rows: _Rows) -> str:
    """Time of every rung of VQ-LLM's kernel and of `_ABLATIONS`, in multiples of SC's."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    shared = {_paper_case(row): row["us"] for row in rows if row["plan"] == "SC"}
    cells = [
        ["SC, us", *(span((us for (of, *_), us in shared.items() if of == name), "{:.1f}".format)
                     for name in names)]
    ]  # fmt: skip
    plans = dict.fromkeys(row["plan"] for row in rows if "exchanges" not in row["plan"])
    for plan in plans:
        if plan != "SC" and (" " not in plan or plan in _ABLATIONS):
            line = [plan]
            for name in names:
                here = [row for row in rows if (row["name"], row["plan"]) == (name, plan)]
                line.append(ratios(row["us"] / shared[_paper_case(row)] for row in here))
            cells.append(line)
    return markdown_table(["x the time of SC", *map(_notation, names)], cells)


def _paper_case(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["name"], row["tokens"], row["out_features"]


def _notation(name: str) -> str:
    scheme = weight_scheme(name)
    return scheme.notation() + (" per tile" if scheme.codebook == "tile" else "")


def generate(rows: _Rows) -> str:
    """Tokens a second of a Llama-3-8B, and how many times those of bfloat16."""
    head = ["weights", "KV cache", "GB a token", "tokens/s of `generate`", "x bf16",
            "captured", "x bf16", "compiled step, ms", "x bf16", "ceiling"]  # fmt: skip
    cells = []
    for row in rows:
        ratio = {key: f"{value:.2f}" for key, value in row.get("speedup", {}).items()}
        captured = row.get("captured_ms")
        cells.append(
            [_name(row), _cache(row), f"{row['gigabytes']:.2f}",
             f"{row['tokens_per_second']:.0f}", ratio.get("generate_ms", "-"),
             f"{1e3 / captured:.0f}" if captured else "-", ratio.get("captured_ms", "-"),
             f"{row['step_ms']:.2f}", ratio.get("step_ms", "-"),
             f"{row['ceiling']:.2f}" if "ceiling" in row else "-"]
        )  # fmt: skip
    return markdown_table(head, cells)


def count(tokens: int) -> str:
    """`1 token`, `16 tokens`."""
    return f"{tokens} token{'s' * (tokens != 1)}"


def _name(row: dict[str, Any]) -> str:
    return _code(row["name"])


def _cache(row: dict[str, Any]) -> str:
    return _code(row.get("cache", "bf16"))


def _code(name: str) -> str:
    return name if name == "bf16" else f"`{name}`"


def quantize(rows: _Rows) -> str:
    """Seconds for the matrices of a model, and memory while one is loaded."""
    found = {(row["what"], row["name"]): row for row in rows}
    billions = next(iter(found.values()))["weights"] / 1e9
    head = ["weights", f"seconds for {billions:.2f} billion", "x PyTorch",
            "MB above the model, loading", "MB above, quantizing while loading"]  # fmt: skip
    cells = []
    for what, name in found:
        if what != "quantize":
            continue
        fit, load, flying = (found[w, name] for w in (what, "load", "quantize while loading"))
        cells.append([
            f"`{name}`", f"{fit['seconds']:.1f}", f"{fit['speedup']['PyTorch']:.0f}",
            f"{load['above_mb']:.0f}", f"{flying['above_mb']:.0f}",
        ])  # fmt: skip
    return markdown_table(head, cells)


def calibrate(rows: _Rows) -> str:
    """Seconds of a block, and minutes of the model that would take."""
    head = ["weights", "blocks measured", "seconds of a block",
            "minutes of 32 blocks, extrapolated", "MB above the model"]  # fmt: skip
    cells = [
        [
            f"`{row['name']}`", str(row["blocks_measured"]), f"{row['block_seconds']:.1f}",
            f"{row['extrapolated_minutes']:.1f}", f"{row['above_mb']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells)


def crossover(rows: _Rows) -> str:
    """Stored bits of learned codebooks, and their error over that of a universal one at equal
    bits, by the size of the layer."""
    names = dict.fromkeys((row["learned"], row["universal"]) for row in rows)
    head = ["size"]
    for learned, universal in names:
        head += [f"bits, `{learned}`", f"error over `{universal}`"]
    found = {(row["learned"], row["size"]): row for row in rows}
    cells = []
    for size in dict.fromkeys(row["size"] for row in rows):
        line = [f"{size} x {size}"]
        for learned, _ in names:
            row = found[learned, size]
            line += [f"{row['bits']:.2f}", f"{row['at_equal_bits']:.2f}"]
        cells.append(line)
    return markdown_table(head, cells)
