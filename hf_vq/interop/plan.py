"""`Plan`: map the tensors of a published checkpoint to the layers of a model.

The file decides: a layer with codes in the file is quantized, whatever the config's list of skipped
layers contains. (Lists of public AQLM checkpoints name parameters, `lm_head.weight`, others name
modules.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping

from ..errors import VQConfigError, VQFormatError
from ..formats.published import LAYOUTS, Layout
from ..formats.published.layout import CURE, FLOATS
from ..formats.spec import is_finite
from ..hf.checkpoint.conversions import renamer_to
from ..hf.checkpoint.expert_names import listed_names, part_names
from ..hf.checkpoint.headers import Checkpoint
from ..nn.expert_list import Parts, VQExpertList
from ..nn.linear import VQLinear, attribute_of
from ..nn.replace import candidates, convertible


@dataclass(frozen=True)
class PublishedLayer:
    """One linear layer of a published checkpoint.

    Args:
        name: of the module in the model.
        layout: how it is stored.
        size: out_features and in_features.
        sources: name in the file of each tensor, by suffix.
    """

    name: str
    layout: Layout
    size: tuple[int, int]
    sources: dict[str, str]

    @property
    def kept(self) -> list[str]:
        """Suffixes of the tensors that are needed."""
        whole = self.layout.stored_as is None
        return [suffix for suffix in self.sources if whole or suffix in self.layout.scheme_keys]

    def key(self, suffix: str) -> str:
        """Key of the tensor that a published tensor becomes."""
        if self.layout.stored_as is None:
            return self.layout.key(suffix)
        return self.layout.scheme_keys[suffix]

    def moves(self) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
        """Conversions by name in the file: name in the model, function that makes the tensor."""
        found = {}
        for suffix in self.kept:
            source = self.sources[suffix]
            found[source] = (f"{self.name}.{attribute_of(self.key(suffix))}", self._maker(suffix))
        return found

    def _maker(self, suffix: str) -> Callable[[Tensor], Tensor]:
        def make(tensor: Tensor) -> Tensor:
            source = self.sources[suffix]
            if not is_finite(self.layout.values(suffix, tensor)):
                raise VQFormatError(f"{source} holds NaN or infinity. {CURE}")
            if self.layout.stored_as is None:
                self.layout.inspect(suffix, tensor, source)
                return tensor.contiguous()
            return self.layout.stored(suffix, tensor, source).contiguous()

        return make


@dataclass
class Plan:
    """Mapping of a published checkpoint to one model.

    Args:
        layers: coded layers by name in the model.
        lists: modules of experts that are coded one by one, with the names of their matrices.
        dense: linear layers that the file stores dense.
        rename: name in a file -> name in the model.
        prefix: prefix of the base model in names.
    """

    layers: dict[str, PublishedLayer] = field(default_factory=dict)
    lists: set[str] = field(default_factory=set)
    parts: Parts = field(default_factory=dict)
    dense: list[str] = field(default_factory=list)
    rename: Callable[[str], str] = str
    prefix: str = ""

    def spellings(self, source: str) -> set[str]:
        """Names of a tensor of the file, with and without the prefix of the base model."""
        name = self.rename(source)
        return {name, name.removeprefix(self.prefix), self.prefix + name}


def make_plan(
    model: Any,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    conversions: Iterable[Any] | None = None,
) -> Plan:
    """Find every coded layer of `model` in a published checkpoint, and check its tensors.

    Args:
        config: the checkpoint's `quantization_config`.

    Raises:
        VQConfigError: an unknown variant.
        VQFormatError: a tensor is missing, or does not fit; names it, and the cure.
    """
    kind = LAYOUTS[config["quant_method"]]
    if conversions is None:
        conversions = get_model_conversion_mapping(model)
    conversions = list(conversions)
    parts = part_names(conversions)
    lists = listed_names(model, parts)
    sizes = dict(_sizes(model, parts, lists))
    expected = {f"{name}.{suffix}": True for name in sizes for suffix in kind.suffixes}
    rename = renamer_to(conversions, model, expected)
    plan = Plan(parts=parts, rename=rename, prefix=f"{model.base_model_prefix}.")
    sources: dict[str, dict[str, str]] = {}
    stray: list[str] = []
    for stored in checkpoint.entries:
        name, suffix = split_name(rename(stored), kind)
        if suffix is None or (suffix == kind.codes and checkpoint.entries[stored].is_float):
            continue  # a dense layer's weight may be called as another method's codes
        if name in sizes:
            sources.setdefault(name, {})[suffix] = stored
        elif suffix == kind.codes:
            stray.append(stored)
    _check_stray(model, stray, rename, kind)
    for name, found in sources.items():
        plan.layers[name] = _layer(checkpoint, config, kind, name, found, sizes[name])
    if not plan.layers:
        raise VQFormatError(
            f"{', '.join(checkpoint.files)}: config.json says {kind.method}, but no layer of "
            f"{type(model).__name__} has {kind.codes} there. {CURE}"
        )
    for name, listed in lists.items():
        coded = [one for one in listed if one in plan.layers]
        if coded and len(coded) < len(listed):
            lacking = next(one for one in listed if one not in plan.layers)
            raise VQFormatError(
                f"the checkpoint lacks {lacking}.{kind.codes}, while other experts of {name} have "
                f"codes: the layer would be random. {CURE}"
            )
        if coded:
            plan.lists.add(name)
    skipped = {name for name, _ in candidates(model)} - set(plan.layers) - plan.lists
    plan.dense = sorted(skipped)
    return plan


def build(model: nn.Module, plan: Plan, make: Callable[..., nn.Module]) -> None:
    """Put empty modules, on the meta device, in the place of the coded layers of a plan.

    Args:
        make: `make(layer, source)` of a `PublishedLayer` and the module to replace.
    """
    linear = nn.Linear(1, 1, bias=False, device="meta")
    for name in plan.lists:
        experts = model.get_submodule(name)

        def one(path: str, out_features: int, in_features: int) -> nn.Module:
            return make(plan.layers[path], linear)

        with torch.device("meta"):
            model.set_submodule(name, VQExpertList(experts, plan.parts, one, name))
    for name, layer in plan.layers.items():
        module = model.get_submodule(name)
        if not isinstance(module, VQLinear):
            with torch.device("meta"):
                new = make(layer, module)
            model.set_submodule(name, new.train(module.training))


def neither(layer: str, method: str) -> VQFormatError:
    """The error of a layer that is in the checkpoint neither coded nor dense."""
    codes = LAYOUTS[method].codes
    return VQFormatError(
        f"the checkpoint has neither {layer}.{codes} nor {layer}.weight: the layer would be "
        f"random. {CURE}"
    )


def split_name(name: str, kind: type[Layout]) -> tuple[str, str | None]:
    """A tensor's layer and suffix; no suffix where it is not one of a coded layer."""
    for suffix in kind.suffixes:
        if name.endswith(f".{suffix}"):
            return name.removesuffix(f".{suffix}"), suffix
    return name, None


