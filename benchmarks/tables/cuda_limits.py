"""What the kernels for GPUs reach, beside what memory and tensor cores allow.

A ratio cannot exceed the time of the peer over that in which the GPU does only what ours cannot do
without, each beside something of its own run: read codes or, for many tokens, write decoded rows
and multiply by them. For a few tokens that is the longest part of our kernel alone (`longest`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ..cuda.attention import Case
from .cuda import count
from .limits import Figure, Rows, limits_table, pick

LINEAR_SUITES = ("cuda-linear", "cuda-peers", "cuda-generate", "cuda-parts")
FEW = ("vq-4", "turboquant-4", "quip-sharp-2", "aqlm-2", "vq-2", "gptvq-2", "aqlm-3", "aqlm-3-int7")
MORE = ("vq-4", "turboquant-4", "quip-sharp-4", "vq-2", "gptvq-2", "quip-sharp-2", "aqlm-2")
MANY = (1024, 2048, 4096)  # tokens
ATTENTION = tuple(
    Case(heads, kv_heads, batch, context)
    for heads, kv_heads, batch, contexts in (
        (32, 32, 1, (4096, 16384, 65536)), (32, 32, 8, (16384,)),
        (32, 8, 1, (4096, 16384, 65536)), (32, 8, 8, (16384, 65536)), (32, 4, 8, (16384,)),
    )
    for context in contexts
)  # fmt: skip
CACHES = ("u4", "cq-4", "u2", "cq-2", "qserve-kv4")


def linear_table(records: Mapping[str, dict[str, Any]]) -> str:
    """The table of linear layers, from the records of `LINEAR_SUITES`."""
    rows = {name: record["results"]["rows"] for name, record in records.items()}
    figures = [
        *_few(rows["cuda-linear"], rows["cuda-parts"]),
        *_more(rows["cuda-linear"], rows["cuda-parts"]),
        *_against(rows["cuda-peers"], rows["cuda-parts"]),
        *_whole(rows["cuda-generate"]),
    ]  # fmt: skip
    return limits_table(figures)


def cache_table(rows: Rows) -> str:
    """The table of attention over KV caches, from the rows of suite `cuda-attention`."""
    return limits_table(_attended(rows, name, case) for name in CACHES for case in ATTENTION)


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


def _few(rows: Rows, parts: Rows) -> Iterator[Figure]:
    for name in FEW:
        found = pick(rows, what="linear", name=name, tokens=1)
        yield Figure(f"1 token, `{name}`", _ratios(found), _reading(found))
        found = pick(rows, what="linear", name=name, tokens=16)
        ratios = _ratios(found)
        yield Figure(f"16 tokens, `{name}`", ratios, _ceiling(found, ratios, parts))


def _ratios(rows: Rows) -> tuple[float, ...]:
    return tuple(row["speedup"]["bf16"] for row in rows)


def _reading(rows: Rows) -> tuple[float, ...]:
    return tuple(row["speedup"]["bf16"] / row["of_reading"] for row in rows if "of_reading" in row)


def _more(rows: Rows, parts: Rows) -> Iterator[Figure]:
    for name in MORE:
        for tokens in (32, 64, 128):
            found = pick(rows, what="linear", name=name, tokens=tokens)
            ratios = _ratios(found)
            yield Figure(f"{tokens} tokens, `{name}`", ratios, _ceiling(found, ratios, parts))
    for tokens in MANY:
        for name in ("vq-4", "vq-2"):
            found = pick(rows, what="linear", name=name, tokens=tokens)
            yield Figure(f"{tokens} tokens, `{name}`", _ratios(found), _decoding(rows, tokens))
    host = {row["name"]: row["us"] for row in pick(rows, what="host")}
    calls = [us for name, us in host.items() if name not in ("bf16", "neg")]
    if calls:
        what = "the host's time for a call, the median of all schemes; limit: `torch.neg`"
        op = (host["neg"],) if "neg" in host else ()
        yield Figure(what, (median(calls),), op, unit="us")


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


def _against(rows: Rows, parts: Rows) -> Iterator[Figure]:
    for tokens, peer in ((1, "aqlm 2x8, token by token"), (16, "aqlm 2x8")):
        ours = pick(rows, name="aqlm-2", tokens=tokens)
        found = [row for row in ours if row["peer"].startswith(peer)]
        best: dict[tuple[int, int], dict[str, Any]] = {}
        for row in found:
            shape = row["out_features"], row["in_features"]
            best[shape] = min(best.get(shape, row), row, key=lambda row: float(row["speedup"]))
        ratios = tuple(row["speedup"] for row in best.values())
        label = "the `aqlm` package" if tokens == 1 else "the faster way of the `aqlm` package"
        limit = _ceiling_of_peers([*best.values()], pick(ours, peer="bf16"), parts)
        yield Figure(f"{count(tokens)}, `aqlm-2`, against {label}", ratios, limit)


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


def _attended(rows: Rows, name: str, case: Case) -> Figure:
    found = pick(rows, what="decode", name=name, **case._asdict())
    return Figure(
        f"`{name}`, {case.heads}/{case.kv_heads} heads, {case.batch} x {case.context:,}",
        tuple(row["speedup"] for row in found),
        tuple(row["speedup"] / row["of_memory"] for row in found),
    )
