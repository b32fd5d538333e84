"""Plans of products of 4-bit weights with 8-bit inputs: what is feasible, chosen and compiled."""

import dataclasses
import itertools
import re

import pytest

from hf_vq import paths
from hf_vq.codegen.__main__ import main
from hf_vq.codegen.families import w4a8 as choose_w4a8
from hf_vq.codegen.families import w4a8_wgmma as choose_w4a8_wide
from hf_vq.codegen.families.w4a8 import W4A8Problem
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import ARCHES, named_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.codegen.w4a8_plan import Source
from tests.buckets.w4a8 import W4A8Case
from tests.fixtures.codegen.launch_recorder import recording

SIZES = [(6144, 4096, 128), (4096, 14336, 0), (37, 704, 64), (5, 32, 0), (14336, 4128, 32)]
TOKENS = (1, 8, 16, 64)
MANY = (32, 128, 1024, 4096)


def asked(tokens, rows, columns, group, arch="sm_90a", dtype=Dtype.BFLOAT16):
    return W4A8Problem(group, tokens, rows, columns, dtype, dtype, ARCHES[arch])


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("rows", "columns", "group"), SIZES)
def test_there_is_a_plan_for_every_problem(rows, columns, group, arch):
    for tokens in TOKENS:
        problem = asked(tokens, rows, columns, group, arch)
        plan = choose_w4a8.choose(problem)
        assert plan is not None and choose_w4a8.feasible(plan, problem) is None
        assert plan.rounds == (tokens == 1)
        given = dataclasses.replace(problem, rounded=True)
        assert not choose_w4a8.choose(given).rounds
        assert choose_w4a8.feasible(choose_w4a8.choose(given), given) is None
        assert plan.shared_bytes <= ARCHES[arch].shared_per_block
        costs = [choose_w4a8.cost(p, problem).cycles for p in choose_w4a8.best(problem)]
        assert costs == sorted(costs)
    for tokens in MANY:
        problem = asked(tokens, rows, columns, group, arch)
        plan = choose_w4a8_wide.choose(problem)
        assert (plan is None) == (arch != "sm_90a")
        if plan is not None:
            assert plan.shared_bytes <= ARCHES[arch].shared_per_block


def test_blocks_cover_rows_and_tokens():
    problem = asked(40, 1000, 4096, 128)
    for plan in choose_w4a8.best(problem):
        blocks = choose_w4a8.blocks(plan, 1000, 40)
        assert blocks * plan.tile_rows * 8 * plan.token_tiles >= 1000 * 40
    for wide in choose_w4a8_wide.best(problem):
        count = choose_w4a8_wide.blocks(wide, 1000, 40, problem.arch)
        tiles = choose_w4a8_wide.tiles(wide, 1000, 40)
        assert tiles * wide.tile_rows * wide.token_tile >= 1000 * 40
        assert count == min(tiles, problem.arch.sms)


