"""Learned codebooks under what the inputs say: every step is the best of its kind."""

from dataclasses import replace

import pytest
import torch

from hf_vq.errors import VQFormatError
from hf_vq.fit import fit_weight, joint
from hf_vq.fit.joint import _JointFit
from hf_vq.fit.ldlq import Feedback
from hf_vq.fit.rows import RowFitter
from hf_vq.formats import VQScheme
from hf_vq.ops import decode_weight

TENSOR = VQScheme.parse("vq4x4r2-tensor-g0-none")
TILES = VQScheme.parse("vq4x4r1-tile16x32-g16-none")


def correlated(size):
    x = torch.randn(1024, size) * torch.linspace(0.2, 2, size) @ torch.randn(size, size)
    return x.T @ x / 1024


def started(scheme, rows=16, columns=80):
    feedback = Feedback(correlated(columns), scheme)
    weight = torch.randn(rows, columns) * torch.rand(rows, 1)
    fit = _JointFit(weight, RowFitter(scheme, columns, "search", "it"), feedback, 0)
    fit.start()
    return fit


def cost(fit, books=None):
    wrong = (fit.rows - fit._scaled(fit._look_up(fit.books if books is None else books))).double()
    return float(((wrong @ fit.moments.double()) * wrong).sum())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [TENSOR, TILES])
def test_no_step_costs_more_and_each_gains(scheme):
    fit = started(scheme)
    for step in (fit._refit_books, fit._refit_scale, fit._sweep, fit._refit_books, fit._sweep):
        before = cost(fit)
        step()
        # Scales are rounded to fp16, 2^-11 of them at most.
        assert cost(fit) < before * (1 + 2**-10)
    assert cost(fit) < 0.9 * cost(started(scheme)) or scheme is TILES


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [TENSOR, TILES])
def test_books_come_to_the_least_squares_of_these_codes(scheme, monkeypatch):
    """A linear problem, which a dense solver knows too."""
    monkeypatch.setattr(joint, "_CONJUGATE_STEPS", 30)
    fit = started(scheme)
    columns = []
    for unit in torch.eye(fit.books.numel()).unbind(0):
        decoded = fit._scaled(fit._look_up(unit.reshape(fit.books.shape)))
        columns.append(decoded.flatten())
    root = torch.linalg.cholesky(fit.moments.double())
    every = torch.stack(columns, 1).double().unflatten(0, fit.rows.shape)
    every = torch.einsum("nib,ij->njb", every, root).flatten(0, 1)
    target = (fit.rows.double() @ root).flatten()
    best = torch.linalg.lstsq(every, target[:, None], driver="gelsd").solution
    least = float((every @ best - target[:, None]).square().sum())
    fit._refit_books()
    assert cost(fit) == pytest.approx(least, rel=1e-3)


def test_a_sweep_finds_what_trying_all_entries_finds():
    fit = started(replace(TENSOR, residuals=1), rows=3, columns=16)
    fit._refit_books()
    tried = started(replace(TENSOR, residuals=1), rows=3, columns=16)
    tried.rows, tried.moments, tried.books = fit.rows, fit.moments, fit.books
    tried.scale, tried.codes = fit.scale, fit.codes.clone()
    fit.alone = torch.linalg.cholesky(joint._diagonal_blocks(fit.moments, 4))
    fit._sweep()
    for vector in range(4):
        each = []
        for code in range(16):
            tried.codes[:, vector] = code
            wrong = tried.rows - tried._scaled(tried.entries())
            each.append(((wrong @ tried.moments) * wrong).sum(1))
        tried.codes[:, vector, 0] = torch.stack(each).argmin(0)
    assert torch.equal(fit.codes, tried.codes)


@pytest.mark.slow
def test_codebooks_learned_with_feedback_beat_those_without():
    """What k-means of the weights alone finds is worse by more than the codes can make up for."""
    scheme = VQScheme.parse("vq4x5r1-tile32x64-g0-none")
    weight, feedback = torch.randn(64, 128), Feedback(correlated(128), scheme)
    fitted = fit_weight(weight, scheme, feedback=feedback)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "TURNS", 0)
        patch.setattr(joint, "_CONJUGATE_STEPS", 0)
        start = fit_weight(weight, scheme, feedback=feedback)
    assert fitted.output_error < 0.9 * start.output_error
    books = fitted.tensors["codebook"]
    assert books.shape == (2, 2, 32, 4) and fitted.tensors["codes"].shape == (64, 20)


@pytest.mark.parametrize(
    "spec",
    ["vq3x4r1-tensor-g96-hadamard64", "vq6x3r2-tensor-g0-none", "vq3x4r1-tile16x192-g0-none"],
)
def test_vectors_that_do_not_divide_a_panel(spec):
    """Errors are passed on in panels of whole vectors."""
    scheme = VQScheme.parse(spec)
    weight, feedback = torch.randn(16, 384), Feedback(correlated(384), scheme)
    fitted = fit_weight(weight, scheme, feedback=feedback)
    wrong = (decode_weight(fitted.tensors, scheme, 384) - weight).double()
    lost = float(((wrong @ feedback.moments.double()) * wrong).sum())
    plain = decode_weight(fit_weight(weight, scheme).tensors, scheme, 384) - weight
    assert lost < 0.8 * float(((plain.double() @ feedback.moments.double()) * plain).sum())


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["tensor", "tile64x64"])
def test_integer_entries_cost_little(spec):
    weight, results = torch.randn(64, 128), []
    for bits in ("", "-int7"):
        scheme = VQScheme.parse(f"vq4x5r1-{spec}{bits}-g0-none")
        feedback = Feedback(torch.diag(torch.linspace(0.1, 4, 128)), scheme)
        fitted = fit_weight(weight, scheme, feedback=feedback)
        results.append(fitted.output_error)
    assert fitted.tensors["codebook"].dtype == torch.int8
    # A step of 1/63 of the largest entry, about 4 standard deviations, adds (4/63)^2 / 12.
    assert results[1] < 1.02 * results[0]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [TENSOR, TILES])
def test_hard_weights(scheme):
    feedback = Feedback(correlated(64), scheme)
    zero = fit_weight(torch.zeros(16, 64), scheme, feedback=feedback)
    assert zero.relative_error == zero.output_error == 0
    some = torch.randn(16, 64)
    some[3] = 0
    fitted = fit_weight(some, scheme, feedback=feedback)
    assert all(t.isfinite().all() for t in fitted.tensors.values())
    assert fit_weight(some, scheme, feedback=Feedback(torch.zeros(64, 64), scheme))
    with pytest.raises(VQFormatError, match="too small for fp16 scales"):
        fit_weight(some * 1e-10, scheme, feedback=feedback)
    some[5, 7] = torch.nan
    with pytest.raises(VQFormatError, match=r"q_proj holds NaN.*modules_to_not_convert"):
        fit_weight(some, scheme, feedback=feedback, where="q_proj")
