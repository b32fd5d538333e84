"""Tables of the suites that run on a GPU, from their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table
from hf_vq.formats.catalog import weight_scheme

_Rows = Sequence[dict[str, Any]]


def peers(rows: _Rows) -> str:
    """Microseconds of peers and of ours, and the latency that is saved, at every shape."""
    rows = [row for row in rows if row["peer"] != "bf16"]
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    found = {
        (row["name"], row["peer"], row["tokens"], row["out_features"], row["in_features"]): row
        for row in rows
    }
    head = ["peer", "weights", "tokens", *(f"{n} x {k}" for n, k in shapes)]
    cells = []
    for name, peer, tokens in dict.fromkeys((r["name"], r["peer"], r["tokens"]) for r in rows):
        line = [peer, f"`{name}`", str(tokens)]
        for shape in shapes:
            key = (name, peer, tokens, *shape)
            row = found[key]
            saved = 1 - 1 / row["speedup"]
            line.append(f"{row['us']:.1f} / {row['ours_us']:.1f}, {saved:.1%}")
        cells.append(line)
    return markdown_table(head, cells)


def rungs(rows: _Rows) -> str:
    """Microseconds of every rung of VQ-LLM's kernel, and of each mechanism alone."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    columns = list(dict.fromkeys((row["tokens"], row["out_features"]) for row in rows))
    found = {(r["name"], r["plan"], r["tokens"], r["out_features"]): r["us"] for r in rows}
    counts = " / ".join(f"{tokens} x {out_features}" for tokens, out_features in columns)
    head = [f"us, tokens x rows: {counts}", *map(_notation, names)]
    plans = dict.fromkeys(row["plan"] for row in rows if "exchanges" not in row["plan"])
    chosen = {
        (row["name"], row["plan"]): row
        for row in rows
        if (row["tokens"], row["out_features"]) == columns[0] and "n_reg" in row
    }
    cells = [
        [f"{plan}: {', '.join(keys)}"]
        + [", ".join(str(chosen[name, plan][key]) for key in keys) for name in names]
        for plan, keys in (("O2", ("n_reg", "n_shared")), ("O3", ("split",)))
    ]
    for plan in plans:
        line = [plan]
        for name in names:
            times = [found.get((name, plan, *column)) for column in columns]
            line.append(" / ".join("-" if us is None else f"{us:.1f}" for us in times))
        cells.append(line)
    return markdown_table(head, cells)


