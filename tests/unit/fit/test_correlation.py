"""How far moments between inputs are believed, as held-out inputs choose."""

import pytest
import torch

from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.fit.correlation import CANDIDATES, choose
from hf_vq.fit.ldlq import Feedback
from hf_vq.formats.catalog import linear_scheme
from hf_vq.formats.stored_weight import rotation_of
from hf_vq.ops import decode_weight

SCHEME, SIZE = linear_scheme("vq-2"), 128


def moments(x):
    return x.T @ x / len(x)


def inputs(count):
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(SIZE, SIZE, generator=generator) * torch.linspace(0.05, 2, SIZE)
    return torch.randn(count, SIZE) @ mix


def feedback_on(seen, unseen):
    rotation = rotation_of(fixed_tensors(SCHEME, SIZE, 0))

    def of(correlation):
        other = None if unseen is None else moments(unseen)
        return Feedback(moments(seen), SCHEME, rotation, correlation=correlation, unseen=other)

    return of


def fit(rows, feedback):
    return fit_weight(rows, SCHEME, feedback=feedback)


def chosen(weight, seen, unseen):
    return choose(weight, SCHEME, feedback_on(seen, unseen), fit)


def test_few_inputs_are_believed_less_than_many():
    """Those of fewer inputs than columns say nothing of most directions."""
    weight = torch.randn(64, SIZE)
    few = [chosen(weight, inputs(24), inputs(256)) for _ in range(3)]
    assert few == [min(CANDIDATES)] * 3
    assert chosen(weight, inputs(8192), inputs(1024)) == max(CANDIDATES)


def test_it_has_the_least_error_on_the_inputs_that_were_not_seen():
    weight, seen, unseen = torch.randn(64, SIZE), inputs(48), inputs(256)
    of, errors = feedback_on(seen, unseen), {}
    for correlation in CANDIDATES:
        fitted = fit(weight, of(correlation))
        tensors = {**fixed_tensors(SCHEME, SIZE, 0), **fitted.tensors}
        wrong = (decode_weight(tensors, SCHEME, SIZE) - weight) @ unseen.T
        errors[correlation] = float(wrong.square().sum() / (weight @ unseen.T).square().sum())
        assert fitted.output_error == pytest.approx(errors[correlation], rel=1e-3)
    assert chosen(weight, seen, unseen) == min(errors, key=lambda one: errors[one])


def test_codes_do_not_depend_on_the_inputs_that_errors_are_reported_on():
    weight, seen = torch.randn(64, SIZE), inputs(64)
    with_, without = (fit(weight, feedback_on(seen, x)(1.0)) for x in (inputs(64), None))
    assert torch.equal(with_.tensors["codes"], without.tensors["codes"])
    assert with_.output_error > without.output_error


def test_what_cannot_be_tried_takes_the_default():
    def fails(rows, feedback):
        raise AssertionError("nothing may be encoded")

    weight = torch.randn(64, SIZE)
    of = feedback_on(inputs(64), None)
    assert choose(weight, SCHEME, of, fails) == 1.0
    learned, of = linear_scheme("gptvq-2"), feedback_on(inputs(64), inputs(64))
    assert choose(weight, learned, of, fails) == 1.0
