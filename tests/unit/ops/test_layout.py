"""Blocks of codes against their definition, written out code by code."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_vq import dispatch
from hf_vq.backends.cpu import library
from hf_vq.dispatch import KVAttentionProblem
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.packing import pack_bits
from hf_vq.ops.layout import (
    BLOCK,
    allocate,
    block_bytes,
    check,
    layouts_for,
    to_rows,
    write_rows,
)

CASES = [(name, bits) for name in ("planes", "quads") for bits in (4, 6, 8)]


def written_out(codes: Tensor, bits: int, name: str) -> Tensor:
    """Blocks uint8 [blocks, S * 32 * bits] of codes [tokens, S]."""
    tokens, vectors = codes.shape
    blocks = -(-tokens // 256)
    padded = numpy.zeros((blocks * 256, vectors), numpy.uint8)
    padded[:tokens] = codes
    data = numpy.zeros((blocks, vectors, 32 * bits), numpy.uint8)
    i = numpy.arange(256)
    for block, packet in numpy.ndindex(blocks, vectors):
        token, vector = i, packet
        if name == "quads":
            strip, quad = divmod(packet, vectors // 4)
            token = 64 * strip + 16 * (i // 64) + i % 64 // 4
            vector = 4 * quad + i % 4
        code = padded[256 * block + token, vector]
        place = data[block, packet]
        if bits == 8:
            place[i] = code
            continue
        numpy.bitwise_or.at(place, 64 * (i // 128) + i % 64, (code & 15) << 4 * (i // 64 % 2))
        if bits == 6:
            numpy.bitwise_or.at(place, 128 + i % 64, (code >> 4) << 2 * (i // 64))
    return torch.from_numpy(data).reshape(blocks, -1)


@pytest.mark.parametrize(("name", "bits"), CASES)
@pytest.mark.parametrize(("tokens", "vectors"), [(1, 4), (256, 8), (300, 32), (513, 64), (70, 260)])
def test_the_definition(name: str, bits: int, tokens: int, vectors: int) -> None:
    codes = torch.randint(0, 1 << bits, (2, 3, tokens, vectors))
    blocks = -(-tokens // BLOCK)
    data = torch.zeros(2, 3, blocks, block_bytes(vectors, bits), dtype=torch.uint8)
    write_rows(data, 0, pack_bits(codes, bits), bits, name)
    for b, h in numpy.ndindex(2, 3):
        assert torch.equal(data[b, h], written_out(codes[b, h], bits, name))


@st.composite
def writes(draw: st.DrawFn) -> tuple[str, int, int, tuple[int, int], list[tuple[int, int]], int]:
    """Layout, bits, vectors, (batch, blocks), [(at, count)], seed."""
    name, bits = draw(st.sampled_from(CASES))
    vectors = draw(st.integers(1, 12)) * (4 if name == "quads" else 1)
    blocks = draw(st.integers(1, 3))
    places = []
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, blocks * BLOCK))
        count = draw(st.sampled_from([0, 1, 2, 255, 256, 257, 1000]))
        places.append((at, min(count, blocks * BLOCK - at)))
    size = draw(st.integers(1, 2)), blocks
    return name, bits, vectors, size, places, draw(st.integers(0, 1 << 30))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(writes())
def test_what_is_written_is_read(
    case: tuple[str, int, int, tuple[int, int], list[tuple[int, int]], int],
) -> None:
    """A tape of random bytes is some codes; writing changes those it should and no others."""
    name, bits, vectors, (batch, blocks), places, seed = case
    source = torch.Generator().manual_seed(seed)
    size = (batch, 1, blocks, block_bytes(vectors, bits))
    data = torch.randint(0, 256, size, generator=source).to(torch.uint8)
    whole = blocks * BLOCK
    wanted = to_rows(data, 0, whole, bits, name).clone()
    for at, count in places:
        codes = torch.randint(0, 1 << bits, (batch, 1, count, vectors), generator=source)
        rows = pack_bits(codes, bits)
        write_rows(data, at, rows, bits, name)
        wanted[:, :, at : at + count] = rows
        assert torch.equal(to_rows(data, at, count, bits, name), rows)
    assert torch.equal(to_rows(data, 0, whole, bits, name), wanted)


def test_rows_are_a_view() -> None:
    data = torch.zeros(1, 2, 10, 7, dtype=torch.uint8)
    rows = torch.randint(0, 256, (1, 2, 3, 7)).to(torch.uint8)
    write_rows(data, 4, rows, 5, "rows")
    assert torch.equal(data[:, :, 4:7], rows) and data.count_nonzero() == rows.count_nonzero()
    assert to_rows(data, 4, 3, 5, "rows").data_ptr() == data[:, :, 4:].data_ptr()


def test_what_has_no_blocks() -> None:
    check("rows", 5, 3)
    for name, bits, vectors in (
        ("quads", 4, 6),
        ("planes", 5, 8),
        ("quads", 3, 8),
        ("tiles", 4, 8),
    ):
        with pytest.raises(VQBackendError, match=rf"{vectors} codes of {bits} bits.*{name}"):
            check(name, bits, vectors)
    data = torch.zeros(1, 1, 1, block_bytes(6, 4), dtype=torch.uint8)
    with pytest.raises(VQBackendError, match="no layout 'quads'"):
        to_rows(data, 0, 1, 4, "quads")


@pytest.fixture
def table() -> Iterator[None]:
    with dispatch.using(entry for entry in dispatch.ENTRIES if entry.name == "reference"):
        yield


@pytest.mark.usefixtures("table")
def test_the_kernel_that_runs_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    u4, u3 = KV_SCHEMES["u4"].key, KV_SCHEMES["u3"].value
    like = torch.zeros(1, dtype=torch.bfloat16)
    assert layouts_for(u4, u3, 64, 32, like) == ("rows", "rows")
    seen: list[KVAttentionProblem] = []

    def wanted(problem: KVAttentionProblem) -> tuple[str, str]:
        seen.append(problem)
        return "quads", "planes"

    def small(problem: KVAttentionProblem) -> str | None:
        return None if problem.head_dim <= 64 else "head_dim over 64"

    blocks = dispatch.Implementation(print, small, layouts=wanted)
    with dispatch.preferred(dispatch.Entry("test.blocks", "kv_attention", blocks, ("cpu",))):
        assert layouts_for(u4, u3, 64, 32, like) == ("quads", "planes")
        specs = u4.spec(), u3.spec()
        assert seen == [KVAttentionProblem("cpu", "bfloat16", *specs, 1, 1, 64, 32, "", "")]
        assert layouts_for(u4, u3, 128, 32, like) == ("rows", "rows")
        assert layouts_for(u4, u3, 64, 32, like.to("meta")) == ("rows", "rows")
        with pytest.raises(VQBackendError, match="6 codes of 8 bits"):
            layouts_for(u4, u3, 12, 32, like)
        monkeypatch.setenv("HF_VQ_BACKEND", "reference")
        assert layouts_for(u4, u3, 64, 32, like) == ("rows", "rows")


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ALLOCATORS", {})
    shape = (1, 2, 3, block_bytes(8, 4))
    memory = allocate(shape, torch.device("cpu"))
    assert memory.shape == shape and memory.dtype == torch.uint8 and memory.count_nonzero() == 0
    own = torch.zeros(shape, dtype=torch.uint8)
    monkeypatch.setattr(dispatch, "ALLOCATORS", {"cpu": "backends.cpu.library:allocate"})
    monkeypatch.setattr(library, "allocate", lambda wanted: own if wanted == shape else own[:0])
    assert allocate(shape, torch.device("cpu")) is own
    assert allocate(shape, torch.device("meta")).device.type == "meta"
