"""`linear` on a GPU for few tokens: the fused kernel, which computes on codes (linear.cu).

What a layer's launches have in common is prepared once and kept as long as its codes live: a launch
from Python may take longer than the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codegen.choose import rotate_plan
from ..codegen.choose_linear import TILE_ROWS, LinearProblem, choose, token_bucket
from ..codegen.device import device_arch
from ..codegen.launch import Kernel
from ..codegen.plan import LinearPlan, RotatePlan
from ..codegen.store import default_store
from ..errors import VQBackendError, VQFormatError
from ..formats.scheme import VQScheme
from .cuda_linear import DTYPES, RotateArguments, Stored, needs_signs


class LinearArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/linear.cu."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
    ]


@dataclass
class Launch:
    """One layer at one bucket of tokens, one dtype and one device."""

    kernel: Kernel
    token_tiles: int
    blocks: int
    before: Kernel | None  # rotates x and puts it in order
    blocks_at_a_time: int  # of `before`
    rotation_block: int
    arranged: int  # numbers of x in order; 0 = as they are
    ragged: bool


Keepers = tuple[Tensor, ...]
Places = tuple[tuple[int, ...], ...]


class _Layer:
    """Launches of one matrix, and what they were prepared for. It keeps no tensor alive."""

    def __init__(self, stored: Stored, signs: Tensor | None, keepers: Keepers) -> None:
        self.scheme, self.rows, self.in_features = stored.scheme, stored.rows, stored.in_features
        self.fixed = (
            stored.codes.data_ptr(),
            stored.codebook.data_ptr(),
            stored.scale.data_ptr(),
            None if signs is None else signs.data_ptr(),
        )
        self.keepers = tuple(map(weakref.ref, keepers))
        self.versions: tuple[int, ...] | None = None  # at the last launch
        self.stream = 0  # of it
        self.launches: dict[tuple[int, torch.dtype, int], Launch] = {}

    def is_of(self, keepers: Keepers) -> bool:
        """Whether it was made for these tensors, and not for others that had their addresses."""
        return all(ref() is tensor for ref, tensor in zip(self.keepers, keepers, strict=True))


# By the identity of the codes, or of what they are a view of (experts share one), as long as it
# lives; then by where everything is.
_layers: dict[int, tuple[weakref.ref[Tensor], dict[Places, _Layer]]] = {}


def _versions(codes: Tensor, codebook: Tensor, scale: Tensor) -> tuple[int, ...] | None:
    """Counters that every write to a tensor moves; None for tensors that do not count."""
    if codes.is_inference() or codebook.is_inference() or scale.is_inference():
        return None
    return codes._version, codebook._version, scale._version


def _layer(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    scheme: VQScheme,
) -> tuple[_Layer, object]:
    """The layer of these tensors, and what must live until it was launched.

    Raises:
        VQFormatError: a tensor is not where `x` is, or sizes do not belong together.
    """
    keepers = tuple(t if t._base is None else t._base for t in (codes, codebook, scale))
    keeper = keepers[0]
    places = (
        (codes.data_ptr(), codebook.data_ptr(), scale.data_ptr()),
        (0,) if rotation is None else (rotation.data_ptr(), rotation.numel()),
        codes.shape + codes.stride(),
        codebook.shape + codebook.stride(),
        scale.shape + scale.stride(),
    )
    known = _layers.get(id(keeper))
    if known is not None and known[0]() is keeper:
        layer = known[1].get(places)
        if (
            layer is not None
            and layer.scheme is scheme
            and layer.in_features == x.shape[-1]
            and layer.is_of(keepers)
        ):
            return layer, None
    for name, tensor in zip(
        ("codes", "codebook", "scale", "signs"), (codes, codebook, scale, rotation), strict=True
    ):
        if tensor is not None and tensor.device != x.device:
            raise VQFormatError(
                f"the input is on {x.device}, but the {name} of the weight on {tensor.device}: "
                "move the layer, or let accelerate do it."
            )
    needs_signs(rotation, scheme, x.shape[-1])
    stored = Stored(codes, codebook, scale, scheme, x.shape[-1])
    signs = None if rotation is None else rotation.to(torch.uint8).contiguous()
    layer = _Layer(stored, signs, keepers)
    same = signs is None or (rotation is not None and signs.data_ptr() == rotation.data_ptr())
    if same and not stored.copied:  # a copy does not follow what is written to its original
        if known is None or known[0]() is not keeper:
            key = id(keeper)
            known = weakref.ref(keeper, lambda _: _layers.pop(key, None)), {}
            _layers[key] = known
        known[1][places] = layer
    return layer, (stored, signs)


@functools.lru_cache(maxsize=1024)
def _kernel(plan: LinearPlan, shared: int, ordinal: int) -> Kernel:
    return Kernel(plan, LinearArguments, ordinal, default_store(), shared)


@functools.lru_cache(maxsize=1024)
def _rotator(plan: RotatePlan, ordinal: int) -> Kernel:
    return Kernel(plan, RotateArguments, ordinal, default_store())


@functools.lru_cache(maxsize=4096)
def _prepare(
    scheme: VQScheme, rows: int, in_features: int, bucket: int, dtype: torch.dtype, ordinal: int
) -> Launch:
    arch = device_arch(ordinal)
    problem = LinearProblem(scheme, bucket, rows, in_features, DTYPES[dtype], arch)
    plan = choose(problem)
    if plan is None:
        raise VQBackendError(f"{scheme.spec()} has no fused kernel for {problem}.")
    return prepare(plan, scheme, rows, in_features, dtype, ordinal)


def prepare(
    plan: LinearPlan,
    scheme: VQScheme,
    rows: int,
    in_features: int,
    dtype: torch.dtype,
    ordinal: int,
) -> Launch:
    """How a layer of this size runs a plan: its kernels, loaded, and their sizes."""
    arch = device_arch(ordinal)
    chunk = 4 * plan.unit
    width = -(-in_features // chunk) * chunk
    teams = plan.threads // 32 // plan.split
    tiles = -(-rows // (TILE_ROWS * plan.row_tiles))
    turns = -(-tiles // (arch.sms * plan.resident * teams))
    before, block, at_a_time = None, 0, 0
    if not plan.single or (scheme.rotation != "none" and not plan.rotate):
        rotated = scheme.rotation != "none"
        rotation = rotate_plan(
            DTYPES[dtype],
            DTYPES[dtype],
            scheme.block(in_features) if rotated else 1,
            scheme.rotation == "random_hadamard",
            False,
            0 if plan.single else plan.unit,
        )
        before = _rotator(rotation, ordinal)
        block, at_a_time = rotation.numbers_of_a_block, rotation.blocks_at_a_time
    return Launch(
        _kernel(plan, plan.shared_bytes_for(in_features), ordinal),
        plan.token_tiles,
        -(-tiles // (turns * teams)),
        before,
        at_a_time,
        block,
        0 if plan.single else 8 * plan.token_tiles * width,
        plan.ragged and not plan.single,
    )


def linear(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    bias: Tensor | None,
    scheme: VQScheme,
) -> Tensor:
    """y = W x + b (`ops.reference.linear`) for few tokens, in 16-bit floats.

    Entries of codebooks, the sum of a weight's stages and the rotated x are rounded to the dtype of
    x; sums over columns are float32.
    """
    out_features = codes.shape[0]
    y = x.new_empty(*x.shape[:-1], out_features)
    if not y.numel():
        return y
    ordinal = x.device.index
    if ordinal == torch.cuda.current_device():
        run(x, codes, codebook, scale, rotation, bias, scheme, y, ordinal)
    else:
        with torch.cuda.device(ordinal):
            run(x, codes, codebook, scale, rotation, bias, scheme, y, ordinal)
    return y


def run(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    bias: Tensor | None,
    scheme: VQScheme,
    y: Tensor,
    ordinal: int,
    launch: Launch | None = None,
    overlap: bool = True,
) -> None:
    """To `y`, by a launch that is given or by the one of the layer.

    Args:
        overlap: let kernels begin before those before them have ended (kernels/cuda/grids.cuh).
    """
    in_features = x.shape[-1]
    layer, _alive = _layer(x, codes, codebook, scale, rotation, scheme)
    tokens = x.numel() // in_features
    key = (token_bucket(tokens), x.dtype, ordinal)
    launch = launch or layer.launches.get(key)
    if launch is None:
        launch = _prepare(scheme, layer.rows, in_features, key[0], x.dtype, ordinal)
        layer.launches[key] = launch
    # The kernel reads codes, scales and codebooks before it waits for the kernels before it, unless
    # one of those may have written them.
    stream = torch._C._cuda_getCurrentRawStream(ordinal)
    versions = _versions(codes, codebook, scale)
    settled = overlap and versions is not None and versions == layer.versions
    if settled and stream != layer.stream:  # within a graph, they would be written by a node of it
        settled = torch.cuda.is_current_stream_capturing()
    layer.versions, layer.stream = versions, stream
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    if launch.before is not None:
        block, arranged = launch.rotation_block, launch.arranged
        make = x.new_zeros if launch.ragged else x.new_empty
        inputs = make(arranged or x.numel())
        count = x.numel() // block
        launch.before(
            -(-count // launch.blocks_at_a_time), stream, x.data_ptr(), layer.fixed[3],
            inputs.data_ptr(),
            count, in_features // block, launch.token_tiles, dependent=overlap,
        )  # fmt: skip
        x = inputs
    if bias is not None and (bias.shape != (layer.rows,) or bias.device != x.device):
        raise VQFormatError(
            f"a bias of shape {list(bias.shape)} on {bias.device} does not suit {layer.rows} "
            f"outputs on {x.device}."
        )
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        bias = bias.to(x.dtype).contiguous()
    launch.kernel(
        launch.blocks, stream, *layer.fixed, x.data_ptr(),
        None if bias is None else bias.data_ptr(), y.data_ptr(), layer.rows, in_features, tokens,
        dependent=settled,
    )  # fmt: skip
