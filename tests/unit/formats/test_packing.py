"""Bits <-> bytes, for every width."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_vq.errors import VQFormatError
from hf_vq.formats import pack_bits, unpack_bits
from hf_vq.formats.packing import packed_size


@given(bits=st.integers(1, 16), count=st.integers(0, 67), seed=st.integers(0, 2**31))
def test_unpack_inverts_pack(bits, count, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (3, 2, count), generator=generator)
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, packed_size(count, bits))
    assert torch.equal(unpack_bits(packed, bits, count), codes.to(torch.int32))


@pytest.mark.parametrize("bits", range(1, 17))
def test_stream_is_little_endian_and_dense(bits):
    """The bytes of a row are one integer: sum_i code_i << (i * bits)."""
    codes = torch.randint(0, 1 << bits, (21,))
    stream = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    expected = stream.to_bytes(packed_size(21, bits), "little")
    assert bytes(pack_bits(codes, bits).tolist()) == expected


def test_codes_that_do_not_fit_are_refused():
    for codes in (torch.tensor([0, 8]), torch.tensor([-1, 0])):
        with pytest.raises(VQFormatError, match="packed to 3 bits"):
            pack_bits(codes, 3)
    for bits in (0, 17):
        with pytest.raises(VQFormatError, match=r"1\.\.16"):
            pack_bits(torch.tensor([0]), bits)


def test_a_truncated_stream_is_refused():
    packed = pack_bits(torch.arange(9), 5)
    with pytest.raises(VQFormatError, match="9 codes of 5 bits are 6 bytes"):
        unpack_bits(packed[:-1], 5, 9)
    with pytest.raises(VQFormatError, match="uint8"):
        unpack_bits(packed.to(torch.int32), 5, 9)
