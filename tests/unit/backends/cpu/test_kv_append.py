"""`cpu.vq_append` against the reference: nearest entries, unbiased scales, bytes of a tape."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.backends.cpu import kv as cpu_attention
from hf_vq.backends.cpu import library
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.packing import unpack_bits
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops.layout import BLOCK, PLANES, QUADS, block_bytes, to_rows
from hf_vq.ops.reference import codes as reference
from hf_vq.transforms import rotate
from tests.fixtures.kv.views import append_kv, one_side

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

OTHERS = ("k4v2", "cq-1", "qserve-kv4")
"""Keys of u4, vectors of 8 and rows with a zero: the last two have no kernel."""
KEYS = {name: scheme.key for name, scheme in KV_SCHEMES.items() if name not in OTHERS}
SCALED = [name for name, scheme in KEYS.items() if scheme.has_scale]


@pytest.fixture(params=library.isas() or [""], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    library.use_isa(request.param)
    yield request.param
    library.use_isa("")


def codebook_of(scheme: VQScheme, heads: int, dim: int) -> Tensor:
    if scheme.codebook == "universal":
        return universal_tensor(scheme)
    return torch.randn(kv_codebook_spec(scheme, heads, dim).shape).half()


def tape(scheme: VQScheme, batch: int, heads: int, tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Codes and scales full of what was there before."""
    size = block_bytes(dim // scheme.vector_size, scheme.entry_bits)
    codes = torch.randint(0, 256, (batch, heads, -(-tokens // BLOCK), size), dtype=torch.uint8)
    return codes, torch.randn(batch, heads, tokens, int(scheme.has_scale)).half()


def distances(x: Tensor, codebook: Tensor, scheme: VQScheme) -> tuple[Tensor, Tensor]:
    """Squared distances [B, H, n, S, entries] in float64, and what float32 may be wrong by.

    A search compares sums of at most 2 x + 2 terms, each at most (|u| + |b|)^2 and rounded once.
    """
    rows = rotate(x.double(), scheme)
    if scheme.has_scale:
        rows = rows / (rows.square().mean(-1, keepdim=True)).sqrt().clamp_min(1e-30)
        books = codebook[0].double()
    else:
        books = codebook.double()[:, None]
    vectors = rows.unflatten(-1, (-1, scheme.vector_size))[..., None, :]
    size = vectors.norm(dim=-1) + books.norm(dim=-1)
    terms = 2 * scheme.vector_size + 2
    # The rotation's own rounding: log2(D) additions of numbers up to the row's norm.
    rotated = 8 * rows.norm(dim=-1)[..., None, None] * size * (scheme.rotation != "none")
    slack = torch.finfo(torch.float32).eps * (terms * size.square() + rotated)
    return (vectors - books).square().sum(-1), slack.amax(-1)


def check(x: Tensor, mean: Tensor | None, scheme: VQScheme, layout: str, at: int) -> None:
    """Append, then: nearest codes, their unbiased scales, and nothing else touched."""
    batch, heads, count, dim = x.shape
    codebook = codebook_of(scheme, heads, dim)
    codes, scale = tape(scheme, batch, heads, at + count + 3, dim)
    bits, vectors = scheme.entry_bits, dim // scheme.vector_size
    tokens = codes.shape[2] * BLOCK
    before = to_rows(codes, 0, tokens, bits, layout), scale.clone()

    append_kv(x, mean, codebook, codes, scale, at, scheme.spec(), layout)

    rows = to_rows(codes, 0, tokens, bits, layout)
    for old, new in ((before[0], rows), (before[1], scale)):
        assert torch.equal(new[:, :, :at], old[:, :, :at])
        assert torch.equal(new[:, :, at + count :], old[:, :, at + count :])
    index = unpack_bits(rows[:, :, at : at + count], bits, vectors).long()
    centred = x.float() if mean is None else x.float() - mean
    distance, slack = distances(centred, codebook, scheme)
    chosen = distance.gather(-1, index[..., None])[..., 0]
    assert (chosen <= distance.amin(-1) + slack).all()
    if scheme.has_scale:
        rotated = rotate(centred.double(), scheme)
        entries = codebook[0].double()[index].flatten(-2)
        energy = rotated.square().sum(-1)
        exact = torch.where(energy == 0, 0, energy / (rotated * entries).sum(-1))
        error = (scale[:, :, at : at + count, 0].double() - exact).abs()
        # Half a unit in the last place of fp16, and float32 sums of D terms.
        assert (error <= exact.abs() * (2.0**-11 + dim * 2.0**-24) + 2.0**-25).all()


@pytest.mark.parametrize("layout", [QUADS, PLANES])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("at", "count"), [(0, 1), (5, 3), (0, 256), (255, 2), (100, 413)])
def test_universal_codes(name: str, layout: str, at: int, count: int) -> None:
    batch, heads = (2, 3) if count < 10 else (1, 1)
    x = 3 * torch.randn(batch, heads, count, 32) + 1
    x[0, 0, 0] = 0
    check(x, torch.randn(batch, heads, 1, 32), KEYS[name], layout, at)


@pytest.mark.parametrize("name", ["cq-4", "cq-2", "nomad-4", "nomad-2", "nomad-1"])
@pytest.mark.parametrize(("at", "count"), [(0, 1), (250, 7), (0, 260)])
def test_learned_codes(name: str, at: int, count: int) -> None:
    check(2 * torch.randn(1, 2, count, 16), None, KEYS[name], PLANES, at)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("name", SCALED)
def test_head_dims(name: str, dim: int) -> None:
    scheme = KEYS[name]
    layout = QUADS if dim % (4 * scheme.vector_size) == 0 else PLANES
    check(torch.randn(1, 2, 5, dim), torch.randn(1, 2, 1, dim), scheme, layout, 254)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["nomad-u4", "cq-2"])
def test_dtypes_and_strides(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 9, 4, 64, dtype=dtype).transpose(1, 2)[:, 1:3]  # tokens before heads
    check(x, None, KEYS[name], PLANES, 3)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_shape_of_codebook(bits: int, size: int) -> None:
    learned = VQScheme(
        size, bits, codebook="channel_group", scale_group=0, rotation="hadamard", rotation_block=0
    )
    check(torch.randn(1, 2, 4, 32), None, learned, PLANES, 0)


def test_levels_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = KEYS["nomad-u4"]
    shuffled = universal_tensor(scheme)[:, torch.randperm(16)]
    monkeypatch.setattr(f"{__name__}.codebook_of", lambda *_: shuffled)
    check(torch.randn(1, 2, 5, 64), None, scheme, QUADS, 0)


@pytest.mark.parametrize("name", SCALED)
def test_rows_without_a_finite_scale(name: str) -> None:
    scheme = KEYS[name]
    x = torch.randn(1, 1, 5, 64)
    x[0, 0, 0, 3], x[0, 0, 1, 5], x[0, 0, 2, 7] = torch.nan, torch.inf, -torch.inf
    codes, scale = tape(scheme, 1, 1, 5, 64)
    append_kv(x, None, universal_tensor(scheme), codes, scale, 0, scheme.spec(), QUADS)
    assert not scale[0, 0, :3].isfinite().any()
    assert scale[0, 0, 3:].isfinite().all()


@pytest.mark.parametrize("count", [1, 37])
@pytest.mark.parametrize("name", SCALED)
def test_scales_beyond_fp16_saturate(name: str, count: int) -> None:
    """Codes are those of the row in any unit; rows beside it are what they are without it."""
    scheme = KEYS[name]
    x, book = torch.randn(1, 2, count, 64).clamp(-4, 4), universal_tensor(scheme)

    def append(x: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
        size = block_bytes(64 // scheme.vector_size, scheme.entry_bits)
        codes = torch.zeros(1, 2, 1, size, dtype=torch.uint8)
        scale = torch.zeros(1, 2, count, 1).half()
        append_kv(x, mean, book, codes, scale, 0, scheme.spec(), QUADS)
        return to_rows(codes, 0, count, scheme.entry_bits, QUADS), scale

    codes, scale = append(x)
    for power in (20, 40, 60, 70, 125):
        huge = x.clone()
        huge[:, 1] *= 2.0**power
        found, numbers = append(huge)
        assert torch.equal(found, codes)
        assert torch.equal(numbers[:, 0], scale[:, 0]) and (numbers[:, 1] == 65504).all()
        wanted = reference.encode(huge, book, None, scheme)[1]
        assert torch.equal(wanted[:, 1], numbers[:, 1])
        mean = torch.zeros(1, 2, 1, 64)
        mean[:, 1] = 2.0 ** min(power, 100)
        assert append(huge, mean)[1].isfinite().all()


def test_nothing_to_append() -> None:
    scheme = KEYS["u4"]
    codes, scale = tape(scheme, 1, 2, 256, 64)
    before = codes.clone()
    x = torch.randn(1, 2, 0, 64)
    append_kv(x, None, universal_tensor(scheme), codes, scale, 256, scheme.spec(), QUADS)
    assert torch.equal(codes, before)


def test_threads_do_not_share_bytes() -> None:
    scheme, threads = KEYS["u3"], torch.get_num_threads()
    x = torch.randn(2, 4, 600, 64)
    found = []
    torch.manual_seed(1)
    first = tape(scheme, 2, 4, 700, 64)
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            codes, scale = (tensor.clone() for tensor in first)
            append_kv(x, None, universal_tensor(scheme), codes, scale, 77, scheme.spec(), QUADS)
            found.append((codes, scale))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_tape_with_gaps_is_refused() -> None:
    scheme = KEYS["u4"]
    codes, scale = tape(scheme, 1, 1, 512, 64)
    with pytest.raises(VQBackendError, match="one after another"):
        append_kv(
            torch.randn(1, 1, 1, 64), None, universal_tensor(scheme), codes[:, :, ::2], scale, 0,
            scheme.spec(), QUADS,
        )  # fmt: skip


def test_who_appends_and_why_not() -> None:
    def reason(spec: str, layout: str, dim: int, dtype: str = "float32") -> str:
        problem = dispatch.KVAppendProblem("cpu", dtype, spec, "", 1, dim, 0, layout, "")
        return cpu_attention.APPEND.supports(problem) or ""

    u4 = KEYS["u4"].spec()
    assert reason(u4, QUADS, 128) == ""
    assert "rows" in reason(u4, "rows", 128)
    assert "head_dim 260" in reason(u4, QUADS, 260)
    assert "float64" in reason(u4, QUADS, 128, "float64")
    assert "rotation" in reason(u4.replace("hadamard0", "qr0"), QUADS, 128)
    assert "no kernel" in reason(VQScheme(1, 3, scale_group=0, rotation="none").spec(), PLANES, 64)


def test_the_reference_agrees_on_the_bytes() -> None:
    """Away from ties both find the same codes, so the tapes are equal."""
    scheme = KEYS["nomad-u4"]
    levels = universal_tensor(scheme)[0, :, 0].float()
    units = levels[torch.randint(0, 16, (1, 2, 300, 64))]
    x = rotate(units, scheme)  # its own inverse
    tapes = [tape(scheme, 1, 2, 300, 64)]
    tapes.append(tuple(tensor.clone() for tensor in tapes[0]))
    arguments = (x, None, universal_tensor(scheme))
    append_kv(*arguments, *tapes[0], 0, scheme.spec(), QUADS)
    view = one_side(*arguments, *tapes[1], 0, scheme.spec(), QUADS)
    reference.kv_append(x, None, view, None)
    same = (tapes[0][0] == tapes[1][0]).float().mean()
    assert same > 0.999
    assert cpu_attention.key_layout(scheme) == QUADS
