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
from ....codegen.families.dequantize import rotate_plan
from ....codegen.families.linear import TILE_ROWS, LinearProblem, blocks_of, choose, token_bucket
from ....codegen.jit.device import device_arch
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel, Prepared
from ....codegen.plan import LinearPlan, RotatePlan
from ....errors import VQBackendError, VQFormatError
from ....formats.scheme import VQScheme
from .. import launch_order
from ..launch_order import State
from .arguments import field_of, together
from .dequantize import DTYPES, RotateArguments, Stored, needs_signs, second_codes


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


Keepers = tuple[Tensor, ...]
Places = tuple[tuple[int, ...], ...]
# A plan, shape and dtype of x, ordinal, and the other matrices of the launch.
Asked = tuple[Launch | None, torch.Size, torch.dtype, int, tuple["_Layer", ...]]
_MOST_CALLS = 16  # that a layer keeps: prompts have many lengths


class _Layer:
    """Launches of one matrix, and what they were prepared for. It keeps no tensor alive."""

    def __init__(self, stored: Stored, signs: Tensor | None, keepers: Keepers) -> None:
        self.scheme, self.rows, self.in_features = stored.scheme, stored.rows, stored.in_features
        given = (stored.codes, stored.codebook, stored.scale)
        self.addresses = tuple(tensor.data_ptr() for tensor in given)
        self.shapes = tuple(tensor.shape for tensor in given)
        self.signs = None if signs is None else signs.data_ptr()
        self.signs_bytes = 0 if signs is None else signs.numel()
        self.device = stored.codes.device
        self.keepers = tuple(map(weakref.ref, keepers))
        self.last: State | None = None  # `state` at the last launch
        self.calls: dict[Asked, _Call] = {}

    def is_of(self, keepers: Keepers) -> bool:
        """Whether it was made for these tensors, and not for others that had their addresses."""
        return all(ref() is tensor for ref, tensor in zip(self.keepers, keepers, strict=True))

    def state(
        self, codes: Tensor, codebook: Tensor, scale: Tensor, stream: int, second: Tensor | None
    ) -> State | None:
        """What a launch now would see (`cuda_overlap`)."""
        if second is None:
            return launch_order.state((codes, codebook, scale), stream)
        found = launch_order.state((codes, codebook, scale, second), stream)
        # It may lie elsewhere at every call.
        return None if found is None else ((*found[0], second.data_ptr()), found[1])

    def added(self, bias: Tensor | None, x: Tensor) -> Tensor | None:
        """The bias, in the dtype of x.

        Raises:
            VQFormatError: it has another size, or is not where x is.
        """
        if bias is None:
            return None
        if bias.shape != (self.rows,) or bias.device != x.device:
            raise VQFormatError(
                f"a bias of shape {list(bias.shape)} on {bias.device} does not suit {self.rows} "
                f"outputs on {x.device}."
            )
        return bias.to(x.dtype).contiguous()

    def is_still(
        self, codes: Tensor, codebook: Tensor, scale: Tensor, rotation: Tensor | None
    ) -> bool:
        """Whether it was made for these tensors, no views, and they are where and as they were.

        What was kept had rows side by side, so a shape and `is_contiguous` say all of its strides.
        """
        of_codes, of_codebook, of_scale = self.keepers
        return (
            of_codes() is codes
            and of_codebook() is codebook
            and of_scale() is scale
            and self.addresses == (codes.data_ptr(), codebook.data_ptr(), scale.data_ptr())
            and self.shapes == (codes.shape, codebook.shape, scale.shape)
            and codes.is_contiguous()
            and codebook.is_contiguous()
            and scale.is_contiguous()
            and (
                self.signs is None
                if rotation is None
                else (self.signs == rotation.data_ptr() and self.signs_bytes == rotation.numel())
            )
        )


