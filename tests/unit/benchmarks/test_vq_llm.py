"""What VQ-LLM decides before it generates a kernel: thread mapping, slack, split, fusion."""

import math

import pytest

from benchmarks.paper_vq_llm.mechanisms import SCHEMES, plans_of
from benchmarks.paper_vq_llm.plan import (
    Fusion,
    base_plan,
    mma_mapping,
    slack,
    split_factor,
    switch_axes,
    with_cache,
    with_fusion,
    with_split,
)
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.errors import VQBackendError
from hf_vq.formats import WEIGHT_SCHEMES, weight_scheme

WARP = range(32)


def computes(row, column):
    """The lane that multiplies an element of the first factor of m16n8k16 (PTX)."""
    return row % 8 * 4 + column % 8 // 2


def test_the_example_of_the_paper():
    """Figure 12: threads 0, 1, 16 and 17 need the same lanes, and become lanes 0 to 3."""
    mapping = mma_mapping(8)
    assert mapping.mini_warps[0] == (0, 1, 2, 3)
    assert [mapping.lane[thread] for thread in (0, 1, 16, 17)] == [0, 1, 2, 3]
    assert mapping.exchanges == 3


@pytest.mark.parametrize(("size", "exchanges"), [(2, 0), (4, 1), (8, 3), (16, 3)])
def test_mini_warps(size, exchanges):
    """Lanes that need a vector are at most a quad: no vector needs more than three exchanges."""
    mapping = mma_mapping(size)
    assert mapping.exchanges == exchanges
    assert sorted(lane for group in mapping.mini_warps for lane in group) == sorted(
        set(mapping.lane)
    )
    if size > 2:
        assert sorted(mapping.lane) == list(WARP)


@pytest.mark.parametrize("size", [4, 8])
def test_register_fusion_brings_every_word_where_it_is_needed(size):
    """Algorithm 1's Reg_Fusion, lane by lane, with the mapping that it is given."""
    mapping = mma_mapping(size)
    words = size // 2
    data = {}
    for thread, lane in enumerate(mapping.lane):
        row, half = divmod(thread, 2)
        data[lane] = [(row, half * size + 2 * word) for word in range(words)]
    position = {lane: i for group in mapping.mini_warps for i, lane in enumerate(group)}
    for offset in range(1, mapping.exchanges + 1):
        sent = {lane: data[lane][position[lane] ^ offset] for lane in WARP}
        for lane in WARP:
            data[lane][position[lane] ^ offset] = sent[lane ^ offset]
    for lane in WARP:
        assert all(computes(*item) == lane for item in data[lane])
        assert len(set(data[lane])) == words


