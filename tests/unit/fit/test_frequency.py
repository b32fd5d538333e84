"""Entries in the order of their frequency mean the same weights."""

import pytest
import torch

from hf_vq.fit import fit_weight, frequency
from hf_vq.fit.frequency import by_frequency
from hf_vq.formats import VQScheme, pack_bits, unpack_bits
from hf_vq.ops.reference.codes import decode_rotated

SPECS = ["vq8x8r2-tensor-g0-none", "vq8x12r2-tensor-g0-none", "vq2x5r1-tensor-g16-none",
         "vq1x3r3-tensor-g0-none", "vq4x16r1-tensor-g0-none"]  # fmt: skip
ROWS, COLUMNS = 24, 240


def skewed(spec):
    """Codes of which a few are frequent, other ones in every stage; some entries are not used."""
    scheme = VQScheme.parse(spec)
    vectors = COLUMNS // scheme.vector_size
    streams = []
    for _ in range(scheme.residuals):
        size = torch.rand(ROWS, vectors) ** 4 * (scheme.entries - 1)
        streams.append(torch.randperm(scheme.entries)[size.long()])
    packed = torch.cat([pack_bits(stream, scheme.entry_bits) for stream in streams], 1)
    codebook = torch.randn(scheme.residuals, scheme.entries, scheme.vector_size).half()
    return scheme, packed, codebook


def counts(packed, scheme):
    streams = packed.unflatten(1, (scheme.residuals, -1)).unbind(1)
    vectors = COLUMNS // scheme.vector_size
    unpacked = [unpack_bits(stream, scheme.entry_bits, vectors).flatten() for stream in streams]
    return torch.stack([torch.bincount(index, minlength=scheme.entries) for index in unpacked])


def decoded(packed, codebook, scheme):
    scale = torch.ones(ROWS, COLUMNS // scheme.group(COLUMNS), dtype=torch.float16)
    return decode_rotated(packed, codebook, scale, scheme, COLUMNS)


@pytest.mark.parametrize("at_once", [1 << 22, 50])
@pytest.mark.parametrize("spec", SPECS)
def test_the_weights_stay_and_the_frequent_come_first(spec, at_once, monkeypatch):
    monkeypatch.setattr(frequency, "_CODES", at_once)
    scheme, packed, codebook = skewed(spec)
    before = packed.clone(), codebook.clone()
    codes, ordered = by_frequency(packed, codebook, scheme, COLUMNS)
    assert torch.equal(decoded(codes, ordered, scheme), decoded(packed, codebook, scheme))
    assert (counts(codes, scheme).diff(dim=1) <= 0).all()
    assert torch.equal(packed, before[0]) and torch.equal(codebook, before[1])
    assert (codes.shape, codes.dtype) == (packed.shape, packed.dtype)
    assert (ordered.shape, ordered.dtype) == (codebook.shape, codebook.dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_once_is_enough(spec):
    scheme, packed, codebook = skewed(spec)
    once = by_frequency(packed, codebook, scheme, COLUMNS)
    again = by_frequency(*once, scheme, COLUMNS)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_stages_are_ordered_for_themselves():
    scheme, packed, codebook = skewed("vq8x8r2-tensor-g0-none")
    _, both = by_frequency(packed, codebook, scheme, COLUMNS)
    one = VQScheme.parse("vq8x8r1-tensor-g0-none")
    for stage, stream in enumerate(packed.chunk(2, 1)):
        _, alone = by_frequency(stream, codebook[stage : stage + 1], one, COLUMNS)
        assert torch.equal(alone[0], both[stage])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vq8x6r2-tensor-g0-none", "vq2x4r1-tensor-g128-none"])
def test_what_is_learned_is_in_that_order(name):
    scheme = VQScheme.parse(name)
    weight = torch.randn(ROWS, COLUMNS) ** 3  # heavy tails: entries differ in how often they occur
    fitted = fit_weight(weight, scheme)
    found = counts(fitted.tensors["codes"], scheme)
    assert (found.diff(dim=1) <= 0).all() and (found[:, 0] > found[:, -1]).all()
