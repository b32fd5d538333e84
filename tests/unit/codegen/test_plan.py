"""A plan is the parameter list of its template."""

import dataclasses
import re

import pytest

from hf_vq import paths
from hf_vq.codegen.encode_plan import EncodePlan, RoundPlan, SearchPlan
from hf_vq.codegen.families.dequantize import rotate_plan
from hf_vq.codegen.families.linear import LinearProblem
from hf_vq.codegen.families.linear_wgmma import rotate_int8_plan
from hf_vq.codegen.jit.device import named_arch
from hf_vq.codegen.kv_plan import DecodeKVPlan
from hf_vq.codegen.plan import (
    DecodePlan,
    Diagonal,
    Dtype,
    LinearPlan,
    RotatePlan,
    Scope,
    render,
)
from hf_vq.formats import weight_scheme
from tests.fixtures.codegen.kernel_templates import argument_fields, enumeration, plan_fields

PLAN = DecodePlan(
    threads=256, blocks_per_sm=4, out=Dtype.BFLOAT16, vector_size=8, entry_bits=12,
    num_codebooks=2, scope=Scope.SHARED, tile_rows=0, tile_columns=0, group=128, unit=8,
    pipeline_depth=2, panel_rows=16, integers=False, codebook_in_shared=True,
)  # fmt: skip
LINEAR = LinearPlan(
    threads=512, blocks_per_sm=1, dtype=Dtype.BFLOAT16, vector_size=2, entry_bits=8,
    num_codebooks=1, scope=Scope.SHARED, group=128, fused=1, in_shared=True, integers=False,
    replicas=32, interleaved=2, unit=32, load_bytes=16, split_k_warps=8, row_tiles=1, token_tiles=1,
    pipeline_depth=2, scales_together=True, ragged=False, single=True, rotate=True, prefetch_x=True,
    x_sets=1, cluster_size=1,
)  # fmt: skip
ENCODE = EncodePlan(
    threads=256, blocks_per_sm=2, vector_size=2, entry_bits=8, num_codebooks=1, scope=Scope.SHARED,
    group=128, beam=8, candidates=8, refit=True, lanes=32, slots=2, one_group=True,
)  # fmt: skip
ROUND = RoundPlan(
    threads=128, blocks_per_sm=4, vector_size=2, entry_bits=8, num_codebooks=1, scope=Scope.SHARED,
    beam=8, lanes=8, size=128,
)  # fmt: skip
DECODE_KV = DecodeKVPlan(
    threads=256, blocks_per_sm=4, out=Dtype.BFLOAT16, vector_size=2, entry_bits=8, dim=128,
    slice=64, tokens=1024, pipeline_depth=4, learned=True, scaled=False, zero=False,
)  # fmt: skip
ROTATE = rotate_plan(Dtype.FLOAT32, Dtype.FLOAT16, 64, Diagonal.SIGNS, False)
ROTATE_INT8 = rotate_int8_plan(
    LinearProblem(weight_scheme("vq-4"), 128, 4096, 4096, Dtype.BFLOAT16, named_arch("sm_90a"), 8)
)


def source(name):
    return (paths.kernel_sources() / "cuda" / name).read_text(encoding="utf-8")


def test_every_field_is_rendered_once_under_its_own_name():
    lines = render(PLAN).splitlines()
    assert "  static constexpr int vector_size = 8;" in lines
    assert "  static constexpr Dtype out = Dtype::BFLOAT16;" in lines
    assert "  static constexpr Scope scope = Scope::SHARED;" in lines
    assert "  static constexpr bool codebook_in_shared = true;" in lines
    names = re.findall(r"static constexpr \w+ (\w+) =", render(PLAN))
    assert names == [field.name for field in dataclasses.fields(PLAN)]


@pytest.mark.parametrize("plan", [PLAN, LINEAR, ENCODE, ROUND, DECODE_KV, ROTATE, ROTATE_INT8])
def test_a_template_reads_every_field_and_no_other(plan):
    text = source(f"{plan.template}.cu")
    if isinstance(plan, DecodePlan):
        text += source("linear/codebook.cuh")
    if isinstance(plan, LinearPlan):
        text += source("linear/table.cuh") + source("primitives/hadamard.cuh")
    if isinstance(plan, SearchPlan):
        text += source("encode/nearest.cuh") + source("encode/nearest_e8p.cuh")
    assert plan_fields(text) == {field.name for field in dataclasses.fields(plan)}


