"""Problems of kernels around products and attention: encode.cu, round_rows.cu, dequantize.cu of
whole rows, rotate.cu, dequantize_kv.cu and softmax_merge.cu.

Nothing in their plans depends on how much there is to do."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.backends.cuda.kv import prefill as cuda_prefill
from hf_vq.backends.cuda.linear.dequantize import on_device
from hf_vq.backends.torch.partial_softmax import Maths
from hf_vq.codegen.families import dequantize as choose
from hf_vq.codegen.families.dequantize import rotate_plan
from hf_vq.codegen.families.encode import encodable, encode_plan, round_plan, roundable
from hf_vq.codegen.families.kv_prefill import decodable_kv, decode_kv_plan, merge_plan
from hf_vq.codegen.jit.device import Arch
from hf_vq.codegen.plan import Diagonal, Dtype, Plan, RotatePlan
from hf_vq.formats.catalog import KV_SCHEMES, WEIGHT_SCHEMES
from hf_vq.formats.packing import packed_size
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.stored_weight import StoredWeight, flat, rotation_of
from hf_vq.ops.codes import encode_weight, rotate, round_weight
from hf_vq.ops.library import parse
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.reference.encode_weight import FACTORS, Assigner
from tests.fixtures.random_weights import left_by_errors, random_tensors

from .append import SCHEMES
from .caches import scales_of
from .case import DTYPES, kv_codebook
from .cover import Features, covering
from .linear import of_plan

_ROTATIONS = {
    Diagonal.NONE: "hadamard",
    Diagonal.SIGNS: "random_hadamard",
    Diagonal.HALVES: "scaled_hadamard",
}
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PARTS = ((0, 2), (1, 1), (3, 2), (13, 3))  # of codes, and of floats
ENCODED = (  # besides the catalogue: groups of all sizes, and wide vectors
    "vq1x3r1-tensor-g16-none", "vq1x9r1-tensor-g64-none", "vq2x1r1-tensor-g32-none",
    "vq4x8r1-universal-g32-random_hadamard32", "vq8x12r1-tensor-g128-none",
    "vq16x5r1-tensor-g16-none", "vq8x16r2-e8p-g16-none", "vq8x16r1-e8p-g0-none",
    "vq4x5r2-tensor-g64-none", "vq1x2r2-tensor-g16-none",
)  # fmt: skip


@dataclass(frozen=True)
class RotateCase:
    """x H, or its inverse.

    Args:
        block: numbers that are rotated together.
        diagonal: what they are multiplied by.
        inverse: whether it is the inverse.
        dtype: of x.
    """

    block: int
    diagonal: Diagonal
    inverse: bool
    dtype: str

    @property
    def scheme(self) -> VQScheme:
        """One with this rotation."""
        kind = _ROTATIONS[self.diagonal]
        return VQScheme(1, 4, rotation=kind, rotation_block=self.block, scale_group=0)

    @property
    def columns(self) -> int:
        """Of a row."""
        return max(8, 3 * self.block)

    @property
    def name(self) -> str:
        """What it is."""
        behind = self.diagonal.value
        return f"rotate {self.block} {self.dtype} behind {behind} inverse {self.inverse}"

    def plans(self, arch: Arch) -> Sequence[RotatePlan]:
        """See `Case`."""
        dtype = Dtype(self.dtype)
        return (rotate_plan(dtype, dtype, self.block, self.diagonal, self.inverse),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return of_plan(self.plans(arch)[0]) | {"type": self.dtype}

    def inputs(self, device: torch.device) -> Any:
        """x, and its diagonal or signs."""
        x = torch.randn(37, self.columns, device=device).to(DTYPES[self.dtype])
        found = rotation_of(random_tensors(self.scheme, 1, self.columns))
        return x, None if found is None else found.to(device)

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        x, rotation = inputs
        return (rotate(x, rotation, self.scheme, self.inverse),)

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """Sums are float32, and the result is rounded once."""
        x, rotation = inputs
        exact = reference.rotate(x.double(), rotation, self.scheme, self.inverse)
        error = float((found[0].double() - exact).norm() / exact.norm())
        assert error <= torch.finfo(x.dtype).eps + 2.0**-18, f"the error is {error:.2e}"


@dataclass(frozen=True)
class EncodeCase:
    """Rows to codes and scales.

    Args:
        spec: of the scheme.
        rows: how many.
        columns: of each.
        fitted: whether scales are searched and fitted to codes.
    """

    spec: str
    rows: int
    columns: int
    fitted: bool

    @property
    def name(self) -> str:
        """What it is."""
        return f"encode {self.spec} {self.rows} x {self.columns}{', fitted' * self.fitted}"

    @property
    def _options(self) -> tuple[tuple[float, ...], bool]:
        return (FACTORS, True) if self.fitted else ((1.0,), False)

    def plans(self, arch: Arch) -> Sequence[Plan]:
        """See `Case`."""
        factors, refit = self._options
        return (encode_plan(parse(self.spec), self.columns, len(factors), refit),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return {"scheme": self.spec, **of_plan(self.plans(arch)[0])}

    def inputs(self, device: torch.device) -> Any:
        """Rows and a codebook."""
        scheme = parse(self.spec)
        tensors = random_tensors(scheme, self.rows, self.columns)
        values = torch.randn(self.rows, self.columns, device=device)
        return values, tensors["codebook"].to(device)

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        values, book = inputs
        codes, scale = encode_weight(values, book, parse(self.spec), *self._options)
        return codes.clone(), scale

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """No row is farther from what it stands for than by the reference, but for float32 and for
        the last bit of scales. Where scales are searched, all rows together: a row whose candidates
        are as good as each other goes on from another one."""
        (values, book), scheme = inputs, parse(self.spec)
        row = next(row for row in dispatch.entries("encode_weight") if row.name == "reference")
        exact = row.run(values, book, scheme, *self._options)
        errors = []
        for codes, scale in (found, exact):
            stored = reference.decode_rotated(codes, book, scale, scheme, self.columns)
            errors.append((stored - values).double().norm(dim=1))
        if self.fitted:
            errors = [error.norm()[None] for error in errors]
        wrong = int((~(errors[0] <= errors[1] * (1 + 2.0**-8))).sum())
        assert not wrong, f"{wrong} of {self.rows} rows are farther than by the reference"


@dataclass(frozen=True)
class RoundCase:
    """Rows to codes, errors passed on inside of blocks.

    Args:
        spec: of the scheme.
        rows: how many.
        size: columns of a block; there are three.
    """

    spec: str
    rows: int
    size: int

    @property
    def name(self) -> str:
        """What it is."""
        return f"round {self.spec} {self.rows} x {3 * self.size} in blocks of {self.size}"

    def plans(self, arch: Arch) -> Sequence[Plan]:
        """See `Case`."""
        return (round_plan(parse(self.spec), self.size),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return {"scheme": self.spec, "rows": self.rows, **of_plan(self.plans(arch)[0])}

    def inputs(self, device: torch.device) -> Any:
        """Rows, scales, a codebook and feedback."""
        scheme = parse(self.spec)
        book = random_tensors(scheme, 1, self.size)["codebook"].to(device)
        values = torch.randn(self.rows, 3 * self.size, device=device)
        scale = (0.5 + torch.rand(self.rows, 3, device=device)).half()
        vector = torch.arange(self.size, device=device) // scheme.vector_size
        feedback = 0.1 * torch.randn(3, self.size, self.size, device=device)
        return values, scale, book, feedback * (vector[:, None] > vector)

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        values, scale, book, feedback = inputs
        return (round_weight(values, scale, book, parse(self.spec), feedback),)

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """Each code is as near to what the errors before it leave, in float64, as that of the
        reference for the same numbers, but for rounding.

        A kernel compares <v, e> - |e|^2 / 2 of entries e, half of what squared distances differ by,
        in sums of float32; the lattice's lose three bits more. What errors leave is such a sum."""
        (values, scale, book, feedback), scheme = inputs, parse(self.spec)
        assigner, size = Assigner(book, scheme), scheme.vector_size
        left, unit = left_by_errors(values, scale, assigner, feedback, found[0])
        vectors = (left / unit).reshape(-1, size)
        eps = 2.0**-20 if scheme.lattice else (size + 3) * 2.0**-24
        apart, rounding = [], torch.zeros(len(vectors), dtype=torch.float64, device=values.device)
        for codes in (found[0].flatten(0, 1), assigner.codes(vectors.float())):
            entries = assigner.entries(codes.long()).double()
            apart.append((vectors - entries).norm(dim=1))
            length = entries.norm(dim=1)
            rounding += 2 * eps * (vectors.norm(dim=1) * length + length.square() / 2)
        # Beams of several stages may end at other entries.
        nearest = apart[1] * (1 + 2.0**-8 if scheme.streams > 1 else 1)
        allowed = (nearest.square() + rounding).sqrt() + self.size * 2.0**-24 * vectors.abs().max()
        wrong = int((~(apart[0] <= allowed)).sum())
        assert not wrong, f"{wrong} of {len(vectors)} codes are farther than by the reference"


