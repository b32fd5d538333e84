"""What a prompt decides of its keys, by CUDA kernels, against the reference in PyTorch on a CPU.

Fresh random keys with means that stand and means that turn, of all strengths; results in memory
full of NaN, each call twice with the same bits. For the whole file a GPU needs about 20 seconds.
"""

import itertools

import pytest
import torch

from hf_vq import dispatch
from hf_vq.backends.cuda.kv import key_means as kernels
from hf_vq.dispatch import KeyMeansProblem, KeySmoothingProblem
from hf_vq.ops.reference.key_means import prompt_means
from hf_vq.ops.rotary_mean import PromptMeans, rotated
from hf_vq.transforms.key_smoothing import key_smoothing
from hf_vq.transforms.smoothing import partners
from tests.buckets.case import twice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [  # batch, heads, tokens, head_dim, pairs
    (1, 8, 200, 128, 64),
    (2, 2, 1000, 64, 32),
    (1, 1, 1, 128, 64),
    (3, 5, 17, 80, 20),
    (1, 4, 65, 256, 128),
    (1, 2, 9000, 96, 48),
    (1, 3, 300, 256, 64),
    (2, 3, 40, 64, 0),
    (1, 2, 15, 16, 8),
    (5, 40, 33, 48, 7),
]


def turning_keys(shape, first, interleaved, dtype):
    """Keys [B, H, n, D] and frequencies; heads without a mean, and with stronger and stronger."""
    batch, heads, tokens, dim, pairs = shape
    inv_freq = 1e4 ** -(torch.arange(pairs) / max(pairs, 1))
    strength = torch.rand(batch, heads, 1, 1) * torch.randint(0, 12, (batch, heads, 1, 1))
    weights = torch.rand(2, batch, heads, 1, dim) ** 4
    means = strength * torch.randn(2, batch, heads, 1, dim) * weights
    means[1, ..., 2 * pairs :] = 0
    positions = torch.arange(first, first + tokens)
    turned = rotated(means[1], inv_freq, interleaved, positions)
    keys = torch.randn(batch, heads, tokens, dim) + means[0] + turned
    return keys.to(dtype), inv_freq


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_means(shape, dtype):
    tokens = shape[2]
    asked = KeyMeansProblem("cuda", str(dtype)[6:], shape[3])
    assert dispatch.select(asked).run is kernels.prompt_means
    options = itertools.product((False, True), (None, "known"), (0.0, 2.0), (1, 16))
    for seed, (interleaved, known, strength, together) in enumerate(options):
        torch.manual_seed(1000 * seed + tokens)
        first = (4, 70_000)[seed % 2]
        keys, inv_freq = turning_keys(shape, first, interleaved, dtype)
        layout = None if known is None else interleaved
        given = layout, strength, together
        expected = prompt_means(keys, first, inv_freq, *given)
        # Heads behind one another, as attention has them; and tokens.
        there = keys.cuda().transpose(1, 2).contiguous().transpose(1, 2)
        there = there.contiguous() if seed % 2 else there
        found = PromptMeans(*twice(kernels.prompt_means, there, first, inv_freq.cuda(), *given))
        assert found.shown.tolist() == expected.shown.tolist()
        largest = max(1.0, float(keys.abs().max()))
        for one, other in zip(found[:2], expected[:2], strict=True):
            assert one.shape == other.shape and one.dtype == torch.float32
            assert torch.equal(one.cpu() == 0, other == 0)
            assert float((one.cpu() - other).abs().max()) < 4e-6 * largest


def test_rows_that_are_lost():
    """What is not finite counts as 0, as of the reference."""
    keys, inv_freq = turning_keys((1, 2, 50, 64, 32), 0, False, torch.float32)
    keys[0, 0, 7], keys[0, 1, 9, 5], keys[0, 1, 11, 3] = torch.nan, torch.inf, 1e38
    expected = prompt_means(keys, 0, inv_freq, False)
    found = kernels.prompt_means(keys.cuda(), 0, inv_freq.cuda(), False)
    for one, other in zip(found, expected, strict=True):
        assert bool(one.isfinite().all())
        assert torch.allclose(one.cpu(), other, rtol=0, atol=1e-5)


