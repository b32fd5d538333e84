"""The tables of bars for GPUs say what the records say."""

import copy

from hf_vq.bench import cuda_bars
from hf_vq.bench.record import read_record


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


def test_of_many_tokens_the_slowest_shape_counts():
    def change(rows):
        found = [
            row for row in rows["cuda-linear"]
            if row["what"] == "linear" and row["name"] == "vq-4" and row["tokens"] in (32, 64, 128)
        ]  # fmt: skip
        for row in found:
            row["speedup"]["bf16"] = 1.5
        found[0]["speedup"]["bf16"] = 0.25

    found = lines(cuda_bars.linear_table, cuda_bars.LINEAR_SUITES, change)
    (line,) = [line for line in found if line.startswith("| 32, 64, 128 tokens, `vq-4`")]
    assert "| 0.25 / 1.5 / 1.5 x | no |" in line


def test_every_bar_of_the_cache_is_measured():
    found = lines(cuda_bars.cache_table, cuda_bars.CACHE_SUITES)
    assert sum("heads" in line for line in found) == 41
    assert sum("tokens/s" in line for line in found) == 4
    assert all(" x |" in line for line in found[2:])
