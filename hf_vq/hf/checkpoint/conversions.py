"""Transformers' conversions of checkpoint tensors, where layers hold codes instead.

A model's conversion mapping may split, merge or transpose dense tensors. Codes are stored under
the names and in the shape of the module that uses them: such a conversion must not touch them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...nn.replace import vq_modules


def stored_names(model: Any) -> list[str]:
    """Names of all parameters of the VQ modules of a model."""
    return [
        f"{prefix}.{name}"
        for prefix, module in vq_modules(model).items()
        for name in module._parameters
    ]


def conversions_of(model: Any) -> list[Any]:
    """The conversions by which a model was loaded; for one that was made in memory, those that
    saving would revert."""
    found = getattr(model, "_weight_conversions", None)
    if found is None:
        made = get_model_conversion_mapping(model, add_legacy=False)
        found = [c for c in made if type(c).__name__ != "PrefixChange"]
    return list(found)


def dense_conversions(
    conversions: Iterable[Any], model: Any, *, reverse: bool = False
) -> list[Any]:
    """The conversions that do not touch the parameters of VQ modules, or rename them so that the
    names come back.

    Args:
        reverse: they will be reverted, to save the model.
    """
    names = stored_names(model)
    kept = []
    for conversion in conversions:
        # Asking for a name marks a conversion as used, hence the copy.
        candidate = copy.deepcopy(conversion)
        if isinstance(conversion, WeightConverter):
            if reverse:
                try:
                    candidate = candidate.reverse_transform()
                except NotImplementedError:
                    continue  # it cannot be reverted, with or without codes
            if any(candidate.rename_source_key(name)[1] is not None for name in names):
                continue
        elif type(conversion) is WeightRenaming and not _is_undone(candidate, names):
            continue
        kept.append(conversion)
    return kept


def _is_undone(renaming: WeightRenaming, names: Iterable[str]) -> bool:
    """True if stored names come back after saving, which reverts a renaming, and loading. One from
    `gate` to `gate.weight` leaves `gate.vq_scale` alone, and then makes it `gate.weight.vq_scale`.
    """
    back = renaming.reverse_transform()
    return all(
        renaming.rename_source_key(back.rename_source_key(name)[0])[0] == name for name in names
    )


def renamer(conversions: Iterable[Any], model: Any) -> Callable[[str], str]:
    """The function from a name in a checkpoint to the name in `model`, as the loader applies it."""
    return renamer_to(conversions, model, model.state_dict())


def renamer_to(
    conversions: Iterable[Any], model: Any, names: Iterable[str]
) -> Callable[[str], str]:
    """The same, if the tensors of `model` were called `names`."""
    renamings = [copy.deepcopy(c) for c in conversions if isinstance(c, WeightRenaming)]
    state = dict.fromkeys(names, True)
    prefix = model.base_model_prefix

    def rename(name: str) -> str:
        renamed: str = rename_source_key(name, renamings, [], prefix, state)[0]
        if renamed not in state and name in state:
            renamed = rename_source_key(name, [], [], prefix, state)[0]
        return renamed

    return rename
