"""Cells with the least and the greatest of several numbers."""

from benchmarks.tables import cpu, cuda, cuda_linear
from benchmarks.tables.ranges import percents, ratios, span


def test_a_range_is_of_all_numbers_and_one_number_where_both_ends_look_alike():
    assert ratios([2.0, 1.5, 1.75]) == "1.50-2.00" and ratios([1.501, 1.499]) == "1.50"
    assert percents([0.5, 0.0401]) == "4-50%" and percents([0.5]) == "50%"
    assert ratios([]) == percents([]) == "-"
    assert span([1.0, 11.0], "{:.0f}".format) == "1-11"


def linear_rows(name, tokens, us, speedup=None):
    sizes = ((64, 32), (32, 64))
    return [
        {"what": "linear", "name": name, "tokens": tokens, "out_features": n, "in_features": k,
         "us": us * (1 + i), **({} if speedup is None else {"speedup": {"bf16": speedup + i}})}
        for i, (n, k) in enumerate(sizes)
    ]  # fmt: skip


def test_speedups_of_linear_layers_are_ranges_over_sizes():
    rows = [
        *linear_rows("bf16", 1, 12.0), *linear_rows("bf16", 16, 14.0),
        *linear_rows("int4 tinygemm", 1, 6.0), *linear_rows("vq-4", 1, 4.0, 2.0),
        *linear_rows("vq-4", 16, 7.0, 0.5),
    ]  # fmt: skip
    table = cuda_linear.speedups(rows)
    assert "| tokens | 1 | 16 |" in table and "| bf16, us | 12-24 | 14-28 |" in table
    assert "| int4 tinygemm | 2.00 | - |" in table
    assert "| `vq-4` | 2.00-3.00 | 0.50-1.50 |" in table


def test_rungs_are_multiples_of_shared_memory():
    rows = [
        {"name": "vq-4", "plan": plan, "tokens": tokens, "out_features": 64, "us": us * tokens}
        for tokens in (1, 16)
        for plan, us in (
            ("GC", 6.0),
            ("SC", 4.0),
            ("O1", 4.0 + tokens),
            ("3 exchanges", 1.0),
            ("O1, other", 1.0),
            ("O1, renumbered", 2.0),
        )
    ]
    lines = cuda.rungs(rows).splitlines()
    assert lines[2:] == [
        "| SC, us | 4.0-64.0 |", "| GC | 1.50 |", "| O1 | 1.25-5.00 |",
        "| O1, renumbered | 0.50 |",
    ]  # fmt: skip


def test_attention_on_a_cpu_is_of_two_instruction_sets():
    def rows(us):
        return [
            {"what": "step", "name": name, "group": group, "threads": threads, "us": us * group}
            for name in ("u4", "arithmetic") for group in (4, 1) for threads in (1, 2)
        ]  # fmt: skip

    head, _, *lines = cpu.attention(rows(100.0), rows(300.0)).splitlines()
    assert head.endswith("| 4 query heads | AVX2, 1 query head | AVX2, 4 query heads |")
    assert lines == ["| u4 | 100 | 400 | 300 | 1200 |"]
