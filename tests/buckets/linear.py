"""Problems of linear layers with codebooks: linear.cu, linear_tile_codebook.cu, linear_wgmma.cu,
and those that decode the weight first (dequantize_rotated.cu, dequantize.cu)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.codegen import tuned
from hf_vq.codegen.families import dequantize as choose
from hf_vq.codegen.families import dequantize_rotated as choose_dense
from hf_vq.codegen.families import linear as choose_linear
from hf_vq.codegen.families import linear_tile_codebook as choose_tiles
from hf_vq.codegen.families import linear_wgmma as choose_wide
from hf_vq.codegen.families.dequantize import DecodeProblem, diagonal_of, rotate_plan
from hf_vq.codegen.families.linear import LinearProblem
from hf_vq.codegen.jit.device import Arch, named_arch
from hf_vq.codegen.plan import (
    DensePlan,
    Dtype,
    LinearPlan,
    Plan,
    RotateInt8Plan,
    RotatePlan,
    WidePlan,
)
from hf_vq.formats.catalog import SCALED, WEIGHT_SCHEMES, weight_scheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.stored_weight import StoredWeight, rotation_of
from hf_vq.ops.linear import linear
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import int8_products, random_tensors

from .case import DTYPES, kernel_of
from .cover import Features, covering

# Rows and columns: some that fill no tile, some of models, the smallest first.
SHAPES = ((33, 1152), (300, 2048), (1024, 4096), (4096, 4096), (4096, 14336), (14336, 4096))
# More of models, each for one in `_OTHERS` schemes of large families: they have values of plans
# that those have not.
MODEL_SHAPES = (
    (128, 896), (192, 576), (576, 576), (1536, 576), (3072, 576), (576, 1536), (640, 2048),
    (256, 1536),
    (896, 4864), (2048, 8192), (2560, 10240), (11008, 4096), (4096, 11008), (18944, 3584),
    (3584, 18944), (8192, 8192), (25600, 5120), (27648, 5120), (5120, 27648), (8192, 28672),
    (28672, 8192),
)  # fmt: skip
_OTHERS = 3
# Of the first scheme of each family, scaled: only how x, or dense rows, are rotated differs.
SCALED_SHAPES = ((300, 2048), (4096, 4096))
LONGEST = 2048  # tokens: beyond, no bucket is looked for
_MOST_ROWS = 4096  # `dequantize._ROWS_OF_A_PLAN`
_DECIDED = {"vector_size", "entry_bits", "num_codebooks", "scope", "fused", "integers",
            "second_bits", "dtype", "out", "tile_rows"}  # fmt: skip
_KEYS = ("codes", "codebook", "scale")


@dataclass(frozen=True)
class LinearCase:
    """y = W x + b, or several of them with one x, which a compiled graph makes one launch.

    Args:
        scheme: name of the weight scheme.
        tokens: rows of x.
        rows: out_features.
        columns: in_features.
        dtype: of x.
        bias: whether there is one.
        others: out_features of further matrices of the launch, of which every second one has a
            bias.
    """

    scheme: str
    tokens: int
    rows: int
    columns: int
    dtype: str
    bias: bool
    others: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What it is."""
        added = " + bias" * self.bias
        rows = " and ".join(map(str, (self.rows, *self.others)))
        return f"linear {self.scheme} {self.tokens} x {rows} x {self.columns} {self.dtype}{added}"

    def plan(self, arch: Arch) -> Plan:
        """Of the kernel that runs it."""
        return _plan(self, arch)

    def plans(self, arch: Arch) -> Sequence[Plan]:
        """See `Case`."""
        plan = self.plan(arch)
        before = self._before(plan)
        return (plan,) if before is None else (plan, before)

    def _before(self, plan: Plan) -> RotatePlan | RotateInt8Plan | None:
        """Of the kernel that rotates x, or puts it in order, if there is one."""
        scheme, dtype = weight_scheme(self.scheme), Dtype(self.dtype)
        rotated, diagonal = scheme.rotation != "none", diagonal_of(scheme)
        block = scheme.block(self.columns) if rotated else 1
        if isinstance(plan, WidePlan) and plan.activations_bits == 8:
            return choose_wide.rotate_int8_plan(_wide_problem(self, plan))
        if isinstance(plan, WidePlan):
            return rotate_plan(dtype, dtype, block, diagonal, False, plan.unit, True)
        if isinstance(plan, LinearPlan) and not plan.single:
            return rotate_plan(dtype, dtype, block, diagonal, False, plan.unit)
        itself = isinstance(plan, DensePlan) or (isinstance(plan, LinearPlan) and plan.rotate)
        if not rotated or itself:
            return None
        return rotate_plan(dtype, dtype, block, diagonal, False)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        scheme, dtype = weight_scheme(self.scheme), Dtype(self.dtype)
        way = route(scheme, self.tokens, self.columns, dtype, arch)
        before = self.plans(arch)[1:]
        return {
            "each kernel before": kernel_of(before[0]) if before else None,
            "each bucket of a scheme": (self.scheme, way),
            "scheme": self.scheme,
            "dtype": self.dtype,
            "bias": self.bias,
            **of_plan(self.plan(arch)),
        }

    def inputs(self, device: torch.device) -> Any:
        """x, and the stored tensors and bias of each matrix."""
        dtype, each = DTYPES[self.dtype], []
        for number, rows in enumerate((self.rows, *self.others)):
            stored = random_tensors(weight_scheme(self.scheme), rows, self.columns)
            tensors = {key: tensor.to(device) for key, tensor in stored.items()}
            added = self.bias == (number % 2 == 0) if self.others else self.bias
            bias = torch.randn(rows, device=device).to(dtype) if added else None
            each.append((tensors, bias))
        return torch.randn(self.tokens, self.columns, device=device).to(dtype), each

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        x, each = inputs
        scheme = weight_scheme(self.scheme)
        if not self.others:
            [(alone, bias)] = each
            return (linear(x, alone, bias, scheme),)
        stored = [[tensors[key] for tensors, _ in each] for key in _KEYS]
        stored.append([rotation_of(tensors) for tensors, _ in each])
        biases = [bias for _, bias in each]
        return tuple(torch.ops.hf_vq.linears.default(x, *stored, biases, scheme.spec()))

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """The error is at most twice that of the same product of rounded numbers in PyTorch; in
        float32, where only sums round, that of a sum of so many terms in any order."""
        x, each = inputs
        int8 = weight_scheme(self.scheme).activations_bits == 8
        for (tensors, bias), y in zip(each, found, strict=True):
            (self._check_int8 if int8 else self._check)(x, tensors, bias, y)

    def _check_int8(
        self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, y: Tensor
    ) -> None:
        check_int8(y, x, tensors, bias, weight_scheme(self.scheme))

    def _check(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, y: Tensor) -> None:
        scheme, dtype = weight_scheme(self.scheme), x.dtype
        rotation = rotation_of(tensors)
        rows = rotated_weight(tensors, scheme, self.columns)
        exact = reference.rotate(x.double(), rotation, scheme, False) @ rows.T
        exact += 0 if bias is None else bias.double()
        rounded = reference.rotate(x.float(), rotation, scheme, False).to(dtype)
        same = torch.nn.functional.linear(rounded, rows.to(dtype), bias)
        assert y.shape == exact.shape and y.dtype == dtype
        bad = int((~y.isfinite()).sum())
        assert not bad, f"{bad} of {y.numel()} numbers are not finite"
        eps = torch.finfo(dtype).eps * exact.norm()
        if dtype == torch.float32:  # what PyTorch's sum has less by its order
            eps *= self.columns**0.5 / 2
        error, other = (y.double() - exact), (same.double() - exact)
        assert error.norm() <= 2 * other.norm() + eps, f"{error.norm()} > 2 {other.norm()} + {eps}"
        largest = 4 * other.abs().max() + eps
        assert error.abs().max() <= largest, f"a number is off by {error.abs().max()}"


