"""What calibration was asked for, what the records hold, and what binds a bar that is missed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..bars import Bar, Rows, bars_table

# calibrated scheme -> KL divergence at most, of tinybooks-17m
WEIGHTS = {"vq-4": 0.0140, "vq-3": 0.061, "vq-2": 0.265, "quip-sharp-2": 0.245,
           "turboquant-4": 0.0160, "gptvq-2-int7": 0.30}  # fmt: skip
FINETUNED = {"block": 0.20, "model": 0.15}
# KL divergence of a cache with 4 sinks and a window of 64 tokens
NOMAD = {"1": 0.0065, "2": 0.044, "4": 0.15}  # channels of a codebook, keys only
NOMAD_U4 = 0.0006
SMOOTHED = 0.0165
QOQ = "qoq-w4a8-g128, all"
QOQ_KLD, QOQ_CHANGE, QOQ_CACHED = 0.0245, 2.5, 3.9  # of perplexities in percent
TOGETHER = 0.05  # of the divergence of the weights
MINUTES = {"cpu-calibrate": 3, "cuda-calibrate": 30}


def table(records: Mapping[str, dict[str, Any] | None]) -> str:
    """The table, from those of the records `SUITES` that there are."""
    rows = {name: found["results"]["rows"] for name, found in records.items() if found is not None}
    bars: list[Bar] = []
    for suite, make in _MAKERS.items():
        bars += make(rows[suite]) if suite in rows else ()
    return bars_table(bars, "what binds")


def _weights(rows: Rows) -> Iterator[Bar]:
    found = {(row["name"], row["kind"]): row for row in rows}
    for name, most in WEIGHTS.items():
        yield _kld(f"`{name}`", most, found.get((name, "calibrated")))
    for bits in (4, 3, 2):
        gptq, ours = (
            found.get((f"GPTQ int{bits} g128", "baseline")),
            found.get((f"vq-{bits}", "calibrated")),
        )
        if gptq is not None:
            yield _kld(f"`vq-{bits}`, below GPTQ int{bits} in the same run", gptq["kld"], ours)
    below, above = (found.get((name, "calibrated")) for name in ("vq-2", "vq-3"))
    if above is not None:
        shared = found.get(("target_bits=3", "calibrated"))
        yield _kld("`target_bits=3`, below `vq-3`", above["kld"], shared)
    learned = found.get(("aqlm-2-int7", "calibrated"))
    if below is not None and above is not None and learned is not None:
        most = _at(learned["bits_per_weight"], below, above)
        yield _kld("`aqlm-2-int7`, below `vq-2` at equal stored bits", most, learned)
    alone, both = (found.get((name, "calibrated")) for name in ("vq-4", "vq-4 + KV u4"))
    if alone is not None and both is not None:
        added = both["kld"] / alone["kld"] - 1
        yield Bar(
            "`vq-4` and a `u4` cache, above `vq-4` alone", TOGETHER, (added,), most=True, unit="%"
        )


def _finetuned(rows: Rows) -> Iterator[Bar]:
    found = {row["kind"]: row for row in rows if row["name"] == "vq-2"}
    for how, most in FINETUNED.items():
        yield _kld(
            f'`vq-2`, `finetune="{how}"`', most, found.get(how),
            "the text: more epochs or larger steps fit it alone",
        )  # fmt: skip


def _kv(rows: Rows) -> Iterator[Bar]:
    found = {row["name"]: row for row in rows if row["case"] == "window"}
    for channels, most in NOMAD.items():
        name = f"NoMAD d_sub {channels}, keys only, 8-bit tables"
        yield _kld(f"KV: {name}", most, found.get(name))
    yield _kld("KV: `nomad-u4`", NOMAD_U4, found.get("nomad-u4"))


def _calibrated_kv(rows: Rows) -> Iterator[Bar]:
    found = {row["name"]: row for row in rows}
    for learned, universal in (("learned-4", "u4"), ("learned-2", "u2"), ("mean 3 bits", "u3")):
        other = found.get(universal)
        if other is not None:
            yield _kld(
                f"KV: {learned}, not above {universal}", other["kld"], found.get(learned),
                "normalised rows are Gaussian, and the universal codebook is the best for those: "
                "the difference is less than a standard error",
            )  # fmt: skip
    yield _kld(
        "KV: QServe's with SmoothAttention", SMOOTHED, found.get("QServe KV4, SmoothAttention")
    )


def _qoq(rows: Rows) -> Iterator[Bar]:
    found = {row["name"]: row for row in rows}
    yield _kld(f"`{QOQ}`", QOQ_KLD, found.get(QOQ))
    for name, most in ((QOQ, QOQ_CHANGE), (f"{QOQ}, KV qserve-kv4", QOQ_CACHED)):
        values = (found[name]["change"],) if name in found else ()
        yield Bar(f"`{name}`, perplexity, change in %", most, values, most=True, unit="")


def _cpu_time(rows: Rows) -> Iterator[Bar]:
    for row in rows:
        if row["name"] == "vq-2" and row["threads"] == 2:
            yield _minutes(
                "calibrating `vq-2` in the shape of tinybooks-17m, 2 cores", "cpu-calibrate",
                row["seconds"] / 60,
            )  # fmt: skip


def _gpu_time(rows: Rows) -> Iterator[Bar]:
    for row in rows:
        yield _minutes(
            f"calibrating a Llama-3-8B shape, `{row['name']}`, one GPU, extrapolated",
            "cuda-calibrate", row["extrapolated_minutes"],
        )  # fmt: skip


def _crossover(rows: Rows) -> Iterator[Bar]:
    for learned in dict.fromkeys(row["learned"] for row in rows):
        own = [row for row in rows if row["learned"] == learned]
        largest = max(own, key=lambda row: row["size"])
        size, universal = largest["size"], largest["universal"]
        yield Bar(
            f"`{learned}` over `{universal}` at equal stored bits, squared error of outputs, "
            f"{size} x {size}",
            1.0, (largest["at_equal_bits"],), most=True, unit="",
            binds="the bits of the codebooks: larger matrices have it below",
        )  # fmt: skip


def _at(bits: float, low: dict[str, Any], high: dict[str, Any]) -> float:
    """The divergence at some bits, exponential in them through two rows."""
    share = (bits - low["bits_per_weight"]) / (high["bits_per_weight"] - low["bits_per_weight"])
    return float(low["kld"] * (high["kld"] / low["kld"]) ** share)


def _kld(what: str, most: float, row: dict[str, Any] | None, binds: str = "") -> Bar:
    return Bar(f"{what}, KLD", most, () if row is None else (row["kld"],), most=True, unit="",
               binds=binds)  # fmt: skip


def _minutes(what: str, suite: str, minutes: float) -> Bar:
    return Bar(what, MINUTES[suite], (minutes,), most=True, unit="min")


_MAKERS = {
    "quality-weights": _weights,
    "quality-finetune": _finetuned,
    "quality-kv": _kv,
    "quality-kv-calibrated": _calibrated_kv,
    "quality-qoq": _qoq,
    "cpu-calibrate": _cpu_time,
    "cuda-calibrate": _gpu_time,
    "cuda-crossover": _crossover,
}
SUITES = tuple(_MAKERS)