@pytest.mark.parametrize("kind", [Dtype, Scope])
def test_enumerations_have_the_same_names_in_the_source(kind):
    names = enumeration(kind.__name__, source("primitives/numbers.cuh"))
    assert names == [member.name for member in kind]


def test_arguments_are_those_of_the_source():
    from hf_vq.backends.cuda.encode import EncodeArguments, RoundArguments
    from hf_vq.backends.cuda.kv.prefill import DecodeKVArguments
    from hf_vq.backends.cuda.linear.arguments import LinearArguments, RotateInt8Arguments
    from hf_vq.backends.cuda.linear.dequantize import DecodeArguments, RotateArguments

    for arguments, file in (
        (DecodeArguments, "linear/dequantize.cu"), (RotateArguments, "linear/rotate.cu"),
        (LinearArguments, "linear/linear.cu"), (EncodeArguments, "encode/encode.cu"),
        (RoundArguments, "encode/round_rows.cu"), (DecodeKVArguments, "kv/dequantize_kv.cu"),
        (RotateInt8Arguments, "linear/rotate_int8.cu"),
    ):  # fmt: skip
        found = [(name, getattr(arguments, name).size) for name, _ in arguments._fields_]
        assert found == argument_fields(source(file))


def test_arguments_of_a_second_pass():
    """They come first, as members of a base do, and only where a plan has one."""
    from hf_vq.backends.cuda.linear.arguments import LinearArguments, grouped_arguments

    assert "struct Arguments : SecondCodes<" in source("linear/linear.cu")
    fields = [name for name, *_ in LinearArguments._fields_]
    assert [name for name, _ in grouped_arguments(1, False)._fields_] == fields
    assert [name for name, _ in grouped_arguments(1, True)._fields_] == ["second", *fields]
    second = grouped_arguments(2, True)._fields_[len(fields) + 1 :]
    assert [name for name, _ in second] == ["second_1", *(f"{name}_1" for name in fields)]


def test_codebook_bytes():
    assert PLAN.codebook_bytes == PLAN.shared_bytes == 2 * 4096 * 8 * 2
    in_l2 = dataclasses.replace(PLAN, codebook_in_shared=False)
    assert (in_l2.codebook_bytes, in_l2.shared_bytes) == (PLAN.codebook_bytes, 0)
    lattice = dataclasses.replace(PLAN, scope=Scope.E8P, entry_bits=16)
    assert lattice.codebook_bytes == 2 * 257 * 8 * 2


def test_tables():
    """Two copies of 256 entries of 128 bytes, or the books of both stages side by side."""
    assert LINEAR.table_bytes == 2 * 256 * 128
    assert dataclasses.replace(LINEAR, interleaved=1).table_bytes == 256 * 128
    assert dataclasses.replace(LINEAR, in_shared=False).table_bytes == 0
    once = dataclasses.replace(LINEAR, vector_size=8, num_codebooks=2, replicas=1, interleaved=2)
    assert once.table_bytes == 2 * 256 * 16
    lattice = dataclasses.replace(
        LINEAR, vector_size=8, entry_bits=16, scope=Scope.E8P, replicas=16
    )
    assert lattice.table_bytes == 2 * 256 * 128  # patterns and flips
    three = dataclasses.replace(lattice, num_codebooks=2, interleaved=4)
    assert three.table_bytes == 4 * 256 * 128  # a place is empty
    assert dataclasses.replace(three, interleaved=1).table_bytes == 3 * 256 * 128
    assert LINEAR.shared_bytes == LINEAR.table_bytes + 2 * 16 * 64
    many = dataclasses.replace(LINEAR, single=False, token_tiles=2)
    assert many.shared_bytes == many.table_bytes + 16 * 1024


@pytest.mark.parametrize("block", [2**i for i in range(11)])
def test_rotation_blocks_are_dealt_to_whole_warps(block):
    plan = rotate_plan(Dtype.FLOAT16, Dtype.FLOAT16, block, Diagonal.SIGNS, False)
    each = 32 if block == 128 else 8  # numbers of a lane (rotate.cu)
    assert plan.blocks_at_a_time * min(32, max(1, block // each)) == plan.threads
    assert block <= RotatePlan.LARGEST_BLOCK
