"""`linear`, its gradient and `decode` on a GPU: codes, decoded by a generated CUDA kernel.

A linear layer decodes some rows of the weight at a time, rotated back, and cuBLAS multiplies; where
no kernel rotates them back (`dequantize_rotated.restorable`), its input is rotated, or the gradient
of its input rotated back. That suits many tokens; for a few it moves more bytes than a dense layer
would.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ....codegen.families.dequantize import (
    LARGEST_PANEL,
    DecodeProblem,
    choose,
    diagonal_of,
    panels,
    rotate_plan,
)
from ....codegen.families.dequantize_rotated import blocks, dense_plan, restorable
from ....codegen.jit.device import device_arch
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel
from ....codegen.plan import DecodePlan, DensePlan, Diagonal, Dtype, RotatePlan
from ....dispatch import Implementation, bucket
from ....errors import VQBackendError, VQFormatError
from ....formats.packing import packed_size
from ....formats.scheme import VQScheme
from ....formats.stored_weight import Residual, StoredWeight
from .. import weight_supports

DECODED_BYTES = 128 << 20  # of dense rows at a time: smaller products would take longer

_ALIGNED = 16  # bytes of the widest load
_SCALE = 2  # bytes
_WORD = 4  # bytes; codes are read by whole words
_MOST_BLOCKS = (1 << 31) - 1
_ROWS_OF_A_PLAN = 4096  # more rows need no other plan
DTYPES = {torch.float32: Dtype.FLOAT32, torch.float16: Dtype.FLOAT16,
           torch.bfloat16: Dtype.BFLOAT16}  # fmt: skip


Read = tuple[Tensor, Tensor, Tensor]  # codes, codebook and scale


class DecodeArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/linear/dequantize.cu."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("first_row", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int32),
    ]


class DenseArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/linear/dequantize_rotated.cu."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("diagonal", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
    ]


class NestedDenseArguments(ctypes.Structure):
    """The same where codes of a nested pass are looked up too."""

    _fields_ = [("second", ctypes.c_void_p), *DenseArguments._fields_]


class RotateArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/linear/rotate.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("diagonal", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
        ("across", ctypes.c_uint32),
        ("token_tiles", ctypes.c_uint32),
    ]


@functools.lru_cache(maxsize=1024)
def _decoder(
    scheme: VQScheme, rows: int, in_features: int, dtype: torch.dtype, ordinal: int
) -> tuple[LoadedKernel, DecodePlan]:
    arch = device_arch(ordinal)
    plan = choose(DecodeProblem(scheme, rows, in_features, DTYPES[dtype], arch))
    return _kernel(plan, DecodeArguments, ordinal), plan


@functools.lru_cache(maxsize=1024)
def _restorer(
    scheme: VQScheme, in_features: int, dtype: torch.dtype, ordinal: int
) -> tuple[LoadedKernel, DensePlan]:
    plan = dense_plan(DecodeProblem(scheme, 0, in_features, DTYPES[dtype], device_arch(ordinal)))
    arguments = NestedDenseArguments if scheme.two_passes else DenseArguments
    return _kernel(plan, arguments, ordinal), plan


@functools.lru_cache(maxsize=1024)
def _rotator(
    source: torch.dtype,
    out: torch.dtype,
    block: int,
    diagonal: Diagonal,
    inverse: bool,
    ordinal: int,
) -> tuple[LoadedKernel, RotatePlan]:
    plan = rotate_plan(DTYPES[source], DTYPES[out], block, diagonal, inverse)
    return _kernel(plan, RotateArguments, ordinal), plan


@functools.cache  # problems share plans
def _kernel(
    plan: DecodePlan | DensePlan | RotatePlan, arguments: type[ctypes.Structure], ordinal: int
) -> LoadedKernel:
    return LoadedKernel(plan, arguments, ordinal, default_store())


_HERE = nullcontext()


def on_device(ordinal: int) -> AbstractContextManager[None]:
    """Where a launch on a GPU must be made: the launch's context is that of the current one."""
    if ordinal == torch._C._cuda_getDevice():
        return _HERE
    device: AbstractContextManager[None] = torch.cuda.device(ordinal)
    return device


