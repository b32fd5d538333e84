"""The table of figures and their limits on a CPU says what the records say."""

from benchmarks.records import read_record
from benchmarks.tables import cpu_limits


def rows_of(generate):
    records = {name: read_record(name) for name in cpu_limits.SUITES}
    records["cpu-generate"] = {"results": generate}
    return cpu_limits.table(records).splitlines()


def test_a_token_is_compared_with_the_fastest_peer_and_with_reading():
    def row(name, ms, **more):
        return {"kv_heads": 4, "context": 16384, "name": name, "ms": ms, **more}

    rows = [
        row("vq-4 + u4", 50.0, bytes=10**9), row("llama.cpp Q4_0, f16 cache", 160.0),
        row("llama.cpp Q4_K_M, f16 cache", 200.0), row("bf16 sdpa", 900.0),
    ]  # fmt: skip
    *_, llama, dense = rows_of({"rows": rows, "gb_per_second": 25.0})
    assert llama.endswith("| 3.2 x | 4 x |")
    assert dense.endswith("| 18 x | 22.5 x |")
    assert not [line for line in rows_of({"rows": rows}) if "a generated token" in line]


def test_without_a_context_the_peer_is_q4_k_m():
    rows = [
        {"kv_heads": 4, "context": 0, "name": name, "ms": ms, "bytes": 10**9}
        for name, ms in (("vq-4 + u4", 40.0), ("llama.cpp Q4_0", 30.0), ("llama.cpp Q4_K_M", 44.0))
    ]
    last = rows_of({"rows": rows, "gb_per_second": 50.0})[-1]
    assert last.endswith("llama.cpp Q4_K_M | 1.1 x | 2.2 x |")


def test_two_threads_gain_no_more_than_reading_allows():
    records = {name: read_record(name) for name in cpu_limits.SUITES}
    linear = records["cpu-linear"]["results"]["rows"]
    linear[:] = [row for row in linear if row["name"] != "arithmetic"]
    for row in linear:
        if row["name"] == "vq-4":
            row["us"], row["of_bandwidth"] = (600.0, 0.5) if row["threads"] == 1 else (400.0, 0.8)
    lines = cpu_limits.table(records).splitlines()
    (line,) = (line for line in lines if "`vq-4`" in line and "2 threads against 1" in line)
    assert line.endswith("| 1.5 / 1.5 / 1.5 x | 1.88 / 1.88 / 1.88 x |")
    for row in linear:
        if row["name"] == "vq-4" and row["threads"] == 2:
            row["of_bandwidth"] = 0.2
    lines = cpu_limits.table(records).splitlines()
    assert any(line.endswith("| 1.5 / 1.5 / 1.5 x | 2 / 2 / 2 x |") for line in lines)
    for us, threads in ((100.0, 1), (80.0, 2)):
        linear += [{"name": "arithmetic", "threads": threads, "us": us}] * 3
    lines = cpu_limits.table(records).splitlines()
    assert any(line.endswith("| 1.5 / 1.5 / 1.5 x | 1.25 / 1.25 / 1.25 x |") for line in lines)


def test_a_step_is_no_faster_than_its_arithmetic_or_reading():
    records = {name: read_record(name) for name in cpu_limits.SUITES}
    for row in records["cpu-attention"]["results"]["rows"]:
        if row["what"] == "step" and row["name"] == "nomad-u4" and row["threads"] == 1:
            row["speedup"], row["us"] = {"torch bmm fp32": 6.0}, 200.0
            row["of_bandwidth"] = 0.4
            row["us_cached"] = {1: 50.0, 4: 160.0}[row["group"]]
    lines = cpu_limits.table(records).splitlines()
    (line,) = (x for x in lines if "`nomad-u4`, 1 and 4" in x and x.count("torch bmm fp32"))
    assert line.endswith("| 6 / 6 x | 15 / 7.5 x |")
