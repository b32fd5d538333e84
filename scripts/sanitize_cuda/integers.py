"""Cases of the kernels that multiply integers of 4 and 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from cases import FLOATS, Case, covering

from hf_vq.backends.cuda import w4a8 as cuda_w4a8
from hf_vq.backends.cuda import w4a8_inputs
from hf_vq.codegen.families import w4a8 as choose_w4a8
from hf_vq.codegen.families import w4a8_wgmma as choose_w4a8_wide
from hf_vq.codegen.families.w4a8 import W4A8Problem
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.codegen.w4a8_plan import W4A8Plan, W4A8WidePlan
from hf_vq.formats import QoQScheme
from hf_vq.formats.qoq import encode
from hf_vq.formats.stored_weight import W4A8Weight
from hf_vq.ops import fused_inputs, w4a8

LAYERS = [  # scheme, columns
    ("qoq-w4a8", 1152), ("qoq-w4a8-g128", 2048), ("qoq-w4a8-g32", 1120), ("qoq-w4a8-g64", 704),
]  # fmt: skip
FEW, MANY = (1, 7, 37, 64), (27, 75, 270)  # tokens


def few_tokens() -> Iterator[Case]:
    """Plans of w4a8.cu, with w4a8_inputs.cu before those that do not round."""
    seen: dict[int, set[tuple[str, Any]]] = {tokens: set() for tokens in FEW}
    for n, ((name, columns), tokens) in enumerate(product(LAYERS, FEW)):
        for plan in covering(choose_w4a8.best(_problem(name, columns, tokens, n)), seen[tokens]):
            rows = 2 * plan.tile_rows - 3
            yield (
                f"w4a8 {tokens} x {rows} x {columns} {name} {plan}",
                partial(multiply, plan, name, tokens, rows, columns),
            )


def many_tokens() -> Iterator[Case]:
    """Plans of w4a8_wgmma.cu."""
    seen: dict[int, set[tuple[str, Any]]] = {tokens: set() for tokens in MANY}
    for n, ((name, columns), tokens) in enumerate(product(LAYERS, MANY)):
        problem = _problem(name, columns, tokens, n)
        for plan in covering(choose_w4a8_wide.best(problem), seen[tokens]):
            rows = 2 * plan.tile_rows - 3
            yield (
                f"w4a8 wide {tokens} x {rows} x {columns} {name} {plan}",
                partial(multiply, plan, name, tokens, rows, columns),
            )


def _problem(name: str, columns: int, tokens: int, n: int) -> W4A8Problem:
    scheme, dtype = QoQScheme.parse(name), (Dtype.FLOAT16, Dtype.BFLOAT16)[n % 2]
    group = scheme.group and scheme.group_of(columns)
    rounded = bool(n // len(FEW) % 2)  # one token, as norms leave it
    return W4A8Problem(group, tokens, 4096, columns, dtype, dtype, device_arch(0), rounded)


def multiply(
    plan: W4A8Plan | W4A8WidePlan, name: str, tokens: int, rows: int, columns: int
) -> None:
    """Two launches, of which the second may begin before the first has ended; of w4a8_wgmma.cu
    of one block, which has several tiles. The same numbers as the reference."""
    dtype, scheme = FLOATS[plan.dtype], QoQScheme.parse(name)
    here = encode(torch.randn(rows, columns), scheme)
    there = {key: tensor.cuda() for key, tensor in here.items()}
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
    moved, added = x.cuda(), bias.cuda()
    stored = [W4A8Weight.of(tensors, scheme, columns) for tensors in (here, there)]
    launch = cuda_w4a8.prepare(plan, columns, 0)
    blocks = int(isinstance(plan, W4A8WidePlan))
    outputs = [torch.full((tokens + 1, rows), float("nan"), dtype=dtype).cuda() for _ in range(2)]
    for y in outputs:
        cuda_w4a8.run(launch, moved, stored[1], added, y[:tokens], blocks)
    exact = w4a8.reference(x, stored[0], bias)
    for y in outputs:
        found = y.cpu()
        assert torch.equal(found[:-1], exact), "a number is not that of the reference"
        assert found[-1].isnan().all(), "a row beyond the last was written"


def inputs() -> Iterator[Case]:
    """Norms and gated products of w4a8_inputs.cu; tokens as they are come with products."""
    for n, (columns, tokens, swizzled) in enumerate(product((704, 4096), (1, 9), (False, True))):
        dtype = (torch.float16, torch.bfloat16)[n % 2]
        yield (
            f"w4a8 inputs {tokens} x {columns} {dtype} {'swizzled' * swizzled}",
            partial(make_inputs, tokens, columns, swizzled, dtype),
        )


def make_inputs(tokens: int, columns: int, swizzled: bool, dtype: torch.dtype) -> None:
    """Scales are those of the same floats on a CPU, whose roots and exponentials are others."""
    x, other = (torch.randn(tokens, columns).to(dtype) for _ in range(2))
    there, by = x.cuda(), other.cuda()
    made = w4a8_inputs.norm(swizzled, there, by[0], 1e-5)
    gated = w4a8_inputs.gated(swizzled, by, there)
    for found, floats in (
        (made, fused_inputs.rms_norm(x, other[0], 1e-5)),
        (gated, fused_inputs.gated(other, x)),
    ):
        _, size = w4a8.quantize_tokens(floats)
        token = found.memory.cpu()[found.token_at :].view(torch.float32).view(tokens, 2)
        wrong = (token[:, :1] - size).abs() > 2 * torch.finfo(dtype).eps * size
        assert not wrong.any(), "a scale is not that of the reference"


MAKERS = {"w4a8": few_tokens, "w4a8-wide": many_tokens, "w4a8-inputs": inputs}
