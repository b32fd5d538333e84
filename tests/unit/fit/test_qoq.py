"""QoQ's codes with clipping and feedback: what they minimise gets less, and stays in 8 bits."""

import pytest
import torch

from hf_vq.fit.ldlq import Feedback
from hf_vq.fit.qoq_calibrated import CLIPS, fit_rows
from hf_vq.formats.packing import unpack_bits
from hf_vq.formats.qoq import QoQScheme, decode, encode, levels

SCHEMES = (QoQScheme(), QoQScheme(32), QoQScheme(128))


def problem(rows=24, columns=256, seed=0):
    """Weights with outliers, and H of correlated inputs of unequal power."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.randn(rows, columns, generator=generator).abs()
    mixed = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(4 * columns, columns, generator=generator) @ (torch.eye(columns) + mixed)
    x *= torch.randn(columns, generator=generator).exp()
    return weight, x.T @ x / len(x)


def cost(weight, tensors, scheme, moments):
    error = (decode(tensors, scheme, weight.shape[1]) - weight).double()
    return float((error @ moments.double() * error).sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=QoQScheme.spec)
@pytest.mark.parametrize("columns", [96, 256])
def test_each_step_costs_less(scheme, columns):
    weight, moments = problem(columns=columns)
    feedback = Feedback(moments, scheme)
    nearest = cost(weight, encode(weight, scheme), scheme, moments)
    found = {
        (clips, in_turn): cost(
            weight,
            fit_rows(weight, scheme, feedback, clips=clips, in_turn=in_turn),
            scheme,
            moments,
        )
        for clips in ((1.0,), CLIPS)
        for in_turn in (False, True)
    }
    assert found[(1.0,), False] == pytest.approx(nearest)
    assert found[CLIPS, False] < 0.97 * nearest
    assert found[(1.0,), True] < 0.7 * nearest
    assert found[CLIPS, True] < 0.97 * found[(1.0,), True]


@pytest.mark.parametrize("scheme", SCHEMES, ids=QoQScheme.spec)
@pytest.mark.parametrize("in_turn", [False, True])
def test_inputs_without_correlation_give_the_nearest(scheme, in_turn):
    weight, _ = problem()
    feedback = Feedback(3 * torch.eye(256), scheme)
    found = fit_rows(weight, scheme, feedback, clips=(1.0,), in_turn=in_turn)
    for key, tensor in encode(weight, scheme).items():
        assert torch.equal(found[key], tensor), key


def test_a_clip_is_the_best_of_those_tried():
    """Of one group, and without feedback: every clip alone costs no less."""
    scheme = QoQScheme(128)
    weight, moments = problem(columns=128)
    feedback = Feedback(moments, scheme)

    def costs(clips):
        tensors = fit_rows(weight, scheme, feedback, clips=clips, in_turn=False)
        error = decode(tensors, scheme, 128) - weight
        return (error @ feedback.damped * error).sum(1)

    alone = torch.stack([costs((clip,)) for clip in CLIPS])
    torch.testing.assert_close(costs(CLIPS), alone.amin(0))
    assert len(alone.argmin(0).unique()) > 2


@pytest.mark.parametrize("seed", range(4))
def test_levels_are_integers_of_8_bits(seed):
    """Also where feedback pushes weights beyond what the row had."""
    scheme = QoQScheme(32)
    weight, moments = problem(seed=seed)
    weight[:, 100:] = weight[:, 100:].sign() * weight.abs().amax(1, keepdim=True)
    tensors = fit_rows(weight, scheme, Feedback(moments, scheme))
    found = levels(unpack_bits(tensors["codes"], 4, 256), tensors)
    assert -128 <= int(found.min()) < -100 and 100 < int(found.max()) <= 127
    assert int(tensors["step"].min()) >= 1 and int(tensors["step"].max()) <= 16


def test_rows_of_zeros_stay_zeros():
    for scheme in SCHEMES:
        weight, moments = problem()
        weight[3] = 0
        tensors = fit_rows(weight, scheme, Feedback(moments, scheme))
        assert not decode(tensors, scheme, 256)[3].any()
