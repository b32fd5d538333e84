"""Tables of the suites `cuda-attention`, `cuda-generate-kv` and `quality-kv-calibrated`, from their
records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table, significant

_Rows = Sequence[dict[str, Any]]
_LONG = 4096  # tokens from which a context is not short


def decode(rows: _Rows) -> str:
    """How many times faster than SDPA one token's attention over a long cache is."""
    return _by_case(rows, "times faster", lambda row: f"{row['speedup']:.2f}", peers=True)


def of_memory(rows: _Rows) -> str:
    """Time to read what must be read, as a fraction of the time that is taken."""
    return _by_case(rows, "of memory", lambda row: f"{row['of_memory']:.0%}", peers=False)


def _by_case(rows: _Rows, title: str, show: Callable[[dict[str, Any]], str], *, peers: bool) -> str:
    rows = [row for row in rows if row["what"] == "decode" and row["context"] >= _LONG]
    groups: dict[tuple[int, int, int], list[int]] = {}
    for row in rows:
        contexts = groups.setdefault((row["heads"], row["kv_heads"], row["batch"]), [])
        if row["context"] not in contexts:
            contexts.append(row["context"])
    head = [title] + [
        f"{heads}/{kv_heads} heads, {batch} x {_joined(map(_thousands, contexts))}"
        for (heads, kv_heads, batch), contexts in groups.items()
    ]
    found = {
        (row["name"], row["heads"], row["kv_heads"], row["batch"], row["context"]): row
        for row in rows
    }
    cells = []
    if peers:
        best = {key[1:]: row["peer"] for key, row in found.items() if "peer" in row}
        line = [
            _joined(_peer(found, best, (*group, context)) for context in contexts)
            for group, contexts in groups.items()
        ]
        cells.append(["SDPA in bf16, us", *line])
    for name in dict.fromkeys(row["name"] for row in rows if "kernel" in row):
        line = []
        for group, contexts in groups.items():
            cases = (found.get((name, *group, context), {}) for context in contexts)
            line.append(_joined(show(row) if "us" in row else "-" for row in cases))
        cells.append([f"`{name}`", *line])
    return markdown_table(head, cells)


def _peer(found: dict[Any, Any], best: dict[Any, str], case: tuple[int, ...]) -> str:
    if case not in best:
        return "-"
    peer = best[case]
    row = found.get((peer, *case), {})
    return f"{row['us']:.1f} ({peer.removeprefix('bf16 ')})"


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k"


def _joined(cells: Iterable[str]) -> str:
    return " / ".join(cells)


def short(rows: _Rows) -> str:
    """The same for short contexts, with 32 and with 8 key/value heads."""
    return _short(rows, lambda row, peer: row["speedup"])


def short_steps(rows: _Rows) -> str:
    """The same, storing the token included on both sides."""
    stores = {
        (row["name"], row["kv_heads"]): row["us"]
        for row in rows
        if row["what"] == "store" and row["batch"] == 1
    }

    def faster(row: dict[str, Any], peer: dict[str, Any]) -> float:
        kv_heads = row["kv_heads"]
        ours = row["us"] + stores[row["name"], kv_heads]
        theirs: float = peer["us"] + stores["bf16", kv_heads]
        return theirs / ours

    return _short(rows, faster)


def _short(rows: _Rows, faster: Callable[[dict[str, Any], dict[str, Any]], float]) -> str:
    rows = [row for row in rows if row["what"] == "decode" and row["context"] < _LONG]
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    kinds = list(dict.fromkeys((row["heads"], row["kv_heads"]) for row in rows))
    found = {(row["name"], row["heads"], row["kv_heads"], row["context"]): row for row in rows}

    def cell(name: str, kind: tuple[int, int], context: int) -> str:
        row = found.get((name, *kind, context), {})
        if "speedup" not in row:
            return "-"
        peer = found.get((row["peer"], *kind, context), row)
        return f"{faster(row, peer):.2f}"

    head = f"tokens; {_joined(f'{heads}/{kv_heads}' for heads, kv_heads in kinds)} heads"
    cells = [
        [f"`{name}`", *(_joined(cell(name, kind, n) for kind in kinds) for n in contexts)]
        for name in dict.fromkeys(row["name"] for row in rows if "kernel" in row)
    ]
    return markdown_table([head, *map(str, contexts)], cells)


