"""Plans of attention with learned codebooks: turns, what fits, and that it compiles."""

import pytest

from hf_vq.codegen.families.kv_attention import attendable, choose, misfit
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.formats import KV_SCHEMES
from tests.fixtures.codegen.compiled_attention import compiles, needs_compiler, problem

LEARNED = ["cq-4", "cq-2", "nomad-4", "nomad-2"]


@pytest.mark.parametrize(("columns", "turns"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (12, 1)])
def test_idle_columns_know_turns(columns, turns):
    plan = choose(problem("cq-4", columns=columns))
    assert (plan.swizzle_orders, plan.columns // plan.swizzle_orders >= min(columns, 8)) == (
        turns,
        True,
    )


def test_an_odd_word_is_not_one_of_a_pair():
    assert choose(problem("cq-4", dim=80, columns=1)).swizzle_orders == 4


@pytest.mark.parametrize("name", LEARNED)
def test_what_fits(name):
    """Both codebooks of 128 channels take 128 KiB, of 64 a half."""
    scheme = KV_SCHEMES[name]
    for arch in ARCHES:
        reason = misfit(scheme.key, scheme.value, 128, 128, ARCHES[arch])
        assert (reason is not None) == (ARCHES[arch].shared_per_block < 128 << 10), (arch, reason)
        assert reason is None or "128 KiB of shared memory" in reason
    assert attendable(scheme.key, 128, "keys") is None


def test_entries_that_are_not_bytes_are_refused():
    reason = attendable(KV_SCHEMES["nomad-1"].key, 128, "keys")
    assert reason is not None and "<4,4,1>" in reason


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("columns", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("name", ["cq-4", "cq-2"])
def test_columns(name, columns):
    compiles(problem(name, columns=columns))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", LEARNED)
def test_every_scheme(name):
    compiles(problem(name, "sm_80"))
    if name.startswith("cq"):  # else keys and values have tables of their own
        compiles(problem(name, "sm_120", dim=64, columns=1))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dim", [32, 80, 96, 192])
def test_every_head_dim(dim):
    compiles(problem("cq-4", dim=dim, columns=1))
    compiles(problem("cq-2", dim=dim))
