"""Kernels of the benchmarks: a plan is the parameter list of its template, which is compiled."""

import dataclasses

import pytest

from benchmarks.paper_vq_llm.linear import VqLlmArguments
from benchmarks.paper_vq_llm.plan import Fusion, base_plan
from benchmarks.roofline.cuda import PLANS, ReadArguments
from hf_vq.codegen.jit import compiler
from hf_vq.formats import WEIGHT_SCHEMES
from tests.fixtures.codegen.kernel_templates import argument_fields, enumeration, plan_fields

PAPER = base_plan(WEIGHT_SCHEMES["aqlm-2"], 4096, 1)
KERNELS = [(PLANS[0], ReadArguments), (PAPER, VqLlmArguments)]


@pytest.mark.parametrize(("plan", "arguments"), KERNELS)
def test_a_template_reads_every_field_and_no_other(plan, arguments):
    text = compiler.template(plan)
    assert plan_fields(text) == {field.name for field in dataclasses.fields(plan)}
    found = [(name, getattr(arguments, name).size) for name, _ in arguments._fields_]
    assert found == argument_fields(text)


def test_fusions_have_the_same_names_in_the_source():
    names = enumeration("Fusion", compiler.template(PAPER))
    assert names == [member.name for member in Fusion]


def test_templates_need_no_header_of_cuda():
    for plan, _ in KERNELS:
        assert "#include <" not in compiler.template(plan)


@pytest.mark.parametrize("plan", [plan for plan, _ in KERNELS])
def test_a_template_that_changes_is_compiled_anew(plan, tmp_path, monkeypatch):
    """Its text is part of the key under which machine code is kept."""
    if compiler.why_not():
        pytest.skip(compiler.why_not())
    before = compiler.key(plan, "sm_90a")
    (tmp_path / f"{plan.template}.cu").write_text(compiler.template(plan) + "\n")
    monkeypatch.setattr(type(plan), "template_folder", tmp_path)
    assert compiler.key(plan, "sm_90a") != before


@pytest.mark.parametrize("plan", [plan for plan, _ in KERNELS])
def test_a_template_compiles(plan):
    if compiler.why_not():
        pytest.skip(compiler.why_not())
    image, found = compiler.compile_plan(plan, "sm_90a")
    assert image.startswith(b"\x7fELF") and found.spilled == 0
