"""Stored tensors that train next to fixed codes: scales and learned codebooks.

    scale       s (1 + d)
    codebook    c + rms(c) d        rms of one codebook [entries, x]

d is a parameter, float32, 0 at first. fp16, in which these tensors are stored, is too coarse for
the steps of an optimizer; and as d is relative, one learning rate serves all layers. An op gets the
moved tensor rounded to fp16, as a file will hold it. The gradient passes the rounding unchanged
(straight-through estimator, Bengio et al., arXiv 1308.3432).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import VQConfigError, shown

if TYPE_CHECKING:
    from .quantized_module import QuantizedModule

_RANGE = (torch.finfo(torch.float16).min, torch.finfo(torch.float16).max)
KINDS = {"scales": ("scale", "scale_2"), "codebooks": ("codebook", "codebook_2")}
"""Keys of the stored tensors that each value of `VQConfig(trainable=...)` names."""


def check_trainable(trainable: object) -> list[str]:
    """The value of `VQConfig(trainable=...)` as a list.

    Raises:
        VQConfigError: it names something else than `KINDS`, or nothing.
    """
    names = [trainable] if isinstance(trainable, str) else trainable
    if not isinstance(names, (list, tuple)) or not names or not all(n in KINDS for n in names):
        raise VQConfigError(
            f"trainable must be of {', '.join(map(repr, KINDS))}; got {shown(trainable)}. Codes "
            'are trained by calibration={"text": ..., "finetune": "model"}.'
        )
    return [name for name in KINDS if name in names]


def train(modules: Mapping[str, Any], kinds: Iterable[str]) -> None:
    """Let changes of stored tensors train; they begin at 0. The tensors themselves do not train,
    though Transformers lets every float tensor train that it reads.

    Args:
        modules: those with codes, embeddings included, by name.
        kinds: of `KINDS`.

    Raises:
        VQConfigError: no module has a tensor of a kind, or its tensors are offloaded.
    """
    layers = {name: module for name, module in modules.items() if hasattr(module, "specs")}
    for name, module in modules.items():
        for attribute in module.specs if name in layers else module.keys:
            if (stored := module._parameters.get(attribute)) is not None:
                stored.requires_grad_(False)
    for kind in kinds:
        found = 0
        for name, module in layers.items():
            for attribute in _attributes(module, KINDS[kind]):
                found += 1
                _add(module, attribute, name)
        if not found:
            raise VQConfigError(
                f"trainable={kind!r}: no layer stores such a tensor. Schemes as vq-4 have one "
                "codebook for all layers, which stays; gptvq-2 and aqlm-* learn theirs."
            )


def _attributes(module: Any, keys: tuple[str, ...]) -> list[str]:
    """Attributes of the stored float tensors of a module, by their keys."""
    parts = module.projections.values() if hasattr(module, "projections") else [module]
    own = [part.attributes[key] for part in parts for key in keys if key in part.attributes]
    specs = module.specs
    return [a for a in own if specs[a].shared_name is None and specs[a].dtype == torch.float16]


def _add(module: Any, attribute: str, where: str) -> None:
    stored = getattr(module, attribute)
    if stored.is_meta:
        raise VQConfigError(f"{where} is offloaded and cannot train: load it without offloading.")
    name = f"{attribute}_delta"
    module.deltas = {**module.deltas, attribute: name}
    module.register_parameter(name, nn.Parameter(torch.zeros_like(stored, dtype=torch.float32)))
    module._bound = None  # which has no gradients of what is stored


def moved(stored: Tensor, delta: Tensor, attribute: str) -> Tensor:
    """The tensor with its change, rounded to fp16 but float32, as gradients of fp16 would
    underflow."""
    origin = stored.detach().float()
    size = origin  # of a scale; of a codebook, how large its entries are
    if "scale" not in attribute:
        size = origin.square().mean((-2, -1), keepdim=True).sqrt()
    exact = (origin + size * delta).clamp(*_RANGE)
    return exact + (exact.detach().to(stored.dtype).float() - exact.detach())


def moved_tensor(module: QuantizedModule, attribute: str) -> Tensor:
    """A stored tensor of a module, with its change if it trains."""
    stored: Tensor = getattr(module, attribute)
    name = module.deltas.get(attribute)
    return stored if name is None else moved(stored, getattr(module, name), attribute)


def forget_changes(module: QuantizedModule) -> None:
    """Start again at 0: the stored tensors were replaced."""
    for name in module.deltas.values():
        before: Tensor = getattr(module, name)
        fresh = nn.Parameter(torch.zeros_like(before), requires_grad=before.requires_grad)
        module._parameters[name] = fresh


def unfreeze(model: nn.Module) -> bool:
    """Let train again what `train` did: PEFT freezes all that is not its own. True if there is
    anything."""
    changes = [
        module.get_parameter(name)
        for module in model.modules()
        for name in getattr(module, "deltas", {}).values()
    ]
    for change in changes:
        change.requires_grad_(True)
    return bool(changes)
