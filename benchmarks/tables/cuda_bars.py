"""What the kernels for GPUs were asked for, what the records hold, and what memory would allow.

A ratio cannot exceed the time of the peer over that in which the GPU does only what ours cannot do
without, each beside something of its own run: read codes or, for many tokens, write decoded rows
and multiply by them. For a few tokens that is the longest part of our kernel alone (`longest`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ..bars import Bar, Rows, bars_table, pick
from ..cuda.attention import Case
from .cuda import count

LINEAR_SUITES = ("cuda-linear", "cuda-peers", "cuda-generate", "cuda-quantize", "cuda-parts")
CACHE_SUITES = ("cuda-attention", "cuda-generate-kv")
_FIRST = ((4096, 4096), (14336, 4096), (4096, 14336))  # the shapes with bars of their own
_CALL_US, _QUANTIZE_SECONDS = 11.0, 60.0
# scheme -> bars at one token (at the shapes of _FIRST, or all) and at sixteen
_FEW: dict[str, tuple[Sequence[float], float]] = {
    "vq-4": ((3.0, 2.8, 3.0), 2.2),
    "turboquant-4": ((3.0, 2.8, 3.0), 2.2),
    "quip-sharp-2": ((2.8, 2.5, 2.7), 2.0),
    "aqlm-2": ((2.8, 2.5, 2.7), 2.0),
    "vq-2": ((2.4,), 1.8),
    "gptvq-2": ((2.4,), 1.8),
    "aqlm-3": ((1.3,), 1.1),
    "aqlm-3-int7": ((1.8,), 1.1),
}
_AGAINST_INT4 = {"vq-4": (1.4, 3.0), "turboquant-4": (1.4, 3.0)}
_TWO_AND_FOUR_BITS = ("vq-4", "turboquant-4", "quip-sharp-4", "vq-2", "gptvq-2", "quip-sharp-2",
                      "aqlm-2")  # fmt: skip
_MANY = {1024: 0.85, 2048: 0.92, 4096: 0.94}
# query heads, key/value heads, batch, contexts, bars of 4 bits, bars of 2 bits
_ATTENTION = (
    (32, 32, 1, (4096, 16384, 65536), (1.7, 2.6, 3.1), (2.2, 3.3, 4.0)),
    (32, 32, 8, (16384,), (3.1,), (4.4,)),
    (32, 8, 1, (4096, 16384, 65536), (1.1, 1.6, 2.2), (1.2, 1.8, 2.6)),
    (32, 8, 8, (16384, 65536), (2.2, 2.4), (2.6, 3.0)),
    (32, 4, 8, (16384,), (2.0,), (2.4,)),
)


def linear_table(records: Mapping[str, dict[str, Any]]) -> str:
    """The table of linear layers, from the records of `LINEAR_SUITES`."""
    rows = {name: record["results"]["rows"] for name, record in records.items()}
    bars = [
        *_few(rows["cuda-linear"], rows["cuda-parts"]),
        *_more(rows["cuda-linear"], rows["cuda-parts"]),
        *_against(rows["cuda-peers"], rows["cuda-parts"]),
        *_whole(rows["cuda-generate"], rows["cuda-quantize"]),
    ]  # fmt: skip
    return bars_table(bars, "ceiling")


def cache_table(records: Mapping[str, dict[str, Any]]) -> str:
    """The table of KV caches, from the records of `CACHE_SUITES`."""
    attention = records["cuda-attention"]["results"]["rows"]
    generated = records["cuda-generate-kv"]["results"]["rows"]
    return bars_table([*_cached(attention), *_generated(generated)], "ceiling")


def longest(parts: Rows, name: str, tokens: int, shape: tuple[int, int]) -> dict[str, Any] | None:
    """The row of suite `cuda-parts` of what takes longest in the loop of a kernel, alone."""
    here = pick(parts, name=name, tokens=tokens, out_features=shape[0], in_features=shape[1])
    alone = [row for row in here if row["what"].startswith("only ")]
    return max(alone, key=lambda row: float(row["us"]), default=None)


def _ceiling(rows: Rows, ratios: Sequence[float], parts: Rows) -> tuple[float, ...]:
    """What ratios would be if kernels took the time of their longest part; none if one is unknown.

    Beyond 64 tokens a codebook per tile is launched for 64 at a time.
    """
    found = []
    for row, ratio in zip(rows, ratios, strict=True):
        shape = row["out_features"], row["in_features"]
        tokens = 64 if row["name"] == "gptvq-2" and row["tokens"] > 64 else row["tokens"]
        part = longest(parts, row["name"], tokens, shape)
        if part is None:
            return ()
        found.append(max(ratio, ratio / part["of whole"]))
    return tuple(found)


def _ceiling_of_peers(rows: Rows, dense: Rows, parts: Rows) -> tuple[float, ...]:
    """What ratios to another peer would be if our kernel took the time of its longest part; none if
    one is unknown. Peers and parts are of two runs, which have the dense layer in common.

    Args:
        rows: of the peer.
        dense: of the dense layer in the same run, for the same sizes.
    """
    found = []
    for row, bf16 in zip(rows, dense, strict=True):
        shape = row["out_features"], row["in_features"]
        part = longest(parts, row["name"], row["tokens"], shape)
        if part is None:
            return ()
        (there,) = pick(parts, name=row["name"], tokens=row["tokens"], what="bf16",
                        out_features=shape[0], in_features=shape[1])  # fmt: skip
        found.append(row["us"] / bf16["us"] * there["us"] / part["us"])
    return tuple(found)


def _few(rows: Rows, parts: Rows) -> Iterator[Bar]:
    for name, (one, sixteen) in _FEW.items():
        yield from _at_shapes(
            f"1 token, `{name}`", pick(rows, what="linear", name=name, tokens=1), one
        )
        found = pick(rows, what="linear", name=name, tokens=16)
        ratios = _ratios(found)
        yield Bar(f"16 tokens, `{name}`", sixteen, ratios, _ceiling(found, ratios, parts))
    for name, bars in _AGAINST_INT4.items():
        for tokens, bar in zip((1, 16), bars, strict=True):
            found = pick(rows, what="linear", name=name, tokens=tokens)
            ratios = tuple(row["speedup"]["int4 tinygemm"] for row in found)
            label = f"{count(tokens)}, `{name}`, against tinygemm's int4"
            yield Bar(label, bar, ratios)


def _at_shapes(what: str, found: Rows, least: Sequence[float]) -> Iterator[Bar]:
    """One bar for all shapes, or one for each of `_FIRST`."""
    if len(least) == 1:
        yield Bar(what, least[0], _ratios(found), _reading(found))
        return
    for shape, bar in zip(_FIRST, least, strict=True):
        here = pick(found, out_features=shape[0], in_features=shape[1])
        yield Bar(f"{what}, {shape[0]} x {shape[1]}", bar, _ratios(here), _reading(here))


def _ratios(rows: Rows) -> tuple[float, ...]:
    return tuple(row["speedup"]["bf16"] for row in rows)


def _reading(rows: Rows) -> tuple[float, ...]:
    return tuple(row["speedup"]["bf16"] / row["of_reading"] for row in rows if "of_reading" in row)


def _more(rows: Rows, parts: Rows) -> Iterator[Bar]:
    for name in _TWO_AND_FOUR_BITS:
        for tokens in (32, 64, 128):
            found = pick(rows, what="linear", name=name, tokens=tokens)
            ratios = _ratios(found)
            yield Bar(f"{tokens} tokens, `{name}`", 1.0, ratios, _ceiling(found, ratios, parts))
    for tokens, least in _MANY.items():
        for name in ("vq-4", "vq-2"):
            found = pick(rows, what="linear", name=name, tokens=tokens)
            yield Bar(f"{tokens} tokens, `{name}`", least, _ratios(found), _decoding(rows, tokens))
    host = {row["name"]: row["us"] for row in pick(rows, what="host")}
    calls = [us for name, us in host.items() if name not in ("bf16", "neg")]
    if calls:
        what = "the host's time for a call, the median of all schemes"
        op = (host["neg"],) if "neg" in host else ()
        yield Bar(what, _CALL_US, (median(calls),), op, most=True, unit="us")


def _decoding(rows: Rows, tokens: int) -> tuple[float, ...]:
    """What cuBLAS allows after rows are decoded in the time that writing them takes."""
    dense = pick(rows, what="linear", name="bf16", tokens=tokens)
    written = {
        (row["out_features"], row["in_features"]): row["us"]
        for row in pick(rows, what="decode", name="write")
    }
    return tuple(
        row["us"] / (row["us"] + written[row["out_features"], row["in_features"]]) for row in dense
    )


def _against(rows: Rows, parts: Rows) -> Iterator[Bar]:
    for tokens, peer, least in ((1, "aqlm 2x8, token by token", 1.7), (16, "aqlm 2x8", 10.0)):
        ours = pick(rows, name="aqlm-2", tokens=tokens)
        found = [row for row in ours if row["peer"].startswith(peer)]
        best: dict[tuple[int, int], dict[str, Any]] = {}
        for row in found:
            shape = row["out_features"], row["in_features"]
            best[shape] = min(best.get(shape, row), row, key=lambda row: float(row["speedup"]))
        ratios = tuple(row["speedup"] for row in best.values())
        label = "the `aqlm` package" if tokens == 1 else "the faster way of the `aqlm` package"
        yield Bar(f"{count(tokens)}, `aqlm-2`, against {label}",
                  least, ratios,
                  _ceiling_of_peers([*best.values()], pick(ours, peer="bf16"), parts))  # fmt: skip


def _whole(generated: Rows, quantized: Rows) -> Iterator[Bar]:
    dense = pick(generated, name="bf16", cache="bf16")
    for name, least in (("vq-4", 2.2), ("vq-2", 2.8)):
        for row in pick(generated, name=name, cache="bf16"):
            for key, how in (("generate_ms", "`generate`"), ("captured_ms", "captured")):
                if key in row["speedup"]:
                    what = f"tokens/s of a Llama-3-8B, `{name}`, {how}"
                    yield Bar(what, least, (row["speedup"][key],), _between_steps(row, dense, key))
    seconds = tuple(
        row["seconds"]
        for row in pick(quantized, what="quantize")
        if row["name"] in ("vq-4", "vq-2")
    )
    yield Bar("seconds to quantize 7 billion weights, `vq-4`, `vq-2`", _QUANTIZE_SECONDS, seconds,
              most=True, unit="s")  # fmt: skip


def _between_steps(row: dict[str, Any], dense: Rows, key: str) -> tuple[float, ...]:
    """The ceiling of a step, with the time that the dense model loses between two of them."""
    if not dense or "ceiling" not in row:
        return ()
    token, step = dense[0][key], dense[0]["step_ms"]
    return (token / (step / row["ceiling"] + token - step),)


def _cached(rows: Rows) -> Iterator[Bar]:
    for heads, kv_heads, batch, contexts, four, two in _ATTENTION:
        for names, least in ((("u4", "cq-4"), four), (("u2", "cq-2"), two)):
            for name in names:
                for context, asked in zip(contexts, least, strict=True):
                    yield _attended(rows, name, Case(heads, kv_heads, batch, context), asked)
    yield _attended(rows, "qserve-kv4", Case(32, 8, 8, 16384), 1.5)
    for name, memory in (("u4", 3.88), ("u2", 7.5)):
        smaller = tuple(round(row["smaller"], 2) for row in pick(rows, what="memory", name=name))
        yield Bar(f"memory of quantized tokens, `{name}`", memory, smaller)


def _attended(rows: Rows, name: str, case: Case, least: float) -> Bar:
    (row,) = pick(rows, what="decode", name=name, **case._asdict())
    return Bar(
        f"`{name}`, {case.heads}/{case.kv_heads} heads, {case.batch} x {case.context:,}", least,
        (row["speedup"],), (row["speedup"] / row["of_memory"],),
    )  # fmt: skip


def _generated(rows: Rows) -> Iterator[Bar]:
    for batch, context in dict.fromkeys((row["batch"], row["context"]) for row in rows):
        for weights, least in (("bf16", 1.3), ("vq-4", 2.5)):
            found = pick(rows, weights=weights, cache="u4", batch=batch, context=context)
            yield Bar(
                f"tokens/s of a Llama-3-8B, {weights} weights, `u4`, {batch} x {context:,}", least,
                tuple(row["speedup"]["generate_ms"] for row in found),
            )  # fmt: skip
