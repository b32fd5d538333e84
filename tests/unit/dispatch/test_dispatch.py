"""The table is read from the top, remembers, and can say why."""

import re

import pytest

from hf_vq import dispatch
from hf_vq.dispatch import ENTRIES, PROBLEMS, Entry, Implementation, LinearProblem
from hf_vq.errors import VQBackendError

ORDER = {
    "linear": [
        "cpu.linear", "cuda.tile_linear", "cuda.int8_linear", "cuda.wide_linear",
        "cuda.fused_linear", "cuda.linear", "triton.linear", "two_passes.linear", "reference",
    ],
    "input_gradient": ["cpu.input_gradient", "cuda.input_gradient", "reference"],
    "w4a8_linear": ["cpu.w4a8_linear", "cuda.w4a8_wide", "cuda.w4a8_linear", "reference"],
    "published_linear": ["cpu.vptq_linear", "cuda.vptq_linear", "cuda.vptq_decoded", "reference"],
    "decode": [
        "cpu.decode", "cuda.decode_integers", "cuda.decode", "two_passes.decode", "reference",
    ],
    "encode_weight": ["cuda.encode_weight", "cpu.encode_weight", "reference"],
    "round_weight": ["cuda.round_weight", "cpu.round_weight", "reference"],
    "encode": ["reference"],
    "rotate": ["cuda.rotate", "reference"],
    "kv_append": ["cuda.vq_store", "cuda.vq_append", "cpu.vq_append", "reference"],
    "kv_attention": [
        "cuda.vq_attention", "cuda.attention_prefill", "cpu.vq_attention", "torch.attention",
        "reference",
    ],
    "key_means": ["cuda.key_means", "cpu.key_means", "reference"],
    "key_smoothing": ["cuda.key_smoothing", "cpu.key_smoothing", "reference"],
}  # fmt: skip
"""Names are what `explain` prints and HF_VQ_BACKEND takes; the first that can, does."""


def entry(name, supports=lambda problem: None, **fields):
    return Entry(name, "linear", Implementation(lambda: name, supports), **fields)


PROBLEM = LinearProblem("cpu", "float32", "vq2x8r1", 1, 8, 8)


def test_the_order_in_which_entries_are_asked():
    assert {op: [each.name for each in dispatch.entries(op)] for op in ORDER} == ORDER
    assert {each.op for each in ENTRIES} == set(ORDER)


@pytest.mark.parametrize("op", ORDER)
def test_every_op_has_a_problem_and_ends_with_its_reference(op):
    last = dispatch.entries(op)[-1]
    assert (last.name, last.devices, last.available) == ("reference", (), None)
    assert PROBLEMS[op]._field_defaults["op"] == op
    fields = PROBLEMS[op]._fields
    assert fields[0] == "device" and fields[-1] == "op"


def test_problems_of_ops_with_the_same_fields_differ():
    fields = ("cpu", "float32", "qoq-w4a8", 1, 8, 8)
    kinds = [PROBLEMS[op] for op in ("linear", "w4a8_linear", "published_linear")]
    assert len({kind(*fields) for kind in kinds}) == 3


@pytest.mark.parametrize("each", ENTRIES, ids=lambda each: f"{each.op}-{each.name}")
def test_an_entry_names_what_there_is(each):
    if each.name.startswith("triton."):
        pytest.importorskip("triton")
    assert isinstance(each.implementation, Implementation)
    assert each.available is None or callable(dispatch.load(each.available))
    assert each.source.startswith("backends.")


def test_what_allocates_blocks_is_there():
    for name in dispatch.ALLOCATORS.values():
        assert callable(dispatch.load(name))


def test_the_first_that_can_runs():
    found = [
        entry("cuda.a", devices=("cuda",)),
        entry("cpu.b", available=lambda: "not built"),
        entry("cpu.c", lambda p: None if p.tokens > 4 else "too few tokens"),
        entry("reference"),
        entry("late"),
    ]
    with dispatch.using(found):
        assert dispatch.select(PROBLEM).name == "reference"
        reasons = {verdict.entry.name: verdict.reason for verdict in dispatch.explain(PROBLEM)}
        assert reasons == {
            "cuda.a": "tensor is on cpu",
            "cpu.b": "not built",
            "cpu.c": "too few tokens",
            "reference": "",
            "late": "an entry above runs it",
        }
        chosen = [v.entry.name for v in dispatch.explain(PROBLEM) if v.chosen]
        assert chosen == ["reference"]
    assert dispatch.entries() == ENTRIES


