"""Plans of attention over coded caches: what is chosen can run, on every architecture."""

import dataclasses

import pytest

from hf_vq.codegen.__main__ import main
from hf_vq.codegen.attention_plan import Mask
from hf_vq.codegen.families.kv_attention import SHORT, attendable, choose, misfit, splits
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import KV_SCHEMES
from tests.fixtures.codegen.compiled_attention import compiles, needs_compiler, problem

UNIVERSAL = ["u4", "u3", "u2", "k4v2", "nomad-u4"]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("arch", ARCHES)
def test_every_architecture(arch):
    for name in ("u4", "u2", "qserve-kv4"):
        compiles(problem(name, arch))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["u3", "k4v2", "nomad-u4", "qserve-kv4"])
def test_every_scheme(name):
    compiles(problem(name))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dim", [64, 80, 96, 192, 256])
def test_every_head_dim(dim):
    compiles(problem("u2" if dim < 100 else "u4", dim=dim))
    if dim in (80, 256):  # words of few codes, and of many
        compiles(problem("qserve-kv4", dim=dim, columns=8))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("columns", [1, 16, 32])
def test_columns(columns):
    compiles(problem(columns=columns, dtype=Dtype.FLOAT16))
    if columns > 1:
        compiles(problem("qserve-kv4", columns=columns))


@pytest.mark.slow
@needs_compiler
def test_masks_and_softcap():
    compiles(problem(mask=Mask.BOOL))
    compiles(problem(mask=Mask.BFLOAT16, softcapped=True, columns=16))
    compiles(problem("qserve-kv4", mask=Mask.BOOL, softcapped=True, tokens=SHORT))


@pytest.mark.slow
@needs_compiler
def test_pages():
    compiles(problem("u4", "sm_90a", page=256))
    compiles(problem("qserve-kv4", "sm_90a", page=256))
    compiles(problem("u2", "sm_80", dim=80, page=64))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("arch", ARCHES)
def test_a_rotary_mean_on_every_architecture(arch):
    for name, columns in (("u4", 4), ("u2", 8)):
        compiles(problem(name, arch, columns=columns, rotary=True))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["u3", "k4v2", "qserve-kv4", "cq-4", "cq-2"])
def test_a_rotary_mean_of_every_scheme(name):
    compiles(problem(name, columns=1, rotary=True, mask=Mask.BOOL))
    compiles(problem(name, dim=64, columns=16, rotary=True, softcapped=True))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["u4", "u3"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_a_rotary_mean_of_few_tokens(name, dim):
    """Their plans have one tile in a step, and more threads."""
    for dtype in (Dtype.FLOAT16, Dtype.BFLOAT16):
        compiles(problem(name, dim=dim, rotary=True, tokens=SHORT, dtype=dtype))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dim", [80, 256])
def test_a_rotary_mean_of_every_head_dim(dim):
    compiles(problem(dim=dim, rotary=True, softcapped=True, mask=Mask.FLOAT32))
    compiles(problem(dim=dim, columns=8, rotary=True, page=64))


def test_memory_of_a_rotary_mean():
    """Where there is no room for it, there is a reason; without one a plan is what it was."""
    u4, largest = KV_SCHEMES["u4"], ARCHES["sm_86"]
    assert misfit(u4.key, u4.value, 256, 256, largest) is None
    assert "rotary mean" in misfit(u4.key, u4.value, 256, 256, largest, rotary=True)
    plain, turning = (choose(problem(rotary=rotary)) for rotary in (False, True))
    assert plain.rotary_bytes == 0 < turning.rotary_bytes
    assert turning.shared_bytes - plain.shared_bytes == turning.rotary_bytes


@pytest.mark.slow
@needs_compiler
def test_memory_of_a_rotary_mean_is_what_the_kernel_lays_out(monkeypatch):
    """With two pairs of steps, one, swizzled columns, several tiles of queries, odd sizes."""
    text = compiler.template
    asked = [
        problem("u4", columns=4, rotary=True),
        problem("u4", "sm_86", columns=4, rotary=True),
        problem("cq-2", dim=192, columns=2, rotary=True),
        problem("cq-4", columns=1, rotary=True),
        problem("u3", dim=80, columns=20, rotary=True),
        problem("u2", dim=48, columns=8, rotary=True),
    ]
    plans = [choose(one) for one in asked]
    assert {plan.rotary for plan in plans} == {1, 2}
    assert {plan.swizzle_orders > 1 for plan in plans} == {plan.query_tiles > 1 for plan in plans}
    for plan, one in zip(plans, asked, strict=True):
        laid_out = f'static_assert(Rotary::bytes == {plan.rotary_bytes}, "laid out");'
        monkeypatch.setattr(compiler, "template", lambda p, said=laid_out: text(p) + said)
        compiler.compile_plan(plan, one.arch.name)


def test_explain_names_the_choice(capsys):
    assert main(["explain", "attention", "u4", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n*") == 1 and "chosen: AttentionPlan(" in out
    assert main(["explain", "attention", "u4", "--dim", "112"]) == 2
    assert "112 channels" in capsys.readouterr().err


def test_what_has_no_kernel_says_why():
    u4 = KV_SCHEMES["u4"].key
    assert attendable(u4, 128, "keys") is None
    assert attendable(KV_SCHEMES["cq-4"].key, 128, "keys") is None
    assert "stand for" in attendable(dataclasses.replace(u4, vector_size=8), 128, "keys")
    assert "scales" in attendable(dataclasses.replace(u4, scale_group=32), 128, "keys")
    assert "rotation" in attendable(dataclasses.replace(u4, rotation="qr"), 128, "keys")
    integers = KV_SCHEMES["qserve-kv4"].key
    assert attendable(integers, 80, "keys") is None
    for bits in (2, 3, 8):
        assert "bits" in attendable(dataclasses.replace(integers, entry_bits=bits), 128, "keys")
    arch = ARCHES["sm_90a"]
    assert misfit(integers, u4, 128, 128, arch) is None
    assert "integers" in misfit(integers, KV_SCHEMES["cq-4"].value, 128, 128, arch)


def test_integers_need_no_table():
    plan = choose(problem("qserve-kv4"))
    assert plan.table_bytes == 0 < choose(problem("nomad-u4")).table_bytes
    u3 = choose(problem("u3"))
    keys = dataclasses.replace(u3, key_integers=True)
    assert keys.table_bytes == u3.table_bytes and keys.step_bytes > u3.step_bytes


def test_copies_and_columns_of_a_query():
    assert choose(problem()).bulk and not choose(problem(arch="sm_89")).bulk
    assert choose(problem(columns=4)).paired and not choose(problem(columns=5)).paired
    assert not choose(problem(dim=80)).paired  # 16 channels for eight lanes: a word each
    assert not choose(problem("cq-4", columns=1)).paired


def test_splits_fill_the_gpu_once():
    asked = problem()
    plan = choose(asked)
    at_a_time = asked.arch.sms * plan.blocks_per_sm
    for groups in (1, 8, 32, 256, 1000):
        count = splits(plan, groups, 1 << 20, asked.arch)
        assert count == 1 or count * groups <= at_a_time < (count + 1) * groups
    assert splits(plan, 8, 0, asked.arch) == 1