def test_sums_of_a_row_are_its_own():
    """A sequence has the same means in any batch."""
    keys, inv_freq = turning_keys((3, 2, 500, 64, 32), 4, False, torch.bfloat16)
    keys, inv_freq = keys.cuda(), inv_freq.cuda()
    together = kernels.prompt_means(keys, 4, inv_freq, False)
    for row in range(3):
        alone = kernels.prompt_means(keys[row : row + 1], 4, inv_freq, False)
        for one, other in zip(alone[:2], together[:2], strict=True):
            assert torch.equal(one[0], other[row])


def exactly(query, keys, mean, turning, pairs, interleaved):
    """`prompt_smoothing` in float64 [B, H, 1, D], and by what part float32 may be off [B, H, 1, 1]:
    a quarter of that of the keys' squares beyond their means, which are differences."""
    heads, dim = keys.shape[1], keys.shape[3]
    of_queries, of_keys = (
        x.double().unflatten(1, (heads, -1)).square().mean((2, 3))[:, :, None]
        for x in (query, keys)
    )
    means = sum(x.double().square() for x in (mean, turning) if x is not None)
    partner = partners(dim, 2 * pairs, "interleaved" if interleaved else "half")
    both = of_keys + of_keys[..., partner]
    left = (both - means - means[..., partner]).clamp_min(1e-4 * both)
    inexact = 1e-5 + 2**-20 / 4 * (both / left).amax(-1, keepdim=True)
    return key_smoothing(of_queries, of_keys, means, partner), inexact


def smoothing(*given):
    return (kernels.prompt_smoothing(*given),)


@pytest.mark.parametrize("shape", [each for each in SHAPES if each[3] % 8 == 0], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factors(shape, dtype):
    batch, heads, tokens, dim, pairs = shape
    asked = KeySmoothingProblem("cuda", str(dtype)[6:], dim)
    assert dispatch.select(asked).run is kernels.prompt_smoothing
    for seed, (groups, interleaved, turns) in enumerate(
        itertools.product((1, 4, 7), (False, True), (False, True))
    ):
        torch.manual_seed(seed + tokens)
        keys, inv_freq = turning_keys(shape, 4, interleaved, dtype)
        channels = 4 * torch.randn(batch, heads, 1, 1, dim)
        query = (torch.randn(batch, heads, groups, tokens, dim) * channels.exp2()).flatten(1, 2)
        query = query.to(dtype)
        mean, turning, shown = prompt_means(keys, 4, inv_freq, interleaved)
        turning = turning if turns else None
        expected, inexact = exactly(query, keys, mean, turning, pairs, interleaved)
        there = [x.cuda().transpose(1, 2).contiguous().transpose(1, 2) for x in (query, keys)]
        if seed % 3 == 1:  # rows that do not begin at multiples of 16 bytes
            there = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in there]
        means = mean.cuda(), None if turning is None else turning.cuda()
        told = interleaved if seed % 2 else shown.cuda()
        (found,) = twice(smoothing, *there, *means, pairs, told)
        assert found.shape == expected.shape
        assert torch.equal(found.cpu() == 1, expected == 1)
        assert bool(((found.cpu() / expected - 1).abs() <= inexact).all())


def test_queries_that_tell_nothing():
    """Factors are 1 for heads whose queries are 0, or hold what is no number."""
    keys, query = torch.randn(1, 3, 64, 64), torch.randn(1, 6, 64, 64)
    query[0, :2], query[0, 3, 5, 7], keys[0, 2, 3, 3] = 0, torch.nan, torch.inf
    factors = kernels.prompt_smoothing(
        query.cuda(), keys.cuda(), torch.zeros(1, 3, 1, 64).cuda(), None, 32, False
    )
    assert torch.equal(factors.cpu(), torch.ones(1, 3, 1, 64))
