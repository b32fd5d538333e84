"""Lanes of the append kernel own every vector once; its grid names every entry that is nearest."""

import ctypes
import dataclasses
import itertools
import re

import pytest
import torch

from hf_vq import paths
from hf_vq.backends.cuda.kv.append import AppendArguments, RotaryAppendArguments, candidates
from hf_vq.backends.cuda.kv.step import RotaryStoreArguments, StoreArguments
from hf_vq.codegen.families.kv_append import CELLS, HEAD_DIMS, append_plan, appendable, store_plan
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.kv_plan import AppendPlan, StorePlan
from hf_vq.codegen.plan import Dtype, render
from hf_vq.formats import KV_SCHEMES, VQScheme
from hf_vq.formats.shared import universal_tensor

SCHEMES = {name: kv.key for name, kv in KV_SCHEMES.items() if name != "cq-1"}
SCHEMES |= {
    f"universal-{bits}": VQScheme(1, bits, scale_group=0, rotation="hadamard", rotation_block=0)
    for bits in range(1, 9)
}
SCHEMES["learned-6"] = VQScheme(4, 6, codebook="channel_group", scale_group=0, rotation="none")
NVRTC = pytest.mark.skipif(bool(compiler.why_not()), reason=compiler.why_not())


def plan_for(scheme, dim, few=False, grid=False, dtype=Dtype.BFLOAT16):
    return append_plan(scheme, dim, dtype, centred=True, aligned=True, few=few, grid=grid)


def checked(plan, arch):
    image, found = compiler.compile_plan(plan, arch)
    assert image.startswith(b"\x7fELF")
    assert (found.stack, found.spilled, found.shared) == (0, 0, 0), plan
    assert 0 < found.registers * plan.threads * plan.blocks_per_sm <= 65536
    assert plan.shared_bytes <= 48 << 10  # what any GPU gives


