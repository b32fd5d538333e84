"""Problems of layers as VPTQ publishes them: vptq.cu, vptq_inputs.cu, vptq_dequantize.cu."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.codegen.families import vptq as choose_vptq
from hf_vq.codegen.families.vptq import MOST_TOKENS, VptqProblem, decode_plan, fusable, inputs_plan
from hf_vq.codegen.jit.device import Arch
from hf_vq.codegen.plan import Dtype, Plan
from hf_vq.formats.published import VptqLayout
from hf_vq.ops.published import decode_published, published_linear

from .case import DTYPES, kernel_of
from .cover import Features, covering
from .linear import of_plan

# Vectors, entries, residual entries, groups, columns of a group, those of outliers.
LAYOUTS = (
    VptqLayout(8, 65536, 256, 1, 2048, norm=True, perm=True),
    VptqLayout(8, 65536, 0, 1, 1152, norm=True, perm=True, dtype="bfloat16"),
    VptqLayout(16, 65536, 65536, 1, 520, norm=True, perm=True),
    VptqLayout(12, 65536, 4096, 1, 264, 5, 4, 300, norm=True, perm=True),
    VptqLayout(6, 4096, 0, 1, 514),
    VptqLayout(4, 256, 0, 1, 77, perm=True),
    VptqLayout(10, 100, 7, 3, 90, 2, 6, 999, norm=True, dtype="bfloat16"),
    VptqLayout(10, 100, 7, 3, 682, 2, 6, 999, norm=True, dtype="bfloat16"),
    VptqLayout(32, 300, 0, 1, 96, norm=True),
    VptqLayout(5, 33, 0, 1, 65),
    VptqLayout(8, 64, 0, 1, 66, dtype="float32"),
)
ROWS = (7, 130, 1024, 3584, 4096, 14336)
TOKENS = (1, 8, 9, MOST_TOKENS, MOST_TOKENS + 1)  # of 8, of 16, and more


@dataclass(frozen=True)
class VptqCase:
    """y = W x + b.

    Args:
        layout: of W.
        tokens: rows of x.
        rows: out_features.
        dtype: of x.
        bias: whether there is one.
    """

    layout: VptqLayout
    tokens: int
    rows: int
    dtype: str
    bias: bool

    @property
    def name(self) -> str:
        """What it is."""
        size = f"{self.tokens} x {self.rows} x {self.columns}"
        return f"vptq {self.layout.name()} {size} {self.dtype}{' + bias' * self.bias}"

    @property
    def columns(self) -> int:
        """in_features."""
        return self.layout.outliers + self.layout.groups * self.layout.group_size

    def plans(self, arch: Arch) -> Sequence[Plan]:
        """See `Case`."""
        dtype, alike = Dtype(self.dtype), dispatch.bucket(self.tokens)
        if alike <= MOST_TOKENS and fusable(self.layout, dtype) is None:
            tokens = 16 if self.tokens > 8 else 8
            problem = VptqProblem(self.layout, tokens, self.rows, dtype, arch)
            plan = choose_vptq.choose(problem)
            if plan is not None:
                return plan, inputs_plan(plan, self.layout)
        return (decode_plan(self.layout, self.columns, dtype),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        plans = self.plans(arch)
        plan = of_plan(plans[0])
        own = ("kernel", "threads", "blocks_per_sm", "unit", "row_vectors", "wide",
               "book_in_shared", "rest_in_shared", "each")  # fmt: skip
        return {
            "each kernel": kernel_of(plans[0]),
            "each kernel of inputs": kernel_of(plans[-1]),
            "layout": self.layout,
            "type": self.dtype,
            "bias": self.bias,
            "tokens": self.tokens,
            **{name: plan[name] for name in own if name in plan},
        }

    def inputs(self, device: torch.device) -> Any:
        """x, random stored tensors, and the bias."""
        layout, found = self.layout, {}
        for key, spec in layout.own(self.rows, self.columns).items():
            if key == "perm":
                order = torch.randperm(self.columns, device=device)
                found[key] = torch.where(order >= 1 << 15, order - (1 << 16), order).short()
            elif key == "outlier_indices":
                entries = torch.randint(layout.outlier_centroids, spec.shape, device=device)
                found[key] = entries.short()
            elif spec.dtype.is_floating_point:
                found[key] = (torch.randn(spec.shape, device=device) / 8).to(spec.dtype)
            else:
                found[key] = _packed(layout, *spec.shape, device=device)
        dtype = DTYPES[self.dtype]
        x = torch.randn(self.tokens, self.columns, device=device).to(dtype)
        bias = torch.randn(self.rows, device=device).to(dtype) if self.bias else None
        return x, found, bias

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        x, tensors, bias = inputs
        return (published_linear(x, tensors, bias, self.layout.spec(), self.rows),)

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """The error is at most twice that of the same product in PyTorch, of the rounded weight."""
        x, tensors, bias = inputs
        (y,) = found
        weight = decode_published(tensors, self.layout, self.rows, self.columns)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        same = torch.nn.functional.linear(x, weight.to(x.dtype), bias).double()
        assert y.isfinite().all(), "a number is not finite"
        eps, error = torch.finfo(x.dtype).eps * exact.norm(), y.double() - exact
        known = same - exact
        assert error.norm() <= 2 * known.norm() + eps, f"{error.norm()} > 2 {known.norm()} + {eps}"
        assert error.abs().max() <= 4 * known.abs().max() + eps, f"off by {error.abs().max()}"


def _packed(
    layout: VptqLayout, groups: int, vectors: int, words: int, *, device: torch.device
) -> Tensor:
    """Random codes as int32 words: streams of bits, a code's lowest bit first."""
    size = groups, vectors, layout.group_size
    main, rest = layout.bits
    codes = torch.randint(layout.centroids, size, device=device)
    codes |= torch.randint(max(layout.residual, 1), size, device=device) << main
    bits = (codes[..., None] >> torch.arange(main + rest, device=device)) & 1
    bits = bits.flatten(2)
    bits = torch.nn.functional.pad(bits, (0, 32 * words - bits.shape[2]))
    numbers = (bits.unflatten(2, (words, 32)) << torch.arange(32, device=device)).sum(-1)
    return torch.where(numbers >= 1 << 31, numbers - (1 << 32), numbers).int()


def cases(arch: Arch) -> list[VptqCase]:
    """Problems that meet every value of features, and every pair that occurs."""
    return list(_cases(arch))


@functools.cache
def _cases(arch: Arch) -> tuple[VptqCase, ...]:
    return tuple(covering(domain(arch), lambda case: case.features(arch)))


@functools.cache
def domain(arch: Arch) -> tuple[VptqCase, ...]:
    """Every bucket of tokens of layouts of all kinds; dtypes and bias are dealt out to them."""
    return tuple(_domain())


def _domain() -> Iterator[VptqCase]:
    found = itertools.product(ROWS, LAYOUTS, TOKENS, DTYPES)
    for number, (rows, layout, tokens, dtype) in enumerate(found):
        yield VptqCase(layout, tokens, rows, dtype, bool(number // 2 % 2))