def check_int8(
    y: Tensor, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, scheme: VQScheme
) -> None:
    """y is rounded once, and sums are exact. But a number that is nearly half an integer may become
    the other one, which is off by 1 where rounding is off by 12^-1/2: where a share p of numbers
    does, the error is (12 p)^1/2 times that of rounding.

    x is rotated in float32: of numbers up to 127 with an error of some 2^-21 p is 10^-4. Stages
    are added in float16; where `int8_weight` does it otherwise, p is .003.
    """
    exact, rounding = int8_products(x, tensors, bias, scheme)
    assert y.shape == exact.shape and y.dtype == x.dtype
    bad = int((~y.isfinite()).sum())
    assert not bad, f"{bad} of {y.numel()} numbers are not finite"
    alike = scheme.streams == 1 or (scheme.streams == 2 and not scheme.lattice)
    share = (12 * (1e-4 if alike else 3e-3)) ** 0.5
    error, once = y.double() - exact, exact.to(y.dtype).double() - exact
    allowed = 1.1 * once.norm() + share * rounding.norm()
    assert error.norm() <= allowed, f"{error.norm()} > {allowed}"
    # A product in which several do at once is off by a part of the largest error of rounding.
    largest = 2 * once.abs().max() + (0.5 if alike else 1) * rounding.abs().max()
    assert error.abs().max() <= largest, f"a number is off by {error.abs().max()}"


