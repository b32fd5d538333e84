"""The table is read from the top, remembers, and can say why."""

import pytest

from hf_vq.errors import VQBackendError
from hf_vq.ops import dispatch
from hf_vq.ops.dispatch import Kernel, Problem


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(dispatch, "_table", [])
    dispatch.forget()
    yield dispatch
    dispatch.forget()


def kernel(name, **fields):
    return Kernel(name, "linear", lambda: name, **fields)


PROBLEM = Problem("linear", "cpu", "float32", "vq2x8r1", tokens=1, n=8, k=8)


def test_first_row_that_can_wins(table):
    table.register(kernel("cuda.a", device="cuda"))
    table.register(kernel("cpu.b", needs=lambda: "not built"))
    table.register(kernel("cpu.c", accepts=lambda p: None if p.tokens > 4 else "too few tokens"))
    table.register(kernel("reference"))
    table.register(kernel("late"))
    assert table.select(PROBLEM).name == "reference"
    reasons = {verdict.kernel.name: verdict.reason for verdict in table.explain(PROBLEM)}
    assert reasons == {
        "cuda.a": "tensor is on cpu",
        "cpu.b": "not built",
        "cpu.c": "too few tokens",
        "reference": "",
        "late": "a row above runs it",
    }
    assert [v.kernel.name for v in table.explain(PROBLEM) if v.chosen] == ["reference"]


def test_rows_below_the_first_that_can_are_not_asked(table):
    table.register(kernel("a"))
    table.register(kernel("b", needs=lambda: pytest.fail("asked")))
    assert table.select(PROBLEM).name == "a"


def test_choice_is_remembered_until_the_table_changes(table):
    asked = []
    table.register(kernel("a", needs=lambda: asked.append(1)))
    for _ in range(3):
        table.select(PROBLEM)
    assert asked == [1]
    table.register(kernel("b"), first=True)
    assert table.select(PROBLEM).name == "b"
    table.register(kernel("b", needs=lambda: "gone"), first=True)
    assert table.select(PROBLEM).name == "a"


def test_forced_backend(table, monkeypatch):
    table.register(kernel("cpu.fast"))
    table.register(kernel("reference"))
    monkeypatch.setenv("HF_VQ_BACKEND", "reference")
    assert table.select(PROBLEM).name == "reference"
    monkeypatch.setenv("HF_VQ_BACKEND", "cpu")
    assert table.select(PROBLEM).name == "cpu.fast"
    monkeypatch.setenv("HF_VQ_BACKEND", "cuda")
    with pytest.raises(VQBackendError, match="Unset HF_VQ_BACKEND=cuda"):
        table.select(PROBLEM)


def test_empty_table(table):
    with pytest.raises(VQBackendError, match="the table is empty"):
        table.select(PROBLEM)


@pytest.mark.parametrize("count,bucket", [(0, 1), (1, 1), (2, 2), (3, 4), (16, 16), (17, 32)])
def test_bucket(count, bucket):
    assert dispatch.bucket(count) == bucket


@pytest.mark.parametrize(
    "op",
    [
        "linear",
        "published_linear",
        "w4a8_linear",
        "decode",
        "encode",
        "rotate",
        "append",
        "attention",
        "encode_weight",
        "store",
        "attention_static",
    ],
)
def test_every_op_ends_with_its_reference(op):
    import hf_vq  # noqa: F401  registers the backends

    assert dispatch.rows(op)[-1].name == "reference"
    assert dispatch.rows(op)[-1].device == "any"
