"""Plans of the kernels for VPTQ's layout: what is chosen can run, compiles, and who has none."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vq import paths
from hf_vq.codegen.__main__ import main
from hf_vq.codegen.families.vptq import (
    MOST_TOKENS,
    VptqProblem,
    best,
    blocks,
    candidates,
    choose,
    cost,
    decode_plan,
    feasible,
    fusable,
    inputs_plan,
    l2_lookups,
    registers,
)
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Dtype
from hf_vq.formats.published import VptqLayout

BOTH = {"norm": True, "perm": True}
LAYOUTS = {  # of 4096 columns
    "v8-k65536-0": VptqLayout(8, 65536, 0, 1, 4096, **BOTH),
    "v8-k65536-256": VptqLayout(8, 65536, 256, 1, 4096, **BOTH, dtype="bfloat16"),
    "v8-k65536-65536": VptqLayout(8, 65536, 65536, 1, 4096, **BOTH),
    "v16-k65536-65536": VptqLayout(16, 65536, 65536, 1, 4096, **BOTH),
    "v12-k65536-4096": VptqLayout(12, 65536, 4096, 1, 4032, 64, 4, 4096, **BOTH),
    "v6-k4096-0": VptqLayout(6, 4096, 0, 1, 4096, **BOTH),
    "v4-k256-0": VptqLayout(4, 256, 0, 1, 4096),
    "odd": VptqLayout(10, 100, 7, 5, 819, 1, 4, 300, perm=True),
}


def problem(layout, tokens=1, rows=4096, dtype=None, arch="sm_90a"):
    return VptqProblem(layout, tokens, rows, dtype or Dtype(layout.dtype), ARCHES[arch])


@st.composite
def problems(draw):
    layout = VptqLayout(
        draw(st.integers(1, 32)), draw(st.integers(2, 65536)), draw(st.integers(2, 65536)),
        draw(st.integers(1, 3)), draw(st.integers(1, 5000)),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
    )  # fmt: skip
    dtype, arch = draw(st.sampled_from(list(Dtype))), draw(st.sampled_from(sorted(ARCHES)))
    return problem(layout, draw(st.sampled_from([8, 16])), draw(st.integers(1, 20000)), dtype, arch)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_chosen_plan_can_run(asked):
    plan = choose(asked)
    if plan is None:
        assert fusable(asked.layout, asked.dtype) or not best(asked)
        return
    assert fusable(asked.layout, asked.dtype) is None and feasible(plan, asked) is None
    # What the kernel relies on.
    assert asked.layout.group_size % plan.unit == 0 and plan.vector_size % 2 == 0
    assert plan.dtype.size == plan.out.size == 2
    assert plan.blocks_per_sm * (plan.shared_bytes + 1024) <= asked.arch.shared_per_sm
    assert plan.blocks_per_sm * plan.threads * registers(plan) <= asked.arch.registers_per_sm
    assert blocks(plan, asked.rows) * plan.row_vectors * plan.vector_size >= asked.rows
    assert plan.wide == (asked.tokens > 8)
    assert cost(plan, asked).cycles > 0


def test_every_candidate_says_whether_it_can_run():
    asked = problem(LAYOUTS["v8-k65536-256"], 16)
    reasons = {feasible(plan, asked) for plan in candidates(asked)}
    assert None in reasons and len(reasons) > 2


def test_where_codebooks_are():
    small, large = (choose(problem(LAYOUTS[name])) for name in ("v4-k256-0", "v8-k65536-256"))
    assert small.book_in_shared and not large.book_in_shared and large.rest_in_shared
    assert l2_lookups(small, problem(LAYOUTS["v4-k256-0"])) == 0
    assert l2_lookups(large, problem(LAYOUTS["v8-k65536-256"])) == 4096 * 4096 / 8
    apart = choose(problem(LAYOUTS["odd"]))
    assert not apart.book_in_shared and not apart.rest_in_shared


def test_who_has_none():
    usual = LAYOUTS["v8-k65536-0"]
    assert choose(problem(usual, MOST_TOKENS + 1)) is None
    for layout, dtype, reason in (
        (usual, Dtype.FLOAT32, "16 bits, x has 32"),
        (dataclasses.replace(usual, dtype="float32"), Dtype.FLOAT16, "codebooks have 32"),
        (dataclasses.replace(usual, dtype="bfloat16"), Dtype.FLOAT16, "three of its bits"),
        (dataclasses.replace(usual, vector=7), Dtype.FLOAT16, "odd number of rows"),
        (dataclasses.replace(usual, vector=64), Dtype.FLOAT16, "more than 32"),
    ):
        assert reason in fusable(layout, dtype)
        assert choose(problem(layout, dtype=dtype)) is None


def test_columns_of_a_thread():
    for layout in LAYOUTS.values():
        plan = decode_plan(layout, 4096, Dtype.FLOAT16)
        assert plan.each == (1 if layout.vector > 16 else 2)
    assert decode_plan(LAYOUTS["v4-k256-0"], 4095, Dtype.FLOAT16).each == 1


def source(name):
    return (paths.kernel_sources() / "cuda" / name).read_text(encoding="utf-8")


def test_templates_read_every_field_and_no_other():
    plan = choose(problem(LAYOUTS["v8-k65536-256"]))
    shared = source("vptq/vptq.cuh")
    for one, text in (
        (plan, source("vptq/vptq.cu") + shared),
        (inputs_plan(plan, LAYOUTS["v8-k65536-256"]), source("vptq/vptq_inputs.cu")),
        (
            decode_plan(LAYOUTS["odd"], 4096, Dtype.FLOAT16),
            source("vptq/vptq_dequantize.cu") + shared,
        ),
    ):
        read = set(re.findall(r"Plan::(\w+)", text))
        assert read == {field.name for field in dataclasses.fields(one)}, one.template


def test_arguments_are_those_of_the_source():
    from hf_vq.backends.cuda import vptq as cuda_vptq

    for arguments, file in (
        (cuda_vptq.VptqArguments, "vptq/vptq.cu"),
        (cuda_vptq.VptqInputsArguments, "vptq/vptq_inputs.cu"),
        (cuda_vptq.VptqDecodeArguments, "vptq/vptq_dequantize.cu"),
    ):
        body = re.search(r"struct Arguments {\n(.*?)};", source(file), re.DOTALL)[1]
        fields = re.findall(r"^ *([\w \*]+?)(\w+);", body, re.MULTILINE)
        expected = [(name, 8 if "*" in kind else 4) for kind, name in fields]
        found = [(name, getattr(arguments, name).size) for name, _ in arguments._fields_]
        assert found == expected


def test_explain_shows_the_plan_and_what_binds_it(capsys):
    assert main(["explain", "vptq", "v8-k65536-256", "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "lookups in L2 take 1.48 of the time of reading" in shown
    assert "chosen: VptqPlan" in shown
    assert main(["explain", "vptq", "v8-k65536-256", "--m", "17"]) == 2
    assert main(["explain", "vptq", "v7-k16-0"]) == 2
    assert main(["explain", "vptq", "2x8"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(bool(compiler.why_not()), reason="NVRTC is missing")
@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_compile_without_local_memory(arch):
    """Beside those of `compile`: outliers, bfloat16, residuals in L2; many on one target."""
    names = LAYOUTS if arch == "sm_90a" else ["v12-k65536-4096", "v4-k256-0"]
    for name in names:
        layout, plans = LAYOUTS[name], []
        for tokens in (8, 16):
            plan = choose(problem(layout, tokens, arch=arch))
            plans += [plan, inputs_plan(plan, layout)]
        plans.append(decode_plan(layout, 4096, Dtype(layout.dtype)))
        plans.append(decode_plan(layout, 4095, Dtype.FLOAT32))
        for plan in plans:
            image, found = compiler.compile_plan(plan, arch)
            assert image.startswith(b"\x7fELF")
            assert (found.stack, found.spilled) == (0, 0), plan
            assert 0 < found.registers * plan.threads * plan.blocks_per_sm <= 65536, plan
