"""Feedback inside blocks of columns: what it weighs, what it lessens, and all sizes."""

import pytest
import torch

from hf_vq.errors import VQCalibrationError
from hf_vq.fit import block_ldlq, fit_weight, fixed_tensors
from hf_vq.fit.block_ldlq import (
    CORRELATION,
    DAMPING,
    BlockFeedback,
    ldlq_blocks,
    padded,
    width_of,
)
from hf_vq.fit.input_scale import input_scale
from hf_vq.fit.ldlq import Feedback, ldlq_rows
from hf_vq.formats import WEIGHT_SCHEMES, weight_scheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.stored_weight import rotation_of
from hf_vq.ops import decode_weight
from hf_vq.ops.reference.encode_weight import FACTORS, encode_weight, packed

ROTATED = [
    name
    for name, scheme in WEIGHT_SCHEMES.items()
    if scheme.codebook == "universal" and scheme.rotation != "none"
]


def moments_of(size, block, tokens=2048, massive=0):
    """H in blocks, of inputs of unequal power that depend on each other."""
    x = torch.randn(tokens, size) @ (torch.eye(size) + 0.3 * torch.randn(size, size) / size**0.5)
    x = x * torch.logspace(-1, 1, size)[torch.randperm(size)]
    x[:, :massive] *= 100
    parts = x.unflatten(1, (-1, block)).transpose(0, 1)
    return x, parts.transpose(1, 2) @ parts / tokens


def feedback_of(scheme, moments, **scale):
    fixed = fixed_tensors(scheme, moments.shape[0] * moments.shape[1], 0, **scale)
    return BlockFeedback(moments, scheme, rotation_of(fixed))


def error(x, weight, fitted, scheme):
    tensors = {**fixed_tensors(scheme, weight.shape[1], 0), **fitted.tensors}
    wrong = (weight - decode_weight(tensors, scheme, weight.shape[1])).double()
    return float(
        (x.double() @ wrong.T).square().sum() / (x.double() @ weight.double().T).square().sum()
    )


@pytest.mark.parametrize("name", ROTATED)
def test_it_lessens_the_error_of_outputs_of_every_rotated_scheme(name):
    scheme = weight_scheme(name)
    x, moments = moments_of(256, 128, massive=2)
    weight = torch.randn(48, 256)
    plain = fit_weight(weight, scheme)
    fitted = fit_weight(weight, scheme, feedback=feedback_of(scheme, moments))
    assert error(x, weight, fitted, scheme) < 0.6 * error(x, weight, plain, scheme)
    scaled = scheme.scaled()
    if scaled.is_scaled:
        scale = {"input_scale": input_scale(moments.diagonal(dim1=1, dim2=2).flatten(), [weight])}
        feedback = feedback_of(scaled, moments, **scale)
        fitted = fit_weight(weight, scaled, feedback=feedback, **scale)
        assert error(x, weight, fitted, scaled) < 0.6 * error(x, weight, plain, scheme)


@pytest.mark.parametrize(
    ("size", "spec"),
    [
        (96, "vq-3"),  # blocks and groups of 32
        (256, "vq2x8r1-universal-g64-random_hadamard128"),  # two groups in a block
        (256, "vq2x8r1-universal-g128-random_hadamard64"),  # two blocks in a group
        (256, "turboquant-2"),
        (256, "vq2x8r1-universal-g0-qr64"),
    ],
)
def test_groups_and_blocks_of_any_size(size, spec):
    scheme = weight_scheme(spec)
    x, moments = moments_of(size, max(scheme.block(size), 32))
    weight = torch.randn(48, size)
    plain = fit_weight(weight, scheme)
    fitted = fit_weight(weight, scheme, feedback=feedback_of(scheme, moments))
    assert fitted.tensors.keys() == plain.tensors.keys()
    assert error(x, weight, fitted, scheme) < 0.8 * error(x, weight, plain, scheme)


def test_one_block_is_rounded_as_ldlq_rounds_a_row():
    scheme = weight_scheme("vq-3")
    _, moments = moments_of(128, 128)
    own = torch.diag_embed(moments.diagonal(dim1=1, dim2=2))
    shrunk = (CORRELATION * moments + (1 - CORRELATION) * own)[0]
    rotation = rotation_of(fixed_tensors(scheme, 128, 0))
    whole = Feedback(shrunk, scheme, rotation, damping=DAMPING)
    rows, codebook = torch.randn(32, 128), universal_tensor(scheme)
    expected, _ = ldlq_rows(rows, codebook, scheme, whole, search=False, refit=False)
    feedback = BlockFeedback(moments, scheme, rotation)
    found, scale = ldlq_blocks(rows, codebook, scheme, feedback, factors=(1.0,), refit=False)
    assert (found == expected).float().mean() > 0.999  # of a tie, either entry
    assert torch.equal(scale, rows.square().mean(1, keepdim=True).sqrt().half())
    damped = shrunk.double() + whole.ridge * torch.eye(128)
    exact = float(((rows.double() @ damped) * rows.double()).sum())
    assert feedback.energy(rows) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("spec", ["vq-3", "vq2x8r1-universal-g0-random_hadamard64"])