@pytest.mark.parametrize("size", [4, 8])
def test_the_kernel_has_this_mapping(size):
    """`row` and `column` of vq_llm.cu: what a lane decodes."""
    mapping = mma_mapping(size)
    for thread, lane in enumerate(mapping.lane):
        group, place = divmod(lane, 4)
        row_bit, half = (place // 2, place % 2) if size == 8 else (place % 2, place // 2)
        assert divmod(thread, 2) == (group + 8 * row_bit, half)


def resident(arch, threads, registers, shared):
    """Blocks of a multiprocessor, as the occupancy calculator of CUDA counts them."""
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // 256) * 256
    return min(
        arch.threads_per_sm // threads,
        arch.registers_per_sm // (of_warp * warps),
        arch.shared_per_sm // (shared + 1024),
    )


@pytest.mark.parametrize("arch", ARCHES.values(), ids=ARCHES)
@pytest.mark.parametrize(
    ("threads", "registers", "shared"),
    [(128, 40, 9000), (256, 90, 17408), (256, 128, 20000), (512, 64, 40000), (1024, 63, 50)],
)
def test_slack_costs_no_occupancy_and_more_would(arch, threads, registers, shared):
    found = slack(arch, threads, registers, shared)
    before = resident(arch, threads, registers, shared)
    assert found.blocks_per_sm == before and found.registers >= 0 <= found.shared
    more = registers + found.registers
    assert resident(arch, threads, more, shared + found.shared) == before
    assert more == 255 or resident(arch, threads, more + 1, shared) < before
    full = shared + found.shared + before  # the last bytes may not divide
    assert full > arch.shared_per_block or resident(arch, threads, registers, full) < before


def test_slack_of_few_blocks():
    arch = ARCHES["sm_90a"]
    many, few = slack(arch, 256, 64, 8192), slack(arch, 256, 64, 8192, blocks=2)
    assert (many.blocks_per_sm, few.blocks_per_sm) == (4, 2)
    assert few.registers == 128 - 64 and few.shared > many.shared
    with pytest.raises(VQBackendError, match="does not fit"):
        slack(arch, 256, 64, 1 << 20)


def test_entries_take_the_slack():
    arch = ARCHES["sm_90a"]
    base = base_plan(weight_scheme("aqlm-3"), 4096, 1)  # two books of 4096 entries of 16 bytes
    found = slack(arch, base.threads, 120, base.shared_bytes + 16)
    plan = with_cache(base, arch, 120, hot=False)
    assert plan.registers == 0 and plan.blocks_per_sm == found.blocks_per_sm == 2
    assert plan.shared == found.shared // 32 // 8 * 8 < 4096
    # Reading takes 16 registers; of what else is free of 128, an entry of both stages takes eight.
    assert with_cache(base, arch, 112).registers == 0
    hot = with_cache(base, arch, 96)
    assert hot.registers == 2 * 32 and hot.shared == hot.registers + plan.shared
    assert hot.shared_bytes == plan.shared_bytes
    small = base_plan(weight_scheme("aqlm-2"), 4096, 1)
    assert with_cache(small, arch, 120).shared == 256, "no more than there are"


def test_split_factor_makes_both_traffics_equal():
    factor = split_factor(1 << 20, 1 << 12)
    assert (1 << 20) / factor == factor * (1 << 12)


@pytest.mark.parametrize(
    ("name", "axes", "split"),
    [("vq-4", "", 1), ("aqlm-2", "R", 2), ("aqlm-3", "R", 2), ("gptvq-2", "MN", 16)],
)
def test_splits_are_along_switch_axes(name, axes, split):
    scheme = weight_scheme(name)
    assert switch_axes(scheme) == axes
    base = base_plan(scheme, 4096, 1)
    plan = with_split(base, 4096, 4096, 1)
    assert plan.split == split and plan.row_tiles == min(split, 4)
    before = base.blocks(4096) * base.codebook_bytes * (16 if axes == "MN" else 1)
    wanted = math.sqrt(before / (4 * 4096))
    assert abs(split - wanted) == min(abs(n - wanted) for n in (1, 2, 4, 8, 16) if n <= split)
    # With 64 times the output, reducing it costs more than the books do.
    assert with_split(base, 4096, 4096, 16 * 64).split <= split


def test_few_exchanges_are_shuffles():
    for name in SCHEMES:
        plan = with_fusion(base_plan(weight_scheme(name), 4096, 1))
        assert plan.fusion is Fusion.SHUFFLE and plan.exchanges <= 3


@pytest.mark.parametrize("name", ["quip-sharp-2", "turboquant-4", "aqlm-2-int7"])
def test_other_schemes_are_refused(name):
    with pytest.raises(VQBackendError, match="has no kernel"):
        base_plan(weight_scheme(name), 4096, 1)
    with pytest.raises(VQBackendError, match="1 to 16 tokens"):
        base_plan(WEIGHT_SCHEMES["aqlm-2"], 4096, 17)
    with pytest.raises(VQBackendError, match="whole words"):
        base_plan(WEIGHT_SCHEMES["aqlm-2"], 4096 + 8, 1)


@pytest.mark.slow
@pytest.mark.skipif(bool(compiler.why_not()), reason="needs NVRTC")
@pytest.mark.parametrize("arch", ARCHES)
def test_plans_of_the_suite_do_not_spill(arch):
    names = SCHEMES if arch == "sm_90a" else ("aqlm-2", "gptvq-2")
    for name in names:
        scheme = weight_scheme(name)
        plans = plans_of(scheme, ARCHES[arch], 4096, 4096, 16)
        assert {"GC", "O1", "O2", "O3", "O4", "O1, renumbered"} <= set(plans)
        if arch != "sm_90a":
            plans = {what: plans[what] for what in ("O2", "O4", "O1, renumbered")}
        for what, plan in plans.items():
            image, found = compiler.compile_plan(plan, arch)
            assert image.startswith(b"\x7fELF")
            assert (found.stack, found.spilled) == (0, 0), (name, what, plan)
            assert plan.shared_bytes + found.shared <= ARCHES[arch].shared_per_block
