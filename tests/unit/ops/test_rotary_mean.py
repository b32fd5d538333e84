"""A rotary mean: what is measured, what is coded and what attention adds, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.shared import universal_tensor
from hf_vq.ops import KVCacheView, KVSide, kv_append, kv_attention
from hf_vq.ops.layout import layouts_for
from hf_vq.ops.reference.codes import mean_of
from hf_vq.ops.rotary_mean import LITTLE, measure_means, rotated

DIM = 64
INV_FREQ = 10000.0 ** -(torch.arange(0, DIM, 2).double() / DIM).float()


def keys_with_bias(
    tokens: int, bias: float, seed: int = 0, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys [2, 3, n, D] whose part before RoPE is m [2, 3, 1, D] and noise, and m."""
    generator = torch.Generator().manual_seed(seed)
    mean = bias * torch.randn(2, 3, 1, DIM, generator=generator)
    noise = torch.randn(2, 3, tokens, DIM, generator=generator)
    return rotated(mean + noise, INV_FREQ, False, start + torch.arange(tokens)), mean


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_is_what_complex_numbers_say(interleaved: bool) -> None:
    mean = torch.randn(1, 2, 1, DIM)
    positions = torch.tensor([0, 1, 77, 100_003])
    found = rotated(mean, INV_FREQ[: DIM // 4], interleaved, positions)
    turning = mean[..., : DIM // 2].double()
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    phase = torch.polar(
        torch.ones(4, DIM // 4).double(), positions[:, None] * INV_FREQ[: DIM // 4].double()
    )
    turned = torch.complex(a, b) * phase
    parts = (turned.real, turned.imag)
    expected = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    torch.testing.assert_close(found[..., : DIM // 2].double(), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(found[..., DIM // 2 :], mean[..., DIM // 2 :].expand(1, 2, 4, -1))


def test_a_bias_is_found_and_leaves_only_the_noise() -> None:
    keys, mean = keys_with_bias(512, 30.0)
    positions = torch.arange(512)
    standing, turning = measure_means(keys, positions, INV_FREQ, False)
    left = keys - standing - rotated(turning, INV_FREQ, False, positions)
    assert left.square().mean() < 1.1  # the noise has 1
    assert (turning - mean).abs().max() < 0.5
    assert (keys - keys.mean(2, keepdim=True)).square().mean() > 100


def test_what_stands_still_keeps_the_standing_mean() -> None:
    """Keys of a model without RoPE, or with another: never worse than the mean."""
    generator = torch.Generator().manual_seed(1)
    keys = 30 * torch.randn(2, 3, 1, DIM, generator=generator) + torch.randn(
        2, 3, 512, DIM, generator=generator
    )
    positions = torch.arange(512)
    standing, turning = measure_means(keys, positions, INV_FREQ, False)
    left = keys - standing - rotated(turning, INV_FREQ, False, positions)
    assert left.square().mean() < 1.02 * (keys - keys.mean(2, keepdim=True)).square().mean()


def test_the_weakest_pairs_stand_where_that_saves_a_product() -> None:
    """As many products as leave out next to nothing, in each head."""
    keys, mean = keys_with_bias(512, 30.0)
    positions, pairs = torch.arange(512), len(INV_FREQ)
    strong = torch.zeros(DIM)
    strong[[1, 1 + pairs, 2, 2 + pairs]] = 1  # of the first head; of the others, all pairs
    keys[:, :1] -= rotated(mean[:, :1] * (1 - strong), INV_FREQ, False, positions)
    plain = measure_means(keys, positions, INV_FREQ, False)[1]
    weak = 0.3 * torch.eye(DIM)[pairs - 1]  # so little that it may stand, and so much that it turns
    keys[:, :1] += rotated(weak.expand(*keys.shape[:1], 1, 1, DIM), INV_FREQ, False, positions)
    assert measure_means(keys, positions, INV_FREQ, False)[1][0, 0].count_nonzero() > 4
    standing, turning = measure_means(keys, positions, INV_FREQ, False, together=2)
    assert torch.equal(turning[:, :1] != 0, (plain[:, :1] != 0) & (strong != 0))
    dropped = (plain - turning)[:, 1:].square().sum(-1)
    assert 0 < dropped.max() < 1.2 * LITTLE * DIM  # the noise of a key has DIM
    assert not (standing * turning).any()


@pytest.mark.parametrize(("pair", "stands"), [(3, True), (DIM // 2 - 1, False)])
def test_what_a_pair_may_give_far_from_here_counts(pair: int, stands: bool) -> None:
    """A slow pair that stands is right where it was measured; half a turn on, its mean is of the
    other sign, four times the energy."""
    generator = torch.Generator().manual_seed(3)
    mean, positions = torch.zeros(1, 1, 1, DIM), torch.arange(512)
    mean[..., [1, 2]], mean[..., pair] = 40.0, (2 * DIM) ** 0.5  # twice the noise
    noise = torch.randn(1, 1, 512, DIM, generator=generator)
    keys = rotated(mean + noise, INV_FREQ, False, positions)
    turning = measure_means(keys, positions, INV_FREQ, False, together=2)[1]
    assert bool(turning[..., pair] == 0) == stands and bool((turning[..., [1, 2]] != 0).all())


@pytest.mark.parametrize("tokens", [1, 2, 5, 28, 512, 5000])
def test_nothing_turns_where_nothing_is_gained(tokens: int) -> None:
    """Then the mean is that of the keys, bit for bit."""
    keys, _ = keys_with_bias(tokens, 0.0)
    standing, turning = measure_means(keys, torch.arange(tokens), INV_FREQ, False)
    assert not turning.any() and torch.equal(standing, mean_of(keys))


def growing_view(
    keys: Tensor, values: Tensor, turning: Tensor, coded: int, start: int
) -> KVCacheView:
    """A view of a growing cache: `coded` tokens to be appended, and the rest as floats."""
    scheme = KV_SCHEMES["u4"].key
    layouts = layouts_for(scheme, scheme, DIM, DIM, keys)
    from hf_vq.cache.token_buffer import CodeBuffer

    def side(x: Tensor, layout: str, mean: Tensor | None) -> KVSide:
        buffer = CodeBuffer(x, scheme, layout, 256, None)
        buffer.reserve(coded)
        return KVSide(
            buffer.data, buffer.scale, universal_tensor(scheme), mean, x[:, :, :4], x[:, :, coded:],
            0, scheme.spec(), layout,
        )  # fmt: skip

    mean = 0.1 * torch.randn(2, 3, 1, DIM)
    return KVCacheView(
        side(keys, layouts[0], mean), side(values, layouts[1], None), None, None, None, None,
        keys.shape[2], keys.shape[2] - coded, 1, coded, turning, INV_FREQ, False, start,
    )  # fmt: skip


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("start", [0, 1000])
def test_attention_sees_the_keys_of_a_strong_bias(queries: int, start: int) -> None:
    """With a bias of 30 and a noise of 1, coded attention is as near as without the bias."""
    errors = []
    for bias in (0.0, 30.0):
        keys, mean = keys_with_bias(200, bias, start=start)
        values = torch.randn(2, 3, 200, DIM)
        view = growing_view(keys, values, mean, 160, start)
        kv_append(keys[:, :, :160], values[:, :, :160], view)
        query = torch.randn(2, 6, queries, DIM) / (1 + bias)
        view = view._replace(num_new=queries)
        found = kv_attention(query, view, softmax_scale=DIM**-0.5)
        wide = [x.double().repeat_interleave(2, 1) for x in (keys, values)]
        mask = torch.ones(queries, 200, dtype=torch.bool).tril(200 - queries)
        exact = torch.nn.functional.scaled_dot_product_attention(
            query.double(), *wide, attn_mask=mask
        )
        errors.append((found - exact).norm() / exact.norm())
    assert errors[1] < 1.5 * errors[0]
