"""The table of what calibration was asked for says what the records say."""

from benchmarks.tables import quality_bars


def lines(**rows):
    records = {name.replace("_", "-"): {"results": {"rows": some}} for name, some in rows.items()}
    return quality_bars.table(dict.fromkeys(quality_bars.SUITES) | records).splitlines()[2:]


def test_without_records_there_are_no_bars():
    assert lines() == []


def test_weights():
    def row(name, kind, kld, bits=4.125):
        return {"name": name, "kind": kind, "kld": kld, "bits_per_weight": bits}

    found = lines(
        quality_weights=[
            row("vq-4", "scheme", 0.02), row("vq-4", "calibrated", 0.012),
            row("vq-4 + KV u4", "calibrated", 0.0132), row("GPTQ int4 g128", "baseline", 0.02),
            row("vq-3", "calibrated", 0.062, 3.125), row("target_bits=3", "calibrated", 0.06),
            row("vq-2", "calibrated", 0.248, 2.125), row("aqlm-2-int7", "calibrated", 0.13, 2.625),
        ],
        quality_finetune=[row("vq-2", "model", 0.19), row("vq-2", "calibrated", 0.24)],
    )  # fmt: skip
    assert "| `vq-4`, KLD | at most 0.014 | 0.012 | yes | - |" in found
    gptq = "| `vq-4`, below GPTQ int4 in the same run, KLD | at most 0.02 | 0.012 | yes | - |"
    assert gptq in found
    assert "| `target_bits=3`, below `vq-3`, KLD | at most 0.062 | 0.06 | yes | - |" in found
    assert "| `vq-3`, KLD | at most 0.061 | 0.062 | no | - |" in found
    learned = (
        "| `aqlm-2-int7`, below `vq-2` at equal stored bits, KLD | at most 0.124 | 0.13 | no | - |"
    )
    assert learned in found  # a bit divides by four here, half of one by two
    together = "| `vq-4` and a `u4` cache, above `vq-4` alone | at most 5 % | 10 % | no | - |"
    assert together in found
    (tuned,) = (line for line in found if "finetune" in line)
    assert tuned.startswith('| `vq-2`, `finetune="model"`, KLD | at most 0.15 | 0.19 | no | ')


def test_caches_and_times():
    def row(name, kld, case="window"):
        return {"name": name, "kld": kld, "case": case}

    found = lines(
        quality_kv=[row("nomad-u4", 0.0004), row("nomad-u4", 0.008, "no window")],
        quality_kv_calibrated=[row("u2", 0.005), row("learned-2", 0.0051), row("mean 3 bits", 1.0)],
        cpu_calibrate=[
            {"name": "vq-2", "threads": 1, "seconds": 300.0},
            {"name": "vq-2", "threads": 2, "seconds": 150.0},
        ],
        cuda_calibrate=[{"name": "vq-4", "extrapolated_minutes": 31.0}],
        cuda_crossover=[
            {"learned": "aqlm-3", "universal": "vq-3", "size": size, "at_equal_bits": ratio}
            for size, ratio in ((512, 40.0), (4096, 0.98), (2048, 1.2))
        ],
    )
    assert found[0] == "| KV: `nomad-u4`, KLD | at most 0.0006 | 0.0004 | yes | - |"
    assert found[1].startswith("| KV: learned-2, not above u2, KLD | at most 0.005 | 0.0051 | no |")
    assert found[2].endswith("2 cores | at most 3 min | 2.5 min | yes | - |")
    assert found[3].endswith("extrapolated | at most 30 min | 31 min | no | - |")
    assert found[4].endswith("outputs, 4096 x 4096 | at most 1 | 0.98 | yes | - |")
    assert len(found) == 5
