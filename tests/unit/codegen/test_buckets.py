"""Problems that the GPU tests run meet every bucket that the backends can ask the choosers for.

Without a GPU: the backends' own Python runs up to the launch (`launch_recorder`). Random problems,
which know nothing of buckets, must not launch what no problem of a bucket runs; BUCKET_SEEDS=100
draws more of them.
"""

import os
import random
from dataclasses import fields, replace

import pytest

from hf_vq import paths
from hf_vq.codegen.attention_plan import AttentionPlan, Mask
from hf_vq.codegen.families import kv_attention as choose_attention
from hf_vq.codegen.jit.device import ARCHES, named_arch
from tests.buckets import attention as attention_buckets
from tests.buckets import linear as linear_buckets
from tests.buckets import store as store_buckets
from tests.buckets.attention import SCHEMES, has_kernel
from tests.buckets.case import kernel_of
from tests.buckets.cover import covering, first_sizes, met
from tests.buckets.every import CASES, DOMAINS
from tests.fixtures.codegen.kernel_templates import plan_fields
from tests.fixtures.codegen.launch_recorder import recording
from tests.fixtures.codegen.random_problems import PROBLEMS, attention

HOPPER = named_arch("sm_90a")
SEEDS = range(int(os.environ.get("BUCKET_SEEDS", "1")))
RANDOM_PROBLEMS = 100
SIZES = ("columns", "groups", "dim", "slice")  # of a layer or head: a kernel for each


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


@pytest.mark.slow
@pytest.mark.parametrize("kernel", CASES)
def test_every_bucket_has_a_problem_that_launches_its_kernel(kernel, monkeypatch):
    if not DOMAINS[kernel](HOPPER):
        pytest.skip("no kernel on a GPU")
    cases = CASES[kernel](HOPPER)
    assert len({case.name for case in cases}) == len(cases), "two problems have one name"
    with recording(monkeypatch, HOPPER) as record:
        lost, other = missing(kernel, cases, HOPPER, record)
    assert not other, f"{len(other)} launch other kernels than they say: {other[:5]}"
    assert not lost, f"{len(lost)} are not run: {sorted(map(str, lost))[:10]}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", PROBLEMS)
def test_random_problems_launch_what_problems_of_buckets_run(kernel, seed, monkeypatch):
    """Of caches whole kernels, as far as `must_run` of a plan says; of others, whose plans depend
    on every size of a layer, every value of a plan."""
    rng, lost, launched = random.Random(f"{kernel} {seed}"), {}, 0
    if not CASES[kernel](HOPPER):
        pytest.skip("no kernel on a GPU")
    run = {value for case in CASES[kernel](HOPPER) for value in run_by(kernel, case)}
    with recording(monkeypatch, HOPPER) as record:
        for _ in range(RANDOM_PROBLEMS):
            case = PROBLEMS[kernel](rng, HOPPER)
            if case is None:
                continue
            plans = record(case).plans
            launched += bool(plans)
            for value in {value for plan in plans for value in values_of(kernel, case, plan)} - run:
                lost.setdefault(value, case.name)
    assert launched >= RANDOM_PROBLEMS // 4
    assert not lost, f"seed {seed}: {len(lost)} are not run: {list(lost.items())[:5]}"


def run_by(kernel, case):
    """What of plans a problem runs."""
    return {value for plan in case.plans(HOPPER) for value in values_of(kernel, case, plan)}


def values_of(kernel, case, plan):
    """What of a plan must be run by a problem of a bucket."""
    if kernel == "attention":
        plain = case.mask is Mask.NONE and not case.softcapped
        return {
            (mask, *one) for one in attention_buckets.must_run(plan).items()
            for mask in (False, plain)
        }  # fmt: skip
    if kernel == "store":
        return set(store_buckets.must_run(plan).items())
    return {
        (plan.kernel, name, value)
        for name, value in linear_buckets.of_plan(kernel_of(plan)).items()
        if kernel == "append" or (name != "each kernel" and name not in SIZES)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHES)
def test_random_attention_on_other_gpus(name):
    """Kernels of GPUs that are not here are looked at, too."""
    arch, rng = ARCHES[name], random.Random(name)
    sizes = attention_buckets.sizes()
    for _ in range(8 * len(SEEDS)):
        case = attention(rng, arch)
        scheme, dims = alike(case.scheme, arch), case.dims
        some = attention_buckets.of_heads(scheme, dims, sizes, arch)
        known = {kernel_of(one.plan(arch)) for one in some}
        for _ in range(20):
            case = replace(attention(rng, arch), scheme=scheme, dims=dims)
            turns = case.rotary and has_kernel(SCHEMES[scheme], dims, arch, True)
            case = replace(case, rotary=turns)
            assert kernel_of(case.plan(arch)) in known, f"{case.name} on {name}"


def alike(name, arch):
    """The scheme that stands for all that have its kernels."""
    schemes = attention_buckets.SCHEMES
    return next(
        one for one in attention_buckets.schemes(arch)
        if attention_buckets.alike(schemes[one], arch)
        == attention_buckets.alike(schemes[name], arch)
    )  # fmt: skip


def test_what_adds_a_rotary_mean_does_not_know_how_tokens_are_coded():
    """So that kernels of a rotary mean need not be run with every scheme and size of heads."""
    folder = paths.kernel_sources() / "cuda"
    read = plan_fields((folder / "kv/attention/attention_rotary.cuh").read_text())
    assert {"threads", "step_tiles", "dtype", "paired"} <= read
    assert not read & attention_buckets.CODED
    assert {field.name for field in fields(AttentionPlan)} >= attention_buckets.CODED


@pytest.mark.slow
def test_a_boundary_that_moves_is_seen(monkeypatch):
    """Problems found under other boundaries miss what is beyond them."""
    forget = attention_buckets.domain.cache_clear, attention_buckets._cases.cache_clear
    monkeypatch.setattr(attention_buckets, "DIMS", ((128, 128),))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(choose_attention, "group_bucket", lambda groups: choose_attention.FEW)
            former = [each() for each in forget] and attention_buckets.cases(HOPPER)
        for each in forget:
            each()
        with recording(monkeypatch, HOPPER) as record:
            lost, _ = missing("attention", former, HOPPER, record)
    finally:
        for each in forget:
            each()
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHES)
def test_every_attention_that_backends_accept_has_a_plan(name):
    """Many queries of a kv head, masks and soft-caps need registers that few GPUs have."""
    arch = ARCHES[name]
    for scheme, dims in attention_buckets.every(arch):
        for case in attention_buckets.most_demanding(scheme, dims, arch):
            assert case.plan(arch) is not None, case.name
