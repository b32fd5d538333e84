"""Problems that the GPU tests run meet every bucket that the backends can ask the choosers for.

Without a GPU: the backends' own Python runs up to the launch (`launch_recorder`).
"""

from dataclasses import replace

import pytest

from hf_vq.codegen import choose_attention
from hf_vq.codegen.device import ARCHES, named_arch
from tests.buckets import attention as attention_buckets
from tests.buckets.cover import covering, first_sizes, met
from tests.buckets.every import CASES, DOMAINS

from .launch_recorder import recording

HOPPER = named_arch("sm_90a")


def missing(kernel, cases, arch, record):
    """Features of problems that are looked at and that no problem that runs has; and problems that
    do not launch what they were chosen for."""
    other, reached = [], []
    for case in cases:
        found = record(case)
        if set(case.plans(arch)) <= set(found.plans):
            reached.append(case.features(arch))
        else:
            other.append(case.name)
    looked_at = met(case.features(arch) for case in DOMAINS[kernel](arch))
    return looked_at - met(reached), other


@pytest.mark.parametrize("kernel", CASES)
def test_every_bucket_has_a_problem_that_launches_its_kernel(kernel, monkeypatch):
    if not DOMAINS[kernel](HOPPER):
        pytest.skip("no kernel on a GPU")
    with recording(monkeypatch, HOPPER) as record:
        lost, other = missing(kernel, CASES[kernel](HOPPER), HOPPER, record)
    assert not other, f"{len(other)} launch other kernels than they say: {other[:5]}"
    assert not lost, f"{len(lost)} are not run: {sorted(map(str, lost))[:10]}"


def test_a_boundary_that_moves_is_seen(monkeypatch):
    """Problems found under other boundaries miss what is beyond them."""
    with monkeypatch.context() as patch:
        patch.setattr(choose_attention, "group_bucket", lambda groups: choose_attention.FEW)
        attention_buckets.domain.cache_clear(), attention_buckets._cases.cache_clear()
        former = attention_buckets.cases(HOPPER)
    attention_buckets.domain.cache_clear(), attention_buckets._cases.cache_clear()
    with recording(monkeypatch, HOPPER) as record:
        lost, _ = missing("attention", former, HOPPER, record)
    assert any(choose_attention.MANY in value for one in lost for _, value in one
               if isinstance(value, tuple))  # fmt: skip


def test_all_buckets_of_sizes_are_found():
    """Their first sizes are those where the choosers' functions change."""
    assert first_sizes(choose_attention.group_bucket, 4096) == {
        choose_attention.FEW: 1, choose_attention.MANY: 8 * choose_attention.FEW,
    }  # fmt: skip
    assert first_sizes(lambda size: size // 10, 25) == {0: 1, 1: 10, 2: 20}


def test_few_items_meet_all_pairs():
    items = [{"a": i % 3, "b": i // 3 % 3, "c": i // 9, "each": i % 7} for i in range(27)]
    kept = covering(items, lambda item: item)
    assert met(kept) == met(items) and len(kept) < 15


@pytest.mark.parametrize("name", ARCHES)
def test_every_attention_that_backends_accept_has_a_plan(name):
    """Many queries of a kv head, masks and soft-caps need registers that few GPUs have."""
    arch = ARCHES[name]
    asked = {  # sizes and pages are no matter
        replace(
            case.problem(arch), tokens=choose_attention.SHORT, groups=choose_attention.FEW, page=0
        )
        for case in attention_buckets.domain(arch)
    }
    unplanned = [problem for problem in asked if choose_attention.choose(problem) is None]
    assert not unplanned, f"{len(unplanned)}: {unplanned[:5]}"
