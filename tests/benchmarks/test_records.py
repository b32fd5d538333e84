"""The committed records hold what the project promises, and say what made them."""

import math

import pytest

from benchmarks.quality.weights import MEASURED
from benchmarks.records import read_record
from hf_vq.formats.catalog import KV_SCHEMES, WEIGHT_SCHEMES

HEAD_DIM = 128  # at which the bits of KV schemes are nominal
# Of a block of tinybooks-17m, [out_features, in_features].
SHAPES = [(512, 384), (256, 384), (256, 384), (384, 512), (1024, 384), (1024, 384), (384, 1024)]

# scheme -> most KL divergence, most change of perplexity in percent
WEIGHT_BARS = {"vq-4": (0.0260, 2.9), "vq-3": (0.112, 10.5), "vq-2": (0.55, 66.0)}
# The same, calibrated; perplexity may vary by 0.4 points at equal divergence.
CALIBRATED_BARS = {
    "vq-4": (0.0140, 1.5 + 0.4),
    "vq-3": (0.061, 5.8 + 0.4),
    "vq-2": (0.265, 27 + 0.4),
    "quip-sharp-2": (0.245, math.inf),
    "turboquant-4": (0.0160, 1.4 + 0.4),
    "gptvq-2-int7": (0.30, math.inf),
}
# (scheme, case, number) -> most
KV_BARS = {
    ("u4", "window", "kld"): 0.00045,
    ("u4", "window", "kld_p99"): 0.006,
    ("u4", "no window", "kld"): 0.0075,
    ("u4", "shifted", "kld"): 0.0005,
    ("u3", "window", "kld"): 0.0018,
    ("u3", "no window", "kld"): 0.031,
    ("k4v2", "window", "kld"): 0.0027,
    ("u2", "window", "kld"): 0.0060,
    ("u2", "no window", "kld"): 0.115,
    ("nomad-u4", "window", "kld"): 0.0006,
    ("NoMAD d_sub 1, keys only, 8-bit tables", "window", "kld"): 0.0065,
    ("NoMAD d_sub 2, keys only, 8-bit tables", "window", "kld"): 0.044,
    ("NoMAD d_sub 4, keys only, 8-bit tables", "window", "kld"): 0.15,
}
# row -> most KL divergence of a calibrated KV cache, of 16k tokens with a window of 64 or without
CALIBRATED_KV_BARS = {"mean 3 bits": 0.0014, "QServe KV4, SmoothAttention": 0.0165}
# row -> what it must be below, or equal to, in the same run
BETTER_KV = {
    "learned-4": "u4",
    "learned-2": "u2",
    "mean 3 bits": "u3",
    "QServe KV4, SmoothAttention": "QServe KV4",
}


def rows(suite: str) -> list[dict]:
    record = read_record(suite)
    assert record is not None
    return record["results"]["rows"]


def test_cpu_records_have_all_their_peers():
    """A library that was not installed is a bar that nobody reads."""
    layers = {row["name"] for row in rows("cpu-linear")}
    assert {"int4", "bf16", "fp32", "q4_K", "read", "aqlm"} <= layers
    assert "onnxruntime int8" in {row["name"] for row in rows("cpu-attention")}
    generated = rows("cpu-generate")
    cases = {(row["kv_heads"], row["context"]) for row in generated}
    for name in ("bf16 sdpa", "llama.cpp Q4_0, f16 cache"):
        found = {(r["kv_heads"], r["context"]) for r in generated if r["name"] == name}
        assert found == cases, name


@pytest.mark.parametrize(
    "suite", ["quality-weights", "quality-kv", "quality-kv-calibrated", "demo"]
)
def test_a_record_says_what_made_it(suite):
    record = read_record(suite)
    assert record is not None
    assert record["revision"] and record["date"]
    assert record["versions"]["hf-vq"][0].isdigit()
    command = f"python -m hf_vq.bench {suite} MODEL_DIR --text TEXT"
    if "calibration_text" in record["settings"]:
        command += " --calibration TEXT"
    command = "hf-vq demo" if suite == "demo" else command
    found = record["command"].removesuffix(" --device-map cuda")
    found = found.removesuffix(f" --kinds {' '.join(MEASURED)}")
    assert found == command, "the tables show whole runs only"


@pytest.mark.parametrize("scheme", WEIGHT_BARS)
def test_weights(scheme):
    kld, change = WEIGHT_BARS[scheme]
    (row,) = (r for r in rows("quality-weights") if (r["name"], r["kind"]) == (scheme, "scheme"))
    assert row["kld"] <= kld and row["change"] <= change


@pytest.mark.parametrize("scheme", CALIBRATED_BARS)
def test_calibrated_weights(scheme):
    found = {row["name"]: row for row in rows("quality-weights") if row["kind"] == "calibrated"}
    kld, change = CALIBRATED_BARS[scheme]
    assert found[scheme]["kld"] <= kld and found[scheme]["change"] <= change


def test_weights_and_cache_together():
    found = {row["name"]: row for row in rows("quality-weights") if row["kind"] == "calibrated"}
    assert found["vq-4 + KV u4"]["kld"] <= 1.05 * found["vq-4"]["kld"]


def test_stored_bits_of_weights_are_nominal():
    measured = [row for row in rows("quality-weights") if row["kind"] == "scheme"]
    assert measured
    for row in measured:
        bits = [WEIGHT_SCHEMES[row["name"]].bits(k, n) * n * k for n, k in SHAPES]
        nominal = sum(bits) / sum(n * k for n, k in SHAPES)
        assert row["bits_per_weight"] == pytest.approx(nominal, rel=0.01)


@pytest.mark.parametrize(("scheme", "case", "number"), KV_BARS, ids=" ".join)
def test_kv_cache(scheme, case, number):
    (row,) = (r for r in rows("quality-kv") if (r["name"], r["case"]) == (scheme, case))
    assert row[number] <= KV_BARS[scheme, case, number]


@pytest.mark.parametrize("name", BETTER_KV)
def test_calibrated_kv_cache(name):
    found = {row["name"]: row for row in rows("quality-kv-calibrated")}
    assert found[name]["kld"] <= found[BETTER_KV[name]]["kld"]
    assert found[name]["bits_per_element"] <= found[BETTER_KV[name]]["bits_per_element"]
    assert found[name]["kld"] <= CALIBRATED_KV_BARS.get(name, math.inf)


def test_stored_bits_of_the_kv_cache_are_nominal():
    measured = [row for row in rows("quality-kv") if row["kind"] == "scheme"]
    assert {row["case"] for row in measured} == {"window", "short prompt", "no window", "shifted"}
    for row in measured:
        scheme = KV_SCHEMES[row["name"]]
        nominal = (scheme.key.bits(HEAD_DIM) + scheme.value.bits(HEAD_DIM)) / 2
        assert row["bits_per_element"] == pytest.approx(nominal, rel=0.01)
