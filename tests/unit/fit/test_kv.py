"""What is kept of recorded keys and values, and the codebooks that are learned from it."""

import pytest
import torch

from hf_vq.errors import VQCacheError, VQSchemeError
from hf_vq.fit.kv import TokenSample, fit_kv_codebook
from hf_vq.formats import KV_SCHEMES, VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.universal import universal_mse
from hf_vq.ops import decode_kv, encode_kv

NOMAD = [KV_SCHEMES[f"nomad-{bits}"].key for bits in (4, 2, 1)]
LEARNED = [*NOMAD, KV_SCHEMES["cq-4"].key]


def stream(tokens, heads=2):
    """Tokens [1, heads, tokens, 1] that are their own numbers."""
    return torch.arange(tokens, dtype=torch.float32).reshape(1, 1, -1, 1).expand(1, heads, -1, 1)


def test_a_short_stream_is_kept_whole_and_in_order():
    sample = TokenSample(100, seed=0)
    states = torch.randn(2, 3, 20, 4, dtype=torch.bfloat16)
    for part in states.split([7, 13], 2):
        sample.add(part)
    expected = torch.cat(
        [part.transpose(0, 1).flatten(1, 2) for part in states.split([7, 13], 2)], 1
    )
    assert sample.seen == 40 and sample.tokens.dtype == torch.bfloat16
    assert torch.equal(sample.tokens, expected)
    torch.testing.assert_close(sample.mean, states.float().mean((0, 2)))


@pytest.mark.parametrize("blocks", [[400], [64] * 6 + [16], [1] * 400, [10, 390]])
def test_every_token_has_the_same_chance(blocks):
    kept = torch.zeros(400)
    rounds = 200 if len(blocks) < 10 else 10
    for seed in range(rounds):
        sample = TokenSample(50, seed)
        for part in stream(400).split(blocks, 2):
            sample.add(part)
        assert torch.equal(sample.tokens[0], sample.tokens[1]), "the heads of a token stay together"
        index = sample.tokens[0, :, 0].long()
        assert len(index.unique()) == 50, "no token twice"
        kept[index] += 1
    expected = 50 * rounds / 400
    spread = (expected / 200) ** 0.5  # of a mean over half of the tokens, nearly Poisson
    for half in kept.split(200):
        assert abs(half.mean() - expected) < 4 * spread
    assert kept.var() < 1.5 * expected


def test_a_sample_is_seeded_and_its_memory_bounded():
    first, again, other = (TokenSample(32, seed) for seed in (1, 1, 2))
    for sample in (first, again, other):
        for part in stream(5000).split(700, 2):
            sample.add(part)
        assert sample.tokens.shape == (2, 32, 1) and sample._kept.shape == (32, 2, 1)
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