def _ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as kernels read it: its numbers side by side, from an aligned address on. Itself,
    if it is so: every layer asks at every call, so what need not be done is not called."""
    if tensor.dtype != dtype or not tensor.is_contiguous():
        tensor = tensor.to(dtype).contiguous()
    return tensor if tensor.data_ptr() % _ALIGNED == 0 else tensor.clone()


def elsewhere(here: torch.device, name: str, device: torch.device) -> VQFormatError:
    """The error where a tensor of a weight is not on the device of the input."""
    return VQFormatError(
        f"the input is on {here}, but the {name} of the weight on {device}: "
        "move the layer, or let accelerate do it."
    )


def check_places(tensors: Sequence[Tensor | None], scheme: VQScheme, device: torch.device) -> None:
    """Check that codes, codebook, scales and rotation, if there is one, are on a device.

    Raises:
        VQFormatError: one is not. A kernel would read another device's address.
    """
    names = "codes", "codebook", "scale", "diagonal" if scheme.is_scaled else "signs"
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and tensor.device != device:
            raise elsewhere(device, name, tensor.device)


class DeviceWeight:
    """Codes, codebooks and scales of rows, checked and ready to be decoded on the current device.

    Args:
        codes: uint8 [rows, bytes].
        codebook: see `formats.tensor_specs`; of nested passes the one of both.
        scale: [rows, groups].
        scheme: of the codes.
        in_features: weights of a row.

    Raises:
        VQFormatError: sizes do not belong together. A kernel would read what is not there.
    """

    def __init__(
        self, codes: Tensor, codebook: Tensor, scale: Tensor, scheme: VQScheme, in_features: int
    ) -> None:
        self.codes = _ready(codes, torch.uint8)
        self.codebook = _ready(codebook, torch.int8 if scheme.largest_entry else torch.float16)
        self.scale = _ready(scale, torch.float16)
        self.scheme, self.rows, self.in_features = scheme, codes.shape[0], in_features
        # A copy does not follow what is written to its original.
        self.copied = not (
            self.codes is codes and self.codebook is codebook and self.scale is scale
        )
        sizes = (self.codes.numel(), self.codebook.numel(), self.scale.numel())
        expected = stored_sizes(scheme, self.rows, in_features)
        if sizes != expected:
            raise VQFormatError(
                f"{self.rows} rows of {in_features} weights as {scheme.spec()} have {expected} "
                f"codes, codebook entries and scales; got {sizes}."
            )
        if odd := self.codes.numel() % _WORD:
            self.codes = torch.nn.functional.pad(self.codes.view(-1), (0, _WORD - odd))
            self.copied = True

    def decode(self, first: int, out: Tensor) -> None:
        """Rows `first`, `first` + 1, .. to `out` [rows, in_features], dense and still rotated.

        Args:
            first: a multiple of `rows_at_a_time`.
        """
        rows, ordinal = len(out), out.device.index
        rows_of_plan = min(bucket(self.rows), _ROWS_OF_A_PLAN)
        kernel, plan = _decoder(self.scheme, rows_of_plan, self.in_features, out.dtype, ordinal)
        kernel(
            _blocks(panels(plan, rows, self.in_features)),
            torch._C._cuda_getCurrentRawStream(ordinal),
            self.codes.data_ptr(),
            self.codebook.data_ptr(),
            self.scale.data_ptr(),
            out.data_ptr(),
            first,
            rows,
            self.in_features,
        )

    def restore(
        self, first: int, rotation: Tensor | None, out: Tensor, second: Tensor | None = None
    ) -> None:
        """Rows `first`, `first` + 1, .. to `out` [rows, in_features], dense and rotated back.

        Of schemes that are `dequantize_rotated.restorable`.

        Args:
            second: `second_codes` of all rows, where there are two passes.
        """
        columns, ordinal = self.in_features, out.device.index
        diagonal = ready_diagonal(rotation, self.scheme, columns)
        kernel, plan = _restorer(self.scheme, columns, out.dtype, ordinal)
        two = () if second is None else (second.data_ptr() + first * second.shape[1],)
        kernel(
            blocks(plan, out.shape[0], columns, device_arch(ordinal)),
            torch._C._cuda_getCurrentRawStream(ordinal),
            *two,
            self.codes.data_ptr() + first * (self.codes.numel() // self.rows),
            self.codebook.data_ptr(),
            self.scale.data_ptr() + first * (self.scale.numel() // self.rows) * _SCALE,
            None if diagonal is None else diagonal.data_ptr(),
            out.data_ptr(),
            out.shape[0],
            columns,
        )

    def rows_at_a_time(self, dtype: torch.dtype) -> int:
        """Rows that are `DECODED_BYTES` when dense; whole panels, whatever the plan."""
        rows = DECODED_BYTES // (dtype.itemsize * self.in_features)
        whole = self.scheme.tile[0] if self.scheme.codebook == "tile" else LARGEST_PANEL
        return max(rows // whole, 1) * whole


@functools.lru_cache(maxsize=1024)
def stored_sizes(scheme: VQScheme, rows: int, in_features: int) -> tuple[int, int, int]:
    """Bytes of codes, numbers of codebooks, and scales; of nested stages the codes of the first
    pass, and the codebook of both."""
    x = scheme.vector_size
    stream = packed_size(in_features // x, scheme.entry_bits)
    books = scheme.streams
    if scheme.codebook == "tile":
        books = math.ceil(rows / scheme.tile[0]) * math.ceil(in_features / scheme.tile[1])
    entries = 257 if scheme.lattice else 1 << scheme.entry_bits + scheme.second_bits
    scales = in_features // scheme.group(in_features)
    return rows * scheme.streams * stream, books * entries * x, rows * scales


def second_codes(
    second: Residual | None, device: torch.device, rows: int, in_features: int, scheme: VQScheme
) -> Tensor:
    """Codes of a nested pass as kernels read them.

    Raises:
        VQFormatError: they are missing, of another size, or on another device.
    """
    shape = (rows, packed_size(in_features, scheme.second_bits))
    codes = None if second is None else second.codes
    if codes is None or codes.shape != shape or codes.device != device:
        got = "none" if codes is None else f"{list(codes.shape)} on {codes.device}"
        raise VQFormatError(
            f"{scheme.spec()} needs codes {list(shape)} of a second pass on {device}; got {got}."
        )
    return _ready(codes, torch.uint8)


def ready_diagonal(
    rotation: Tensor | None, scheme: VQScheme, in_features: int, bytewise: bool = False
) -> Tensor | None:
    """The signs or the diagonal in front of a rotation as kernels read it; None without.

    Args:
        bytewise: signs are read byte by byte, wherever they lie, as those of experts may.

    Raises:
        VQFormatError: it is not there, or of another size.
    """
    if diagonal_of(scheme) is Diagonal.NONE:
        return None
    count, dtype = diagonal_size(scheme, in_features)
    if rotation is None or rotation.numel() != count:
        what = "number" if scheme.is_scaled else "sign"
        raise VQFormatError(f"{scheme.spec()} needs a {what} for each of {in_features} inputs.")
    if bytewise and not scheme.is_scaled:
        return rotation.to(dtype).contiguous()
    return _ready(rotation, dtype)


def diagonal_size(scheme: VQScheme, in_features: int) -> tuple[int, torch.dtype]:
    """Numbers, and their type, of the signs or the diagonal in front of a rotation."""
    kind = diagonal_of(scheme)
    if kind is Diagonal.HALVES:
        return in_features, torch.float16
    return packed_size(in_features, 1) if kind is Diagonal.SIGNS else 0, torch.uint8


def _rotate(
    x: Tensor, rotation: Tensor | None, scheme: VQScheme, out: Tensor, inverse: bool = False
) -> None:
    """`x` [rows, in_features], rotated by a Hadamard matrix, to `out`, which may be `x`."""
    block, ordinal = scheme.block(x.shape[-1]), x.device.index
    diagonal = ready_diagonal(rotation, scheme, x.shape[-1])
    count = x.numel() // block
    kernel, plan = _rotator(x.dtype, out.dtype, block, diagonal_of(scheme), inverse, ordinal)
    kernel(
        _blocks(-(-count // plan.blocks_at_a_time)),
        torch._C._cuda_getCurrentRawStream(ordinal),
        x.data_ptr(),
        None if diagonal is None else diagonal.data_ptr(),
        out.data_ptr(),
        count,
        x.shape[-1] // block,
        0,
        dependent=True,
    )


def rotate(x: Tensor, rotation: Tensor | None, scheme: VQScheme, inverse: bool) -> Tensor:
    """`ops.reference.rotate`, summed in float32 and rounded once.

    Raises:
        VQFormatError: the signs or the diagonal are not where `x` is.
    """
    if scheme.rotation == "none":
        return x
    if rotation is not None and rotation.device != x.device:
        what = "diagonal" if scheme.is_scaled else "signs"
        raise VQFormatError(
            f"the input is on {x.device}, but the {what} of its rotation on {rotation.device}: "
            "move the layer, or let accelerate do it."
        )
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rotated.numel():
        with torch.cuda.device(x.device):
            _rotate(_ready(x, x.dtype), rotation, scheme, rotated, inverse)
    return rotated


def _blocks(count: int) -> int:
    if count > _MOST_BLOCKS:
        raise VQBackendError(f"{count} blocks are more than a launch can have: split the input.")
    return count


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.reference.linear`), with W, and a rotated x, rounded to x's dtype."""
    scheme, in_features, out_features = weight.scheme, weight.in_features, weight.out_features
    y = x.new_empty(*x.shape[:-1], out_features)
    if not y.numel():
        return y
    check_places((*read(weight), weight.first.rotation), scheme, x.device)
    with on_device(x.get_device()):
        inputs = _ready(x, x.dtype).view(-1, in_features)
        if _stays_rotated(scheme, in_features, x.dtype):
            rotated = torch.empty_like(inputs)
            _rotate(inputs, weight.first.rotation, scheme, rotated)
            inputs = rotated
        products = y.view(-1, out_features)
        for rows, dense in _dense_rows(weight, x):
            # All rows at a time, as most layers have it, are no part of anything.
            part = products if len(dense) == out_features else products[:, rows]
            if bias is None:
                torch.mm(inputs, dense.t(), out=part)
            else:
                torch.addmm(bias[rows].to(x.dtype), inputs, dense.t(), out=part)
    return y


