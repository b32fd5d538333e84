"""`LazyActivation`: a tensor not yet computed, which a `W4A8Linear` takes as integers of 8 bits.

    RMSNorm    -> LazyActivation(Norm) -> q, k, v           rounded once, by the norm's kernel
    SiLU(gate) -> LazyActivation(Silu), times up -> LazyActivation(Gated) -> down

Every other operation, and every other layer, finds the floats that would have been there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import ops
from ..dispatch import Fused
from ..errors import VQBackendError
from ..ops import fused_inputs


@dataclass(frozen=True)
class Norm:
    """RMSNorm of x [..., k] with weight [k]."""

    x: Tensor
    weight: Tensor
    eps: float

    def read(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of."""
        return self.x, self.weight

    def floats(self) -> Tensor:
        """As the model's own module computes it."""
        return fused_inputs.rms_norm(self.x, self.weight, self.eps)

    def rounded(self, fused: Fused) -> Any:
        """As the product of `fused` reads it."""
        return fused.norm(self.x, self.weight, self.eps)


@dataclass(frozen=True)
class Silu:
    """SiLU of `gate`, of which nothing is made yet."""

    gate: Tensor

    def read(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of."""
        return (self.gate,)

    def floats(self) -> Tensor:
        """As the model's own module computes it."""
        return torch.nn.functional.silu(self.gate)


@dataclass(frozen=True)
class Gated:
    """SiLU(gate) * up, both [..., k]."""

    gate: Tensor
    up: Tensor

    def read(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of."""
        return self.gate, self.up

    def floats(self) -> Tensor:
        """As the model's own modules compute it."""
        return fused_inputs.gated(self.gate, self.up)

    def rounded(self, fused: Fused) -> Any:
        """As the product of `fused` reads it."""
        return fused.gated(self.gate, self.up)


Source = Norm | Silu | Gated


class LazyActivation(Tensor):
    """What a source stands for; it looks like the tensor of floats, and becomes it when touched.

    Args:
        source: what to compute, of the shape of its first tensor.
    """

    source: Source
    _dense: Tensor | None
    _rounded: dict[Fused, Any]
    _versions: tuple[int, ...] | None

    # Its shape is asked without us.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, source: Source) -> LazyActivation:
        """See the class."""
        x = source.read()[0]
        made: LazyActivation = torch.Tensor._make_wrapper_subclass(
            cls, x.shape, dtype=x.dtype, device=x.device
        )
        made.source, made._dense, made._rounded = source, None, {}
        made._versions = _versions(source)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyActivation({list(self.shape)}, {self.dtype}, {type(self.source).__name__})"

    def times(self, tensors: Mapping[str, Tensor], bias: Tensor | None, spec: str) -> Tensor | None:
        """`ops.w4a8_linear` of it; None where only floats will do: they are there already, or
        somebody asks for more than the result."""
        source = self.source
        if self._dense is not None or self.requires_grad or isinstance(source, Silu):
            return None
        if not ops.is_plain_eager(*source.read(), bias, *tensors.values()):
            return None
        fused = fused_inputs.fused_inputs(self, spec, len(tensors["codes"]))
        if fused is None:
            return None
        if fused not in self._rounded:
            self._check()
            self._rounded[fused] = source.rounded(fused)
        return fused_inputs.linear(fused, self._rounded[fused], self, tensors, bias, spec)

    def floats(self) -> Tensor:
        """The tensor that it stands for, contiguous as it says it is; no gradient follows it, as
        none was asked for when the source was made."""
        if self._dense is None:
            self._check()
            with torch.no_grad():
                self._dense = self.source.floats().contiguous()
        return self._dense

    def _check(self) -> None:
        if self._versions != _versions(self.source):
            raise VQBackendError(
                f"the input of {type(self.source).__name__} was changed in place before anything "
                "read its output, which is computed then. Set HF_VQ_FUSED_INPUTS=0."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.floats().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.floats().clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.mul.Tensor:
            later = _product(*args)
            if later is not None:
                return later
        args, kwargs = tree_map_only(LazyActivation, LazyActivation.floats, (args, kwargs or {}))
        return func(*args, **kwargs)


def _of_floats(name: str) -> Callable[..., Any]:
    def method(self: LazyActivation, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.floats(), name)(*args, **kwargs)

    return method


# Torch answers these from memory, without `__torch_dispatch__`: here is none.
for _name in ("__dlpack__", "data_ptr", "numpy", "tolist", "untyped_storage"):
    setattr(LazyActivation, _name, _of_floats(_name))


def _product(one: Any, other: Any) -> LazyActivation | None:
    """SiLU(gate) * up, in either order, where both are alike and no gradient follows."""
    if type(one) is not LazyActivation:
        one, other = other, one
    if (
        type(one) is not LazyActivation
        or not isinstance(one.source, Silu)
        or one._dense is not None
    ):
        return None
    gate = one.source.gate
    if not isinstance(other, Tensor) or not ops.is_plain_eager(gate, other):
        return None
    if (other.shape, other.dtype, other.device) != (gate.shape, gate.dtype, gate.device):
        return None
    one._check()
    return LazyActivation(Gated(gate, other))


def _versions(source: Source) -> tuple[int, ...] | None:
    """What every write moves; None in inference mode, where nobody counts."""
    try:
        return tuple(tensor._version for tensor in source.read())
    except RuntimeError:
        return None