def store(rows: _Rows) -> str:
    """Microseconds to store one token's keys and values."""
    rows = [row for row in rows if row["what"] == "store"]
    kinds = list(dict.fromkeys((row["kv_heads"], row["batch"]) for row in rows))
    found = {(row["name"], row["kv_heads"], row["batch"]): row["us"] for row in rows}
    head = ["us", *(f"{kv_heads} heads, batch {batch}" for kv_heads, batch in kinds)]
    cells = []
    for name in dict.fromkeys(row["name"] for row in rows):
        times = (found.get((name, *kind)) for kind in kinds)
        cells.append([_name(name), *("-" if us is None else f"{us:.1f}" for us in times)])
    return markdown_table(head, cells)


def memory(rows: _Rows) -> str:
    """Bytes of a token that is coded, of keys and values of one head."""
    rows = [row for row in rows if row["what"] == "memory"]
    head = ["KV cache", "bytes of a token and head", "times smaller than bf16"]
    cells = [
        [f"`{row['name']}`", f"{row['bytes_per_token']:.1f}", f"{row['smaller']:.2f}"]
        for row in rows
    ]
    return markdown_table(head, cells)


def generate(rows: _Rows) -> str:
    """Tokens a second of `generate()` behind a long context."""
    head = ["weights", "KV cache", "batch x context", "GB a step", "cache, GB",
            "tokens/s of `generate`", "x", "captured", "x", "compiled step, ms", "x",
            "eager graph, ms", "x"]  # fmt: skip
    cells = []
    for row in rows:
        ratio = {key: f"{value:.2f}" for key, value in row.get("speedup", {}).items()}
        cells.append(
            [_name(row["weights"]), _name(row["cache"]), f"{row['batch']} x {row['context']:,}",
             f"{row['gigabytes']:.2f}", f"{row['cache_gigabytes']:.2f}",
             _shown(row, "tokens_per_second", 0), ratio.get("generate_ms", "-"),
             _shown(row, "captured_per_second", 0), ratio.get("captured_ms", "-"),
             _shown(row, "step_ms", 2), ratio.get("step_ms", "-"),
             _shown(row, "eager_graph_ms", 2), ratio.get("eager_graph_ms", "-")]
        )  # fmt: skip
    return markdown_table(head, cells)


def steps(rows: _Rows) -> str:
    """Where the milliseconds of a compiled step go."""
    rows = [row for row in rows if "parts_ms" in row]
    most = {
        part: max(row["parts_ms"][part] for row in rows)
        for part in (rows[0]["parts_ms"] if rows else ())
    }
    parts = sorted((part for part in most if most[part]), key=lambda part: -most[part])
    cells = [
        [f"{row['weights']} + {row['cache']}, {row['batch']} x {row['context']:,}",
         *(f"{row['parts_ms'][part]:.3f}" for part in parts)]
        for row in rows
    ]  # fmt: skip
    return markdown_table(["ms of a step: weights + cache", *parts], cells)


def calibrated(rows: _Rows) -> str:
    """Quality of KV caches that were calibrated."""
    head = ["KV cache", "bits", "window", "KLD", "99th percentile", "top-1 %", "perplexity, %"]
    cells = [
        [row["name"] if " " in row["name"] else f"`{row['name']}`",
         "-" if row["window"] is None else f"{row['bits_per_element']:.3f}",
         "exact" if row["window"] is None else str(row["window"] or "none"),
         f"{significant(row['kld'])} ± {significant(row['kld_se'], 1)}",
         significant(row["kld_p99"]), f"{row['top1']:.1f}", f"{row['change']:+.2f}"]
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
    "cuda-attention-memory": ("cuda-attention", of_memory),
    "cuda-attention-short": ("cuda-attention", short),
    "cuda-attention-short-steps": ("cuda-attention", short_steps),
    "cuda-store": ("cuda-attention", store),
    "cuda-kv-memory": ("cuda-attention", memory),
    "quality-kv-calibrated": ("quality-kv-calibrated", calibrated),
    "cuda-generate-kv": ("cuda-generate-kv", generate),
    "cuda-generate-kv-steps": ("cuda-generate-kv", steps),
}
