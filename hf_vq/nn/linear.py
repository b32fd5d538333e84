"""`VQLinear`: a linear layer that computes on codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import VQBackendError, VQFormatError
from ..formats.catalog import LinearScheme
from ..formats.scheme import VQScheme
from ..formats.tensors import tensor_specs
from .quantized_module import QuantizedModule, mark_initialized
from .residual_offload import SecondPass, at_home, first_only
from .trained import forget_changes, moved_tensor


def attribute_of(key: str) -> str:
    """Attribute that holds the stored tensor `key`: codes are called `weight`.

    A library that does not know us then meets a `weight` of another shape and stops, instead of
    loading random numbers.
    """
    return "weight" if key == "codes" else f"vq_{key}"


LOADING = "vq_codes"  # what codes are called while a model is being loaded


Method = TypeVar("Method", bound=Callable[..., Any])


def _constant(method: Method) -> Method:
    """What torch.compiler.assume_constant_result does, without importing the compiler: a compiled
    model compares all else at every token, layer by layer."""
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


class VQLinear(QuantizedModule, nn.Linear):
    """y = W x + b with W stored as codes.

    It is an `nn.Linear` so that adapters wrap it as one. `weight` holds the packed codes: [out,
    bytes], or [1, out, bytes] where the dense weight has that shape (8 bits of codes per weight).

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        bias: add a learned bias.
        scheme: how W is stored.
        seed: seed of the rotation.
        dtype: dtype of the bias.
        where: name of the layer, for errors.
        source: class of the layer that this one replaces, for `restored`.

    Raises:
        VQSchemeError: the scheme cannot store a matrix of this size.
    """

    op = "linear"  # that computes it
    input_parts = 1  # devices that share in_features: each one's input is so much shorter
    _bound: ops.BoundLinear | None = None  # of one pass whose tensors are those of `forward`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        scheme: LinearScheme,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        where: str = "the layer",
        source: type[nn.Module] = nn.Linear,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self.spec = scheme.spec()  # compiled code compares this string, not a scheme's fields
        self.first_spec = scheme.first_pass().spec()
        self.where = where
        self.source = source
        self.specs = {}
        found = tensor_specs(scheme, out_features, in_features, seed=seed, where=where)
        codes = found.pop("codes")
        # Without hf_vq, Transformers would load codes of the dense shape as if they were weights.
        lead = (1,) if codes.shape == (out_features, in_features) else ()
        self.register("weight", codes, lead)
        self.attributes = {"codes": "weight"}
        empty = torch.empty(out_features, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(empty) if bias else None)
        for key, spec in found.items():
            self.attributes[key] = attribute_of(key)
            self.register(self.attributes[key], spec)
        rotations = [key for key in found if key in ("signs", "diagonal")]
        self._rotation = attribute_of(rotations[0]) if rotations else ""
        if self.op == "linear" and set(found) <= {"codebook", "scale", "signs", "diagonal"}:
            self._bound = ops.BoundLinear(self.spec)

    @classmethod
    def replacing(
        cls, layer: nn.Module, scheme: LinearScheme, *, seed: int = 0, where: str = "the layer"
    ) -> VQLinear:
        """An empty `VQLinear` for an `nn.Linear` or a `Conv1D` (whose weight is [in, out])."""
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        out_features, in_features = weight.shape if isinstance(layer, nn.Linear) else weight.T.shape
        return cls(
            in_features,
            out_features,
            bias is not None,
            scheme,
            seed=seed,
            dtype=weight.dtype,
            where=where,
            source=type(layer),
        )

    @property
    def transposed(self) -> bool:
        """Whether the layer that this one replaces keeps its weight as [in, out]."""
        return not issubclass(self.source, nn.Linear)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by key (`formats.tensor_specs`)."""
        compiling = torch.compiler.is_compiling()
        attributes = dict(self._names()) if compiling else self.attributes
        found = self.registered(attributes)
        if self.deltas:
            found |= {k: moved_tensor(self, a) for k, a in attributes.items() if a in self.deltas}
        if found["codes"].ndim == 3:
            found["codes"] = found["codes"][0]
        return found

    @_constant
    def _names(self) -> tuple[tuple[str, str], ...]:
        """Items of `attributes`, which follow from the scheme, whose spec is compared."""
        return tuple(self.attributes.items())

    def set_activations_bits(self, bits: int) -> None:
        """See `set_activations_bits` of a model."""
        super().set_activations_bits(bits)
        if isinstance(self.scheme, VQScheme):
            self.first_spec = self.scheme.first_pass().with_activations(bits).spec()
            if self._bound is not None:
                self._bound = ops.BoundLinear(self.spec)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of `x`."""
        # A compiled model would compare at every call what it was traced by.
        if (
            torch.compiler.is_compiling()
            or self._bound is None
            or x.shape[-1] * self.input_parts != self.in_features
        ):
            return self._checked(x)
        parameters, buffers = self._parameters, self._buffers
        codes, scale = parameters.get("weight"), parameters.get("vq_scale")
        codebook = buffers.get("vq_codebook")
        if codebook is None:
            codebook = parameters.get("vq_codebook")
        rotation = parameters.get(self._rotation)
        usual = codes is not None and scale is not None and codebook is not None
        # A tool that shards or parametrizes modules keeps some tensors elsewhere.
        if not usual or "bias" not in parameters or (rotation is None) == bool(self._rotation):
            return self._checked(x)
        y: Tensor | None = self._bound(x, (codes, codebook, scale, rotation), parameters["bias"])
        return self._checked(x) if y is None else y

    def _checked(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise VQFormatError(
                f"{self.where} got an input of {x.dtype}: the model casts it to `weight.dtype`, "
                "but `weight` holds codes. Leave it dense: "
                f"VQConfig(modules_to_not_convert=[{self.where!r}])."
            )
        if x.shape[-1] * self.input_parts != self.in_features:
            raise VQFormatError(
                f"{self.where} got an input of shape {list(x.shape)}; its last dimension must be "
                f"in_features={self.in_features // self.input_parts}."
            )
        parameters = self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401, it is slow
        if self.second is not None:
            return self._with_second_pass(self.second, x, bias)
        return self._product(x, bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear(x, self.tensors(), bias, self.spec)

    def _with_second_pass(self, second: SecondPass, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            raise VQBackendError(
                f"{self.where} cannot be compiled: its second pass is offloaded. Load the model "
                'with VQConfig(pass2="resident").'
            )
        if second.left_out(x):
            return ops.linear(x, first_only(self.tensors()), bias, self.first_spec)
        with second.lent(self, x) as tensors:
            return ops.linear(x, tensors, bias, self.spec)

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight [out_features, in_features]."""
        return ops.decode_weight(at_home(self.tensors()), self.scheme, self.in_features, dtype)

    def restored(self, dtype: torch.dtype) -> nn.Module:
        """A dense layer of the class that this one replaced."""
        weight = self.decoded(dtype)
        layer: nn.Module
        with torch.device("meta"):
            if self.transposed:
                layer = self.source(self.out_features, self.in_features)
                weight = weight.T.contiguous()
            else:
                layer = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        layer.register_parameter("weight", nn.Parameter(weight))
        if self.bias is not None:
            layer.register_parameter("bias", nn.Parameter(self.bias.detach().to(dtype)))
        return layer.train(self.training)

    def weights(self) -> list[str]:
        """Name of the dense parameter that the codes replace."""
        return ["weight"]

    def matrices(self, weight: str, dense: Tensor) -> list[Tensor]:
        """`dense` as a list of one matrix [out_features, in_features]."""
        return [dense.T if self.transposed else dense]

    def begin_load(self, weight: str, fitted: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Make room for the tensors that were fitted to `matrices`; return them by attribute.

        The codes are called `vq_codes` until `finish_load`: a loader that offloads to disk would
        otherwise keep reading `weight` from the dense checkpoint.
        """
        codes = self.specs["weight"]
        del self._parameters["weight"]
        empty = torch.empty(codes.shape, dtype=codes.dtype, device="meta")
        self.register_parameter(LOADING, nn.Parameter(empty, requires_grad=False))
        # Some models initialize `layer.weight` from outside, and read its shape; this one is
        # marked as done.
        shape = (self.out_features, self.in_features)
        dense = torch.empty(shape[::-1] if self.transposed else shape, device="meta")
        self.__dict__["weight"] = mark_initialized(dense)
        names = {**self.attributes, "codes": LOADING}
        tensors = {**fitted[0], "codes": fitted[0]["codes"].reshape(codes.shape)}
        return {names[key]: tensor for key, tensor in tensors.items()}

    def finish_load(self) -> None:
        """Give the codes that were loaded their own name."""
        del self.__dict__["weight"]
        codes = self._parameters.pop(LOADING)
        self._parameters = {"weight": codes, **self._parameters}

    def assign(self, fitted: dict[str, Tensor], bias: nn.Parameter | None) -> None:
        """Take the tensors that were fitted to `matrices`, outside of a loader."""
        for key, tensor in fitted.items():
            shape = self.specs[self.attributes[key]].shape
            stored = nn.Parameter(tensor.reshape(shape).contiguous(), requires_grad=False)
            mark_initialized(stored)
            self.register_parameter(self.attributes[key], stored)
        self.register_parameter("bias", bias)
        forget_changes(self)

    def weight_count(self) -> int:
        """Weights of W."""
        return self.in_features * self.out_features

    def reset_parameters(self) -> None:
        """Do nothing: codes have no random initial value."""

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        bias = self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, {self.scheme.spec()}"
