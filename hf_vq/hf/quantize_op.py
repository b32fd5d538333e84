"""The operation that turns a dense tensor into codes while Transformers loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from ..errors import VQFormatError
from ..fit import fit_weight
from ..formats.catalog import LinearScheme, scheme_name
from ..formats.scheme import VQScheme
from ..nn.accelerate_hooks import hook_of
from ..nn.experts import VQExperts
from ..nn.linear import LOADING, VQLinear
from ..nn.replace import vq_modules
from ..progress import Progress

if TYPE_CHECKING:
    from .config import VQConfig


class Deferred(dict[str, Any]):
    """A dict whose items are made while they are iterated over.

    Transformers runs an operation inside a block that turns every exception into a line of a
    report, and iterates over the result outside of it. Made here, an error keeps its own type and
    message, and there is never more than one result.
    """

    def __init__(self, make: Callable[[], Iterator[tuple[str, Any]]]) -> None:
        super().__init__()
        self._make = make

    def items(self) -> Any:
        """Make the items, once."""
        return self._make()


class Quantize(ConversionOps):
    """Dense tensors in, stored tensors out.

    Args:
        config: scheme, seed and search.
        wanted: whether a parameter's name is to be quantized.
        leave_dense: puts a head that has another size back, and returns True; False if the layer
            is no head. Transformers then raises its error, or ignores the size if it was told to.
        progress: shown to the user.
        errors: filled with the relative error of each quantized tensor, by name.
    """

    def __init__(
        self,
        config: VQConfig,
        wanted: Callable[[nn.Module, str], bool],
        leave_dense: Callable[[nn.Module, str], bool],
        progress: Progress,
        errors: dict[str, float],
    ) -> None:
        self.config, self.wanted, self.leave_dense = config, wanted, leave_dense
        self.progress, self.errors = progress, errors

    def convert(
        self,
        input_dict: dict[str, Any],
        model: Any = None,
        missing_keys: Any = None,
        **unused: Any,
    ) -> Any:
        """Quantize `input_dict` (name: tensor, or a list of one) for `model`."""

        def make() -> Iterator[tuple[str, Any]]:
            try:
                while input_dict:
                    name = next(iter(input_dict))
                    value = input_dict.pop(name)
                    dense = value[0] if isinstance(value, list) else value
                    del value
                    if self.wanted(model, name):
                        if missing_keys is not None:
                            missing_keys.discard(name)
                        yield from self._quantize(model, name, dense)
                    else:
                        yield name, dense
            except BaseException:
                self.progress.close()
                raise

        return Deferred(make)

    def _quantize(self, model: Any, name: str, dense: Tensor) -> Iterator[tuple[str, Tensor]]:
        prefix, _, attribute = name.rpartition(".")
        module: VQLinear | VQExperts = model.get_submodule(prefix)
        expected = getattr(module, attribute).shape
        if dense.shape != expected:
            if self.leave_dense(model, prefix):
                yield name, dense
                return
            raise VQFormatError(
                f"the checkpoint's {name} has shape {list(dense.shape)}; {type(model).__name__} "
                f"expects {list(expected)}. Its config.json does not belong to it."
            )
        self.progress.start(prefix, dense.numel())
        shown = name if isinstance(module, VQExperts) else prefix
        fitted, self.errors[shown] = encode(module, attribute, dense, self.config, shown)
        for stored, tensor in module.begin_load(attribute, fitted).items():
            kept = nn.Parameter(tensor.contiguous(), requires_grad=False)
            yield f"{prefix}.{stored}", kept
        self.progress.done()


def advice(schemes: Iterable[LinearScheme]) -> str:
    """Advice where the schemes of layers take long: those that learn codebooks do."""
    slow = [s for s in schemes if isinstance(s, VQScheme) and s.codebook != "universal"]
    if not slow:
        return ""
    fast = f"vq-{min(max(int(slow[0].bits()), 2), 4)}"
    name = scheme_name(slow[0]) or slow[0].spec()
    return f"{name} learns codebooks for every layer; {fast} has ready ones, and is far faster."


def encode(
    module: VQLinear | VQExperts, weight: str, dense: Tensor, config: VQConfig, where: str
) -> tuple[list[dict[str, Tensor]], float]:
    """Encode one dense tensor of a layer without data.

    Args:
        module: the empty module that will store it.
        weight: name of the tensor in the layer.
        where: name of the layer, for errors.

    Returns:
        The stored tensors by key of each of its matrices, and the relative error of all together:
        squared error over squared norm.
    """
    fitted, error, energy = [], 0.0, 0.0
    for matrix in module.matrices(weight, dense):
        found = fit_weight(
            matrix, module.scheme, seed=config.seed, where=where, search=config.search
        )
        kind = torch.promote_types(matrix.dtype, torch.float32)
        norm = float(torch.linalg.vector_norm(matrix, dtype=kind)) ** 2
        error, energy = error + found.relative_error * norm, energy + norm
        fitted.append(found.tensors)
    return fitted, float(f"{error / energy if energy else 0.0:.4g}")


def settle(model: nn.Module) -> None:
    """Give the codes of a model that was just quantized their name, offloaded ones too."""
    for prefix, module in vq_modules(model).items():
        if not isinstance(module, VQLinear) or LOADING not in module._parameters:
            continue
        module.finish_load()
        if (hook := hook_of(module)) is not None:
            weights = hook.weights_map
            old, new = f"{weights.prefix}{LOADING}", f"{weights.prefix}weight"
            stores = [weights.dataset]
            if not isinstance(weights.dataset, dict):
                stores = [weights.dataset.state_dict, weights.dataset.index]
            if not any(old in store for store in stores):
                raise VQFormatError(
                    f"{prefix}: its offloaded codes are not where accelerate puts them."
                )
            for store in stores:
                if old in store:
                    store[new] = store.pop(old)


def bytes_per_weight(module: VQLinear | VQExperts) -> float:
    """Bytes of codes per weight: what a dense placeholder will shrink to."""
    codes = sum(
        torch.Size(spec.shape).numel() * spec.dtype.itemsize
        for name, spec in module.specs.items()
        if name == "weight" or name.endswith("_codes")
    )
    return codes / module.weight_count()
