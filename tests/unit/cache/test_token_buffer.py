"""Tapes of codes: what goes in comes out, wherever the tape begins and however it is ordered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_vq.cache.token_buffer import CodeBuffer
from hf_vq.errors import VQCacheError
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.ops.layout import write_rows

# A tape asks no kernel: these tests need not run twice.
pytestmark = pytest.mark.parametrize("layouts", ["rows"], indirect=True)
CASES = [(name, layout) for name in ("u4", "u3", "nomad-u4", "nomad-2") for layout in
         ("rows", "planes", "quads")]  # fmt: skip


def fresh(tape: CodeBuffer, count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random canonical rows and scales for a tape."""
    batch, heads, _, scales = tape.scale.shape
    rows = torch.randint(0, 256, (batch, heads, count, tape.width), generator=source)
    scale = torch.randn(batch, heads, count, scales, generator=source)
    return rows.to(torch.uint8), scale.half()


def append(tape: CodeBuffer, rows: Tensor, scale: Tensor) -> None:
    """What the op `append` does with codes that are already there."""
    at, count = tape.reserve(rows.shape[2]), rows.shape[2]
    write_rows(tape.data, at, rows, tape.bits, tape.layout)
    tape.scale[:, :, at : at + count] = scale
    tape.end += count


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([0, 1, 2, 30, 255, 256, 300])),
        st.tuples(st.sampled_from(["pop", "drop"]), st.sampled_from([0, 1, 5, 200, 256, 400])),
        st.tuples(st.sampled_from(["turn", "replace"]), st.just(0)),
    ),
    max_size=8,
)


@settings(
    max_examples=60, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.sampled_from(CASES), st.integers(0, 300), steps, st.integers(0, 1 << 30))
def test_it_holds_what_a_list_would(
    case: tuple[str, str], capacity: int, steps: list[tuple[str, int]], seed: int
) -> None:
    name, layout = case
    source = torch.Generator().manual_seed(seed)
    scheme = KV_SCHEMES[name].key
    tape = CodeBuffer(torch.zeros(2, 1, 1, 16), scheme, layout, capacity)
    rows, scale = fresh(tape, 0, source)
    for step, count in steps:
        if step == "append":
            more = fresh(tape, count, source)
            append(tape, *more)
            rows, scale = torch.cat([rows, more[0]], 2), torch.cat([scale, more[1]], 2)
        elif step == "pop":
            tape.pop(count)
            kept = max(rows.shape[2] - count, 0)
            rows, scale = rows[:, :, :kept], scale[:, :, :kept]
        elif step == "drop":
            tape.drop(count)
            rows, scale = rows[:, :, count:], scale[:, :, count:]
        elif step == "turn":
            tape.map(lambda x: x.flip(0))
            rows, scale = rows.flip(0), scale.flip(0)
        else:
            tape.replace(rows, scale)
            assert tape.begin == 0
        assert len(tape) == rows.shape[2]
        assert torch.equal(tape.rows(), rows) and torch.equal(tape.scales(), scale)
        assert tape.nbytes == rows.nbytes + scale.nbytes and tape.allocated >= tape.nbytes
        room = tape.scale.shape[2]
        assert tape.data.shape[2] * (1 if layout == "rows" else 256) == room >= tape.end


@pytest.mark.parametrize("layout", ["rows", "planes"])
def test_growth_is_bounded(layout: str) -> None:
    source, unit = torch.Generator(), 1 if layout == "rows" else 256
    tape = CodeBuffer(torch.zeros(1, 1, 1, 16), KV_SCHEMES["u4"].key, layout)
    moves, address = 0, tape.data.data_ptr()
    for _ in range(3000):
        append(tape, *fresh(tape, 1, source))
        moves, address = moves + (tape.data.data_ptr() != address), tape.data.data_ptr()
        assert tape.scale.shape[2] < 1.5 * len(tape) + unit
    assert moves < 20
    for _ in range(1000):  # a window slides: memory stays
        append(tape, *fresh(tape, 1, source))
        tape.drop(1)
    assert len(tape) == 3000 and tape.scale.shape[2] < 1.5 * 3000 + 2 * unit


@pytest.mark.parametrize("layout", ["rows", "planes"])
def test_limit(layout: str) -> None:
    source = torch.Generator()
    tape = CodeBuffer(torch.zeros(1, 1, 1, 16), KV_SCHEMES["u4"].key, layout, 300, 300)
    append(tape, *fresh(tape, 10, source))
    address = tape.data.data_ptr()
    append(tape, *fresh(tape, 290, source))
    assert tape.data.data_ptr() == address
    assert tape.data.shape[2] == (300 if layout == "rows" else 2)
    tape.drop(10)
    append(tape, *fresh(tape, 10, source))  # the limit is of the tokens held
    with pytest.raises(VQCacheError, match="600 tokens, max_cache_len=300"):
        tape.reserve(300)


@pytest.mark.parametrize("layout", ["rows", "planes", "quads"])
def test_other_devices_hold_rows(layout: str) -> None:
    tape = CodeBuffer(torch.zeros(1, 1, 1, 16), KV_SCHEMES["u4"].key, layout)
    rows, scale = fresh(tape, 300, torch.Generator())
    append(tape, rows, scale)
    tape.drop(7)
    tape.map(lambda x: x.to("meta"))
    assert tape.layout == "rows" and tape.data.device.type == tape.scale.device.type == "meta"
    assert len(tape) == 293 and tape.rows().shape == (1, 1, 293, 8)
    tape.map(lambda x: torch.zeros_like(x, device="cpu") + 5)  # stands for a copy back
    assert tape.layout == layout and len(tape) == 293
    assert (tape.rows() == 5).all() and (tape.scales() == 5).all()


def test_room_behind_the_last_token_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a GPU copy what lies in the same 16 bytes, too."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with 255
    try:
        tape = CodeBuffer(torch.zeros(2, 1, 1, 16), KV_SCHEMES["u3"].key, "rows", 40)
        tape.reserve(7)
        assert not tape.data.any() and not tape.scale.any()
    finally:
        torch.use_deterministic_algorithms(False)
