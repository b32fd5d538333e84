"""What keys are multiplied by: what it gains, which channels share it, and when it is 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.shared import universal_tensor
from hf_vq.ops.reference import codes as reference
from hf_vq.transforms.key_smoothing import MOST, WORTH, key_smoothing, squares
from hf_vq.transforms.smoothing import PAIRINGS, partners

HEADS, DIM = 2, 64
ALONE = torch.arange(DIM)


def unlike(spread: float, generator: torch.Generator) -> Tensor:
    """Standard deviations of channels [1, HEADS, 1, D], the same ones of a pair of halves."""
    half = (spread * torch.randn(1, HEADS, 1, DIM // 2, generator=generator)).exp()
    return torch.cat([half, half], -1)


def decided(
    queries: Tensor, keys: Tensor, partner: Tensor = ALONE, means: Tensor | None = None
) -> Tensor:
    heads = keys.shape[1]
    means = torch.zeros(keys.shape[0], heads, 1, keys.shape[3]) if means is None else means
    return key_smoothing(squares(queries, heads), squares(keys, heads), means, partner)


def logit_error(queries: Tensor, keys: Tensor, factor: Tensor | float) -> Tensor:
    """Squared error of the logits of each key/value head, with codes of `factor` times the keys."""
    scheme = KV_SCHEMES["u4"].key
    codes, scale = reference.encode((keys * factor).float(), universal_tensor(scheme), None, scheme)
    decoded = reference.decode_rows(codes, universal_tensor(scheme), scale, scheme, keys.shape[3])
    apart = decoded.double() / factor - keys.double()
    grouped = queries.double().unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    return (grouped @ apart.mT).square().mean((0, 2, 3))


def predicted(queries: Tensor, keys: Tensor, factor: Tensor) -> Tensor:
    """What the docstring says of the error of each head, relative to that without factors."""
    asked, held = (squares(x, keys.shape[1]).double() for x in (queries, keys))

    def error(s: Tensor) -> Tensor:
        return (asked / s.square()).sum(-1) * (held * s.square()).sum(-1)

    return (error(factor.double()) / error(torch.ones_like(factor).double())).flatten()


@pytest.mark.parametrize("spread", [0.5, 1.0])
@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_errors_of_logits_fall_as_predicted(spread: float, share: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, HEADS, 700, DIM, generator=generator) * unlike(spread, generator)
    queries = torch.randn(2, HEADS * share, 300, DIM, generator=generator)
    queries = queries * unlike(spread, generator).repeat_interleave(share, 1)
    factor = decided(queries, keys, partners(DIM, DIM, "half"))
    assert factor.shape == (2, HEADS, 1, DIM) and factor.dtype == torch.float32
    queries, keys, factor = queries[:1], keys[:1], factor[:1]
    gained = logit_error(queries, keys, factor) / logit_error(queries, keys, 1.0)
    wanted = predicted(queries, keys, factor)
    assert (wanted < 0.9).all() and (gained < 0.95).all()
    assert ((gained / wanted - 1).abs() < 0.25).all(), (gained, wanted)


def test_no_other_factors_are_better() -> None:
    """Of those that pairs share."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(1, HEADS, 500, DIM, generator=generator) * unlike(0.6, generator)
    queries = torch.randn(1, HEADS, 500, DIM, generator=generator) * unlike(0.6, generator)
    factor = decided(queries, keys, partners(DIM, DIM, "half"))
    best = predicted(queries, keys, factor)
    assert ((factor > 1 / MOST) & (factor < MOST)).all()
    for _ in range(20):
        half = (0.1 * torch.randn(1, HEADS, 1, DIM // 2, generator=generator)).exp()
        moved = factor * torch.cat([half, half], -1)
        assert (predicted(queries, keys, moved) > best * (1 - 1e-5)).all()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("turning", [DIM, DIM // 2, 10, 0])
def test_pairs_share_and_channels_that_stand_are_free(pairing: str, turning: int) -> None:
    sizes = (0.7 * torch.randn(2, 1, HEADS, 1, DIM)).exp()
    keys, queries = torch.randn(2, HEADS, 400, DIM), torch.randn(2, HEADS, 400, DIM)
    partner = partners(DIM, turning, pairing)
    factor = decided(queries * sizes[0], keys * sizes[1], partner)
    assert torch.equal(factor, factor[..., partner])
    still = factor[..., turning:]
    assert still.unique().numel() == still.numel()
    torch.testing.assert_close(factor.log().mean(-1), torch.zeros(2, HEADS, 1), atol=1e-2, rtol=0)
    # s^2 is rms(q) / rms(k) up to one factor for all, of a channel alone or of a pair.
    asked, held = squares(queries * sizes[0], HEADS), squares(keys * sizes[1], HEADS)
    ratio = ((asked + asked[..., partner]) / (held + held[..., partner])).sqrt() / factor.square()
    torch.testing.assert_close(ratio / ratio[..., :1], torch.ones_like(ratio), atol=1e-4, rtol=0)


def test_squares() -> None:
    x = torch.randn(2, 6, 30, 16)
    wanted = x.double().square().unflatten(1, (2, 3)).mean((2, 3))[:, :, None]
    torch.testing.assert_close(squares(x, 2), wanted.float())
    found = squares((300 * x).half(), 2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (300 * 300 * wanted).float(), rtol=2e-3, atol=0)
    assert not squares(x[:, :, :0], 2).any()


def test_heads_that_gain_little_are_left_alone() -> None:
    """Of one row, one head gains, and one does not."""
    generator = torch.Generator().manual_seed(2)
    keys, queries = (torch.randn(1, 2, 2000, DIM, generator=generator) for _ in range(2))
    keys[:, 1] *= unlike(1.0, generator)[:, 1]
    factor = decided(queries, keys)
    assert torch.equal(factor[:, 0], torch.ones(1, 1, DIM)) and (factor[:, 1] != 1).all()
    assert (predicted(queries, keys, factor)[1] * WORTH <= 1).all()
    small = 1 + 0.05 * torch.randn(DIM, generator=generator)
    assert torch.equal(decided(queries[:, :1] * small, keys[:, :1]), torch.ones(1, 1, 1, DIM))


def test_what_is_in_means_is_not_coded() -> None:
    """Keys of a large mean in some channels are smoothed as those without."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, HEADS, 4000, DIM, generator=generator) * unlike(0.7, generator)
    queries = torch.randn(2, HEADS, 4000, DIM, generator=generator) * unlike(0.7, generator)
    mean = 5 * torch.randn(2, HEADS, 1, DIM, generator=generator) * (ALONE % 4 == 0)
    wanted = decided(queries, keys - keys.mean(2, keepdim=True))
    found = decided(queries, keys - keys.mean(2, keepdim=True) + mean, means=mean.square())
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0)
    assert not torch.allclose(decided(queries, keys + mean), wanted, rtol=0.1)


def test_a_mean_that_is_all_there_is() -> None:
    """Rounded differences of squares are no numbers to go by, and may be negative."""
    keys = 100 * torch.randn(1, HEADS, 1, DIM).expand(-1, -1, 64, -1)
    queries = torch.randn(1, HEADS, 64, DIM)
    for more in (0.999, 1.0, 1.001, 2.0):
        factor = decided(queries, keys, means=more * keys[:, :, :1].square())
        assert factor.isfinite().all() and ((factor >= 1 / MOST) & (factor <= MOST)).all()


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e3, 1e12])
@pytest.mark.parametrize("which", ["queries", "keys"])
def test_sizes_do_not_matter(size: float, which: str) -> None:
    generator = torch.Generator().manual_seed(7)
    keys = torch.randn(1, HEADS, 400, DIM, generator=generator) * unlike(0.7, generator)
    queries = torch.randn(1, HEADS, 400, DIM, generator=generator) * unlike(0.7, generator)
    before = decided(queries, keys)
    after = decided(
        queries * (size if which == "queries" else 1), keys * (size if which == "keys" else 1)
    )
    torch.testing.assert_close(after, before, rtol=1e-4, atol=0)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e30, 3e38, 0.0, 1e-30])
@pytest.mark.parametrize("which", ["queries", "keys", "both"])
@pytest.mark.parametrize("where", ["one", "channel", "all"])
def test_numbers_that_are_none(number: float, which: str, where: str) -> None:
    """Of a head with NaN, infinity or nothing but zeros all factors are 1; they are always finite
    and between their bounds, and other heads do not see it."""
    sizes = (0.7 * torch.randn(2, 1, HEADS, 1, DIM)).exp()
    queries, keys = torch.randn(2, 2, HEADS, 50, DIM) * sizes
    right = decided(queries, keys)
    spoilt = {
        "one": (0, 0, 7, 9), "channel": (0, 0, slice(None), 9), "all": (0, 0)
    }[where]  # fmt: skip
    for name, x in (("queries", queries), ("keys", keys)):
        if which in (name, "both"):
            x[spoilt] = number
    found = decided(queries, keys)
    assert found.isfinite().all() and ((found >= 1 / MOST) & (found <= MOST)).all()
    assert torch.equal(found[0, 1], right[0, 1]) and torch.equal(found[1], right[1])
    if not abs(number) < 1e30 or (where == "all" and number == 0):
        assert torch.equal(found[0, 0], torch.ones(1, DIM))


def test_the_most() -> None:
    sizes = torch.logspace(-6, 6, DIM)
    keys, queries = torch.randn(1, 1, 100, DIM) * sizes, torch.randn(1, 1, 100, DIM) / sizes
    factor = decided(queries, keys)
    assert float(factor.max()) <= MOST and float(factor.min()) >= 1 / MOST
    assert (factor.flatten().diff() <= 0.2).all() and factor[0, 0, 0, 0] > 4 * factor[0, 0, 0, -1]
