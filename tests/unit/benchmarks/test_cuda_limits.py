"""The tables of figures and their limits on a GPU say what the records say."""

import copy

from benchmarks.records import read_record
from benchmarks.tables import cuda_limits


def lines(table, suites, change=None):
    records = {name: copy.deepcopy(read_record(name)) for name in suites}
    if change:
        change({name: record["results"]["rows"] for name, record in records.items()})
    return table(records).splitlines()


def test_a_ratio_stands_beside_the_time_of_reading():
    def change(rows):
        for row in rows["cuda-linear"]:
            if row["what"] == "linear" and row["name"] == "vq-2" and row["tokens"] == 1:
                row |= {"speedup": {"bf16": 2.0, "int4 tinygemm": 1.0}, "of_reading": 0.5}

    found = lines(cuda_limits.linear_table, cuda_limits.LINEAR_SUITES, change)
    (line,) = [line for line in found if line.startswith("| 1 token, `vq-2` |")]
    assert line.endswith("| 2 / 2 / 2 / 2 x | 4 / 4 / 4 / 4 x |")


def test_the_longest_part_alone_is_a_ceiling():
    def change(rows):
        found = [
            row for row in rows["cuda-linear"]
            if row["what"] == "linear" and row["name"] == "vq-4" and row["tokens"] == 64
        ]  # fmt: skip
        for row in found:
            row["speedup"]["bf16"] = 0.5
        rows["cuda-parts"] += [
            {"name": "vq-4", "tokens": 64, "out_features": row["out_features"],
             "in_features": row["in_features"], "what": what, "us": us, "of whole": us / 10}
            for row in found
            for what, us in (("whole", 10.0), ("only codes", 5.0), ("only x", 8.0))
        ]  # fmt: skip

    found = lines(cuda_limits.linear_table, cuda_limits.LINEAR_SUITES, change)
    (line,) = [line for line in found if line.startswith("| 64 tokens, `vq-4`")]
    ratios, ceilings = (" / ".join([number] * 4) for number in ("0.5", "0.625"))
    assert line.endswith(f"| {ratios} x | {ceilings} x |")


def test_a_ceiling_of_two_runs_goes_by_the_dense_layer():
    def change(rows):
        for row in rows["cuda-peers"]:
            if row["name"] == "aqlm-2" and row["tokens"] == 16:
                row["us"], row["speedup"] = (20.0, 2.0) if row["peer"] == "bf16" else (60.0, 6.0)
        for row in rows["cuda-parts"]:
            if row["name"] == "aqlm-2" and row["tokens"] == 16:
                row["us"] = {"bf16": 30.0, "only codes": 7.5}.get(row["what"], 5.0)

    found = lines(cuda_limits.linear_table, cuda_limits.LINEAR_SUITES, change)
    (line,) = [line for line in found if "the faster way of the `aqlm` package" in line]
    assert line.endswith("| 6 / 6 / 6 / 6 x | 12 / 12 / 12 / 12 x |")


def test_caches_of_all_schemes_and_lengths():
    rows = [
        {"what": "decode", "name": name, **case._asdict(), "speedup": 2.0, "of_memory": 0.5}
        for name in cuda_limits.CACHES for case in cuda_limits.ATTENTION
    ]  # fmt: skip
    head, rule, *found = cuda_limits.cache_table(rows).splitlines()
    assert len(found) == len(rows) and all(line.endswith("| 2 x | 4 x |") for line in found)
    assert found[0].startswith("| `u4`, 32/32 heads, 1 x 4,096 |")
    assert cuda_limits.cache_table([]).splitlines() == [head, rule]