def input_gradient(grad: Tensor, weight: StoredWeight) -> Tensor:
    """dL/dx [..., in] of dL/dy `grad` [..., out] (`ops.input_gradient`), with W rounded to its
    dtype, summed in float32 where rows are decoded in several parts."""
    scheme, in_features, out_features = weight.scheme, weight.in_features, weight.out_features
    x = grad.new_empty(*grad.shape[:-1], in_features)
    if not grad.numel():
        return x.zero_()
    check_places((*read(weight), weight.first.rotation), scheme, grad.device)
    with on_device(grad.get_device()):
        tokens = _ready(grad, grad.dtype).view(-1, out_features)
        product = total = x.view(-1, in_features)
        for rows, dense in _dense_rows(weight, grad):
            if len(dense) == out_features:
                torch.mm(tokens, dense, out=total)
                continue
            if rows.start == 0:
                total = torch.zeros_like(product, dtype=torch.float32)
            total += tokens[:, rows] @ dense
        if _stays_rotated(scheme, in_features, grad.dtype):
            _rotate(total, weight.first.rotation, scheme, product, inverse=True)
        elif total is not product:
            product.copy_(total)
    return x


def read(weight: StoredWeight) -> Read:
    """Codes, codebook and scale of the first pass; nested ones have one table for both."""
    codes, codebook, scale, _ = weight.first
    return codes, codebook if weight.residual is None else weight.residual.codebook, scale


