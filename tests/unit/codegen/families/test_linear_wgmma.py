"""Plans of the fused kernel for many tokens: what is chosen can run, and who has none."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vq.codegen.families.linear import LinearProblem
from hf_vq.codegen.families.linear_wgmma import (
    FEWEST_INT8_TOKENS,
    MOST_TOKENS,
    best,
    blocks,
    candidates,
    choose,
    clusters,
    feasible,
    fewest_tokens,
    rotate_int8_plan,
    spare_registers,
    token_bucket,
    wide,
)
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme

SCHEMES = ("vq-4", "turboquant-4", "vq-3", "vq-2", "quip-sharp-2", "quip-sharp-4", "aqlm-2")


def problem(scheme, tokens=128, rows=4096, columns=4096, arch="sm_90a", bits=16):
    return LinearProblem(scheme, tokens, rows, columns, Dtype.BFLOAT16, ARCHES[arch], bits)


@st.composite
def problems(draw):
    scheme = VQScheme(
        draw(st.sampled_from([1, 2, 4, 8, 16])),
        draw(st.integers(1, 16)),
        draw(st.integers(1, 4)),
        "tensor",
        scale_group=draw(st.sampled_from([0, 32, 128, 256])),
        rotation=draw(st.sampled_from(["none", "random_hadamard"])),
    )
    columns = 64 * draw(st.integers(1, 180))
    tokens, bits = token_bucket(draw(st.integers(33, 9000))), draw(st.sampled_from([16, 8]))
    return problem(scheme, tokens, draw(st.integers(1, 20000)), columns, bits=bits)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_the_chosen_plan_can_run(asked):
    plan = choose(asked)
    if plan is None:
        bits = asked.activations_bits
        many = bits == 16 and asked.tokens > MOST_TOKENS
        assert many or wide(asked.scheme, asked.in_features, asked.arch, bits) or not best(asked)
        return
    assert feasible(plan, asked) is None and spare_registers(plan, asked.arch) >= 0
    # What the kernel relies on.
    assert plan.unit % 16 == 0 and asked.in_features % (4 * plan.unit) == 0
    assert plan.unit % (plan.vector_size * plan.fused) == 0
    assert plan.unit // plan.vector_size * plan.entry_bits % (8 * plan.load_bytes) == 0
    assert plan.load_bytes in (4, 8, 16)
    assert plan.group == 0 or plan.group % (4 * plan.unit) == 0
    assert plan.threads % 128 == 0 and plan.warpgroups >= 2
    int8 = plan.activations_bits == 8
    assert plan.pipeline_depth * plan.unit // (32 if int8 else 16) % 2 == 0
    assert plan.activations_bits == asked.activations_bits and plan.out is asked.dtype
    assert plan.dtype is (Dtype.FLOAT16 if int8 else asked.dtype)
    assert plan.slot_bytes % 1024 == 0  # whole groups of eight tokens
    assert plan.blocks_per_sm * (plan.shared_bytes + 1024) <= asked.arch.shared_per_sm
    assert plan.x_stages * plan.slot_bytes + plan.table_bytes <= plan.shared_bytes
    count = blocks(plan, asked.rows, asked.tokens, asked.arch)
    assert count >= 1 and count % plan.cluster_size == 0


@pytest.mark.parametrize("name", SCHEMES)
def test_the_catalogue_has_plans(name):
    for tokens in (33, 64, 100, 256, 1000, MOST_TOKENS):
        for rows, columns in ((4096, 4096), (14336, 4096), (4096, 14336), (11008, 4096), (1, 256)):
            assert choose(problem(WEIGHT_SCHEMES[name], tokens, rows, columns)), (tokens, rows)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_catalogue_has_plans_of_int8(name):
    scheme = WEIGHT_SCHEMES[name]
    for tokens in (FEWEST_INT8_TOKENS, 128, MOST_TOKENS, 1 << 17):
        for rows, columns in ((4096, 4096), (14336, 4096), (4096, 14336), (1, 256), (7, 28672)):
            asked = problem(scheme, token_bucket(tokens), rows, columns, bits=8)
            assert choose(asked), (tokens, rows, columns)
            rounding = rotate_int8_plan(asked)
            assert rounding.threads % 32 == 0 and 32 <= rounding.threads <= 1024
            assert columns <= 32 * rounding.threads  # four threads have 128 columns
            warps = rounding.threads // 32
            of_rows = rounding.blocks(tokens, rows) - tokens
            assert (of_rows - 1) * warps * rounding.rows_of_warp < rows
            assert rows <= of_rows * warps * rounding.rows_of_warp


def test_who_has_no_int8():
    hopper = ARCHES["sm_90a"]
    assert "wgmma" in wide(WEIGHT_SCHEMES["vq-4"], 4096, ARCHES["sm_100"], 8)
    assert "128 columns" in wide(WEIGHT_SCHEMES["aqlm-3"], 4096, hopper, 8)
    assert "128 columns" in wide(VQScheme.parse("vq2x8r1-tensor-g64-none"), 4096, hopper, 8)
    blocks_of_256 = VQScheme.parse("vq2x8r1-universal-g128-random_hadamard256")
    assert "rotated by 256" in wide(blocks_of_256, 4096, hopper, 8)
    assert "block of threads" in wide(WEIGHT_SCHEMES["vq-4"], (1 << 15) + 128, hopper, 8)


@pytest.mark.parametrize("tokens", [64, 128, 1024])
def test_lanes_do_not_meet_in_tables(tokens):
    """Three books have their copies too, one after the other."""
    for name in SCHEMES:
        plan = choose(problem(WEIGHT_SCHEMES[name], tokens))
        assert plan.replicas * plan.entry_bytes == 128, name
    plan = choose(problem(WEIGHT_SCHEMES["quip-sharp-4"], tokens))
    assert (plan.interleaved, plan.table_bytes) == (1, 3 * 256 * 128)


def test_lattices_of_two_stages_begin_with_fewer_tokens():
    fewest = {name: fewest_tokens(WEIGHT_SCHEMES[name]) for name in SCHEMES}
    assert fewest.pop("quip-sharp-4") == 17 and set(fewest.values()) == {33}


def test_who_has_none():
    vq = WEIGHT_SCHEMES["vq-4"]
    for name in ("sm_80", "sm_89", "sm_100"):
        assert "wgmma" in wide(vq, 4096, ARCHES[name])
        assert choose(problem(vq, arch=name)) is None
    hopper = ARCHES["sm_90a"]
    assert wide(vq, 4096, hopper) is None
    assert choose(problem(vq, MOST_TOKENS + 1)) is None
    assert "tile" in wide(WEIGHT_SCHEMES["gptvq-2"], 4096, hopper)
    assert "second pass" in wide(WEIGHT_SCHEMES["turboquant-4+4"], 4096, hopper)
    assert "shared memory" in wide(VQScheme.parse("vq8x16r1-tensor-g0-none"), 4096, hopper)
    assert "64 columns" in wide(VQScheme.parse("vq2x8r1-tensor-g0-none"), 1160, hopper)


def test_few_kernels_serve_all_tokens():
    """A plan is compiled where it is first met: buckets keep their number small."""
    buckets = {token_bucket(tokens) for tokens in range(33, MOST_TOKENS + 1)}
    assert all(token_bucket(tokens) >= tokens for tokens in (33, 64, 65, 1000))
    assert all(token_bucket(bucket) == bucket for bucket in buckets) and len(buckets) < 20
    scheme = WEIGHT_SCHEMES["vq-4"]
    assert len({choose(problem(scheme, bucket)) for bucket in buckets}) <= 12


def test_every_candidate_says_whether_it_can_run():
    asked = problem(WEIGHT_SCHEMES["quip-sharp-4"])  # tables of 128 KB
    reasons = {feasible(plan, asked) for plan in candidates(asked)}
    assert None in reasons and len(reasons) > 1


@pytest.mark.parametrize(
    "spec", ["vq4x5r1-universal-g0-random_hadamard128", "vq2x8r1-universal-g128-random_hadamard4"]
)
def test_a_rotation_without_an_order_is_refused(spec):
    assert "have no order" in wide(VQScheme.parse(spec), 4096, ARCHES["sm_90a"])


def test_a_slice_of_a_gpu_holds_no_large_clusters():
    arch = replace(ARCHES["sm_90a"], sms=16)
    plan = choose(replace(problem(WEIGHT_SCHEMES["vq-4"]), arch=arch))
    assert plan is None or clusters(plan, arch) > 0
