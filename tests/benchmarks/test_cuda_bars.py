"""The tables of bars for GPUs say what the records say."""

import copy

from benchmarks.records import read_record
from benchmarks.tables import cuda_bars


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

    found = lines(cuda_bars.linear_table, cuda_bars.LINEAR_SUITES, change)
    (line,) = [line for line in found if line.startswith("| 1 token, `vq-2` |")]
    assert line.endswith("| at least 2.4 x | 2 / 2 / 2 / 2 x | no | 4 / 4 / 4 / 4 x |")


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

    found = lines(cuda_bars.linear_table, cuda_bars.LINEAR_SUITES, change)
    (line,) = [line for line in found if line.startswith("| 64 tokens, `vq-4`")]
    ratios, ceilings = (" / ".join([number] * 4) for number in ("0.5", "0.625"))
    assert line.endswith(f"| at least 1 x | {ratios} x | no | {ceilings} x |")


def test_a_ceiling_of_two_runs_goes_by_the_dense_layer():
    def change(rows):
        for row in rows["cuda-peers"]:
            if row["name"] == "aqlm-2" and row["tokens"] == 16:
                row["us"], row["speedup"] = (20.0, 2.0) if row["peer"] == "bf16" else (60.0, 6.0)
        for row in rows["cuda-parts"]:
            if row["name"] == "aqlm-2" and row["tokens"] == 16:
                row["us"] = {"bf16": 30.0, "only codes": 7.5}.get(row["what"], 5.0)

    found = lines(cuda_bars.linear_table, cuda_bars.LINEAR_SUITES, change)
    (line,) = [line for line in found if "the faster way of the `aqlm` package" in line]
    assert line.endswith("| 6 / 6 / 6 / 6 x | no | 12 / 12 / 12 / 12 x |")


def test_every_bar_of_the_cache_is_measured():
    found = lines(cuda_bars.cache_table, cuda_bars.CACHE_SUITES)
    assert sum("heads" in line for line in found) == 41
    assert sum("tokens/s" in line for line in found) == 4
    assert all(" x |" in line for line in found[2:])