def test_a_wide_block_is_rounded_as_ldlq_rounds_a_row(spec):
    """Errors pass from chunk to chunk as through a row of `ldlq_rows`."""
    scheme = weight_scheme(spec)
    x, _ = moments_of(384, 128)
    moments = x.T @ x / len(x)
    own = torch.diag_embed(moments.diagonal())
    rotation = rotation_of(fixed_tensors(scheme, 384, 0))
    shrunk = CORRELATION * moments + (1 - CORRELATION) * own
    block = scheme.block(384)
    ridge = DAMPING * moments.diagonal().unflatten(0, (-1, block)).mean(1)
    damped = shrunk + torch.diag(ridge.repeat_interleave(block))
    whole = Feedback(damped, scheme, rotation, damping=1e-9)
    rows, codebook = torch.randn(32, 384), universal_tensor(scheme)
    feedback = BlockFeedback(moments[None], scheme, rotation)
    found, _ = ldlq_blocks(rows, codebook, scheme, feedback, factors=(1.0,), refit=False)
    expected, _ = ldlq_rows(rows, codebook, scheme, whole, search=False, refit=False)
    assert (found == expected).float().mean() > 0.99


def test_one_huge_input_does_not_drown_a_wide_block():
    """Blocks of the rotation without it are rounded nearly as they are where it is a usual one."""
    scheme, weight, errors = weight_scheme("vq-3"), torch.randn(64, 1024), []
    x, _ = moments_of(1024, 128, tokens=8192)
    others = x.clone()
    others[:, 5] = 0
    fixed = rotation_of(fixed_tensors(scheme, 1024, 0))
    for factor in (1, 1000):
        x[:, 5] *= factor
        feedback = BlockFeedback((x.T @ x / len(x))[None], scheme, fixed)
        errors.append(error(others, weight, fit_weight(weight, scheme, feedback=feedback), scheme))
    assert errors[1] < 2.2 * errors[0]  # its own block of the rotation is rounded for it


def test_rows_that_fill_their_blocks_in_part(monkeypatch):
    """Three blocks of a rotation, at most two in a block of H: one is behind the row's end."""
    monkeypatch.setattr(block_ldlq, "WIDTH", 256)
    scheme = weight_scheme("vq-3")
    x = torch.randn(2048, 48) @ torch.randn(48, 384) + torch.randn(2048, 384)
    assert width_of(384, 128) == 256
    parts = padded(x, 256).transpose(0, 1)
    wide = parts.mT @ parts / len(x)
    rotation = rotation_of(fixed_tensors(scheme, 384, 0))
    feedback = BlockFeedback(wide, scheme, rotation, in_features=384)
    narrow = x.unflatten(1, (-1, 128)).transpose(0, 1)
    narrow = BlockFeedback(narrow.mT @ narrow / len(x), scheme, rotation)
    weight = torch.randn(64, 384)
    fitted = fit_weight(weight, scheme, feedback=feedback)
    chunks = fit_weight(weight, scheme, feedback=narrow)
    assert error(x, weight, fitted, scheme) < 0.9 * error(x, weight, chunks, scheme)
    # The last block stands alone, so it is rounded as without the others.
    assert torch.equal(fitted.tensors["scale"][:, -1], chunks.tensors["scale"][:, -1])


@pytest.mark.parametrize(
    ("in_features", "block", "width"),
    [(576, 64, 576), (1536, 128, 1536), (4096, 128, 2048), (4864, 128, 1664), (8192, 8192, 8192)],
)
def test_blocks_of_h_are_wide_and_alike(in_features, block, width):
    assert width_of(in_features, block) == width


def test_equal_inputs_give_what_plain_rounding_gives():
    scheme = weight_scheme("vq-4")
    feedback = feedback_of(scheme, torch.eye(128).expand(2, -1, -1))
    rows, codebook = torch.randn(16, 256), universal_tensor(scheme)
    codes, scale = encode_weight(rows, codebook, scheme, FACTORS, False)
    found, same = ldlq_blocks(rows, codebook, scheme, feedback, factors=FACTORS, refit=False)
    assert torch.equal(packed(found, scheme), codes) and torch.equal(same, scale)


