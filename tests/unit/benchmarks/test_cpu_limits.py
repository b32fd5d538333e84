"""The table of figures and their limits on a CPU says what the records say."""

from benchmarks.records import read_record
from benchmarks.tables import cpu, cpu_limits


def test_a_layer_is_beside_what_takes_longer_reading_or_computing():
    rows = [
        {"name": "vq-4", "threads": 1, "out_features": n, "in_features": 64, "us": 100.0,
         "us_cached": cached, "of_bandwidth": 0.5, "speedup": {"int4": 2.0, "bf16": 8.0}}
        for n, cached in ((64, 40.0), (128, 80.0))
    ]  # fmt: skip
    assert cpu.linear(rows).endswith("| `vq-4` | 100 | 100 | 2.0 | 8.0 | 50-80% |")


def test_two_threads_gain_no_more_than_reading_allows():
    records = {name: read_record(name) for name in cpu_limits.SUITES}
    linear = records["cpu-linear"]["results"]["rows"]
    linear[:] = [row for row in linear if row["name"] != "arithmetic"]
    for row in linear:
        if row["name"] == "vq-4":
            row["us"], row["of_bandwidth"] = (600.0, 0.5) if row["threads"] == 1 else (400.0, 0.8)
    lines = cpu_limits.table(records).splitlines()
    (line,) = (line for line in lines if "`vq-4`" in line and "2 threads against 1" in line)
    assert line.endswith("| 1.5 x | 1.88 x |")
    for row in linear:
        if row["name"] == "vq-4" and row["threads"] == 2:
            row["of_bandwidth"] = 0.2
    lines = cpu_limits.table(records).splitlines()
    assert any(line.endswith("| 1.5 x | 2 x |") for line in lines)
    for us, threads in ((100.0, 1), (80.0, 2)):
        linear += [{"name": "arithmetic", "threads": threads, "us": us}] * 3
    lines = cpu_limits.table(records).splitlines()
    assert any(line.endswith("| 1.5 x | 1.25 x |") for line in lines)


def test_a_step_is_no_faster_than_its_arithmetic_or_reading():
    records = {name: read_record(name) for name in cpu_limits.SUITES}
    for row in records["cpu-attention"]["results"]["rows"]:
        if row["what"] == "step" and row["name"] == "nomad-u4" and row["threads"] == 1:
            row["us"], row["of_bandwidth"] = 200.0, 0.4
            row["us_cached"] = {1: 50.0, 4: 160.0}[row["group"]]
    lines = cpu_limits.table(records).splitlines()
    assert "| whole step, `nomad-u4`, 1 query head | 200 us | 80 us |" in lines
    assert "| whole step, `nomad-u4`, 4 query heads | 200 us | 160 us |" in lines