def _wide_problem(case: LinearCase, plan: WidePlan) -> LinearProblem:
    """What the kernel before int8 products is made for: no GPU matters."""
    scheme, dtype = weight_scheme(case.scheme), Dtype(case.dtype)
    arch = named_arch("sm_90a")
    return LinearProblem(
        scheme, case.tokens, case.rows, case.columns, dtype, arch, plan.activations_bits
    )


def of_plan(plan: Plan) -> dict[str, Hashable]:
    """What is a matter of choice in a plan, by name; and all of it."""
    found: dict[str, Hashable] = {"kernel": plan.kernel, "each kernel": kernel_of(plan)}
    for field in fields(plan):
        if field.name not in _DECIDED:
            found[field.name] = getattr(plan, field.name)
    return found


@functools.cache  # asked for again and again: by features, by plans, by tests
def _plan(case: LinearCase, arch: Arch) -> Plan:
    scheme, dtype = weight_scheme(case.scheme), Dtype(case.dtype)
    way, bucket = route(scheme, case.tokens, case.columns, dtype, arch)
    if way == "dense":
        restored = choose_dense.restorable(scheme, case.columns, dtype) is None
        rows = min(dispatch.bucket(case.rows), _MOST_ROWS)
        asked = DecodeProblem(scheme, rows, case.columns, dtype, arch)
        return choose_dense.dense_plan(asked) if restored else choose.choose(asked)
    each = case.rows, *case.others
    bits = 8 if way == "int8" else 16
    problem = LinearProblem(scheme, bucket, sum(each), case.columns, dtype, arch, bits)
    if tuned.find(problem) is None:
        problem = replace(problem, rows=max(each))
    plan: Plan | None = _CHOOSERS[way].choose(problem)
    assert plan is not None, f"no plan for {case.name}"
    return replace(plan, matrices=len(each)) if isinstance(plan, LinearPlan) else plan


_CHOOSERS: dict[str, Any] = {
    "few": choose_linear, "wide": choose_wide, "int8": choose_wide, "tiles": choose_tiles,
}  # fmt: skip


def route(scheme: VQScheme, tokens: int, columns: int, dtype: Dtype, arch: Arch) -> tuple[str, int]:
    """Which kernels the table of the backends has for so many tokens, and their bucket of them."""
    alike = dispatch.bucket(tokens)
    if dtype is Dtype.FLOAT32:
        return "dense", 0
    tiled = choose_tiles.tiled(scheme, columns) is None
    if tiled and alike <= choose_tiles.MOST_LAUNCHES * choose_tiles.MOST_TOKENS:
        return "tiles", choose_linear.token_bucket(min(tokens, choose_tiles.MOST_TOKENS))
    int8 = scheme.activations_bits == 8 and alike >= choose_wide.FEWEST_INT8_TOKENS
    if int8 and choose_wide.wide(scheme, columns, arch, 8) is None:
        return "int8", choose_wide.token_bucket(tokens)
    wide = choose_wide.wide(scheme, columns, arch) is None
    if wide and choose_wide.fewest_tokens(scheme) <= alike <= choose_wide.MOST_TOKENS:
        return "wide", choose_wide.token_bucket(tokens)
    if alike <= choose_linear.MOST_TOKENS and choose_linear.fusable(scheme, columns) is None:
        return "few", choose_linear.token_bucket(tokens)
    return "dense", 0


def rotated_weight(tensors: dict[str, Tensor], scheme: VQScheme, columns: int) -> Tensor:
    """The weight, still rotated, in float64: entries and scales are exact in float32."""
    (codes, codebook, scale, _), second, _, _ = StoredWeight.of(tensors, scheme, columns)
    ones = torch.ones_like(scale)
    if second is not None:
        rows = reference.decode_nested(codes, second.codes, second.codebook, ones, scheme, columns)
    else:
        rows = reference.decode_rotated(codes, codebook, ones, scheme, columns)
    grouped = rows.double().unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.double()[..., None]).flatten(-2)


def families() -> dict[str, list[str]]:
    """Names of weight schemes whose codes are read alike, by the first of each family."""
    found: dict[Any, list[str]] = {}
    for name, scheme in WEIGHT_SCHEMES.items():
        alike = (scheme.vector_size, scheme.streams, scheme.codebook, scheme.stages,
                 scheme.lattice, scheme.largest_entry > 0)  # fmt: skip
        found.setdefault(alike, []).append(name)
    return {names[0]: names for names in found.values()}