def test_blocks_without_inputs_are_rounded_as_any():
    scheme = weight_scheme("vq-4")
    weight, plain = torch.randn(16, 256), fit_weight(torch.randn(16, 256), scheme)
    fitted = fit_weight(weight, scheme, feedback=feedback_of(scheme, torch.zeros(2, 128, 128)))
    assert fitted.relative_error < 1.2 * plain.relative_error


def test_moments_that_are_not_finite_are_named():
    with pytest.raises(VQCalibrationError, match="NaN or infinity"):
        feedback_of(weight_scheme("vq-4"), torch.full((1, 128, 128), torch.inf))


def test_the_scale_is_that_of_the_exponents_and_survives_zeros():
    h, weights = torch.rand(64) + 0.1, [torch.randn(8, 64), 100 * torch.randn(24, 64)]
    w = sum(m.double().square().mean(0) / m.double().square().mean() for m in weights) / 2
    exact = h.double() ** 0.125 / w**0.375
    exact /= exact.log().mean().exp()
    torch.testing.assert_close(input_scale(h, weights).double(), exact, rtol=1e-5, atol=0)
    h[3], weights[0][:, 5], weights[1][:, 5] = 0, 0, 0
    found = input_scale(h, weights)
    assert bool((found.isfinite() & (found > 0)).all())


def halves_of(x, block=128):
    """H of two halves of inputs [tokens, in], as the sum of which H is given."""
    parts = torch.stack(x.chunk(2)).unflatten(2, (-1, block)).transpose(1, 2)
    return parts.transpose(2, 3) @ parts / len(x)


def test_halves_that_agree_are_believed_and_those_that_do_not_are_not():
    scheme = weight_scheme("vq-3")
    fixed = rotation_of(fixed_tensors(scheme, 256, 0))
    directions = torch.randn(4, 256)
    few = torch.randn(4096, 4) @ directions + 0.05 * torch.randn(4096, 256)  # four are enough
    agree = BlockFeedback(halves_of(few), scheme, fixed)
    assert agree.correlation.min() > 0.95 * CORRELATION
    nothing = BlockFeedback(halves_of(torch.randn(48, 256)), scheme, fixed)
    assert nothing.correlation.max() < 0.1 * CORRELATION


def test_few_inputs_in_halves_lose_almost_nothing_on_other_inputs():
    """24 inputs of 128 numbers that are all alike say nothing; without halves they are believed."""
    scheme, weight, errors = weight_scheme("vq-3"), torch.randn(256, 256), {}
    fixed, seen = rotation_of(fixed_tensors(scheme, 256, 0)), torch.randn(24, 256)
    halves, other = halves_of(seen), torch.randn(4096, 256)
    for name, given in (("halves", halves), ("one", halves.sum(0)), ("none", None)):
        feedback = None if given is None else BlockFeedback(given, scheme, fixed)
        fitted = fit_weight(weight, scheme, feedback=feedback)
        errors[name] = error(other, weight, fitted, scheme)
    assert errors["halves"] < 1.03 * errors["none"] < errors["one"]


def test_a_massive_token_is_kept_and_costs_the_others_little():
    """As the first tokens of a text have: energy 1e5 times that of others, in a few directions."""
    scheme = weight_scheme("vq-3")
    x, _ = moments_of(256, 128)
    usual = x / x.square().mean().sqrt()
    one = torch.zeros(256)
    one[[7, 40, 200]] = torch.tensor([4.0, -3.0, 2.0])
    massive = 1000 * one + 30 * torch.randn(16, 256)  # each a little different
    x = usual.clone()
    x[::128] = massive
    weight = torch.randn(96, 256)
    plain = fit_weight(weight, scheme)
    fixed = rotation_of(fixed_tensors(scheme, 256, 0))
    even = torch.cat([x[::2], x[1::2]])  # only one half has seen such tokens
    for halves in (halves_of(x), halves_of(even)):
        fitted = fit_weight(weight, scheme, feedback=BlockFeedback(halves, scheme, fixed))
        unseen = 1000 * one + 30 * torch.randn(16, 256)
        assert error(unseen, weight, fitted, scheme) < 0.5 * error(unseen, weight, plain, scheme)
        others = error(usual, weight, fitted, scheme)
        assert others < 1.15 * error(usual, weight, plain, scheme)
