"""Plans of the kernel for codebooks of tiles: what is chosen can run, and who has none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vq.codegen.__main__ import main
from hf_vq.codegen.families.linear import LinearProblem, token_bucket
from hf_vq.codegen.families.linear_tile_codebook import (
    MOST_TOKENS,
    best,
    blocks,
    candidates,
    choose,
    cost,
    feasible,
    places,
    spare_registers,
    tiled,
)
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme

GPTVQ = WEIGHT_SCHEMES["gptvq-2"]
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (11008, 4096), (1, 256), (333, 1152))


def problem(scheme=GPTVQ, tokens=1, rows=4096, columns=4096, arch="sm_90a"):
    return LinearProblem(scheme, tokens, rows, columns, Dtype.BFLOAT16, ARCHES[arch])


@st.composite
def problems(draw):
    x = draw(st.sampled_from([2, 4, 8, 16]))
    tile = draw(st.sampled_from([16, 48, 64, 128, 256, 300])), 32 * draw(st.integers(1, 20))
    scheme = VQScheme(
        x, draw(st.integers(1, 10)), 1, "tile", tile=tile, scale_group=0, rotation="none"
    )
    rows, columns = draw(st.integers(1, 20000)), 16 * draw(st.integers(1, 400))
    tokens = token_bucket(draw(st.integers(1, 64)))
    return problem(scheme, tokens, rows, columns, draw(st.sampled_from(sorted(ARCHES))))


@settings(max_examples=50, deadline=None)
@given(problems())
def test_the_chosen_plan_can_run(asked):
    plan = choose(asked)
    if plan is None:
        assert tiled(asked.scheme, asked.in_features) or not best(asked)
        return
    assert feasible(plan, asked) is None and spare_registers(plan, asked.arch) >= 0
    # What the kernel relies on.
    assert plan.tile_columns == asked.scheme.tile[1] and plan.tile_rows % plan.band == 0
    assert plan.unit % 8 == 0 and asked.in_features % plan.unit == 0
    assert plan.unit // plan.vector_size * plan.entry_bits % (8 * plan.load_bytes) == 0
    assert plan.load_bytes in (4, 8, 16)
    assert plan.threads % (plan.tile_columns // 2) == 0
    assert plan.replicas * plan.vector_size == 64 and plan.x_stages >= 2
    assert plan.cluster_size == 1 or asked.arch.overlaps_launches
    assert plan.cluster_size <= -(-asked.in_features // plan.tile_columns)
    assert plan.blocks_per_sm * (plan.shared_bytes + 1024) <= asked.arch.shared_per_sm
    assert blocks(plan, asked.rows) % plan.cluster_size == 0
    assert cost(plan, asked).cycles > 0


@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64])
def test_the_catalogue_has_plans(tokens):
    for rows, columns in SHAPES:
        for arch in ("sm_80", "sm_90a", "sm_100"):
            plan = choose(problem(GPTVQ, tokens, rows, columns, arch))
            assert plan, (rows, columns, arch)
            assert plan.cluster_size == 1 or arch != "sm_80"
    # With 100 KB of shared memory, inputs of few tokens have a place beside two tables.
    small = choose(problem(GPTVQ, tokens, arch="sm_89"))
    assert (small is None) == (tokens > 32)


def test_clusters_fit_their_gpu():
    """Where all blocks cannot run at a time, a cluster would wait for another one to end."""
    arch = ARCHES["sm_90a"]
    for tokens in (1, 16, 32, 64):
        plan = choose(problem(tokens=tokens))
        assert -(-4096 // plan.band) <= places(plan.cluster_size, plan.blocks_per_sm, arch)


def test_who_has_none():
    assert choose(problem(tokens=MOST_TOKENS + 1)) is None
    assert tiled(GPTVQ, 4096) is None
    for scheme, columns, reason in (
        (WEIGHT_SCHEMES["vq-4"], 4096, "not one of tiles"),
        (WEIGHT_SCHEMES["turboquant-4+4"], 4096, "second pass"),
        (VQScheme.parse("vq4x8r1-tile256x256-g128-none"), 4096, "several scales"),
        (WEIGHT_SCHEMES["gptvq-2-int7"], 4096, "hold integers"),
        (VQScheme.parse("vq1x4r1-tile256x256-g0-none"), 4096, "one weight"),
        (VQScheme.parse("vq4x7r1-tile256x16-g0-none"), 4096, "whole words"),
        (VQScheme.parse("vq4x8r1-tile24x20-g0-none"), 80, "whole words"),
        (GPTVQ, 1156, "whole words"),
    ):
        assert reason in tiled(scheme, columns)
        assert choose(problem(scheme, columns=columns)) is None


def test_the_command_line_explains(capsys):
    assert main(["explain", "linear", "gptvq-2", "--m", "64", "--top", "2"]) == 0
    assert "launches" not in capsys.readouterr().out
    assert main(["explain", "linear", "gptvq-2", "--m", "100", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 launches, of 64 tokens at most" in out and "chosen: TilePlan(" in out
    assert main(["explain", "linear", "gptvq-2", "--m", "129"]) == 2
    assert "rows are decoded" in capsys.readouterr().err


def test_every_candidate_says_whether_it_can_run():
    asked = problem(tokens=64)
    reasons = {feasible(plan, asked) for plan in candidates(asked)}
    assert None in reasons and len(reasons) > 3