class _Call:
    """Launches of layers with one input, for one shape of it: only addresses change."""

    def __init__(self, layers: Sequence[_Layer], launch: Launch, x: Tensor) -> None:
        in_features = layers[0].in_features
        self.arranged, self.ragged = launch.arranged or x.numel(), launch.ragged
        values: dict[str, int | None] = {}
        self.before: list[Prepared] = []  # a rotation for each, or none
        for i, (layer, blocks) in enumerate(zip(layers, launch.blocks, strict=True)):
            if x.device != layer.device:
                raise VQFormatError(_elsewhere(x, "codes", layer.device))
            codes, codebook, scale = layer.addresses
            fixed = {
                "codes": codes, "codebook": codebook, "scale": scale, "signs": layer.signs,
                "rows": layer.rows, "columns": in_features, "tokens": x.numel() // in_features,
                "blocks": blocks,
            }  # fmt: skip
            values |= {field_of(name, i): value for name, value in fixed.items()}
            if launch.before is not None:
                count = x.numel() // launch.rotation_block
                rotation = launch.before.prepare(
                    -(-count // launch.blocks_at_a_time), signs=layer.signs, blocks=count,
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


# By the identity of the codes, or of what they are a view of (experts share one), as long as it
# lives.
_layers: dict[int, _Known] = {}


class _Known:
    """The layers of one tensor of codes, by where everything is, and the one that ran last."""

    def __init__(self, keeper: Tensor) -> None:
        key = id(keeper)
        self.keeper = weakref.ref(keeper, lambda _: _layers.pop(key, None))
        self.by_place: dict[Places, _Layer] = {}
        self.latest: _Layer | None = None


def is_known(codes: Tensor) -> bool:
    """Whether a layer of these codes was launched from here, which remembers how they were."""
    return id(codes) in _layers


def _elsewhere(x: Tensor, name: str, device: torch.device) -> str:
    return (
        f"the input is on {x.device}, but the {name} of the weight on {device}: "
        "move the layer, or let accelerate do it."
    )


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
    known = _layers.get(id(codes))
    layer = None if known is None else known.latest
    if (
        layer is not None
        and layer.is_still(codes, codebook, scale, rotation)
        and layer.scheme is scheme
        and layer.in_features == x.shape[-1]
    ):
        return layer, None
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
    if known is not None and known.keeper() is keeper:
        layer = known.by_place.get(places)
        if (
            layer is not None
            and layer.scheme is scheme
            and layer.in_features == x.shape[-1]
            and layer.is_of(keepers)
        ):
            known.latest = layer
            return layer, None
    for name, tensor in zip(
        ("codes", "codebook", "scale", "signs"), (codes, codebook, scale, rotation), strict=True
    ):
        if tensor is not None and tensor.device != x.device:
            raise VQFormatError(_elsewhere(x, name, tensor.device))
    needs_signs(rotation, scheme, x.shape[-1])
    stored = Stored(codes, codebook, scale, scheme, x.shape[-1])
    signs = None if rotation is None else rotation.to(torch.uint8).contiguous()
    layer = _Layer(stored, signs, keepers)
    same = signs is None or (rotation is not None and signs.data_ptr() == rotation.data_ptr())
    if same and not stored.copied:  # a copy does not follow what is written to its original
        if known is None or known.keeper() is not keeper:
            known = _layers[id(keeper)] = _Known(keeper)
        known.by_place[places] = known.latest = layer
    return layer, (stored, signs)


@functools.lru_cache(maxsize=1024)
def _kernel(plan: LinearPlan, ordinal: int) -> LoadedKernel:
    arguments = together(plan.matrices, plan.second_bits > 0)
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
            scheme.rotation == "random_hadamard",
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


def linear(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    bias: Tensor | None,
    scheme: VQScheme,
    second: Tensor | None = None,
) -> Tensor:
    """y = W x + b (`ops.reference.linear`) for few tokens, in 16-bit floats.

    Entries of codebooks, the sum of a weight's stages and the rotated x are rounded to the dtype of
    x; sums over columns are float32.

    Args:
        second: codes of a nested pass; `codebook` is the one of both.
    """
    y = x.new_empty((*x.shape[:-1], codes.shape[0]))
    if not y.numel():
        return y
    ordinal = x.get_device()
    given = (x, codes, codebook, scale, rotation, bias, scheme, y, ordinal)
    if ordinal == torch._C._cuda_getDevice():
        run(*given, second=second)
    else:
        with torch.cuda.device(ordinal):
            run(*given, second=second)
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
    second: Tensor | None = None,
) -> None:
    """To `y`, by a launch that is given or by the one of the layer.

    Args:
        overlap: let kernels begin before those before them have ended (pdl.cuh).
    """
    layer, _alive = _layer(x, codes, codebook, scale, rotation, scheme)
    copied = False
    if scheme.two_passes:
        stored, second = second, second_codes(second, x, layer.rows, scheme)
        copied = second is not stored  # just now, and nobody counted
    call = _call(layer, (), x, scheme, ordinal, launch)
    stream = torch._C._cuda_getCurrentRawStream(ordinal)
    given = call.input(_readable(x), 0, stream, overlap)
    bias = layer.added(bias, x)
    kernel = call.kernel
    with kernel.lock:
        arguments = kernel.arguments
        arguments.x, arguments.y = given.data_ptr(), y.data_ptr()
        arguments.bias = None if bias is None else bias.data_ptr()
        if second is not None:
            arguments.second = second.data_ptr()
        state = layer.state(codes, codebook, scale, stream, second)
        settled = not copied and launch_order.is_settled(state, layer.last)
        kernel.start(stream, overlap and settled)
        layer.last = state


def linears(
    x: Tensor,
    codes: Sequence[Tensor],
    codebook: Sequence[Tensor],
    scale: Sequence[Tensor],
    rotation: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    scheme: VQScheme,
) -> list[Tensor]:
    """`linear` of several matrices with one input, in one launch."""
    found = [x.new_empty((*x.shape[:-1], len(rows))) for rows in codes]
    if not all(y.numel() for y in found):
        return found
    ordinal = x.get_device()
    with torch.cuda.device(ordinal):
        stored = list(zip(codes, codebook, scale, strict=True))
        layers, _alive = zip(
            *(_layer(x, *one, signs, scheme) for one, signs in zip(stored, rotation, strict=True)),
            strict=True,
        )
        call = _call(layers[0], layers[1:], x, scheme, ordinal)
        stream = torch._C._cuda_getCurrentRawStream(ordinal)
        x = _readable(x)
        inputs: dict[int | None, Tensor] = {}  # by their signs
        for i, layer in enumerate(layers):
            if layer.signs not in inputs:
                inputs[layer.signs] = call.input(x, i, stream, True)
        added = [layer.added(b, x) for layer, b in zip(layers, bias, strict=True)]
        with call.kernel.lock:
            rotated = [inputs[layer.signs] for layer in layers]
            for name, tensors in (("x", rotated), ("bias", added), ("y", found)):
                for i, tensor in enumerate(tensors):
                    address = None if tensor is None else tensor.data_ptr()
                    setattr(call.kernel.arguments, field_of(name, i), address)
            states = [
                layer.state(*one, stream, None) for layer, one in zip(layers, stored, strict=True)
            ]
            settled = [
                launch_order.is_settled(now, layer.last)
                for layer, now in zip(layers, states, strict=True)
            ]
            call.kernel.start(stream, all(settled))
            for layer, state in zip(layers, states, strict=True):
                layer.last = state
    return found


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
