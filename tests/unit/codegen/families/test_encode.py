"""Lanes and slots of the encode kernel own every vector once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vq.codegen.families import encode as choose_encode
from hf_vq.codegen.families.encode import encodable, encode_plan, round_plan, roundable
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Scope
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme, weight_scheme
from hf_vq.ops.reference import encode_weight


@st.composite
def schemes(draw):
    x = draw(st.sampled_from([1, 2, 4, 8, 16]))
    group = draw(st.sampled_from([0, 16, 32, 64, 128, 256, 1024]))
    bits = draw(st.integers(1, 16))
    return VQScheme(x, bits, draw(st.integers(1, 2)), "tensor", scale_group=group, rotation="none")


@settings(max_examples=200, deadline=None)
@given(schemes(), st.integers(1, 900))
def test_a_warp_has_whole_groups_or_whole_turns_of_one(scheme, blocks):
    columns = 16 * blocks
    if encodable(scheme, columns, ARCHES["sm_90a"]):
        return
    plan = encode_plan(scheme, columns, 8, True)
    vectors = (plan.group or columns) // scheme.vector_size
    if plan.one_group and plan.lanes == 32:
        assert plan.groups_of_warp == 1 and vectors % (32 * plan.slots) == 0
    else:  # then a group is in one slot
        assert vectors == plan.lanes and 32 % plan.lanes == 0
        assert plan.groups_of_warp == 32 // plan.lanes * plan.slots
    assert columns % (plan.group or columns) == 0
    assert columns // scheme.vector_size * scheme.entry_bits % 8 == 0  # rows follow each other
    assert plan.num_codebooks == 1 or columns // scheme.vector_size % 32 == 0
    assert plan.shared_bytes <= ARCHES["sm_90a"].shared_per_block


@pytest.mark.parametrize("columns", [4096, 14336, 11008, 1152])
@pytest.mark.parametrize(
    "name", [n for n, s in WEIGHT_SCHEMES.items() if s.codebook == "universal"]
)
def test_every_universal_scheme_is_encoded_on_every_gpu(name, columns):
    scheme = weight_scheme(name)
    assert all(encodable(scheme, columns, arch) is None for arch in ARCHES.values())
    plan = encode_plan(scheme, columns, 8, True)
    assert (plan.scope is Scope.E8P) == (scheme.lattice is not None)
    assert plan.num_codebooks == scheme.streams and plan.group == 128


@pytest.mark.parametrize("size", [32, 128, 4096])
@pytest.mark.parametrize(
    "name", [n for n, s in WEIGHT_SCHEMES.items() if s.codebook == "universal"]
)
def test_every_universal_scheme_is_rounded_on_every_gpu(name, size):
    scheme = weight_scheme(name)
    assert all(roundable(scheme, size, arch) is None for arch in ARCHES.values())
    plan = round_plan(scheme, size)
    assert plan.threads % 32 == 0 and 32 % plan.lanes == 0


def test_rows_and_codebooks_fit_in_shared_memory():
    vq4 = weight_scheme("vq-4")
    assert round_plan(vq4, 128).shared_bytes == 256 * 3 * 4 + 16 * 136 * 4
    assert round_plan(vq4, 4096).shared_bytes == 256 * 3 * 4 + 4 * 4104 * 4


def test_the_kernel_follows_as_many_as_the_specification():
    assert choose_encode.BEAM == encode_weight.BEAM


@pytest.mark.parametrize(
    ("scheme", "columns", "reason"),
    [
        (WEIGHT_SCHEMES["gptvq-2"], 4096, "per tile"),
        (WEIGHT_SCHEMES["aqlm-3"], 4096, "shared memory"),
        (VQScheme(2, 4, 3, "tensor", scale_group=0), 4096, "3 stages"),
        (VQScheme(8, 8, 2, "tensor", scale_group=128), 128, "16 codes of a stage"),
        (VQScheme(32, 4, 1, "tensor", scale_group=0), 4096, "32 weights"),
        (VQScheme(2, 8, 1, "tensor", scale_group=0, rotation="none"), 288, "144 vectors"),
        (VQScheme(2, 5, 1, "tensor", scale_group=0, rotation="none"), 8, "whole bytes"),
        (VQScheme(8, 16, 1, "tensor", scale_group=0, rotation="none"), 4096, "shared memory"),
    ],
)
def test_what_is_not_encoded_says_why(scheme, columns, reason):
    assert reason in encodable(scheme, columns, ARCHES["sm_90a"])


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [("gptvq-2", 128, "per tile"), ("quip-sharp-2", 20, "whole vectors"),
     ("vq-4", 16384, "shared memory"), ("aqlm-3", 128, "shared memory")],
)  # fmt: skip
def test_what_is_not_rounded_says_why(name, size, reason):
    assert reason in roundable(weight_scheme(name), size, ARCHES["sm_90a"])
