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
    assert row_of(found, "| `vq-4` |")[3] == "-"
    assert not any(line.startswith("| `vq-3` |") for line in found), "it was not taken apart"