def exchanges(rows: _Rows) -> str:
    """What register fusion with so many exchanges takes, in multiples of shared-memory fusion."""
    shuffled = [row for row in rows if "exchanges" in row["plan"]]
    shared = {
        (row["name"], row["tokens"], row["out_features"]): row["us"]
        for row in rows
        if row["plan"] == "SC"
    }
    found: dict[tuple[str, int], list[float]] = {}
    for row in shuffled:
        peer = shared[row["name"], row["tokens"], row["out_features"]]
        found.setdefault((row["name"], row["exchanges"]), []).append(row["us"] / peer)
    counts = sorted({count for _, count in found})
    cells = [
        [_notation(name), *(_range(found.get((name, count), [])) for count in counts)]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    return markdown_table(["exchanges", *map(str, counts)], cells)


def _notation(name: str) -> str:
    scheme = weight_scheme(name)
    return scheme.notation() + (" per tile" if scheme.codebook == "tile" else "")


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else "-"


def generate(rows: _Rows) -> str:
    """Tokens a second of a Llama-3-8B, and how many times those of bfloat16."""
    head = ["weights", "KV cache", "GB a token", "x less", "tokens/s of `generate`", "x bf16",
            "captured", "x bf16", "compiled step, ms", "x bf16", "ceiling", "eager graph, ms",
            "x bf16"]  # fmt: skip
    cells = []
    for row in rows:
        faster = row.get("speedup", {})
        ratio = {key: f"{value:.2f}" for key, value in faster.items()}
        captured, eager = row.get("captured_ms"), row.get("eager_graph_ms")
        cells.append(
            [_name(row), _cache(row), f"{row['gigabytes']:.2f}", ratio.get("bytes", "-"),
             f"{row['tokens_per_second']:.0f}", ratio.get("generate_ms", "-"),
             f"{1e3 / captured:.0f}" if captured else "-", ratio.get("captured_ms", "-"),
             f"{row['step_ms']:.2f}", ratio.get("step_ms", "-"),
             f"{row['ceiling']:.2f}" if "ceiling" in row else "-",
             f"{eager:.2f}" if eager else "-", ratio.get("eager_graph_ms", "-")]
        )  # fmt: skip
    return markdown_table(head, cells)


def steps(rows: _Rows) -> str:
    """Where the milliseconds of a compiled step go."""
    most = {part: max(row["parts_ms"][part] for row in rows) for part in rows[0]["parts_ms"]}
    parts = sorted((part for part in most if most[part]), key=lambda part: -most[part])
    cells = [
        [_name(row), _cache(row), *(f"{row['parts_ms'][part]:.3f}" for part in parts),
         f"{row['alone_ms']:.3f}" if "alone_ms" in row else "-"]
        for row in rows
    ]  # fmt: skip
    return markdown_table(["ms of a step", "KV cache", *parts, "layers alone"], cells)


def parts(rows: _Rows) -> str:
    """Microseconds of the fused kernel with one of its parts left out."""
    wholly = {(row["name"], row["tokens"]) for row in rows if row["what"] == "without codes"}
    rows = [row for row in rows if (row["name"], row["tokens"]) in wholly]
    columns = list(dict.fromkeys((row["name"], row["tokens"]) for row in rows))
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    found = {
        (row["what"], row["name"], row["tokens"], row["out_features"], row["in_features"]): row[
            "us"
        ]
        for row in rows
    }
    cells = []
    for what in dict.fromkeys(row["what"] for row in rows):
        line = [what]
        for name, tokens in columns:
            times = [found.get((what, name, tokens, *shape)) for shape in shapes]
            shown = ["-" if us is None else f"{us:.1f}" for us in times]
            line.append("-" if set(shown) == {"-"} else " / ".join(shown))
        cells.append(line)
    head = [f"us at {' / '.join(f'{n} x {k}' for n, k in shapes)}"]
    head += [f"`{name}`, {count(tokens)}" for name, tokens in columns]
    return markdown_table(head, cells)


def longest(rows: _Rows) -> str:
    """Microseconds of kernels, and of the part of their loop that takes longest alone."""
    found: dict[str, dict[tuple[int, int], list[dict[str, Any]]]] = {}
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    for row in rows:
        shape = row["out_features"], row["in_features"]
        case = f"{_name(row)}, {count(row['tokens'])}"
        found.setdefault(case, {}).setdefault(shape, []).append(row)
    lines = []
    for case, here in found.items():
        cells = []
        for shape in shapes:
            us = {row["what"]: row["us"] for row in here.get(shape, [])}
            alone = {what: us[what] for what in us if what.startswith("only ")}
            part = max(alone, key=lambda what: alone[what], default="")
            cells.append(f"{us['whole']:.1f} / {us[part]:.1f} {part[5:]}" if part else "-")
        lines.append([case, *cells])
    head = ["us of all / of the longest part alone", *(f"{n} x {k}" for n, k in shapes)]
    return markdown_table(head, lines)


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
    head = ["weights", f"seconds for {billions:.2f} billion", "times as fast as PyTorch alone",
            "loading: MB stored / above / of a layer",
            "quantizing while loading: MB above / of a dense layer"]  # fmt: skip
    cells = []
    for what, name in found:
        if what != "quantize":
            continue
        fit, load, flying = (found[w, name] for w in (what, "load", "quantize while loading"))
        stored = [load["stored_mb"], load["above_mb"], load["layer_mb"]]
        cells.append([
            f"`{name}`", f"{fit['seconds']:.1f}", f"{fit['speedup']['PyTorch']:.0f}",
            " / ".join(f"{mb:.0f}" for mb in stored),
            " / ".join(f"{flying[key]:.0f}" for key in ("above_mb", "layer_mb")),
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