def test_the_last_tile_ends_where_tokens_end_rounded_up_to_8():
    for tokens in range(2, 200):
        problem = asked(choose_w4a8.token_bucket(tokens), 4096, 4096, 128)
        tiles = max(plan.token_tiles for plan in choose_w4a8.best(problem))
        assert 8 * tiles <= -(-tokens // 8) * 8


def test_blocks_without_a_token_fill_up_the_last_eight(monkeypatch):
    """In fragments: bulk copies of what is swizzled end with the last token."""
    with recording(monkeypatch, named_arch("sm_90a")) as record:
        for tokens, wanted in ((1, 1), (2, 8), (8, 8), (9, 16), (300, 300)):
            case = W4A8Case("qoq-w4a8", tokens, 1024, 4096, "float16", None, Source.NORM)
            launches = record(case).launches
            blocks = [count for plan, count in launches if plan.kernel == "w4a8_inputs"]
            assert blocks == [wanted], tokens


def test_teams_do_not_wait_for_each_other():
    """Each has a slot until its next one is full."""
    problem = asked(64, 4096, 10240, 32)
    plans = choose_w4a8_wide.candidates(problem)
    assert any(plan.x_stages == plan.split_k_warpgroups for plan in plans)
    able = choose_w4a8_wide.best(problem)
    assert able and all(plan.x_stages > plan.split_k_warpgroups for plan in able)


def test_buckets_of_tokens():
    assert [choose_w4a8.token_bucket(n) for n in (1, 2, 8, 9, 64, 65, 4096)] == [
        1, 8, 8, 16, 64, 64, 64,
    ]  # fmt: skip
    assert [choose_w4a8_wide.token_bucket(n) for n in (17, 32, 33, 200, 1000)] == [
        32, 32, 64, 224, 1024,
    ]  # fmt: skip


def test_rows_that_kernels_do_not_take():
    assert choose_w4a8.multipliable(4096) is None
    assert "77" in choose_w4a8.multipliable(77)
    assert "32 bits" in choose_w4a8.multipliable(1 << 20)
    # The largest sum of unsigned with signed bytes, before 128 times that of x is subtracted.
    assert choose_w4a8.LONGEST_ROW * 127 * 127 < 1 << 31


def sources(*names):
    folder = paths.kernel_sources() / "cuda"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def test_templates_read_every_field_and_no_other():
    few, wide = asked(1, 64, 128, 0), asked(32, 64, 128, 0)
    for plan, headers in (
        (choose_w4a8.choose(few), ("w4a8/w4a8.cuh", "w4a8/w4a8_round.cuh")),
        (choose_w4a8_wide.choose(wide), ("w4a8/w4a8.cuh", "primitives/wgmma_ring.cuh")),
        (
            choose_w4a8.inputs_plan(Dtype.FLOAT16, 128, True),
            ("w4a8/w4a8.cuh", "w4a8/w4a8_round.cuh"),
        ),
    ):
        read = set(re.findall(r"Plan::(\w+)", sources(f"{plan.template}.cu", *headers)))
        assert read == {field.name for field in dataclasses.fields(plan)}


def test_arguments_are_those_of_the_source():
    from hf_vq.backends.cuda import w4a8 as cuda_w4a8
    from hf_vq.backends.cuda import w4a8_inputs

    for arguments, file in (
        (cuda_w4a8.W4A8Arguments, "w4a8/w4a8.cu"),
        (cuda_w4a8.W4A8WideArguments, "w4a8/w4a8_wgmma.cu"),
        (w4a8_inputs.W4A8InputsArguments, "w4a8/w4a8_inputs.cu"),
    ):
        body = re.search(r"struct Arguments .*?{\n(.*?)};", sources(file), re.DOTALL)[1]
        fields = re.findall(r"^ *([\w \*]+?)(\w+);", body, re.MULTILINE)
        expected = [(name, 8 if "*" in kind else 4) for kind, name in fields]
        assert [(name, getattr(arguments, name).size) for name, _ in arguments._fields_] == expected


def test_the_command_line_explains(capsys):
    assert main(["explain", "w4a8", "qoq-w4a8-g128", "--top", "2"]) == 0
    few = capsys.readouterr().out
    assert "token_tiles" in few and "chosen: W4A8Plan(" in few
    assert main(["explain", "w4a8", "qoq-w4a8", "--m", "100", "--top", "2"]) == 0
    assert "chosen: W4A8WidePlan(" in capsys.readouterr().out
    assert main(["explain", "w4a8", "qoq-w4a8", "--m", "100", "--arch", "sm_80"]) == 0
    assert "chosen: W4A8Plan(" in capsys.readouterr().out
    assert main(["explain", "w4a8", "qoq-w4a8", "--k", "77"]) == 2
    assert "does not divide 77" in capsys.readouterr().err


def compiled(plan, arch):
    image, found = compiler.compile_plan(plan, arch)
    assert image.startswith(b"\x7fELF")
    assert (found.stack, found.spilled) == (0, 0), plan
    assert not found.serialized, plan
    assert 0 < found.registers * plan.threads * plan.blocks_per_sm <= 65536


needs_nvrtc = pytest.mark.skipif(bool(compiler.why_not()), reason=compiler.why_not())


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("rows", "columns", "group"), [SIZES[0], SIZES[1], SIZES[-1]])
def test_chosen_plans_compile_without_local_memory(rows, columns, group, arch):
    for tokens in (1, 16, 64):
        compiled(choose_w4a8.choose(asked(tokens, rows, columns, group, arch)), arch)
    given = dataclasses.replace(asked(1, rows, columns, group, arch), rounded=True)
    compiled(choose_w4a8.choose(given), arch)
    for swizzled, source in itertools.product((False, True), Source):
        compiled(choose_w4a8.inputs_plan(Dtype.BFLOAT16, columns, swizzled, source), arch)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("tokens", [64, 1024])
def test_wide_plans_compile_without_local_memory(tokens):
    for group in (0, 128):
        compiled(choose_w4a8_wide.choose(asked(tokens, 4096, 14336, group)), "sm_90a")


ONE_OR_ALL = """
#include "primitives/wgmma.cuh"
extern "C" __global__ void products(int* y, const uint32_t* x, int count) {
  int sums[16] = {};
  uint32_t a[2][4] = {};
  for (int i = FIRST; i < count; ++i) {
    wgmma_fence();
    wgmma_bytes<false, 32>(sums, a[0], wgmma_descriptor(0));
    a[1][0] = x[i];
    wgmma_bytes<false, 32>(sums, a[1], wgmma_descriptor(0));
    wgmma_commit();
    wgmma_wait<0>();
  }
  y[threadIdx.x] = sums[0];
}"""


@needs_nvrtc
@pytest.mark.parametrize(
    ("first", "serialized"),
    [("threadIdx.x / 128", True), ("__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)", False)],
)
def test_products_of_warps_that_may_part_are_seen(first, serialized):
    headers = {name: text for name, text in compiler.sources().items() if name.endswith(".cuh")}
    source = ONE_OR_ALL.replace("FIRST", first)
    log = compiler.compile_source(source, "products.cu", headers, "sm_90a")[1]
    assert (compiler.SERIALIZED in log) == serialized
