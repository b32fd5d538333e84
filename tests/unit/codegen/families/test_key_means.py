"""Plans of the kernels by which a prompt decides how its keys are coded."""

import re

import pytest

from hf_vq import paths
from hf_vq.codegen.families.key_means import (
    key_means_plan,
    key_smoothing_plan,
    measurable,
    smoothable,
    split,
)
from hf_vq.codegen.jit.compiler import compile_plan, why_not
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Dtype
from hf_vq.ops.reference.codes import LARGEST_IN_MEAN
from hf_vq.ops.rotary_mean import _FEWEST as FEWEST
from hf_vq.ops.rotary_mean import DIFFERENT, FAR, LITTLE, NOISE, SMALLEST_SHARE, TIE
from hf_vq.transforms.key_smoothing import _LEAST as LEAST
from hf_vq.transforms.key_smoothing import MOST, WORTH

CONSTANTS = {
    "kv/turning_pairs.cuh": {
        "smallest_share": SMALLEST_SHARE, "tie": TIE, "noise": NOISE, "little": LITTLE,
        "far": FAR, "different": DIFFERENT, "largest_in_mean": LARGEST_IN_MEAN,
    },
    "kv/key_means.cu": {"fewest": FEWEST},
    "kv/key_smoothing.cu": {"worth": WORTH, "highest": MOST, "least": LEAST},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("make", [key_means_plan, key_smoothing_plan])
def test_it_compiles(make, arch):
    for dtype in Dtype:
        plan = make(dtype)
        _, found = compile_plan(plan, arch)
        assert (found.stack, found.spilled) == (0, 0), plan
        assert found.shared <= 48 << 10
        assert found.registers * plan.threads * plan.blocks_per_sm <= 65536


@pytest.mark.parametrize("file", CONSTANTS)
def test_what_decides_is_that_of_the_reference(file):
    text = (paths.kernel_sources() / "cuda" / file).read_text(encoding="utf-8")
    found = dict(re.findall(r"\b(\w+) = ([\d.]+)f?[,;]", text))
    assert {name: float(found[name]) for name in CONSTANTS[file]} == CONSTANTS[file]


def test_heads_that_have_no_kernel():
    assert measurable(256) is None and measurable(1) is None and "257" in measurable(257)
    assert smoothable(80) is None and "100" in smoothable(100) and "264" in smoothable(264)


@pytest.mark.parametrize("tokens", [1, 64, 65, 4096, 4097, 131_072])
def test_blocks_have_all_tokens(tokens):
    parts, each = split(tokens)
    assert (parts - 1) * each < tokens <= parts * each and parts <= 64
