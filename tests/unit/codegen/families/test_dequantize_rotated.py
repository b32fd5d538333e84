"""Which rows are decoded and rotated back by one kernel, and with what plan."""

import pytest

from hf_vq.codegen.families.dequantize import DecodeProblem
from hf_vq.codegen.families.dequantize_rotated import blocks, dense_plan, restorable
from hf_vq.codegen.jit.compiler import compile_plan, why_not
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme, weight_scheme

ROTATED_BACK = ("vq-4", "vq-3", "vq-2", "turboquant-1", "turboquant-8", "quip-sharp-2",
                "quip-sharp-4", "aqlm-2", "aqlm-2-int7", "turboquant-4+4", "turboquant-4+2",
                "turboquant-3+1")  # fmt: skip


def plan_of(scheme, arch="sm_90a", columns=4096):
    return dense_plan(DecodeProblem(scheme, 0, columns, Dtype.BFLOAT16, ARCHES[arch]))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ROTATED_BACK)
def test_the_plan_fits(name, arch):
    for columns in (4096, 14336, 1152):
        scheme = WEIGHT_SCHEMES[name]
        assert restorable(scheme, columns, Dtype.FLOAT16) is None
        plan = plan_of(scheme, arch, columns)
        most = ARCHES[arch].shared_per_sm
        assert plan.blocks_per_sm * (plan.shared_bytes + 1024) <= most
        assert plan.blocks_per_sm * plan.threads <= ARCHES[arch].threads_per_sm
        # What the kernel relies on.
        assert plan.unit == 32 and plan.group % 128 == 0 and plan.block in (1, 128)
        assert plan.unit % (plan.vector_size * plan.fused) == 0
        assert plan.unit // plan.vector_size * plan.entry_bits % (8 * plan.load_bytes) == 0
        assert plan.load_bytes in (4, 8, 16)


@pytest.mark.parametrize(
    ("spec", "columns", "reason"),
    [
        ("vq2x8r1-universal-g128-random_hadamard256", 4096, "256 weights"),
        ("vq2x8r1-universal-g128-qr128", 4096, "QR"),
        ("vq2x8r1-universal-g64-random_hadamard128", 4096, "one scale"),
        ("vq2x8r1-tensor-g0-none", 1160, "one scale"),
        ("vq8x16r1-tensor-g0-none", 4096, "shared memory"),
        ("vq4x12r4-tensor-g128-random_hadamard128", 4096, "shared memory"),
        ("vq8x12r1-tensor-g0-none", 4096, "whole words"),
        ("vq4x8r1-tile256x256-g0-none", 4096, "tile"),
        ("vq1x4r2-universal-g128-random_hadamard128-rerotated", 4096, "second pass"),
    ],
)
def test_what_is_not_rotated_back_by_it(spec, columns, reason):
    assert reason in restorable(VQScheme.parse(spec), columns, Dtype.BFLOAT16)


def test_float32_is_not():
    assert "float32" in restorable(WEIGHT_SCHEMES["vq-4"], 4096, Dtype.FLOAT32)


@pytest.mark.parametrize("rows", [1, 16, 4096, 100_000])
@pytest.mark.parametrize("columns", [128, 4096, 14336, 1 << 20])
def test_every_column_has_a_warp(rows, columns):
    plan = plan_of(WEIGHT_SCHEMES["vq-4"])
    count = blocks(plan, rows, columns, ARCHES["sm_90a"])
    warps, across = count * plan.threads // 32, columns // 128
    assert warps // across >= 1
    assert count <= max(264, across)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason="needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize(
    "spec",
    [
        "vq2x8r1-universal-g256-random_hadamard32",
        "vq4x8r2-tensor-g0-hadamard4",
        "vq8x8r4-tensor-g128-random_hadamard8",
        "vq1x2r4-tensor-g128-hadamard16",
        "vq4x4r4-tensor-int7-g0-hadamard128",
        "vq1x4r2-universal-g128-random_hadamard128-nested",
        "vq1x4+2r2-universal-g0-none-nested",
        "vq1x3+1r2-universal-g256-hadamard64-nested",
    ],
)
def test_odd_schemes_compile(spec, arch):
    scheme = weight_scheme(spec)
    assert restorable(scheme, 4096, Dtype.BFLOAT16) is None
    plan = plan_of(scheme, arch)
    _, found = compile_plan(plan, arch)
    assert (found.stack, found.spilled, found.shared) == (0, 0, 0)
    assert found.registers * plan.threads * plan.blocks_per_sm <= 65536