def _sizes(
    model: nn.Module, parts: Parts, lists: Mapping[str, list[str]]
) -> Iterable[tuple[str, tuple[int, int]]]:
    """out_features and in_features of every layer that codes may stand for."""
    for name, module in candidates(model):
        if convertible(module):
            weight: Any = module.weight
            rows, columns = weight.shape
            yield name, (rows, columns) if isinstance(module, nn.Linear) else (columns, rows)
    for name, listed in lists.items():
        experts = model.get_submodule(name)
        shapes: dict[str, tuple[int, int]] = {}
        for fused, names in parts.items():
            if (weight := getattr(experts, fused, None)) is not None:
                rows, columns = weight.shape[1:]
                if getattr(experts, "is_transposed", False):
                    rows, columns = columns, rows
                shapes |= dict.fromkeys(names, (rows // len(names), columns))
        for one in listed:
            yield one, shapes[one.rpartition(".")[2]]


def _layer(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    kind: type[Layout],
    name: str,
    sources: dict[str, str],
    size: tuple[int, int],
) -> PublishedLayer:
    found = {suffix: checkpoint.entries[source] for suffix, source in sources.items()}
    tensors = {suffix: entry.placeholder() for suffix, entry in found.items()}
    where = split_name(next(iter(sources.values())), kind)[0]
    try:
        layout = kind.of(config, where, tensors)
    except VQConfigError as error:
        raise VQConfigError(f"{where}: {error}") from None
    layout.check(tensors, size, where)
    if getattr(layout, "dtype", "float16") != "float16":
        # Numbers of another dtype fit float16 or not: only they can say.
        half = replace(layout, dtype="float16")  # type: ignore[call-arg]
        floats = [s for s, tensor in tensors.items() if tensor.dtype in FLOATS]
        if half.scheme() and all(
            _fits_half(half.values(s, checkpoint.read(sources[s]))) for s in floats
        ):
            layout = half
    return PublishedLayer(name, layout, size, sources)


def _fits_half(tensor: Tensor) -> bool:
    return torch.equal(tensor.half().to(tensor.dtype), tensor)


def _check_stray(
    model: nn.Module, stray: list[str], rename: Callable[[str], str], kind: type[Layout]
) -> None:
    """Raise if codes belong to a module of the model that cannot hold them."""
    modules = dict(model.named_modules())
    base = f"{getattr(model, 'base_model_prefix', '')}."
    for stored in stray:
        name = rename(stored).rpartition(".")[0]
        for owner in (name, name.removeprefix(base), base + name):
            if owner in modules and owner:
                raise VQFormatError(
                    f"{stored} are codes, but {owner} is a {type(modules[owner]).__name__}, which "
                    f"hf_vq cannot read from {kind.method}. Its weight would be random."
                )