def test_entries_below_the_first_that_can_are_not_asked():
    with dispatch.using([entry("a"), entry("b", available=lambda: pytest.fail("asked"))]):
        assert dispatch.select(PROBLEM).name == "a"


def test_what_is_elsewhere_or_missing_is_not_imported(monkeypatch):
    imported = []
    monkeypatch.setattr("hf_vq.dispatch.entry.import_module", imported.append)
    entries = [
        Entry("cuda.a", "linear", "backends.nowhere:LINEAR", ("cuda",)),
        Entry("cpu.b", "linear", "backends.nowhere:LINEAR", available=lambda: "not built"),
        entry("reference"),
    ]
    with dispatch.using(entries):
        assert dispatch.select(PROBLEM).name == "reference"
    assert imported == []


def test_the_choice_is_remembered_until_other_entries_are_asked():
    asked = []
    first = entry("a", available=lambda: asked.append(1))
    with dispatch.using([first]):
        for _ in range(3):
            dispatch.select(PROBLEM)
        assert asked == [1]
        with dispatch.preferred(entry("b")):
            assert dispatch.select(PROBLEM).name == "b"
        with dispatch.preferred(entry("b", available=lambda: "gone")):
            assert dispatch.select(PROBLEM).name == "a"
        assert dispatch.entries() == (first,)


def test_the_table_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError), dispatch.preferred(entry("b")):
        raise ZeroDivisionError
    assert dispatch.entries() == ENTRIES


def test_a_forced_backend(monkeypatch):
    with dispatch.using([entry("cpu.fast"), entry("other.c"), entry("reference")]):
        monkeypatch.setenv("HF_VQ_BACKEND", "reference")
        assert dispatch.select(PROBLEM).name == "reference"
        monkeypatch.setenv("HF_VQ_BACKEND", "cpu")
        assert dispatch.select(PROBLEM).name == "cpu.fast"
        for name in ("other", "other.c"):
            monkeypatch.setenv("HF_VQ_BACKEND", name)
            assert dispatch.select(PROBLEM).name == "other.c"
        monkeypatch.setenv("HF_VQ_BACKEND", "cuda")
        with pytest.raises(VQBackendError, match="Unset HF_VQ_BACKEND=cuda"):
            dispatch.select(PROBLEM)


def test_an_empty_table():
    with dispatch.using([]), pytest.raises(VQBackendError, match="the table is empty"):
        dispatch.select(PROBLEM)


@pytest.mark.parametrize("count,bucket", [(0, 1), (1, 1), (2, 2), (3, 4), (16, 16), (17, 32)])
def test_bucket(count, bucket):
    assert dispatch.bucket(count) == bucket


def test_importing_the_package_imports_no_backend(run_python):
    layers = ("hf_vq.backends", "hf_vq.codegen")
    code = f"import sys, hf_vq; print([m for m in sys.modules if m.startswith({layers})])"
    assert run_python(code).strip() == "[]"


def test_the_pages_name_entries_that_there_are(root):
    """The list of docs/architecture.md is the table; no page names an entry that is not in it."""
    architecture = (root / "docs" / "architecture.md").read_text("utf-8")
    for op, names in ORDER.items():
        assert f"| `{op}` | {', '.join(f'`{name}`' for name in names)} |" in architecture
    known = {each.name for each in ENTRIES}
    modules = {"cuda.bindings", "triton.enable_pdl"}  # of Python, and of PyTorch
    for page in (*root.glob("*.md"), *root.glob("docs/**/*.md"), root / "kernels" / "README.md"):
        named = re.findall(r"`((?:cpu|cuda|triton|two_passes)\.\w+)`", page.read_text("utf-8"))
        assert set(named) <= known | modules, page


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_cpu_that_is_forced_decides_for_a_prompt(backend, monkeypatch):
    monkeypatch.setenv("HF_VQ_BACKEND", backend)
    for op in ("key_means", "key_smoothing"):
        assert dispatch.select(PROBLEMS[op]("cpu", "float32", 64)).name.startswith(backend)
