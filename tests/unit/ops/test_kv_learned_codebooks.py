"""Codes under codebooks of each head and group of channels, and scores by lookup."""

import math

import pytest
import torch

from hf_vq.formats import KV_SCHEMES, VQScheme, unpack_bits
from hf_vq.ops import decode_kv, encode_kv
from hf_vq.ops.reference.nomad import look_up, quantized_tables, score_tables

SCHEMES = {name: KV_SCHEMES[name].key for name in ("nomad-4", "nomad-2", "nomad-1", "cq-4", "cq-2")}
SCHEMES["odd bits"] = VQScheme(2, 3, codebook="channel_group", scale_group=0, rotation="none")
SCHEMES["rotated"] = VQScheme(
    2, 4, codebook="channel_group", scale_group=0, rotation="hadamard", rotation_block=0
)
HEADS, DIM = 3, 24


def books(scheme: VQScheme, dim: int = DIM) -> torch.Tensor:
    return torch.randn(HEADS, dim // scheme.vector_size, scheme.entries, scheme.vector_size).half()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("lead", [(2,), (), (0,)], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_every_vector_takes_the_nearest_entry_of_its_own_codebook(scheme, lead, tokens):
    codebook = books(scheme)
    x = torch.randn(*lead, HEADS, tokens, DIM)
    codes, scale = encode_kv(x, codebook, scheme)
    bits, size = scheme.entry_bits, scheme.vector_size
    assert codes.shape == (*lead, HEADS, tokens, math.ceil(DIM // size * bits / 8))
    assert scale.shape == (*lead, HEADS, tokens, 0) and scale.dtype == torch.float16
    stored = decode_kv(codes, scale, codebook, scheme, DIM)
    assert stored.shape == x.shape and stored.dtype == torch.float32
    if scheme.rotation != "none":
        return
    index = unpack_bits(codes, bits, DIM // size).long()
    for place in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
        *row, head, token, group = place
        vector = x[(*row, head, token)][group * size : (group + 1) * size]
        entries = codebook[head, group].float()
        distance = (entries - vector).square().sum(1)
        chosen = index[tuple(place)]
        assert distance[chosen] <= distance.min() + 1e-5
        part = stored[(*row, head, token)][group * size : (group + 1) * size]
        assert torch.equal(part, entries[chosen])


def test_entries_come_back_exactly():
    """What was decoded is coded again to itself."""
    for name in ("nomad-4", "cq-2"):
        scheme = SCHEMES[name]
        codebook = books(scheme)
        x = torch.randn(2, HEADS, 5, DIM)
        stored = decode_kv(*encode_kv(x, codebook, scheme), codebook, scheme, DIM)
        again = decode_kv(*encode_kv(stored, codebook, scheme), codebook, scheme, DIM)
        assert torch.equal(stored, again)


def test_a_rotated_scheme_learns_in_the_rotated_space():
    scheme = SCHEMES["rotated"]
    grid = torch.linspace(-2, 2, 4)
    codebook = torch.cartesian_prod(grid, grid).expand(HEADS, 8, 16, 2).half()
    x = torch.randn(1, HEADS, 200, 16)
    stored = decode_kv(*encode_kv(x, codebook, scheme), codebook, scheme, 16)
    assert (stored - x).square().mean() < 0.2


def test_rows_that_are_not_finite_get_codes():
    scheme = SCHEMES["nomad-2"]
    codebook = books(scheme)
    x = torch.randn(1, HEADS, 3, DIM)
    x[:, :, 1] = torch.nan
    x[:, :, 2, 0] = torch.inf
    stored = decode_kv(*encode_kv(x, codebook, scheme), codebook, scheme, DIM)
    assert stored.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_opcheck(dtype, scheme):
    x, codebook = torch.randn(1, HEADS, 2, DIM, dtype=dtype), books(scheme)
    torch.library.opcheck(torch.ops.hf_vq.encode.default, (x, codebook, None, scheme.spec()))
    codes, scale = encode_kv(x, codebook, scheme)
    arguments = (codes, codebook, scale, None, None, None, None, None, scheme.spec(), DIM)
    torch.library.opcheck(torch.ops.hf_vq.decode.default, arguments)


@pytest.fixture(params=[1, 2, 4])
def nomad(request):
    """Queries, codebook and codes of a head_dim of 128; head 0 has channels 30 times larger."""
    size = request.param
    codebook = torch.randn(2, 128 // size, 16, size)
    codebook[0, :2] *= 30
    query = torch.randn(3, 2, 5, 128)
    return query, codebook.half(), torch.randint(0, 16, (3, 2, 400, 128 // size))


def test_float_tables_give_the_dot_product(nomad):
    query, codebook, codes = nomad
    tables = score_tables(query, codebook)
    assert tables.shape == (3, 2, 5, codes.shape[-1], 16)
    index = codes.transpose(2, 3)[..., None].expand(-1, -1, -1, -1, codebook.shape[-1])
    entries = codebook.float().expand(3, -1, -1, -1, -1).gather(3, index)
    keys = entries.transpose(2, 3).flatten(-2)
    expected = query @ keys.mT
    torch.testing.assert_close(look_up(tables, codes), expected, atol=1e-3, rtol=1e-5)


def test_the_error_of_8_bit_tables(nomad):
    """Never more than S step / 2 and, as roundings of different sub-quantizers are independent,
    step sqrt(S / 12) on average."""
    query, codebook, codes = nomad
    groups = codes.shape[-1]
    tables = score_tables(query, codebook)
    levels, step, low = quantized_tables(tables)
    assert levels.dtype == torch.uint8 and levels.shape == tables.shape
    assert step.shape == low.shape == (3, 2, 5, 1, 1)
    assert (levels.amin(-1) == 0).all(), "the minimum of every sub-quantizer is 0"
    assert (levels.amax((-2, -1)) == 255).all(), "one range, used whole"
    scores = look_up(levels, codes)
    assert scores.max() <= 255 * groups < 2**16, "16-bit sums hold it"
    error = scores * step[..., 0] + low[..., 0] - look_up(tables, codes)
    rounding = 1e-5 * tables.abs().amax((-2, -1)).unsqueeze(-1) * groups
    assert (error.abs() <= groups * step[..., 0] / 2 + rounding).all()
    typical = step[..., 0] * (groups / 12) ** 0.5
    # Sub-quantizers of small range have small codebook errors too: the estimate is from above.
    assert (error / typical).square().mean().sqrt() < 1.1
    assert error[:, 1].square().mean() > 0.8 * typical[:, 1].square().mean()


def test_tables_without_a_range():
    """A query of zeros scores 0 everywhere, and constants are only in the minima."""
    codebook = torch.randn(1, 4, 16, 2)
    for tables in (score_tables(torch.zeros(1, 1, 8), codebook), torch.full((1, 1, 4, 16), 3.0)):
        levels, step, low = quantized_tables(tables)
        assert (levels == 0).all() and (step == 0).all()
        assert torch.equal(low[..., 0, 0], tables[..., 0].sum(-1))