def test_only_the_mean():
    sample = TokenSample(0, seed=0)
    sample.add(torch.zeros(1, 2, 0, 8))
    assert sample.seen == 0
    states = torch.randn(1, 2, 9, 8) + 100
    sample.add(states)
    torch.testing.assert_close(sample.mean, states[0].mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", LEARNED, ids=lambda scheme: scheme.notation())
def test_codebooks_are_those_of_each_head_and_channel(scheme):
    """Every channel has a size and a place of its own: one codebook for two would show."""
    scale = 2.0 ** torch.randint(-4, 5, (2, 1, 16))
    place = 10 * torch.randn(2, 1, 16) * scale
    codebook = fit_kv_codebook(torch.randn(2, 2048, 16) * scale + place, scheme)
    groups = 16 // scheme.vector_size
    assert codebook.dtype == torch.float16 and codebook.device.type == "cpu"
    assert codebook.shape == (2, groups, scheme.entries, scheme.vector_size)
    new = torch.randn(2, 500, 16) * scale + place
    stored = decode_kv(*encode_kv(new, codebook, scheme), codebook, scheme, 16)
    error = ((stored - new) / scale).square().mean((1, 2))
    # Rate-distortion theory: no code of so many bits has less than 2^(-2 bits) on Gaussian data.
    bound = 2 ** (-2 * scheme.bits())
    if scheme.vector_size == 1:
        assert (error < 4 * bound).all()
    assert (error < 1).all() and (error > bound).all()


def test_codebooks_of_numbers_ascend():
    codebook = fit_kv_codebook(torch.randn(2, 300, 8), NOMAD[0])
    assert (codebook.float().diff(dim=2) >= 0).all()


def test_rotated_codebooks():
    """A constant channel is spread over all by the rotation, before anything is learned."""
    plain = VQScheme(2, 4, codebook="channel_group", scale_group=0, rotation="none")
    rotated = VQScheme(
        2, 4, codebook="channel_group", scale_group=0, rotation="hadamard", rotation_block=0
    )
    tokens = torch.randn(1, 1000, 16) * torch.tensor([30.0] + [0.5] * 15)
    for scheme in (plain, rotated):
        codebook = fit_kv_codebook(tokens, scheme)
        stored = decode_kv(*encode_kv(tokens, codebook, scheme), codebook, scheme, 16)
        assert (stored - tokens).square().mean() < 0.2 * tokens.square().mean()
    sizes = fit_kv_codebook(tokens, rotated).float().square().mean((0, 2, 3))
    assert sizes.max() < 2 * sizes.min()


def test_it_is_deterministic_and_split_by_heads(monkeypatch):
    tokens = torch.randn(3, 200, 8)
    whole = fit_kv_codebook(tokens, NOMAD[1], seed=3)
    assert torch.equal(fit_kv_codebook(tokens, NOMAD[1], seed=3), whole)
    assert not torch.equal(fit_kv_codebook(tokens, NOMAD[1], seed=4), whole)
    monkeypatch.setattr("hf_vq.fit.kv._AT_ONCE", 1)
    assert fit_kv_codebook(tokens, NOMAD[1], seed=3).shape == whole.shape


def error(tokens, codebook, scheme):
    stored = decode_kv(*encode_kv(tokens, codebook, scheme), codebook, scheme, tokens.shape[2])
    return (stored - tokens).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned-4", "learned-2"])
def test_a_codebook_per_tensor_beats_the_universal_one(name):
    """On new tokens of a kind that rotation does not make Gaussian: few directions, long tails."""
    scheme = KV_SCHEMES[name].key
    mixing = torch.randn(4, 32)

    def tokens(count):
        return (torch.randn(2, count, 4).pow(3) @ mixing) + 0.05 * torch.randn(2, count, 32)

    codebook = fit_kv_codebook(tokens(4096), scheme)
    assert codebook.dtype == torch.float16
    assert codebook.shape == (1, scheme.entries, scheme.vector_size)
    new, universal = tokens(1000), universal_tensor(KV_SCHEMES[f"u{name[-1]}"].key)
    assert error(new, codebook, scheme) < 0.95 * error(new, universal, scheme)


@pytest.mark.slow
def test_of_gaussian_tokens_it_stays_what_it_was():
    """What Lloyd's rounds find in a sample of them is worse on others, which are asked."""
    scheme = KV_SCHEMES["learned-4"].key
    found = fit_kv_codebook(torch.randn(2, 4096, 64), scheme)
    assert torch.equal(found, universal_tensor(KV_SCHEMES["u4"].key))
    assert error(torch.randn(2, 500, 64), found, scheme) < 1.02 * universal_mse(2, 8)


def test_fisher_weights_decide_what_is_served():
    """Tokens with a gradient are stored better than the others, in the groups that have one."""
    scheme = KV_SCHEMES["nomad-1"].key
    tokens = torch.cat([torch.randn(1, 500, 8), torch.randn(1, 500, 8) + 30], 1)
    gradients = torch.full((1, 1000, 8), 1e-3)
    gradients[:, :500, :4] = 1.0
    plain = fit_kv_codebook(tokens, scheme)
    weighted = fit_kv_codebook(tokens, scheme, gradients=gradients)

    def errors(codebook):
        stored = decode_kv(*encode_kv(tokens, codebook, scheme), codebook, scheme, 8)
        return (stored - tokens).square()[0, :500].unflatten(1, (2, 4)).mean((0, 2))

    better, same = errors(weighted) / errors(plain)
    assert better < 0.9 and 0.8 < same < 1.25


@pytest.mark.slow
def test_what_cannot_be_learned():
    with pytest.raises(VQSchemeError, match=r"divisible by 4; layer 2, keys has 18"):
        fit_kv_codebook(torch.randn(2, 100, 18), NOMAD[2], where="layer 2, keys")
    for wrong in (torch.nan, torch.inf, 1e5):
        for scheme in NOMAD:
            tokens = torch.randn(1, 100, 8)
            tokens[0, 5] = wrong
            tokens[0, 50:] = wrong
            with pytest.raises(VQCacheError, match="layer 1 holds NaN, infinity or numbers beyond"):
                fit_kv_codebook(tokens, scheme, where="layer 1")
