"""Tables of the suites `cuda-attention`, `cuda-generate-kv` and `quality-kv-calibrated`, from their
records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table, significant

from .ranges import ratios, span

_Rows = Sequence[dict[str, Any]]
_LONG = 4096  # tokens from which a context is not short
_ALIKE = ("k4v2", "nomad-u4")  # between `u4` and `u2`, and like `u4`: left to the record


def decode(rows: _Rows) -> str:
    """Speedup of one token's attention over SDPA on a long cache, and the fraction of the memory
    roofline that it reaches."""
    rows = [row for row in rows if row["what"] == "decode" and row["context"] >= _LONG]
    found = {_key(row["name"], row): row for row in rows}
    best = {_case(row): found[_key(row["peer"], row)] for row in rows if "peer" in row}
    names = [name for name in dict.fromkeys(row["name"] for row in rows if "kernel" in row)
             if name not in _ALIKE]  # fmt: skip
    cells = []
    for case in dict.fromkeys(map(_case, rows)):
        heads, kv_heads, batch, context = case
        line = [f"{heads}/{kv_heads}, {batch} x {context // 1024}k"]
        line.append(f"{best[case]['us']:.1f}" if case in best else "-")
        for name in names:
            row = found.get((name, *case), {})
            shown = f"{row['speedup']:.2f}, {row['of_memory']:.0%}" if "us" in row else "-"
            line.append(shown)
        cells.append(line)
    head = ["heads, batch x context", "SDPA, us", *(f"`{name}`" for name in names)]
    return markdown_table(head, cells)


def _case(row: dict[str, Any]) -> tuple[int, int, int, int]:
    return row["heads"], row["kv_heads"], row["batch"], row["context"]


def _key(name: str, row: dict[str, Any]) -> tuple[str, int, int, int, int]:
    return name, *_case(row)


def rotary(rows: _Rows) -> str:
    """Time with a rotary mean against that without, of each scheme: of attention, and of a step."""
    rows = [row for row in rows if row["what"] == "rotary"]
    names = dict.fromkeys(row["name"] for row in rows)
    turning = {"rotary mean": "all", "rotary mean of zeros": "none"}
    return markdown_table(
        ["pairs of channels that turn", *(f"`{name}`" for name in names)],
        [
            [turning.get(mean, mean.removeprefix("rotary mean of ").removesuffix(" pairs"))]
            + [", ".join(ratios(row[part] for row in rows
                                if (row["name"], row["mean"]) == (name, mean))
                         for part in ("of_plain", "step_of_plain")) for name in names]
            for mean in dict.fromkeys(row["mean"] for row in rows)
        ],
    )  # fmt: skip


def short(rows: _Rows) -> str:
    """The same for short contexts, of all schemes together; then with the token stored on both
    sides."""
    stores = {
        (row["name"], row["kv_heads"]): row["us"]
        for row in rows
        if row["what"] == "store" and row["batch"] == 1
    }
    rows = [row for row in rows if row["what"] == "decode" and row["context"] < _LONG]
    found = {_key(row["name"], row): row for row in rows}
    kinds = list(dict.fromkeys((row["heads"], row["kv_heads"]) for row in rows))
    cells = []
    for context in dict.fromkeys(row["context"] for row in rows):
        speedups, stored = [], []
        for kind in kinds:
            ours = [
                row for row in rows
                if (row["heads"], row["kv_heads"], row["context"]) == (*kind, context)
                and "speedup" in row
            ]  # fmt: skip
            speedups.append(ratios(row["speedup"] for row in ours))
            stored.append(ratios(
                (found[_key(row["peer"], row)]["us"] + stores["bf16", kind[1]])
                / (row["us"] + stores[row["name"], kind[1]])
                for row in ours
            ))  # fmt: skip
        cells.append([str(context), *speedups, *stored])
    shown = [f"{heads}/{kv_heads} heads" for heads, kv_heads in kinds]
    head = ["tokens", *shown, *(f"{kind}, and storing" for kind in shown)]
    return markdown_table(head, cells)


def store(rows: _Rows) -> str:
    """Microseconds to store one token's keys and values, over all numbers of heads and batches."""
    rows = [row for row in rows if row["what"] == "store"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    times = (
        span((row["us"] for row in rows if row["name"] == name), "{:.1f}".format) for name in names
    )
    return markdown_table(["", *map(_name, names)], [["us", *times]])


def generate(rows: _Rows) -> str:
    """Tokens a second of `generate()` behind a long context."""
    head = ["weights", "KV cache", "batch x context", "cache, GB", "tokens/s of `generate`", "x",
            "captured", "x", "compiled step, ms", "of it attention, ms",
            "eager graph, ms"]  # fmt: skip
    cells = []
    for row in rows:
        ratio = {key: f"{value:.2f}" for key, value in row.get("speedup", {}).items()}
        cells.append(
            [_name(row["weights"]), _name(row["cache"]), f"{row['batch']} x {row['context']:,}",
             f"{row['cache_gigabytes']:.2f}",
             _shown(row, "tokens_per_second", 0), ratio.get("generate_ms", "-"),
             _shown(row, "captured_per_second", 0), ratio.get("captured_ms", "-"),
             _shown(row, "step_ms", 2), _shown(row.get("parts_ms", {}), "attention", 2),
             _shown(row, "eager_graph_ms", 2)]
        )  # fmt: skip
    return markdown_table(head, cells)


def calibrated(rows: _Rows) -> str:
    """Quality of KV caches that were calibrated."""
    head = ["KV cache", "bits", "window", "KLD", "99th percentile"]
    cells = [
        [row["name"] if " " in row["name"] else f"`{row['name']}`",
         "-" if row["window"] is None else f"{row['bits_per_element']:.3f}",
         "exact" if row["window"] is None else str(row["window"] or "none"),
         f"{significant(row['kld'])} ± {significant(row['kld_se'], 1)}",
         significant(row["kld_p99"])]
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells)


def _shown(row: dict[str, Any], key: str, digits: int) -> str:
    return f"{row[key]:.{digits}f}" if key in row else "-"


def _name(name: str) -> str:
    return name if name.startswith("bf16") else f"`{name}`"


# name -> suite, and what makes the table of its rows
TABLES: dict[str, tuple[str, Callable[[_Rows], str]]] = {
    "cuda-attention": ("cuda-attention", decode),
    "quality-kv-calibrated": ("quality-kv-calibrated", calibrated),
    "cuda-generate-kv": ("cuda-generate-kv", generate),
}
