"""Problems of products of 4-bit weights with 8-bit inputs: the kernels of w4a8*.cu."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.codegen.families import w4a8 as choose_w4a8
from hf_vq.codegen.families import w4a8_wgmma as choose_w4a8_wide
from hf_vq.codegen.families.w4a8 import W4A8Problem, inputs_plan
from hf_vq.codegen.jit.device import Arch
from hf_vq.codegen.plan import Dtype, Plan
from hf_vq.codegen.w4a8_plan import Source, W4A8Plan, W4A8WidePlan
from hf_vq.formats import qoq
from hf_vq.formats.catalog import QOQ_SCHEMES
from hf_vq.formats.stored_weight import W4A8Weight
from hf_vq.ops import fused_inputs, w4a8

from .case import DTYPES
from .cover import Features, covering
from .linear import of_plan

SCHEMES = (*QOQ_SCHEMES, "qoq-w4a8-g32", "qoq-w4a8-g64", "qoq-w4a8-g256")
SHAPES = ((37, 704), (1024, 4096), (4096, 4096), (4096, 14336), (14336, 4096))
MODEL_SHAPES = (  # more of models, for one scheme each
    (576, 576), (128, 896), (256, 1536), (576, 1536), (512, 2048), (2304, 2304), (1024, 2560),
    (3072, 3072), (512, 3584), (896, 4864), (1024, 5120), (3072, 8192), (1536, 8960),
    (2304, 9216), (2560, 9728), (2560, 10240), (2048, 11008), (3584, 18944), (5120, 25600),
    (5120, 27648), (8192, 28672),
)  # fmt: skip
LONGEST = 4096  # tokens: beyond, no bucket is looked for
_EPS = 1e-5  # of norms


@dataclass(frozen=True)
class W4A8Case:
    """y = W round(x) + b.

    Args:
        scheme: spec of the `QoQScheme`.
        tokens: rows of x.
        rows: out_features.
        columns: in_features.
        dtype: of x.
        bias: dtype of the bias; None: there is none.
        source: of what is rounded.
    """

    scheme: str
    tokens: int
    rows: int
    columns: int
    dtype: str
    bias: str | None
    source: Source

    @property
    def name(self) -> str:
        """What it is."""
        return (
            f"w4a8 {self.scheme} {self.tokens} x {self.rows} x {self.columns} {self.dtype}, bias "
            f"{self.bias}, {self.source.value}"
        )

    def plan(self, arch: Arch) -> W4A8Plan | W4A8WidePlan:
        """Of the product."""
        scheme, many = w4a8.parse(self.scheme), is_many(self.tokens, arch)
        chooser: Any = choose_w4a8_wide if many else choose_w4a8
        problem = W4A8Problem(
            scheme.group and scheme.group_of(self.columns), chooser.token_bucket(self.tokens),
            self.rows, self.columns, Dtype(self.dtype), Dtype(self.bias or self.dtype), arch,
            self.source is not Source.TOKENS,
        )  # fmt: skip
        plan: W4A8Plan | W4A8WidePlan | None = chooser.choose(problem)
        assert plan is not None, f"no plan for {self.name}"
        return plan

    def plans(self, arch: Arch) -> Sequence[Plan]:
        """See `Case`."""
        plan = self.plan(arch)
        wide = isinstance(plan, W4A8WidePlan)
        if isinstance(plan, W4A8Plan) and plan.rounds:
            return (plan,)
        return plan, inputs_plan(plan.dtype, self.columns, wide, self.source)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return {
            "each bucket of a scheme": (self.scheme, bucket(self.tokens, arch)),
            "each source": (self.source, self.columns, is_many(self.tokens, arch), self.dtype),
            "scheme": self.scheme,
            "dtype": self.dtype,
            **{
                name: value
                for name, value in of_plan(self.plan(arch)).items()
                if name not in ("columns", "groups")
            },
        }

    def inputs(self, device: torch.device) -> Any:
        """x and what it is made of, the stored tensors, and the bias."""
        weight = torch.randn(self.rows, self.columns, device=device)
        weight *= 3 * torch.rand(self.rows, 1, device=device)
        tensors = qoq.encode(weight, w4a8.parse(self.scheme))
        most = 1 if self.dtype == "float16" else 2  # so that no result is beyond it
        size = torch.logspace(-2, most, self.tokens, device=device)[:, None]
        shape = self.tokens, self.columns
        x = (torch.randn(shape, device=device) * size).to(DTYPES[self.dtype])
        other = torch.randn(shape[1:] if self.source is Source.NORM else shape, device=device)
        bias = None
        if self.bias is not None:
            bias = torch.randn(self.rows, device=device).to(DTYPES[self.bias])
        return x, other.to(x.dtype), tensors, bias

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        x, other, tensors, bias = inputs
        if self.source is Source.TOKENS:
            return (w4a8.w4a8_linear(x, tensors, bias, self.scheme),)
        fused = fused_inputs.fused_inputs(x, self.scheme, self.rows)
        assert fused is not None, "no row takes inputs that are rounded"
        made = fused.gated(x, other) if self.source is Source.GATED else None
        made = fused.norm(x, other, _EPS) if made is None else made
        return (fused_inputs.linear(fused, made, x, tensors, bias, self.scheme),)

    def _reference(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> Tensor:
        weight = W4A8Weight.of(tensors, w4a8.parse(self.scheme), x.shape[-1])
        return w4a8.reference(x, weight, bias)

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """The numbers of the reference, bit by bit. Of floats that a kernel makes itself, whose
        roots and exponentials are others, the error is at most twice the reference's."""
        x, other, tensors, bias = inputs
        (y,) = found
        if self.source is Source.TOKENS:
            exact = self._reference(x, tensors, bias)
            wrong = int((y != exact).sum())
            assert not wrong, f"{wrong} of {y.numel()} numbers are not those of the reference"
            return
        if self.source is Source.GATED:
            floats, wide = fused_inputs.gated(x, other), x.double().sigmoid() * x.double()
            wide = wide * other.double()
        else:
            floats, wide = fused_inputs.rms_norm(x, other, _EPS), x.double()
            wide = wide * (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt() * other.double()
        weight = qoq.decode(tensors, w4a8.parse(self.scheme), self.columns).double()
        exact = wide @ weight.T + (0 if bias is None else bias.double())
        same = self._reference(floats, tensors, bias).double()
        assert y.isfinite().all(), "a number is not finite"
        eps = torch.finfo(y.dtype).eps * exact.norm(dim=-1)
        error, known = (y.double() - exact).norm(dim=-1), (same - exact).norm(dim=-1)
        wrong = int((error > 2 * known + eps).sum())
        assert not wrong, f"{wrong} of {self.tokens} tokens are wrong"


def is_many(tokens: int, arch: Arch) -> bool:
    """Whether the table of the backends has the kernel for many tokens."""
    enough = dispatch.bucket(tokens) >= choose_w4a8_wide.FEWEST_TOKENS
    return enough and choose_w4a8_wide.wide(arch) is None


def bucket(tokens: int, arch: Arch) -> tuple[bool, int]:
    """Kernel and bucket of so many tokens."""
    many = is_many(tokens, arch)
    chooser: Any = choose_w4a8_wide if many else choose_w4a8
    return many, chooser.token_bucket(tokens)


def cases(arch: Arch) -> list[W4A8Case]:
    """Problems that meet every value of features, and every pair that occurs."""
    return list(_cases(arch))


@functools.cache
def _cases(arch: Arch) -> tuple[W4A8Case, ...]:
    return tuple(covering(domain(arch), lambda case: case.features(arch)))


@functools.cache
def domain(arch: Arch) -> tuple[W4A8Case, ...]:
    """Every bucket of tokens of every scheme, by its smallest and its largest number, for layers of
    several sizes; dtypes, bias and sources are dealt out to them."""
    return tuple(_domain(arch))


def _domain(arch: Arch) -> Iterator[W4A8Case]:
    found: dict[Hashable, tuple[int, int]] = {}
    for tokens in range(1, LONGEST + 1):
        first, _ = found.get(bucket(tokens, arch), (tokens, 0))
        found[bucket(tokens, arch)] = first, tokens
    number, dtypes = 0, ("float16", "bfloat16")
    layers = [
        *itertools.product(SHAPES, SCHEMES),
        *zip(MODEL_SHAPES, itertools.cycle(SCHEMES), strict=False),
        *((shape, SCHEMES[0]) for shape in MODEL_SHAPES),
    ]
    for (rows, columns), name in layers:
        if columns % (w4a8.parse(name).group or 1):
            continue
        for ends in found.values():
            for source in (
                Source if ends[0] <= 2 * choose_w4a8_wide.FEWEST_TOKENS else (Source.TOKENS,)
            ):
                number += 1
                dtype = dtypes[number % 2]
                bias = (None, dtype, "float32", dtypes[number // 3 % 2])[number // 5 % 4]
                yield W4A8Case(name, ends[number // 2 % 2], rows, columns, dtype, bias, source)
