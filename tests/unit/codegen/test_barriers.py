"""Barriers in shared memory (mbarrier) have it alone until they are invalidated: PTX forbids to
store anything over one, and such a store may be lost. Results of warps that met in the memory of
barriers were wrong in some of many calls of attention.
"""

import re
from types import SimpleNamespace

import pytest

from hf_vq import paths
from hf_vq.codegen.jit.device import named_arch
from hf_vq.formats.catalog import WEIGHT_SCHEMES, weight_scheme
from tests.buckets import w4a8
from tests.buckets.linear import LinearCase, runs
from tests.fixtures.codegen.kernel_templates import constants, expanded

HOPPER = named_arch("sm_90a")
ATTENTION = "kv/attention/attention"
LINEAR, TILES, WIDE, W4A8 = (
    "linear/linear", "linear/linear_tile_codebook", "linear/linear_wgmma", "w4a8/w4a8_wgmma",
)  # fmt: skip
INT8 = WEIGHT_SCHEMES["vq-4"].with_activations(8).spec()
WIDTH = 16  # bytes of a barrier, or of two


def test_every_file_with_barriers_is_looked_at():
    """A kernel that gets barriers needs a test here."""
    folder = paths.kernel_sources() / "cuda"
    found = {
        path.relative_to(folder).as_posix()
        for path in (*folder.rglob("*.cu"), *folder.rglob("*.cuh"))
        if re.search(r"\bbarrier_init\(|mbarrier\.init", path.read_text())
    }
    assert found == {
        "primitives/wgmma.cuh", "primitives/wgmma_ring.cuh", "kv/attention/attention_mainloop.cuh",
        f"{LINEAR}.cu", f"{TILES}.cu",
    }  # fmt: skip


def body_of(text, name):
    """The text between the braces of a function."""
    begin = text.index("{", re.search(rf"\b{name}\(", text).end())
    depth = 0
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin + 1 : at]
    raise AssertionError(f"{name} does not end")


def test_attention_invalidates_its_barriers_before_warps_meet_in_their_memory():
    text = expanded(f"{ATTENTION}.cu")
    step = text[text.index("struct Step {") :]
    begin, end = body_of(step, "begin"), body_of(step, "end")
    (made,) = re.findall(r"for \(int (\w) = 0; \1 < (.*?); \+\+\1\) barrier_init\((.*?),", begin)
    (freed,) = re.findall(r"if \((\w+) < (.*?)\) barrier_invalidate\((.*?)\);", end)
    # As many of them, at the same places.
    assert made[1] == freed[1]
    assert re.sub(rf"\b{made[0]}\b", "?", made[2]) == re.sub(rf"\b{freed[0]}\b", "?", freed[2])
    # No lane of the warp waits any more.
    assert end.index("__syncwarp()") < end.index("barrier_invalidate(")
    # All warps have done so before any of them leaves its results.
    main = text[text.index('extern "C" __global__') :]
    (meeting,) = (found.start() for found in re.finditer(r"\bfinish\(", main))
    (freeing,) = (found.start() for found in re.finditer(r"\bStep::end\(", main))
    last = max(found.end() for found in re.finditer(r"\battend\(|\bStep::wait\(", main))
    assert last < freeing < meeting
    assert main[freeing:meeting].count("\n") == 1, "something lies between them"
    finish = body_of(text, "finish")
    assert finish.index("__syncthreads()") < finish.index(".leave(")


def weights(kernel):
    """Plans of a kernel of coded weights."""
    found = {
        LinearCase(name, tokens, rows, columns, "float16", False).plan(HOPPER)
        for name in ("vq-2", "vq-4", "gptvq-2", "turboquant-1", "quip-sharp-2", "aqlm-3", INT8)
        for rows, columns in ((300, 2048), (4096, 4096), (14336, 4096), (4096, 14336))
        for tokens in (1, 2, 8, 16, 64, 512, 2048)
        if runs(weight_scheme(name), columns) is None
    }
    return [plan for plan in found if plan.template == kernel]


def plans(kernel):
    """Those whose barriers are used."""
    if kernel == W4A8:
        every = {plan for case in w4a8.cases(HOPPER) for plan in case.plans(HOPPER)}
        return [plan for plan in every if plan.template == W4A8]
    return [plan for plan in weights(kernel) if kernel == WIDE or plan.cluster_size > 1]


def layout(plan):
    """Constants of the kernel of a plan."""
    text = expanded(f"{plan.template}.cu")
    first = 1024 if plan.template == WIDE else 0
    table = SimpleNamespace(bytes=getattr(plan, "table_bytes", 0), first=first)
    return SimpleNamespace(**constants(text, {"Plan": plan, "Table": table})), table


@pytest.mark.parametrize("kernel", [LINEAR, TILES, WIDE, W4A8])
def test_barriers_of_products_lie_behind_what_is_written_before(kernel):
    """And nothing else lies where they are."""
    found = plans(kernel)
    assert len(found) > 2
    for plan in found:
        at, table = layout(plan)
        begin, end, origin = at.sums_barrier, at.sums_barrier + WIDTH, 0
        if kernel == LINEAR:
            parts = [(0, table.bytes), (table.bytes, at.partial_sum_bytes)]
        elif kernel == TILES:
            sums = at.added * at.parts * 512
            parts = [(0, table.bytes), (at.ring, plan.x_stages * at.slot_bytes),
                     (at.factors, 4 * at.band), (at.partial_sums, sums)]  # fmt: skip
        else:
            origin, begin = at.origin, at.barriers
            sums = at.added * at.split * at.math_threads * 16 * (at.split > 1)
            parts = [(origin, table.bytes), (at.first_byte, plan.x_stages * at.slot_bytes),
                     (at.partial_sums, sums)]  # fmt: skip
            assert begin + WIDTH * plan.x_stages <= at.sums_barrier
        for one, size in parts:
            assert one + size <= begin, f"{plan}: {one} + {size} > {begin}"
        if kernel == WIDE:
            behind = at.factors + plan.warpgroups * at.factors_of_warpgroup
            assert at.factors >= end and behind == origin + plan.shared_bytes, plan
        elif kernel == W4A8:
            assert at.of_groups >= end and origin + plan.shared_bytes > at.of_groups, plan
        else:
            assert end == origin + plan.shared_bytes, f"{plan}: something lies behind {end}"