def cases(arch: Arch, family: str) -> list[LinearCase]:
    """Problems of a family that meet every pair of values of features that occurs."""
    return list(_cases(arch, family))


@functools.cache
def _cases(arch: Arch, family: str) -> tuple[LinearCase, ...]:
    return tuple(covering(domain(arch, family), lambda case: case.features(arch)))


@functools.cache
def domain(arch: Arch, family: str) -> tuple[LinearCase, ...]:
    """Every bucket of tokens of every scheme of a family, by its smallest and its largest number,
    for layers of several sizes, alone and with others in one launch; dtypes and bias are dealt out
    to them."""
    return (*_alone(arch, family), *_together(arch, family))


def _alone(arch: Arch, family: str) -> Iterator[LinearCase]:
    number = 0
    names, more = families()[family], itertools.count()
    layers = [
        *itertools.product(SHAPES, names),
        *((shape, name) for shape in MODEL_SHAPES for name in names
          if len(names) <= 2 or next(more) % _OTHERS == 0),
    ]  # fmt: skip
    if weight_scheme(names[0]).scaled().is_scaled:
        layers += [(shape, names[0] + SCALED) for shape in SCALED_SHAPES]
    for (rows, columns), name in layers:
        scheme = weight_scheme(name)
        if runs(scheme, columns) is not None:
            continue
        for smallest, largest in _buckets(scheme, columns, arch).values():
            number += 1
            tokens = (smallest, largest)[number // 2 % 2]
            dtype = ("float16", "bfloat16")[number % 2]
            yield LinearCase(name, tokens, rows, columns, dtype, bool(number // 3 % 2))
        for smallest, largest in _int8_buckets(scheme, columns, arch):
            number += 1
            tokens = (smallest, largest)[number // 2 % 2]
            dtype = ("float16", "bfloat16")[number % 2]
            int8, bias = scheme.with_activations(8).spec(), bool(number // 3 % 2)
            yield LinearCase(int8, tokens, rows, columns, dtype, bias)
        if not scheme.two_passes:  # those of float32 run as two products
            yield LinearCase(name, 3, rows, columns, "float32", bool(number % 2))


def joinable(case: LinearCase, arch: Arch) -> bool:
    """Whether others can be in the same launch."""
    scheme, dtype = weight_scheme(case.scheme), Dtype(case.dtype)
    way, _ = route(scheme, case.tokens, case.columns, dtype, arch)
    return way == "few" and not scheme.two_passes


def _together(arch: Arch, family: str) -> Iterator[LinearCase]:
    """Queries, keys and values, the two halves of a gated MLP, and as many as a launch takes."""
    for number, case in enumerate(_alone(arch, family)):
        if not joinable(case, arch):
            continue
        quarter = -(-case.rows // 4)
        for others in ((case.rows,), (quarter, quarter), (7, case.rows, quarter)):
            yield replace(case, others=others, bias=bool(number % 2))


def runs(scheme: VQScheme, columns: int) -> str | None:
    """None if kernels run layers of so many columns, else why not."""
    if scheme.stages == "nested":
        return choose_dense.restorable(scheme, columns, Dtype.FLOAT16)
    return choose.decodable(scheme) or choose.rotatable(scheme, columns)


def _int8_buckets(scheme: VQScheme, columns: int, arch: Arch) -> Iterator[tuple[int, int]]:
    """The smallest and the largest number of tokens of every bucket of int8 inputs."""
    if choose_wide.wide(scheme, columns, arch, 8) is None:
        tokens = range(choose_wide.FEWEST_INT8_TOKENS, LONGEST + 1)
        for _, alike in itertools.groupby(tokens, choose_wide.token_bucket):
            first, *others = alike
            yield first, others[-1] if others else first


@functools.cache
def _buckets(scheme: VQScheme, columns: int, arch: Arch) -> dict[Hashable, tuple[int, int]]:
    """The smallest and the largest number of tokens of every bucket."""
    found: dict[Hashable, tuple[int, int]] = {}
    for tokens in range(1, LONGEST + 1):
        bucket = route(scheme, tokens, columns, Dtype.FLOAT16, arch)
        first, _ = found.get(bucket, (tokens, 0))
        found[bucket] = first, tokens
    return {
        bucket: (first, min(last, first + 1) if bucket[0] == "dense" else last)  # type: ignore[index]
        for bucket, (first, last) in found.items()
    }
