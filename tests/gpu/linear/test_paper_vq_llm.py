"""The kernel that VQ-LLM describes, on a GPU against float64: every mechanism on and off.

Fresh random codes, scales and inputs; outputs and the sums of parts lie in memory full of NaN.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from benchmarks.paper_vq_llm.linear import PaperLinear
from benchmarks.paper_vq_llm.plan import Fusion, base_plan
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.codegen.plan import Scope
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme
from hf_vq.ops.reference import codes as reference
from tests.fixtures.cuda_layers import stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CASES = [  # spec, rows, in_features
    ("vq2x8r1-universal-g128-none", 333, 1152),
    ("vq4x8r1-universal-g128-none", 333, 1152),
    (WEIGHT_SCHEMES["aqlm-2"].spec(), 333, 1280),
    (WEIGHT_SCHEMES["aqlm-3"].spec(), 77, 512),
    (WEIGHT_SCHEMES["gptvq-2"].spec(), 400, 1024),
    ("vq4x8r3-tensor-g256-none", 16, 256),
    ("vq8x8r1-tensor-g256-none", 5, 4096),
    ("vq2x6r2-tensor-g128-none", 129, 384),
]


def plans(scheme, in_features, tokens):
    """Tiers, fusions, exchanges and splits; half of all pairs with one token, half with more."""
    base = base_plan(scheme, in_features, tokens)
    entries, books = 1 << base.entry_bits, base.num_codebooks
    if base.scope is Scope.TILE:
        books = in_features // base.tile_columns
    some = entries // 4
    tiers = [(0, 0), (0, entries), (0, some), (32, some), (64, 64), (32, entries)]
    fusions = [(Fusion.SHARED, 0), (Fusion.SHUFFLE, 0), (Fusion.SHUFFLE, 4), (Fusion.RENUMBERED, 0)]
    splits = [(1, 1), (1, 2), (books, 1), (books, 2)]
    for i, (registers, kept) in enumerate(tiers):
        for j, (fusion, more) in enumerate(fusions):
            if (i + j) % 2 == (tokens == 1):
                continue
            split, row_tiles = splits[(i + j // 2) % 4]
            yield replace(
                base, registers=registers, shared=kept, fusion=fusion, split=split,
                exchanges=base.exchanges + more, row_tiles=row_tiles, blocks_per_sm=1,
            )  # fmt: skip


def check(y, x, tensors, scheme):
    """The error is at most twice that of the same product of rounded numbers in PyTorch."""
    ones = torch.ones_like(tensors["scale"])
    rows = reference.decode_rotated(
        tensors["codes"], tensors["codebook"], ones, scheme, x.shape[-1]
    ).double()
    grouped = rows.unflatten(-1, (ones.shape[-1], -1))
    weight = (grouped * tensors["scale"].double()[..., None]).flatten(-2)
    exact = x.double() @ weight.T
    same = torch.nn.functional.linear(x, weight.half())
    eps = torch.finfo(torch.float16).eps * exact.norm()
    assert (y.double() - exact).norm() <= 2 * (same.double() - exact).norm() + eps
    assert (y.double() - exact).abs().max() <= 4 * (same.double() - exact).abs().max() + eps


@pytest.mark.parametrize(("spec", "rows", "columns"), CASES)
def test_every_mechanism(spec, rows, columns):
    scheme, arch, store = VQScheme.parse(spec), device_arch(0).name, default_store()
    cases = [(tokens, plan) for tokens in (1, 11) for plan in plans(scheme, columns, tokens)]
    fit = [(t, p) for t, p in cases if p.shared_bytes + 16 <= device_arch(0).shared_per_block]
    assert len(fit) >= len(cases) // 2
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda case: compiler.cubin(case[1], arch, store), fit))
    _, tensors = stored(spec, rows, columns)
    for tokens, plan in fit:
        layer = PaperLinear(plan, rows, tokens)
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.float16)
        y = torch.full((tokens + 1, rows), float("nan"), device="cuda", dtype=torch.float16)
        layer(x, tensors, y)
        assert y[tokens:].isnan().all(), plan
        check(y[:tokens], x, tensors, scheme)
        # Sums do not depend on which block comes first, and those of before are gone.
        first = y[:tokens].clone()
        for again in range(3):
            y.fill_(float("nan"))
            layer.partial.fill_(float("nan"))
            layer(x, tensors, y, overlap=again > 0)
            assert torch.equal(y[:tokens], first), plan
        assert not layer.arrived.any()


def test_extreme_codes():
    """Bytes of any value stay in the codebook, whatever tier they come from."""
    scheme, tensors = stored(WEIGHT_SCHEMES["aqlm-3"].spec(), 40, 512)
    x = torch.randn(3, 512, device="cuda", dtype=torch.float16)
    base = replace(base_plan(scheme, 512, 3), blocks_per_sm=1)
    for byte, (hot, kept) in itertools.product((0x00, 0xFF, 0x80), ((0, 4096), (32, 100), (0, 0))):
        tensors["codes"].fill_(byte)
        y = torch.full((3, 40), float("nan"), device="cuda", dtype=torch.float16)
        PaperLinear(replace(base, registers=hot, shared=kept // 8 * 8), 40, 3)(x, tensors, y)
        check(y, x, tensors, scheme)