@pytest.mark.slow
@NVRTC
@pytest.mark.parametrize("name", ["u4", "u2", "nomad-u4", "qserve-kv4"])
def test_pages(name):
    for few, arch in ((False, "sm_80"), (True, "sm_90a")):
        plan = append_plan(
            SCHEMES[name], 128, Dtype.BFLOAT16, centred=True, aligned=True, few=few, page=64
        )
        checked(plan, arch)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_vector_is_in_one_slot(name, dim, few):
    scheme = SCHEMES[name]
    assert appendable(scheme, dim) is None
    plan, vectors = plan_for(scheme, dim, few), dim // scheme.vector_size
    assert plan.width * scheme.entry_bits % 8 == 0 and vectors % plan.width == 0
    if plan.learned:
        assert plan.blocks_across * plan.threads // 32 * plan.width >= vectors
        return
    assert 32 % plan.lanes == 0
    uppers = -(-vectors // (plan.lanes * plan.width))
    slots = uppers * plan.width
    owned = [
        (slot // plan.width * plan.lanes + lane) * plan.width + slot % plan.width
        for lane in range(plan.lanes)
        for slot in range(slots)
    ]
    assert sorted(owned)[:vectors] == list(range(vectors))
    assert slots <= 16 and slots * scheme.vector_size <= 24
    # Butterflies stay in whole blocks.
    assert dim % plan.block == 0 and plan.block & (plan.block - 1) == 0


@pytest.mark.parametrize(
    ("scheme", "dim", "reason"),
    [
        (VQScheme(2, 4, 2, scale_group=0), 128, "one stage"),
        (VQScheme(8, 8, scale_group=0), 128, "x is 1, 2 or 4"),
        (KV_SCHEMES["cq-1"].key, 128, "x is 1, 2 or 4"),
        (VQScheme(2, 9, scale_group=0), 128, "up to 8 bits"),
        (VQScheme(2, 8, scale_group=0, rotation="qr"), 128, "'qr'"),
        (VQScheme(2, 8, scale_group=64, rotation="none"), 128, "several scales"),
        (SCHEMES["u4"], 512, "head_dim 512"),
        (VQScheme(4, 6, scale_group=0, rotation="none"), 72, "head_dim 72"),
        (dataclasses.replace(SCHEMES["cq-4"], rotation="hadamard"), 128, "rotated rows"),
        (dataclasses.replace(SCHEMES["cq-4"], entry_bits=7), 128, "registers"),
    ],
)
def test_what_is_not_appended_says_why(scheme, dim, reason):
    assert reason in appendable(scheme, dim)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [16, 32, 64])
@pytest.mark.parametrize("name", ["u4", "u3", "few"])
def test_candidates_of_a_cell(name, cells):
    if name == "few":
        book = torch.randn(16, 2).half()
        book[8:] *= 0.01  # more than four in a cell
    else:
        book = universal_tensor(SCHEMES[name])[0]
    lists, per_unit = candidates(book, cells)
    vectors = 1.3 * book.float().abs().max() * (2 * torch.rand(50000, 2) - 1)
    cell = (vectors * per_unit + cells / 2).floor().long()
    inside = ((cell >= 0) & (cell < cells)).all(1)
    assert 0.5 < inside.float().mean() < 1
    vectors, (x, y) = vectors[inside], cell[inside].unbind(1)
    word = lists[y, x].long() & 0xFFFFFFFF
    named = torch.stack([word >> 8 * k & 255 for k in range(4)], 1)
    more = word == 1
    assert (named.diff(dim=1)[~more] >= 0).all()
    nearest = torch.cdist(vectors.double(), book.double()).argmin(1)
    assert ((named == nearest[:, None]).any(1) | more).all()
    if name != "few" and cells == CELLS[SCHEMES[name].entry_bits]:
        assert not more.any()


@pytest.mark.slow
@NVRTC
@pytest.mark.parametrize("name", ["u4", "u3", "u2", "nomad-u4", "cq-4", "nomad-2", "qserve-kv4"])
def test_a_rotary_mean(name):
    for few, dim in itertools.product((True, False), (64, 256)):
        plan = append_plan(
            SCHEMES[name], dim, Dtype.BFLOAT16, centred=True, aligned=True, few=few, grid=True,
            rotary=True,
        )  # fmt: skip
        checked(plan, "sm_90a")
        if few:
            values = dataclasses.replace(plan, centred=False, rotary=False)
            checked(store_plan(plan, values), "sm_80")


def source(name):
    return (paths.kernel_sources() / "cuda" / name).read_text(encoding="utf-8")


def test_templates_read_every_field_and_no_other():
    text = "".join(
        map(
            source,
            (
                "kv/append.cuh",
                "kv/append_groups.cuh",
                "kv/append_integers.cuh",
                "kv/append_nearest.cuh",
                "kv/append_rotary.cuh",
            ),
        )
    )
    fields = {field.name for field in dataclasses.fields(AppendPlan)}
    assert set(re.findall(r"\b(?:S|Plan)::(\w+)", text + source("kv/append.cu"))) == fields
    of_store = set(re.findall(r"\bPlan::(\w+)", source("kv/kv_step.cu")))
    assert of_store == {field.name for field in dataclasses.fields(StorePlan)}
    plan = store_plan(plan_for(SCHEMES["u4"], 128, True), plan_for(SCHEMES["cq-4"], 64, True))
    lines = [line.strip() for line in render(plan).splitlines()]
    assert lines.count("static constexpr bool learned = true;") == 1
    assert lines.index("struct keys {") < lines.index("struct values {")
    assert lines.count("};") == 3


def test_arguments_are_those_of_the_source():
    """Names and order; their types are a pointer, or numbers of the named size."""
    sizes = {"int64_t": 8, "int": 4, "float": 4}
    rotary = "primitives/rotary.cuh"

    def members(file, struct):
        body = re.search(rf"struct {struct} {{\n(.*?)}};", source(file), re.DOTALL)[1]
        body = re.sub("//.*", "", body)
        for kind, names in re.findall(r"([\w \*]+?[ \*])((?:\w+, )*\w+);", body):
            for name in names.split(", "):
                yield name, 8 if "*" in kind else sizes.get(kind.strip(), kind.strip())

    def mirrored(arguments):
        return [(name, getattr(arguments, name).size) for name, _ in arguments._fields_]

    assert list(members("kv/append.cu", "Arguments")) == mirrored(AppendArguments)
    turning = [(f"rotary_{name}", size) for name, size in members(rotary, "RotaryMean")]
    for longer, plain in (
        (RotaryAppendArguments, AppendArguments), (RotaryStoreArguments, StoreArguments)
    ):  # fmt: skip
        assert mirrored(longer) == mirrored(plain) + turning
        # Where a compiler puts the members of a derived struct.
        assert longer.rotary_mean.offset == ctypes.sizeof(plain)
    sides = {"keys": "key_", "values": "value_"}
    expected = []
    for name, size in members("kv/kv_step.cu", "Arguments"):
        if name in sides:
            expected += [(sides[name] + part, of) for part, of in members("kv/kv_step.cu", "Side")]
        else:
            expected.append((name, size))
    assert expected == mirrored(StoreArguments)


@pytest.mark.slow
@NVRTC
@pytest.mark.parametrize("arch", ARCHES)
def test_the_matrix_compiles(arch):
    for name in ("u4", "u3", "u2", "nomad-u4", "cq-4", "nomad-2", "qserve-kv4"):
        few = plan_for(SCHEMES[name], 128, few=True, grid=True)
        checked(few, arch)
        checked(plan_for(SCHEMES[name], 128, grid=True), arch)
        checked(store_plan(few, dataclasses.replace(few, centred=False)), arch)


@pytest.mark.slow
@NVRTC
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    "name", ["u4", "u3", "u2", "nomad-u4", "universal-5", "learned-6", "qserve-kv4"]
)
def test_other_sizes(name, few):
    for dim in (80, 192, 256):
        checked(plan_for(SCHEMES[name], dim, few, False, Dtype.FLOAT32), "sm_80")
