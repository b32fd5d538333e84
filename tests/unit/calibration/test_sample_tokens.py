"""Sampling of tokens from logits: the chances of softmax, and never a token without one."""

import pytest
import torch

from hf_vq.calibration.text import sample_tokens
from hf_vq.errors import VQCalibrationError


@pytest.mark.parametrize("size", [7, 512, 1300])
def test_frequencies_are_those_of_softmax(size):
    logits = 2 * torch.randn(size)
    rows = min(20_000, 5_000_000 // size)
    found = sample_tokens(logits.expand(rows, size), torch.Generator().manual_seed(size))
    assert found.shape == (rows, 1) and found.dtype == torch.int64
    counts = found.flatten().bincount(minlength=size).double()
    expected = rows * logits.double().softmax(-1)
    often = expected >= 5  # where Pearson's sum has its distribution
    pearson = ((counts - expected).square() / expected)[often].sum()
    degrees = int(often.sum())
    assert pearson < degrees + 6 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53, 1.0])
@pytest.mark.parametrize("seen", [[0], [511], [512], [1299], [3, 700, 1100]])
def test_tokens_without_a_chance(monkeypatch, number, seen):
    """The first and the last uniform number there is, and one that is rounded up to 1, give the
    first and the last token seen."""
    logits = torch.full((2, 1300), -torch.inf)
    logits[:, seen] = torch.randn(2, len(seen))
    monkeypatch.setattr(
        torch, "rand", lambda *shape, **_: torch.full(shape, number, dtype=torch.float64)
    )
    found = sample_tokens(logits, torch.Generator())
    assert found.flatten().tolist() == 2 * [seen[0 if number == 0 else -1]]


def test_one_seed_gives_one_text():
    logits = torch.randn(4, 3000).bfloat16()
    one, same, other = (sample_tokens(logits, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_not_finite(wrong):
    logits = torch.randn(2, 600)
    logits[1, 400] = wrong
    with pytest.raises(VQCalibrationError, match="cannot write a text"):
        sample_tokens(logits, torch.Generator())
