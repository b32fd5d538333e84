"""Plans of the kernels around attention over decoded keys and values."""

import pytest

from hf_vq.codegen.families.kv_prefill import blocks, decodable_kv, decode_kv_plan, merge_plan
from hf_vq.codegen.jit.compiler import compile_plan, why_not
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import VQScheme
from hf_vq.formats.catalog import KV_SCHEMES

ALL = {part for kv in KV_SCHEMES.values() for part in (kv.key, kv.value)}
PARTS = sorted(part.spec() for part in ALL)
HEADS = (64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("spec", PARTS)
def test_the_plan_fits(spec, head_dim):
    scheme = VQScheme.parse(spec)
    assert decodable_kv(scheme, head_dim) is None
    plan = decode_kv_plan(scheme, head_dim, Dtype.BFLOAT16)
    assert plan.shared_bytes <= 48 << 10 and plan.shared_bytes % 4 == 0
    # What the kernel relies on.
    assert head_dim % plan.slice == 0 and plan.slice % 8 == 0 and plan.slice % plan.vector_size == 0
    assert plan.slice // 8 <= plan.threads and plan.entry_bits % plan.vector_size == 0
    tables = plan.slice // plan.vector_size if plan.learned else 1
    assert plan.shared_bytes == tables * scheme.entries * scheme.vector_size * 2


@pytest.mark.parametrize(
    ("spec", "head_dim", "reason"),
    [
        ("vq2x8r1-universal-g0-hadamard0", 100, "whole bytes"),
        ("vq4x6r1-tile256x256-g0-none", 128, "codebook for all rows"),
        ("vq2x8r2-universal-g0-hadamard0", 128, "one stage"),
        ("vq2x8r1-universal-g32-hadamard0", 128, "several scales"),
        ("vq2x5r1-channel_group-g0-none", 128, "whole bytes"),
        ("vq2x14r1-channel_group-g0-none", 128, "shared memory"),
    ],
)
def test_what_is_not_decoded_by_it(spec, head_dim, reason):
    assert reason in decodable_kv(VQScheme.parse(spec), head_dim)


def test_every_token_has_a_block():
    plan = decode_kv_plan(KV_SCHEMES["cq-4"].key, 128, Dtype.FLOAT16)
    slices = 128 // plan.slice
    assert slices == 2
    for tokens in (1, plan.tokens, plan.tokens + 1):
        assert blocks(plan, 6, tokens) == 6 * slices * -(-tokens // plan.tokens)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("arch", ARCHES)
def test_it_compiles(arch):
    for spec in PARTS:
        plan = decode_kv_plan(VQScheme.parse(spec), 128, Dtype.BFLOAT16)
        check(plan, arch)
    for head_dim in HEADS:
        plan = merge_plan(KV_SCHEMES["u4"].value, head_dim, Dtype.FLOAT16)
        assert plan.block == 1 or (head_dim % plan.block == 0 and plan.block >= 8)
        check(plan, arch)


def check(plan, arch):
    _, found = compile_plan(plan, arch)
    assert (found.stack, found.spilled) == (0, 0)
    assert found.registers * plan.threads * plan.blocks_per_sm <= 65536
