"""`hf_vq::kv_append`: what it writes is what `encode` gives, where it belongs and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import hf_vq  # noqa: F401  registers the backends
from hf_vq import dispatch
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.packing import packed_size
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import encode_kv, kv_append
from hf_vq.ops.kv import flatten
from hf_vq.ops.layout import BLOCK, block_bytes, to_rows
from hf_vq.ops.reference import codes as reference
from tests.fixtures.kv.views import append_kv, one_side

SCHEMES = {
    "u4": KV_SCHEMES["u4"].key,
    "u3": KV_SCHEMES["u3"].key,
    "u2": KV_SCHEMES["u2"].key,
    "nomad-u4": KV_SCHEMES["nomad-u4"].key,
    "nomad-2": KV_SCHEMES["nomad-2"].key,
    "cq-4": KV_SCHEMES["cq-4"].key,
}


@pytest.fixture(autouse=True)
def only_the_reference() -> Iterator[None]:
    with dispatch.using(entry for entry in dispatch.ENTRIES if entry.name == "reference"):
        yield


def codebook_of(scheme: VQScheme, heads: int, dim: int) -> Tensor:
    if scheme.codebook == "universal":
        return universal_tensor(scheme)
    return torch.randn(kv_codebook_spec(scheme, heads, dim).shape).half()


def tape(scheme: VQScheme, heads: int, dim: int, blocks: int, layout: str) -> tuple[Tensor, Tensor]:
    """A tape of random codes, and of scales that are NaN."""
    vectors = dim // scheme.vector_size
    tokens = blocks * BLOCK
    size = (blocks, block_bytes(vectors, scheme.entry_bits))
    if layout == "rows":
        size = (tokens, packed_size(vectors, scheme.entry_bits))
    codes = torch.randint(0, 256, (2, heads, *size)).to(torch.uint8)
    scale = torch.full((2, heads, tokens, int(scheme.has_scale)), torch.nan, dtype=torch.float16)
    return codes, scale


@pytest.mark.parametrize("layout", ["rows", "planes", "quads"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_encode_in_its_place(name: str, layout: str, dtype: torch.dtype) -> None:
    scheme, dim, at = SCHEMES[name], 32, 250
    codebook = codebook_of(scheme, 3, dim)
    x = (2 * torch.randn(2, 20, 3, dim)).to(dtype).transpose(1, 2)  # rows are not dense
    mean = torch.randn(2, 3, 1, dim)
    for centre in (mean, None):
        codes, scale = tape(scheme, 3, dim, 2, layout)
        before = to_rows(codes, 0, 2 * BLOCK, scheme.entry_bits, layout).clone()
        done = append_kv(x, centre, codebook, codes, scale, at, scheme.spec(), layout)
        assert done is None
        rows = x.float() if centre is None else x.float() - centre
        wanted, scales = encode_kv(rows, codebook, scheme)
        before[:, :, at : at + 20] = wanted
        after = to_rows(codes, 0, 2 * BLOCK, scheme.entry_bits, layout)
        assert torch.equal(after, before)
        assert torch.equal(scale[:, :, at : at + 20], scales)
        assert scale.isfinite().sum() == scales.numel()


@pytest.mark.parametrize("layout", ["rows", "planes", "quads"])
@pytest.mark.parametrize("name", ["u4", "u3", "u2", "nomad-u4"])
def test_smoothed_rows(name: str, layout: str) -> None:
    """What is left of a row is multiplied; attention and whoever decodes divides."""
    scheme, dim, at = SCHEMES[name], 32, 250
    codebook, x = codebook_of(scheme, 3, dim), 2 * torch.randn(2, 3, 20, dim)
    mean, factor = torch.randn(2, 3, 1, dim), torch.randn(2, 3, 1, dim).exp()
    for centre in (mean, None):
        codes, scale = tape(scheme, 3, dim, 2, layout)
        view = one_side(x, centre, codebook, codes, scale, at, scheme.spec(), layout)
        kv_append(x, x[:, :, :0], view.replace(key_smoothing=factor))
        rows = (x - (0 if centre is None else centre)) * factor
        wanted, scales = encode_kv(rows, codebook, scheme)
        assert torch.equal(to_rows(codes, at, 20, scheme.entry_bits, layout), wanted)
        assert torch.equal(scale[:, :, at : at + 20], scales)
        kv_append(x, x[:, :, :0], view.replace(key_smoothing=torch.ones_like(factor)))
        ones = to_rows(codes, at, 20, scheme.entry_bits, layout).clone()
        kv_append(x, x[:, :, :0], view)
        assert torch.equal(to_rows(codes, at, 20, scheme.entry_bits, layout), ones)


@pytest.mark.parametrize("layout", ["rows", "planes"])
def test_many_tokens_or_one_by_one(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "APPEND_TOKENS", 7)  # a long prompt is encoded in parts
    scheme = SCHEMES["u4"]
    codebook = codebook_of(scheme, 2, 16)
    x = torch.randn(2, 2, 300, 16)
    at_once, steps = tape(scheme, 2, 16, 2, layout), tape(scheme, 2, 16, 2, layout)
    append_kv(x, None, codebook, *at_once, 100, scheme.spec(), layout)
    for position in range(300):
        token = x[:, :, position : position + 1]
        append_kv(token, None, codebook, *steps, 100 + position, scheme.spec(), layout)
    for a, b in zip(at_once, steps, strict=True):
        if a.dtype == torch.uint8:
            a, b = (to_rows(data, 100, 300, 8, layout) for data in (a, b))
        else:
            a, b = a[:, :, 100:400], b[:, :, 100:400]
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["rows", "quads"])
def test_opcheck(layout: str) -> None:
    for name in ("nomad-u4", "nomad-2"):
        scheme = SCHEMES[name]
        codebook = codebook_of(scheme, 2, 16)
        codes, scale = tape(scheme, 2, 16, 1, layout)
        scale = scale.nan_to_num()
        for mean in (torch.randn(2, 2, 1, 16), None):
            x = torch.randn(2, 2, 3, 16)
            view = one_side(x, mean, codebook, codes, scale, 9, scheme.spec(), layout)
            arguments = (x, x.new_empty(2, 2, 0, 16), *flatten(view), None)
            torch.library.opcheck(torch.ops.hf_vq.kv_append, arguments)


def test_modes() -> None:
    scheme = SCHEMES["u4"]
    codebook, x = codebook_of(scheme, 2, 16), torch.randn(2, 2, 3, 16)
    start = tape(scheme, 2, 16, 1, "planes")

    def run(codes: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        append_kv(x + 1, None, codebook, codes, scale, 4, scheme.spec(), "planes")
        return scale[:, :, 4:7] * 2

    wanted = [part.clone() for part in start]
    doubled = run(*wanted, x)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for function, mode in ((compiled, torch.no_grad), (run, torch.inference_mode)):
        parts = [part.clone() for part in start]
        with mode():
            out = function(*parts, x)
        assert torch.equal(out, doubled) and torch.equal(parts[0], wanted[0])
        assert torch.equal(parts[1].nan_to_num(), wanted[1].nan_to_num())