def _stays_rotated(scheme: VQScheme, in_features: int, dtype: torch.dtype) -> bool:
    """True if rows are decoded as they are stored, so that what they multiply is rotated."""
    return scheme.rotation != "none" and restorable(scheme, in_features, DTYPES[dtype]) is not None


def _dense_rows(weight: StoredWeight, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """All rows of a weight, dense, some at a time in the same memory: which, and [rows, in].

    They are rotated back unless they stay rotated (`_stays_rotated`).

    Args:
        weight: codes, of two passes if those are nested.
        like: has the device, which is the current one, and the dtype of the rows.
    """
    (codes, codebook, scale), rotation = read(weight), weight.first.rotation
    _, residual, scheme, in_features = weight
    out_features, second = codes.shape[0], None
    if scheme.two_passes:
        second = second_codes(residual, like.device, out_features, in_features, scheme)
    stored = DeviceWeight(codes, codebook, scale, scheme, in_features)
    at_a_time = min(stored.rows_at_a_time(like.dtype), out_features)
    # From PyTorch's allocator, which hands the same memory to the next layer, another one to
    # another stream, and a graph its own.
    dense = like.new_empty(at_a_time, in_features)
    restored = restorable(scheme, in_features, DTYPES[like.dtype]) is None
    for first in range(0, out_features, at_a_time):
        some = dense[: out_features - first]
        if restored:
            stored.restore(first, rotation, some, second)
        else:
            stored.decode(first, some)
        yield slice(first, first + len(some)), some


def decode(weight: StoredWeight) -> Tensor:
    """The stored rows, rotated back (`ops.reference.decode`): [..., length] float32."""
    (codes, codebook, scale, rotation), _, scheme, length = weight
    decoded = torch.empty(*codes.shape[:-1], length, dtype=torch.float32, device=codes.device)
    if not decoded.numel():
        return decoded
    rows = decoded.view(-1, length)
    with torch.cuda.device(codes.device):
        stored = DeviceWeight(
            codes.reshape(len(rows), -1), codebook, scale.reshape(len(rows), -1), scheme, length
        )
        stored.decode(0, rows)
        if scheme.rotation != "none":
            _rotate(rows, rotation, scheme, rows, inverse=True)
    return decoded


LINEAR = Implementation(linear, weight_supports.linear)
GRADIENT = Implementation(input_gradient, weight_supports.linear)
DECODE = Implementation(decode, weight_supports.decode)
ROTATE = Implementation(rotate, weight_supports.rotate)