@dataclass(frozen=True)
class DecodeCase:
    """Rows of codes to float32, rotated back.

    Args:
        scheme: name of the weight scheme.
        rows: how many.
        columns: of each.
    """

    scheme: str
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """What it is."""
        return f"decode {self.scheme} {self.rows} x {self.columns}"

    def plans(self, arch: Arch) -> Sequence[Plan]:
        """See `Case`."""
        rows = min(dispatch.bucket(self.rows), 4096)
        scheme = WEIGHT_SCHEMES[self.scheme]
        asked = choose.DecodeProblem(scheme, rows, self.columns, Dtype.FLOAT32, arch)
        return (choose.choose(asked),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return {"scheme": self.scheme, **of_plan(self.plans(arch)[0])}

    def inputs(self, device: torch.device) -> Any:
        """Stored tensors."""
        tensors = random_tensors(WEIGHT_SCHEMES[self.scheme], self.rows, self.columns)
        return {key: tensor.to(device) for key, tensor in tensors.items()}

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        spec = WEIGHT_SCHEMES[self.scheme].spec()
        return (torch.ops.hf_vq.decode(*flat(inputs), spec, self.columns),)

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """Those of the reference; a rotation sums in another order."""
        scheme = WEIGHT_SCHEMES[self.scheme]
        exact = reference.decode(StoredWeight.of(inputs, scheme, self.columns))
        error = float((found[0] - exact).double().norm() / exact.double().norm())
        bound = 0.0 if scheme.rotation == "none" else 2.0**-18
        assert error <= bound, f"the error is {error:.2e}"


@dataclass(frozen=True)
class DecodeKVCase:
    """Keys or values of a tape to dense rows, rotated still, as prompts are attended to.

    Args:
        spec: of their scheme.
        dim: numbers of a row.
        tokens: how many.
        dtype: of the rows.
    """

    spec: str
    dim: int
    tokens: int
    dtype: str

    @property
    def name(self) -> str:
        """What it is."""
        return f"decode_kv {self.spec} {self.tokens} x {self.dim} {self.dtype}"

    def plans(self, arch: Arch) -> Sequence[Plan]:
        """See `Case`."""
        return (decode_kv_plan(parse(self.spec), self.dim, Dtype(self.dtype)),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return {
            "scheme": self.spec, "type": self.dtype, "each number of tokens": self.tokens,
            **of_plan(self.plans(arch)[0]),
        }  # fmt: skip

    def inputs(self, device: torch.device) -> Any:
        """Codes, scales, codebook and mean."""
        scheme, shape = parse(self.spec), (2, 3, self.tokens + 9)
        width = packed_size(self.dim // scheme.vector_size, scheme.entry_bits)
        codes = torch.randint(256, (*shape, width), dtype=torch.uint8, device=device)
        scale, some = scales_of(scheme, shape, device), slice(7, 7 + self.tokens)
        mean = torch.randn(2, 3, 1, self.dim, device=device)
        book = kv_codebook(scheme, 3, self.dim, device)
        return codes[:, :, some], scale[:, :, some], book, mean

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        codes, scale, book, mean = inputs
        dtype = DTYPES[self.dtype]
        with on_device(codes.get_device()):
            rows = cuda_prefill.decode(codes, scale, book, mean, parse(self.spec), self.dim, dtype)
        return (rows,)

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """The numbers of the reference, rounded once."""
        codes, scale, book, mean = inputs
        exact = reference.decode_rotated(codes, book, scale, parse(self.spec), self.dim) + mean
        wrong = int((found[0] != exact.to(found[0].dtype)).sum())
        assert not wrong, f"{wrong} numbers are not those of the reference"


@dataclass(frozen=True)
class MergeCase:
    """Attention to several parts of the tokens, merged.

    Args:
        scheme: name of the KV scheme whose values are parts.
        dim: numbers of a row.
        parts: of codes, and of floats.
        dtype: of them.
    """

    scheme: str
    dim: int
    parts: tuple[int, int]
    dtype: str

    @property
    def name(self) -> str:
        """What it is."""
        return f"merge {self.scheme} {self.parts} x {self.dim} {self.dtype}"

    def plans(self, arch: Arch) -> Sequence[Plan]:
        """See `Case`."""
        return (merge_plan(KV_SCHEMES[self.scheme].value, self.dim, Dtype(self.dtype)),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return {"parts": self.parts, "type": self.dtype, **of_plan(self.plans(arch)[0])}

    def inputs(self, device: torch.device) -> Any:
        """Parts and sink logits."""
        parts = [
            (
                torch.randn(2, 3, 37, self.dim, device=device).to(DTYPES[self.dtype]),
                torch.randn(2, 3, 37, device=device),
            )
            for _ in range(sum(self.parts))
        ]
        return parts, torch.randn(3, device=device)

    def _merged(self, inputs: Any, merge: Any, dtype: torch.dtype) -> Tensor:
        parts, aux = inputs
        coded, value = self.parts[0], KV_SCHEMES[self.scheme].value
        found: Tensor = merge(parts[:coded], parts[coded:], aux, value, dtype)
        return found

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        return (self._merged(inputs, cuda_prefill.merge, DTYPES[self.dtype]),)

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """Of float32, rounded once."""
        exact = self._merged(inputs, Maths().merge, torch.float32)
        error = float((found[0].float() - exact).norm() / exact.norm())
        assert error <= torch.finfo(found[0].dtype).eps + 2.0**-18, f"the error is {error:.2e}"


RowsCase = RotateCase | EncodeCase | RoundCase | DecodeCase | DecodeKVCase | MergeCase
_KINDS = (RotateCase, EncodeCase, RoundCase, DecodeCase, DecodeKVCase, MergeCase)


def cases(arch: Arch) -> list[RowsCase]:
    """Problems that meet every value of features, and every pair that occurs."""
    return list(_cases(arch))


@functools.cache
def _cases(arch: Arch) -> tuple[RowsCase, ...]:
    found = [[one for one in domain(arch) if isinstance(one, kind)] for kind in _KINDS]
    return tuple(one for kind in found for one in covering(kind, lambda one: one.features(arch)))


@functools.cache
def domain(arch: Arch) -> tuple[RowsCase, ...]:
    """Every size of a rotation, scheme, and size of a head."""
    return (*_rotations(), *_encoded(arch), *_rounded(arch), *_decoded(), *_cached())


def _rotations() -> Iterator[RotateCase]:
    blocks = [1 << i for i in range(1, RotatePlan.LARGEST_BLOCK.bit_length())]
    for block, diagonal, inverse, dtype in itertools.product(
        blocks, Diagonal, (True, False), DTYPES
    ):
        yield RotateCase(block, diagonal, inverse, dtype)


def _encoded(arch: Arch) -> Iterator[EncodeCase]:
    for scheme in (*WEIGHT_SCHEMES.values(), *map(parse, ENCODED)):
        for (rows, columns), fitted in itertools.product(((37, 1152), (5, 768)), (False, True)):
            if scheme.stages != "nested" and encodable(scheme, columns, arch) is None:
                yield EncodeCase(scheme.spec(), rows, columns, fitted)


def _rounded(arch: Arch) -> Iterator[RoundCase]:
    for scheme in (*WEIGHT_SCHEMES.values(), *map(parse, ENCODED)):
        for rows, size in itertools.product((5, 37, 4100), (32, 64, 128)):
            if scheme.stages != "nested" and roundable(scheme, size, arch) is None:
                yield RoundCase(scheme.spec(), rows, size)


def _decoded() -> Iterator[DecodeCase]:
    rows = [1, *((1 << i) + 1 for i in range(12))]  # of every bucket, the fewest
    for (name, scheme), columns, count in itertools.product(
        WEIGHT_SCHEMES.items(), (576, 1152, 2048), rows
    ):
        if choose.decodable(scheme) is None and choose.rotatable(scheme, columns) is None:
            yield DecodeCase(name, count, columns)


def _cached() -> Iterator[DecodeKVCase | MergeCase]:
    specs = {part.spec(): part for one in SCHEMES.values() for part in (one.key, one.value)}
    for (spec, scheme), dim, tokens, dtype in itertools.product(
        specs.items(), HEAD_DIMS, (1, 129, 1100), DTYPES
    ):
        if decodable_kv(scheme, dim) is None:
            yield DecodeKVCase(spec, dim, tokens, dtype)
    for name, dim, parts, dtype in itertools.product(
        ("u4", "cq-4"), HEAD_DIMS, PARTS, ("float16", "bfloat16")
    ):
        yield MergeCase(name, dim, parts, dtype)
