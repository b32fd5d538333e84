"""Tables of two passes say what the records say."""

from benchmarks.tables import passes as passes_tables

PASSES = [
    {"name": "turboquant-4+4", "bits_per_weight": 8.125, "kld": 2e-4, "kld_p99": 1e-3,
     "change": 0.01},
    {"name": "first pass of turboquant-4+4", "bits_per_weight": 4.125, "kld": 0.02,
     "kld_p99": 0.1, "change": -1.5},
    {"name": "turboquant-4+2", "bits_per_weight": 6.125, "kld": 4e-3, "kld_p99": 1e-2,
     "change": 0.2},
]  # fmt: skip


def offloaded(tokens, hidden, launching=12.4):
    return {
        "name": "turboquant-4+4", "tokens": tokens, "resident_ms": 10.0, "offload_ms": 12.5,
        "offload_host_ms": launching, "copies_ms": 5.0, "gb_per_second": 52.0, "of_bus": 0.94,
        "bus_gb_per_second": 55.0, "hidden": hidden, "copied_mb": 276.0, "largest_mb": 32.8,
        "slots_mb": 65.5, "same_logits": True,
    }  # fmt: skip


def timed(tokens, bf16, cuda, triton=9.0):
    alone = {"read_us": 5.5, "filled_us": 12.0, "filled_rows": 6144} if tokens == 1 else {}
    return {
        "name": "turboquant-4+4", "tokens": tokens, "out_features": 4096, "in_features": 2048,
        "bf16_us": bf16, "cuda_us": cuda, "triton_us": triton, **alone,
    }  # fmt: skip


def test_quality():
    lines = passes_tables.quality(PASSES).splitlines()[2:]
    assert lines[0] == "| `turboquant-4+4` | 8.125 | 0.000200 | 0.00100 | +0.01 |"
    first = "| `turboquant-4+4`, the first pass alone | 4.125 | 0.0200 | 0.100 | -1.50 |"
    assert lines[1] == first


def test_offload():
    line, _, memory = passes_tables.offload([offloaded(2048, -0.4)]).splitlines()[2:]
    assert line == "| `turboquant-4+4` | 2,048 | 10.00 | 12.50 | 5.00 | 0% | yes |"
    assert memory == (
        "`turboquant-4+4`: 276 MB are copied at 52.0 GB/s, one large copy has 55.0; of 276 MB on "
        "the GPU 66 are left, two slots of 33."
    )


def test_kernels():
    rows = [timed(1, 16.0, 11.0), timed(1, 16.0, 12.5, 10.0), timed(16, 16.0, 10.0, 14.0)]
    assert passes_tables.kernels(rows).splitlines() == [
        "| weights | tokens | us | x bf16 |",
        "|---|---:|---:|---:|",
        "| `turboquant-4+4` | 1 | 11.0-12.5 | 1.28-1.45 |",
        "| `turboquant-4+4` | 16 | 10.0 | 1.60 |",
        "",
        "Triton takes 0.80 to 1.40 times as long as this kernel. Reading the codes takes 0.44 to "
        "0.50 times as long as this kernel.",
    ]
