"""Plans of the fused linear kernel: what is chosen can run, and what was measured is chosen."""

import dataclasses
import itertools
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vq.codegen import tuned
from hf_vq.codegen.families.linear import (
    MOST_TOKENS,
    LinearProblem,
    best,
    blocks_of,
    busiest,
    choose,
    cost,
    feasible,
    fusable,
    spare_registers,
)
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme


def problem(scheme, tokens=1, rows=4096, columns=4096, arch="sm_90a"):
    return LinearProblem(scheme, tokens, rows, columns, Dtype.FLOAT16, ARCHES[arch])


@pytest.fixture(autouse=True)
def own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_VQ_STORE", str(tmp_path))
    for cache in (tuned._on_disk, tuned._shipped, choose):
        cache.cache_clear()
    yield
    for cache in (tuned._on_disk, tuned._shipped, choose):
        cache.cache_clear()


@st.composite
def problems(draw):
    x = draw(st.sampled_from([1, 2, 4, 8, 16]))
    scheme = VQScheme(
        x,
        draw(st.integers(1, 16)),
        draw(st.integers(1, 4)),
        "tensor",
        scale_group=draw(st.sampled_from([0, 32, 128, 256])),
        rotation=draw(st.sampled_from(["none", "random_hadamard"])),
    )
    columns = 128 * draw(st.integers(1, 90))
    tokens = draw(st.sampled_from([1, 8, 16, 32, 64]))
    arch = draw(st.sampled_from(sorted(ARCHES)))
    return problem(scheme, tokens, draw(st.integers(1, 20000)), columns, arch)


