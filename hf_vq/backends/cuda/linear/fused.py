"""`linear` on a GPU for few tokens: the fused kernel, which computes on codes (linear.cu).

What a layer's launches have in common is prepared once and kept as long as its codes live: a launch
from Python may take longer than the kernel.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....codegen import tuned
from ....codegen.families.dequantize import diagonal_of, rotate_plan
from ....codegen.families.linear import TILE_ROWS, LinearProblem, blocks_of, choose, token_bucket
from ....codegen.jit.device import device_arch
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel, Prepared
from ....codegen.plan import LinearPlan, RotateInt8Plan, RotatePlan
from ....errors import VQBackendError, VQFormatError
from ....formats.scheme import VQScheme
from ....formats.stored_weight import StoredWeight
from ..bound_weight import ATTRIBUTE, State, bind_weight, bound_weight, is_settled, state
from .arguments import field_of, grouped_arguments
from .dequantize import (
    DTYPES,
    DeviceWeight,
    Read,
    RotateArguments,
    check_places,
    elsewhere,
    on_device,
    read,
    ready_diagonal,
    second_codes,
)


@dataclass(eq=False)
class Launch:
    """One layer at one bucket of tokens, one dtype and one device."""

    kernel: LoadedKernel
    token_tiles: int
    blocks: tuple[int, ...]  # of each matrix
    before: LoadedKernel | None  # rotates x and puts it in order
    blocks_at_a_time: int  # of `before`
    rotation_block: int
    arranged: int  # numbers of x in order; 0 = as they are
    ragged: bool
    rounds: bool = False  # `before` rounds x to int8 (rotate_int8.cu)


Keepers = tuple[Tensor, ...]
Places = tuple[tuple[int, ...], ...]
# A plan, shape and dtype of x, ordinal, and the other matrices of the launch.
Asked = tuple[Launch | None, torch.Size, torch.dtype, int, tuple["_Layer", ...]]
_MOST_CALLS = 16  # that a layer keeps: prompts have many lengths


class _Layer:
    """Launches of one matrix, and what they were prepared for. It keeps no tensor alive."""

    def __init__(self, stored: DeviceWeight, diagonal: Tensor | None, keepers: Keepers) -> None:
        self.scheme, self.rows, self.in_features = stored.scheme, stored.rows, stored.in_features
        given = (stored.codes, stored.codebook, stored.scale)
        self.addresses = tuple(tensor.data_ptr() for tensor in given)
        self.shapes = tuple(tensor.shape for tensor in given)
        self.diagonal = None if diagonal is None else diagonal.data_ptr()  # or its signs
        self.diagonal_size = 0 if diagonal is None else diagonal.numel()
        self.device = stored.codes.device
        self.keepers = tuple(map(weakref.ref, keepers))
        self.last: State | None = None  # `state` at the last launch
        self.calls: dict[Asked, _Call] = {}

    def is_of(self, keepers: Keepers) -> bool:
        """Whether it was made for these tensors, and not for others that had their addresses."""
        return all(ref() is tensor for ref, tensor in zip(self.keepers, keepers, strict=True))

    def added(self, bias: Tensor, x: Tensor) -> Tensor:
        """The bias, in the dtype of x.

        Raises:
            VQFormatError: it has another size, or is not where x is.
        """
        if bias.shape != (self.rows,) or bias.device != x.device:
            raise VQFormatError(
                f"a bias of shape {list(bias.shape)} on {bias.device} does not suit {self.rows} "
                f"outputs on {x.device}."
            )
        return bias.to(x.dtype).contiguous()

    def is_still(self, weight: StoredWeight, tensors: Read) -> bool:
        """Whether it was made for these tensors, no views, and they are where and as they were.

        What was kept had rows side by side, so a shape and `is_contiguous` say all of its strides.
        """
        of_codes, of_codebook, of_scale = self.keepers
        codes, codebook, scale = tensors
        rotation = weight.first.rotation
        return (
            of_codes() is codes
            and of_codebook() is codebook
            and of_scale() is scale
            and self.addresses == (codes.data_ptr(), codebook.data_ptr(), scale.data_ptr())
            and self.shapes == (codes.shape, codebook.shape, scale.shape)
            and codes.is_contiguous()
            and codebook.is_contiguous()
            and scale.is_contiguous()
            and self.scheme is weight.scheme
            and self.in_features == weight.in_features
            and (
                self.diagonal is None
                if rotation is None
                else (
                    self.diagonal == rotation.data_ptr() and self.diagonal_size == rotation.numel()
                )
            )
        )


class _Call:
    """Launches of layers with one input, for one shape of it: only addresses change."""

    def __init__(self, layers: Sequence[_Layer], launch: Launch, x: Tensor) -> None:
        in_features = layers[0].in_features
        self.arranged, self.ragged = launch.arranged or x.numel(), launch.ragged
        values: dict[str, int | None] = {}
        self.before: list[Prepared] = []  # a rotation for each, or none
        self.changing: list[tuple[str, ...]] = []  # arguments of each that change
        for i, (layer, blocks) in enumerate(zip(layers, launch.blocks, strict=True)):
            if x.device != layer.device:
                raise elsewhere(x.device, "codes", layer.device)
            codes, codebook, scale = layer.addresses
            fixed = {
                "codes": codes, "codebook": codebook, "scale": scale,
                "diagonal": layer.diagonal,
                "rows": layer.rows, "columns": in_features, "tokens": x.numel() // in_features,
                "blocks": blocks,
            }  # fmt: skip
            values |= {field_of(name, i): value for name, value in fixed.items()}
            self.changing.append(tuple([field_of(name, i) for name in ("x", "bias", "y")]))
            if launch.before is not None and launch.rounds:
                plan, tokens = launch.before.plan, x.numel() // in_features
                assert isinstance(plan, RotateInt8Plan)
                rounding = launch.before.prepare(
                    plan.blocks(tokens, layer.rows), diagonal=layer.diagonal, codebook=codebook,
                    scale=scale, tokens=tokens, rows=layer.rows,
                )  # fmt: skip
                self.before.append(rounding)
            elif launch.before is not None:
                count = x.numel() // launch.rotation_block
                rotation = launch.before.prepare(
                    -(-count // launch.blocks_at_a_time), diagonal=layer.diagonal, blocks=count,
                    across=in_features // launch.rotation_block, token_tiles=launch.token_tiles,
                )  # fmt: skip
                self.before.append(rotation)
        self.kernel = launch.kernel.prepare(sum(launch.blocks), **values)

    def input(self, x: Tensor, layer: int, stream: int, overlap: bool) -> Tensor:
        """x as the kernel reads it: rotated and in its order, if that is a launch of its own."""
        if not self.before:
            return x
        rotated = (x.new_zeros if self.ragged else x.new_empty)(self.arranged)
        before = self.before[layer]
        with before.lock:
            before.arguments.x, before.arguments.y = x.data_ptr(), rotated.data_ptr()
            before.start(stream, overlap)
        return rotated


def _readable(x: Tensor) -> Tensor:
    if x.data_ptr() % 16 or not x.is_contiguous():
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def _layer(x: Tensor, weight: StoredWeight, tensors: Read) -> tuple[_Layer, object]:
    """The layer of a weight, and what must live until it was launched.

    Args:
        tensors: of the weight, as `read` gives them.

    Raises:
        VQFormatError: a tensor is not where `x` is, or sizes do not belong together.
    """
    codes, codebook, scale = tensors
    latest = getattr(getattr(codes, ATTRIBUTE, None), "latest", None)
    if latest is not None and latest.is_still(weight, tensors):
        return latest, None
    rotation, scheme = weight.first.rotation, weight.scheme
    keepers = tuple(t if t._base is None else t._base for t in tensors)
    places: Places = (
        tuple(tensor.data_ptr() for tensor in tensors),
        (0,) if rotation is None else (rotation.data_ptr(), rotation.numel()),
        *(tensor.shape + tensor.stride() for tensor in tensors),
    )
    known = bound_weight(keepers[0])
    if known is not None:
        layer: _Layer | None = known.layers.get(places)
        if (
            layer is not None
            and layer.scheme is scheme
            and layer.in_features == weight.in_features
            and layer.is_of(keepers)
        ):
            known.latest = layer
            return layer, None
    check_places((*tensors, rotation), scheme, x.device)
    diagonal = ready_diagonal(rotation, scheme, weight.in_features, bytewise=True)
    stored = DeviceWeight(codes, codebook, scale, scheme, weight.in_features)
    layer = _Layer(stored, diagonal, keepers)
    same = diagonal is None or diagonal is rotation
    if same and not stored.copied:  # a copy does not follow what is written to its original
        known = bind_weight(keepers[0])
        known.layers[places] = known.latest = layer
    return layer, (stored, diagonal)


@functools.lru_cache(maxsize=1024)
def _kernel(plan: LinearPlan, ordinal: int) -> LoadedKernel:
    arguments = grouped_arguments(plan.matrices, plan.second_bits > 0)
    return LoadedKernel(plan, arguments, ordinal, default_store())


@functools.lru_cache(maxsize=1024)
def rotator(plan: RotatePlan, ordinal: int) -> LoadedKernel:
    """The kernel that rotates x, or puts it in order, before the product."""
    return LoadedKernel(plan, RotateArguments, ordinal, default_store())


@functools.lru_cache(maxsize=4096)
def prepared(
    scheme: VQScheme,
    rows: tuple[int, ...],
    in_features: int,
    bucket: int,
    dtype: torch.dtype,
    ordinal: int,
) -> Launch:
    """How matrices of so many rows with one input run the plan that is chosen for them.

    Args:
        bucket: of tokens.

    Raises:
        VQBackendError: there is no plan.
    """
    arch = device_arch(ordinal)
    problem = LinearProblem(scheme, bucket, sum(rows), in_features, DTYPES[dtype], arch)
    if tuned.find(problem) is None:  # several matrices: the largest one's plan, measured or not
        problem = replace(problem, rows=max(rows))
    plan = choose(problem)
    if plan is None:
        raise VQBackendError(f"{scheme.spec()} has no fused kernel for {problem}.")
    plan = replace(plan, matrices=len(rows))
    return prepare(plan, scheme, rows, in_features, dtype, ordinal)


def prepare(
    plan: LinearPlan,
    scheme: VQScheme,
    rows: Sequence[int],
    in_features: int,
    dtype: torch.dtype,
    ordinal: int,
) -> Launch:
    """How matrices of so many rows run a plan: its kernels, loaded, and their sizes."""
    arch = device_arch(ordinal)
    chunk = 4 * plan.unit
    width = -(-in_features // chunk) * chunk
    tiles = [-(-count // (TILE_ROWS * plan.row_tiles)) for count in rows]
    blocks = blocks_of(plan, tiles, arch)
    before, block, at_a_time = None, 0, 0
    if not plan.single or (scheme.rotation != "none" and not plan.rotate):
        rotated = scheme.rotation != "none"
        rotation = rotate_plan(
            DTYPES[dtype],
            DTYPES[dtype],
            scheme.block(in_features) if rotated else 1,
            diagonal_of(scheme),
            False,
            0 if plan.single else plan.unit,
        )
        before = rotator(rotation, ordinal)
        block, at_a_time = rotation.numbers_of_a_block, rotation.blocks_at_a_time
    return Launch(
        _kernel(plan, ordinal),
        plan.token_tiles,
        tuple(blocks),
        before,
        at_a_time,
        block,
        0 if plan.single else 8 * plan.token_tiles * width,
        plan.ragged and not plan.single,
    )


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.reference.linear`) for few tokens, in 16-bit floats.

    Entries of codebooks, the sum of a weight's stages and the rotated x are rounded to the dtype of
    x; sums over columns are float32.
    """
    return grouped(x, (weight,), (bias,))[0]


