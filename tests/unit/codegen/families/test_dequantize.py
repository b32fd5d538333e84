"""The four pure functions: what is chosen can run, costs least, and the model has sense."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vq.codegen.families.dequantize import (
    DecodeProblem,
    candidates,
    choose,
    cost,
    decodable,
    feasible,
    panels,
    rotatable,
)
from hf_vq.codegen.jit import device
from hf_vq.codegen.jit.device import ARCHES, device_arch, named_arch
from hf_vq.codegen.plan import Dtype, Scope
from hf_vq.errors import VQBackendError
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme


def problem(scheme, rows=4096, in_features=4096, out=Dtype.FLOAT16, arch="sm_90a"):
    return DecodeProblem(scheme, rows, in_features, out, ARCHES[arch])


@st.composite
def problems(draw):
    x = draw(st.sampled_from([1, 2, 4, 8, 16]))
    kind = draw(st.sampled_from(["tensor", "tile"]))
    scheme = VQScheme(
        x,
        draw(st.integers(1, 16)),
        1 if kind == "tile" else draw(st.integers(1, 4)),
        kind,
        tile=(draw(st.integers(1, 300)), x * draw(st.integers(1, 40))),
        scale_group=draw(st.sampled_from([0, 16, 128])),
        rotation="none",
    )
    columns = 16 * draw(st.integers(1, 700)) if scheme.scale_group else x * draw(st.integers(1, 99))
    rows = draw(st.integers(1, 20000))
    return problem(
        scheme, rows, columns, draw(st.sampled_from(Dtype)), draw(st.sampled_from(sorted(ARCHES)))
    )


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_chosen_plan_can_run_and_none_costs_less(asked):
    chosen = choose(asked)
    assert feasible(chosen, asked) is None
    able = [plan for plan in candidates(asked) if feasible(plan, asked) is None]
    assert cost(chosen, asked).cycles == min(cost(plan, asked).cycles for plan in able)
    # What the kernel relies on.
    assert asked.in_features % chosen.unit == 0 and chosen.unit % chosen.vector_size == 0
    assert chosen.tile_rows % chosen.panel_rows == 0 and chosen.tile_columns % chosen.unit == 0
    assert chosen.group % chosen.unit == 0
    assert chosen.shared_bytes <= asked.arch.shared_per_block
    assert chosen.threads * chosen.blocks_per_sm <= asked.arch.threads_per_sm
    assert 0 < panels(chosen, asked.rows, asked.in_features) < 1 << 31
    # A block has work for more than half of its threads.
    width = min(chosen.tile_columns or asked.in_features, asked.in_features)
    units = min(chosen.panel_rows, asked.rows) * width // chosen.unit
    assert chosen.threads == 128 or units > chosen.threads // 2


@settings(max_examples=60, deadline=None)
@given(problems())
def test_bytes_are_at_least_what_must_move_and_grow_with_the_problem(asked):
    plan = choose(asked)
    least = asked.rows * asked.in_features * asked.out.size
    twice = dataclasses.replace(asked, rows=2 * asked.rows)
    assert least < cost(plan, asked).bytes < cost(plan, twice).bytes
    assert 0 < cost(plan, asked).cycles <= cost(plan, twice).cycles * 1.0001


def test_bytes_are_exact():
    asked = problem(WEIGHT_SCHEMES["vq-4"], 4096, 4096)
    weights = 4096 * 4096
    assert cost(choose(asked), asked).bytes == weights * 2 + weights // 2 + weights // 64 + 1024


@pytest.mark.parametrize("name", [n for n in WEIGHT_SCHEMES if not decodable(WEIGHT_SCHEMES[n])])
@pytest.mark.parametrize("arch", ARCHES)
def test_every_scheme_has_a_plan_on_every_gpu(name, arch):
    asked = problem(WEIGHT_SCHEMES[name], arch=arch)
    plan = choose(asked)
    assert plan.unit * plan.out.size == 16  # one store of 16 bytes
    if plan.codebook_bytes < 32768:
        assert plan.codebook_in_shared
    assert (plan.scope is Scope.E8P) == (WEIGHT_SCHEMES[name].lattice is not None)


def test_a_codebook_that_does_not_fit_is_read_from_l2():
    large = VQScheme(8, 16, codebook="tensor", scale_group=0, rotation="none")
    assert not choose(problem(large)).codebook_in_shared
    aqlm = WEIGHT_SCHEMES["aqlm-3"]  # 128 KB
    assert choose(problem(aqlm, arch="sm_90a")).codebook_in_shared
    assert not choose(problem(aqlm, arch="sm_86")).codebook_in_shared


def test_a_model_that_sees_what_hurts():
    asked = problem(WEIGHT_SCHEMES["aqlm-2"])
    plan = choose(asked)
    in_l2 = dataclasses.replace(plan, codebook_in_shared=False)
    assert cost(in_l2, asked).cycles > cost(plan, asked).cycles
    strided = dataclasses.replace(plan, unit=16)
    assert cost(strided, asked).cycles > cost(plan, asked).cycles
    one_block = dataclasses.replace(plan, panel_rows=4096)
    assert cost(one_block, asked).cycles > 50 * cost(plan, asked).cycles


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (WEIGHT_SCHEMES["turboquant-4+4"], "nested stages have a second pass"),
        (VQScheme(2, 4, codebook="channel_group", scale_group=0), "channel group"),
        (VQScheme(32, 4, codebook="tensor"), "32 weights"),
        (VQScheme(2, 4, 5, codebook="tensor"), "5 stages"),
    ],
)
def test_what_has_no_plan_says_why(scheme, reason):
    assert reason in decodable(scheme)
    with pytest.raises(VQBackendError, match=reason):
        choose(problem(scheme))


def test_rotations():
    assert rotatable(WEIGHT_SCHEMES["vq-4"], 4096) is None
    assert rotatable(VQScheme(2, 8, rotation="none"), 4096) is None
    assert rotatable(VQScheme(2, 8, rotation_block=0), 3 * 1024) is None
    assert "2048" in rotatable(VQScheme(2, 8, rotation_block=0), 2048)
    assert "QR" in rotatable(VQScheme(2, 8, rotation="qr"), 4096)


def test_a_driver_that_does_not_know_the_memory(monkeypatch):
    """As those of GPUs that share the processor's memory."""
    known = dict(MULTIPROCESSOR_COUNT=20, CLOCK_RATE=1_500_000, COMPUTE_CAPABILITY_MAJOR=11)
    monkeypatch.setattr(device, "driver_attribute", lambda name, ordinal: known.get(name, 0))
    found = device_arch.__wrapped__(0)
    assert found.name == "sm_110" and 0 < found.dram_bytes_per_clock < 5


def test_unknown_architecture():
    with pytest.raises(VQBackendError, match=r"unknown architecture 'sm_1'; known: sm_80"):
        named_arch("sm_1")