@settings(max_examples=12, deadline=None)
@given(problems())
def test_the_chosen_plan_can_run(asked):
    plan = choose(asked)
    if plan is None:
        assert fusable(asked.scheme, asked.in_features) or not best(asked, 8)
        return
    assert feasible(plan, asked) is None and spare_registers(plan, asked.arch) >= 0
    scheme, warps = asked.scheme, plan.threads // 32
    # What the kernel relies on.
    width = plan.vector_size * plan.fused
    unit_bits = plan.unit // plan.vector_size * plan.entry_bits
    stream_bits = asked.in_features // scheme.vector_size * scheme.entry_bits
    assert plan.unit % max(width, 8) == 0 and asked.in_features % plan.unit == 0
    assert unit_bits % (8 * plan.load_bytes) == 0 and stream_bits % (8 * plan.load_bytes) == 0
    assert plan.load_bytes in (4, 8, 16)
    assert plan.group == 0 or plan.group % (4 * plan.unit) == 0
    assert plan.group == 0 or not plan.ragged
    assert warps % plan.split_k_warps == 0 and warps // plan.split_k_warps < 16  # barriers
    assert plan.token_tiles * 8 >= asked.tokens
    if plan.scales_together:
        assert asked.in_features // plan.group % 2 == 0
    if plan.single:
        pieces, octets = max(1, plan.unit // 32), min(4, plan.unit // 8)
        chunks = -(-asked.in_features // (4 * plan.unit))
        share = -(-chunks // (plan.split_k_warps * plan.pipeline_depth)) * plan.pipeline_depth
        assert 8 * plan.x_sets >= share * pieces and 8 // pieces % plan.pipeline_depth == 0
        assert not plan.rotate or (octets == 4 and pieces == 1)
    assert plan.blocks_per_sm * (plan.shared_bytes + 1024) <= asked.arch.shared_per_sm


def test_the_catalogue_has_plans_on_a_large_gpu():
    for name, scheme in WEIGHT_SCHEMES.items():
        reason = fusable(scheme, 4096)
        if reason:
            assert "tile" in reason or "second pass" in reason, name
            continue
        for tokens in (1, 8, 16, 32, 64):  # at a size that nobody measured
            assert choose(problem(scheme, tokens, rows=5000)) is not None, (name, tokens)
    assert choose(problem(WEIGHT_SCHEMES["vq-4"], MOST_TOKENS + 1)) is None


def test_one_token_too_long_for_registers_runs_as_several():
    plan = choose(problem(WEIGHT_SCHEMES["quip-sharp-4"], columns=1 << 19, arch="sm_80"))
    assert not plan.single and plan.token_tiles == 1


def test_tables_of_integers_are_half_as_large():
    """On a GPU with 100 KB of shared memory they are tables at all."""
    floats, integers = WEIGHT_SCHEMES["aqlm-3"], WEIGHT_SCHEMES["aqlm-3-int7"]
    plans = [choose(problem(scheme)) for scheme in (floats, integers)]
    assert [plan.entry_bytes for plan in plans] == [16, 8]
    assert plans[0].table_bytes == 2 * 4096 * 16 * plans[0].replicas
    assert plans[1].table_bytes == 2 * 4096 * 8 * plans[1].replicas
    assert choose(problem(floats, arch="sm_86")) is None
    assert choose(problem(integers, arch="sm_86")).table_bytes == 65536


def test_codes_without_whole_words_have_none():
    reason = fusable(VQScheme(2, 5, codebook="tensor", scale_group=16, rotation="none"), 48)
    assert "whole words" in reason


def test_the_model_knows_what_the_measurements_showed():
    """On an H200: copies of a codebook pay, and so do several warps for a row."""
    asked = problem(WEIGHT_SCHEMES["aqlm-2"], 1, 4096, 14336)
    plan = choose(asked)
    once = dataclasses.replace(plan, replicas=1, interleaved=1)
    alone = dataclasses.replace(plan, split_k_warps=1)
    assert plan.replicas == 8 and plan.split_k_warps > 1
    assert cost(once, asked).cycles > 1.2 * cost(plan, asked).cycles
    assert cost(alone, asked).cycles > 1.2 * cost(plan, asked).cycles


def test_a_measured_plan_is_chosen_and_kept(tmp_path):
    asked = problem(WEIGHT_SCHEMES["vq-2"], 8, 304, 512)
    first, *_, last = best(asked, 8)
    assert choose(asked) == first
    assert tuned.keep({asked: last}) == tmp_path / "tuned.json"
    choose.cache_clear()
    assert choose(asked) == last
    other = dataclasses.replace(asked, arch=ARCHES["sm_100"])
    assert tuned.find(other) is None  # measured on another GPU
    same_bucket = dataclasses.replace(asked, tokens=5)
    assert tuned.find(same_bucket) == tuned.knobs(last)


def test_a_table_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    asked = problem(WEIGHT_SCHEMES["vq-2"], 8, 304, 512)
    path = tuned.keep({asked: best(asked, 8)[-1]})
    before = path.read_text()

    def refuse(*names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        tuned.keep({asked: best(asked, 8)[0]})
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == before


def test_a_table_of_another_version_is_not_read(tmp_path):
    asked = problem(WEIGHT_SCHEMES["vq-2"], 8, 304, 512)
    first, *_, last = best(asked, 8)
    path = tuned.keep({asked: last})
    table = json.loads(path.read_text())
    for version in ({}, {"version": tuned.VERSION + 1}, {"version": "1"}):
        del table["version"]
        path.write_text(json.dumps(table | version))
        table["version"] = tuned.VERSION
        tuned._on_disk.cache_clear()
        choose.cache_clear()
        assert choose(asked) == first
    tuned.keep({asked: last})
    choose.cache_clear()
    assert choose(asked) == last


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2, "sm_90a/132": 3}',
                                  '{"version": 2, "sm_90a/132": {"a": []}}'])  # fmt: skip
def test_a_file_that_is_no_table_is_as_good_as_none(tmp_path, text):
    (tmp_path / "tuned.json").write_text(text)
    asked = problem(WEIGHT_SCHEMES["vq-2"], 8, 304, 512)
    assert choose(asked) == best(asked, 8)[0]


def test_knobs_that_cannot_run_are_not_chosen(tmp_path):
    asked = problem(WEIGHT_SCHEMES["vq-2"], 8, 304, 512)
    plan = best(asked, 8)[0]
    for wrong in (
        {"threads": 4096}, {"unit": 7}, {"split_k_warps": 5}, {"split_k_warps": 0}, {"replicas": 3},
        {"interleaved": 3}, {"rotate": 1}, {"cluster_size": 3},
    ):  # fmt: skip
        table = {tuned.gpu(asked): {tuned.name(asked): {**tuned.knobs(plan), **wrong}}}
        (tmp_path / "tuned.json").write_text(tuned.text(table))
        tuned._on_disk.cache_clear()
        choose.cache_clear()
        assert choose(asked) == plan


def test_the_shipped_table_is_current():
    """Every plan of it can run on the GPU that it names."""
    table = tuned._read(tuned._SHIPPED)
    assert tuned.text(table) == tuned._SHIPPED.read_text(encoding="utf-8")
    (plans,) = table.values()
    assert list(table) == ["sm_90a/132"] and len(plans) > 100
    for name, knobs in plans.items():
        spec, shape, dtype = name.split()
        tokens, rows, columns = map(int, shape.split("x"))
        asked = LinearProblem(
            VQScheme.parse(spec), tokens, rows, columns, Dtype(dtype), ARCHES["sm_90a"]
        )
        assert tuned.knobs(choose(asked)) == knobs, name


def of_teams(teams, resident, tokens=1):
    """A plan with so many teams in a block."""
    plan = choose(problem(WEIGHT_SCHEMES["vq-4"], tokens))
    return dataclasses.replace(
        plan, threads=32 * teams, split_k_warps=1, blocks_per_sm=resident, cluster_size=1
    )


@pytest.mark.parametrize("tiles", [[896], [896, 896], [256, 64, 64], [1], [5, 1000], [3000], [133]])
@pytest.mark.parametrize(("teams", "resident"), [(2, 2), (3, 1), (1, 1), (7, 1)])
@pytest.mark.parametrize("tokens", [1, 16])
def test_blocks_have_all_tiles_and_no_more_turns(tiles, teams, resident, tokens):
    arch = ARCHES["sm_90a"]
    blocks = blocks_of(of_teams(teams, resident, tokens), tiles, arch)
    assert sum(blocks) <= arch.sms * resident
    turns = 0
    for of, count in zip(tiles, blocks, strict=True):
        # As linear.cu deals them out to one token.
        dealt = [
            list(range(team * count + block, of, count * teams))
            for block in range(count)
            for team in range(teams)
        ]
        assert sorted(itertools.chain.from_iterable(dealt)) == list(range(of))
        turns = max(turns, *map(len, dealt))
    fewest = -(-sum(tiles) // (arch.sms * resident * teams))
    assert fewest <= turns <= fewest + len(tiles)


def test_one_token_s_last_turn_is_spread_over_all_multiprocessors():
    arch = ARCHES["sm_90a"]
    assert busiest([896], [224], arch.sms) == 8
    assert blocks_of(of_teams(2, 2, 16), [896], arch) == [224]
    assert busiest([896], blocks_of(of_teams(2, 2), [896], arch), arch.sms) == 7
    assert busiest([896, 896], blocks_of(of_teams(2, 2), [896, 896], arch), arch.sms) == 14