def grouped(
    x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """`linear` of several weights of one scheme with one input, in one launch."""
    found = [x.new_empty((*x.shape[:-1], weight.out_features)) for weight in weights]
    if all(y.numel() for y in found):
        ordinal = x.get_device()
        with on_device(ordinal):
            run(x, weights, biases, found, ordinal)
    return found


def run(
    x: Tensor,
    weights: Sequence[StoredWeight],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    ordinal: int,
    launch: Launch | None = None,
    overlap: bool = True,
) -> None:
    """To `outputs`, by a launch that is given or by the one of the layers.

    Args:
        weights: several only where the launch has as many; of nested passes one.
        overlap: let kernels begin before those before them have ended (pdl.cuh).
    """
    layers, reads, alive = [], [], []  # the last until the launch
    for weight in weights:
        tensors = read(weight)
        layer, kept = _layer(x, weight, tensors)
        layers.append(layer)
        reads.append(tensors)
        alive.append(kept)
    first, scheme = layers[0], weights[0].scheme
    second, copied = None, False
    if scheme.stages != "independent":
        residual = weights[0].residual
        second = second_codes(residual, x.device, first.rows, x.shape[-1], scheme)
        copied = residual is None or second is not residual.codes  # just now, and nobody counted
    call = _call(first, tuple(layers[1:]), x, scheme, ordinal, launch)
    stream = torch._C._cuda_getCurrentRawStream(ordinal)
    x = _readable(x)
    inputs: dict[int | None, Tensor] = {}  # by their diagonal
    added = list(biases)
    for i, layer in enumerate(layers):
        if layer.diagonal not in inputs:
            inputs[layer.diagonal] = call.input(x, i, stream, overlap)
        if (bias := added[i]) is not None:
            added[i] = layer.added(bias, x)
    kernel, settled = call.kernel, overlap and not copied
    with kernel.lock:
        arguments = kernel.arguments
        if second is not None:
            arguments.second = second.data_ptr()
        states = []
        for i, layer in enumerate(layers):
            of_x, of_bias, of_y = call.changing[i]
            bias = added[i]
            setattr(arguments, of_x, inputs[layer.diagonal].data_ptr())
            setattr(arguments, of_bias, None if bias is None else bias.data_ptr())
            setattr(arguments, of_y, outputs[i].data_ptr())
            now = _state(reads[i], second, stream)
            settled = settled and is_settled(now, layer.last)
            states.append(now)
        kernel.start(stream, settled)
        for layer, now in zip(layers, states, strict=True):
            layer.last = now  # a launch that failed is none


def _state(tensors: Read, second: Tensor | None, stream: int) -> State | None:
    """What a launch now would see (`bound_weight`)."""
    if second is None:
        return state(tensors, stream)
    found = state((*tensors, second), stream)
    # It may lie elsewhere at every call.
    return None if found is None else ((*found[0], second.data_ptr()), found[1])


def _call(
    layer: _Layer,
    others: tuple[_Layer, ...],
    x: Tensor,
    scheme: VQScheme,
    ordinal: int,
    launch: Launch | None = None,
) -> _Call:
    """The launch of layers for an x of this shape, if none is given."""
    asked = launch, x.shape, x.dtype, ordinal, others
    call = layer.calls.get(asked)
    if call is None:
        if launch is None:
            bucket = token_bucket(x.numel() // layer.in_features)
            rows = tuple(one.rows for one in (layer, *others))
            launch = prepared(scheme, rows, layer.in_features, bucket, x.dtype, ordinal)
        if len(layer.calls) == _MOST_CALLS:
            layer.calls.clear()
        call = layer.calls[asked] = _Call((layer, *others), launch, x)
    return call
