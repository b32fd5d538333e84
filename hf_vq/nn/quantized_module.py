"""What `VQLinear` and `VQExperts` have in common: stored tensors as parameters, and the tensors
that all layers share as buffers with one storage per device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..formats.catalog import LinearScheme
from ..formats.scheme import VQScheme
from ..formats.spec import TensorSpec
from ..formats.universal import tensor_hash
from .residual_offload import SecondPass, finish_copies, offloaded

_shared: WeakValueDictionary[tuple[Any, ...], Tensor] = WeakValueDictionary()


def digest(tensor: Tensor) -> str:
    """SHA-256 of the bytes of a tensor, as `sha256:<hex>`."""
    return f"sha256:{tensor_hash(tensor.detach().cpu())}"


def share(tensor: Tensor) -> Tensor:
    """The one tensor that holds these values on this device; `tensor` itself if it is the first."""
    if tensor.is_meta:
        return tensor
    # The digest is one of bytes alone.
    key = (digest(tensor), tensor.dtype, tensor.shape, str(tensor.device))
    return _shared.setdefault(key, tensor)


def mark_initialized(tensor: Tensor) -> Tensor:
    """Keep Transformers from filling a tensor with random numbers."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor


def _leads_to_a_gpu(fn: Callable[..., Any]) -> bool:
    """Whether what is applied to a module's tensors moves them to another device than a CPU."""
    return fn(torch.empty(0, dtype=torch.uint8, device="cpu")).device.type not in ("cpu", "meta")


class QuantizedModule(nn.Module):
    """Base of modules whose weights are stored tensors (`formats.tensor_specs`).

    Every stored tensor is a parameter without gradient, because buffers are not offloaded, except
    the shared ones: those are non-persistent buffers, kept once per checkpoint and per device.

    Codes, scales and codebooks keep their dtype when the model is cast: a scale in bfloat16 would
    lose three bits and the file would no longer be the one that was written.
    """

    scheme: LinearScheme
    spec: str  # of the scheme, as ops of the module get it
    activations_bits = 16
    specs: dict[str, TensorSpec]  # by attribute
    second: SecondPass | None = None  # where it is not beside the first
    deltas: Mapping[str, str] = {}

    def register(self, attribute: str, spec: TensorSpec, lead: tuple[int, ...] = ()) -> None:
        """Add one stored tensor, empty, on the default device; `lead` is put before its shape."""
        if spec.shared_name is None:
            spec = replace(spec, shape=(*lead, *spec.shape))
            empty = torch.empty(spec.shape, dtype=spec.dtype)
            parameter = nn.Parameter(empty, requires_grad=False)
            mark_initialized(parameter)
            self.register_parameter(attribute, parameter)
        else:
            empty = torch.empty(spec.shape, dtype=spec.dtype)
            self.register_buffer(attribute, empty, persistent=False)
        self.specs[attribute] = spec

    def set_activations_bits(self, bits: int) -> None:
        """See `set_activations_bits` of a model."""
        if isinstance(self.scheme, VQScheme):
            self.activations_bits = bits
            self.spec = self.scheme.with_activations(bits).spec()

    def set_shared(self, shared: Mapping[str, Tensor]) -> None:
        """Put the tensors that layers share in place, from their names in the checkpoint.

        They go to the device where this module's buffers are.
        """
        for attribute, spec in self.specs.items():
            if spec.shared_name is not None:
                buffer = self._buffers[attribute]
                assert buffer is not None
                tensor = shared[spec.shared_name]
                if not buffer.is_meta:
                    tensor = tensor.to(buffer.device)
                self._buffers[attribute] = share(tensor)

    def registered(self, attributes: Mapping[str, str]) -> dict[str, Any]:
        """The registered tensors of some attributes, by key, as `getattr` gives them but faster.

        Asked anew at every call: a tensor may be moved or replaced at any time.
        """
        parameters, buffers = self._parameters, self._buffers
        try:
            return {
                key: (parameters if attribute in parameters else buffers)[attribute]
                for key, attribute in attributes.items()
            }
        except KeyError:  # a tool that shards or parametrizes modules keeps some elsewhere
            return {key: getattr(self, attribute) for key, attribute in attributes.items()}

    def stored(self, attribute: str) -> Tensor:
        """One stored tensor in the dtype of its spec (a tool may have cast it behind our back)."""
        tensor: Tensor = getattr(self, attribute)
        return tensor.detach().to(self.specs[attribute].dtype)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        if self.second is not None:
            finish_copies()
        state, prefix = arguments[:2]
        for attribute, name in self.deltas.items():  # a state that was saved has them in itself
            if prefix + attribute in state and prefix + name not in state:
                state[prefix + name] = torch.zeros_like(getattr(self, name))
        super()._load_from_state_dict(*arguments, **options)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        if self.second is None:
            return self._apply_to_all(fn, recurse)
        # What is offloaded stays in the CPU's memory when the module goes to a GPU.
        whole = dict(self._parameters)
        away = offloaded(self) if _leads_to_a_gpu(fn) else []
        for name in away:
            del self._parameters[name]
        try:
            self._apply_to_all(fn, recurse)
        finally:
            now = {**self._parameters, **{name: whole[name] for name in away}}
            self._parameters = {name: now[name] for name in whole}
        return self

    def _apply_to_all(self, fn: Callable[..., Any], recurse: bool) -> Any:
        # Module.to casts floating tensors only, so those that keep their dtype pass as integers.
        kept = {
            id(tensor)
            for attribute in (*self.specs, *self.deltas.values())
            if (tensor := getattr(self, attribute, None)) is not None and tensor.is_floating_point()
        }

        def cast_others(tensor: Tensor) -> Tensor:
            if id(tensor) not in kept:
                return fn(tensor)
            words = torch.int16 if tensor.dtype.itemsize == 2 else torch.int32
            moved: Tensor = fn(tensor.view(words))
            return moved.view(tensor.dtype)

        super()._apply(cast_others, recurse)  # type: ignore[no-untyped-call]
        for attribute, spec in self.specs.items():
            buffer = self._buffers.get(attribute)
            if spec.shared_name is not None and buffer is not None:
                self._buffers[attribute] = share(buffer)
        return self

    def check_codes(self, read: Callable[[str], Tensor], where: str) -> None:
        """Look at codes whose range other tensors decide; `read` gives a tensor by attribute.

        Raises:
            VQFormatError: one is outside of it; names `where`.
        """

    def weights(self) -> list[str]:
        """Names of the dense parameters that codes replace."""
        raise NotImplementedError

    def pending(self) -> list[str]:
        """The dense parameters that are not quantized yet."""
        return [
            name
            for name in self.weights()
            if (weight := self._parameters.get(name)) is not None and weight.dtype.is_floating_point
        ]

    def weight_count(self) -> int:
        """Weights of the matrices that are stored here."""
        raise NotImplementedError

    def stored_bits(self) -> int:
        """Bits of the stored tensors, without the shared ones."""
        return sum(
            8 * spec.dtype.itemsize * torch.Size(spec.shape).numel()
            for spec in self.specs.values()
            if spec.shared_name is None
        )

    def shared_names(self) -> dict[str, str]:
        """Name in the checkpoint of every shared tensor, by attribute."""
        return {
            attribute: spec.shared_name
            for attribute, spec in self.specs.items()
            if spec.shared_name is not None
        }
