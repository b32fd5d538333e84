"""The tables of limits on a GPU say what the records say."""

import copy

from benchmarks.records import read_record
from benchmarks.tables import cuda_limits


def lines(table, suites, change=None):
    records = {name: copy.deepcopy(read_record(name)) for name in suites}
    if change:
        change({name: record["results"]["rows"] for name, record in records.items()})
    return table(records).splitlines()


def row_of(found, start):
    (line,) = [line for line in found if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_one_token_is_compared_with_reading():
    def change(rows):
        found = [
            row for row in rows["cuda-linear"]
            if row["what"] == "linear" and row["name"] == "vq-2" and row["tokens"] == 1
        ]  # fmt: skip
        for row, share in zip(found, (0.5, 0.25, 0.625, 0.5), strict=True):
            row["of_reading"] = share

    found = lines(cuda_limits.linear_table, cuda_limits.LINEAR_SUITES, change)
    assert row_of(found, "| `vq-2` |")[1] == "25-62%"


def test_the_longest_part_alone_is_the_limit():
    def change(rows):
        rows["cuda-parts"] += [
            {"name": "vq-4", "tokens": 64, "out_features": out_features, "in_features": 64,
             "what": what, "us": us, "of whole": us / 10}
            for out_features, x in ((64, 8.0), (128, 2.0), (256, 11.0))
            for what, us in (("whole", 10.0), ("only codes", 5.0), ("only x", x))
        ]  # fmt: skip

    found = lines(cuda_limits.linear_table, cuda_limits.LINEAR_SUITES, change)
    assert row_of(found, "| `vq-4` |")[4] == "50-100% x, codes"
    assert row_of(found, "| `vq-3` |")[4] == "-"


def test_calls_of_layers_are_compared_with_the_least_op():
    def change(rows):
        host = [row for row in rows["cuda-linear"] if row["what"] == "host"]
        for row in host:
            row["us"] = 5.0 if row["name"] == "neg" else 20.0

    found = lines(cuda_limits.whole_table, cuda_limits.LINEAR_SUITES, change)
    assert row_of(found, "| eager call, all schemes, median")[1:] == ["20 us", "5 us"]


def test_a_token_is_compared_with_layers_that_read_as_fast_as_dense_ones():
    def change(rows):
        for row in rows["cuda-generate"]:
            if row["cache"] == "bf16":
                row |= {"generate_ms": 8.0, "step_ms": 6.0, "ceiling": 3.0}
                if row["name"] == "vq-4":
                    row["speedup"] = {"generate_ms": 1.5}

    found = lines(cuda_limits.whole_table, cuda_limits.LINEAR_SUITES, change)
    line = row_of(found, "| tokens/s of a Llama-3-8B, `vq-4`, `generate`")
    assert line[1:] == ["1.5 x", "2 x"], "8 ms, of which 2 ms of a step and 2 ms between steps stay"
