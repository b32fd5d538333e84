"""Layers that stay dense without being named: task heads, and what a scheme does not fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers.utils import logging

from ..errors import VQConfigError, VQSchemeError
from ..formats.catalog import LinearScheme
from ..nn.replace import candidates, check_fits
from .checkpoint.new_parts import is_outside

logger = logging.get_logger("hf_vq")


def task_heads(model: Any) -> list[str]:
    """Names of the linear layers behind the base model that compute one output for each label."""
    labels = getattr(model.config, "num_labels", None)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == labels
        and is_outside(model, name)
    ]


def leave_misfits(
    model: Any, wanted: Mapping[str, Iterable[LinearScheme]], named: Iterable[str]
) -> list[str]:
    """Names of the modules that one of their schemes cannot store; one warning lists them.

    Args:
        wanted: the schemes that may store a module, by its name.
        named: modules that the user gave a scheme by name, which must fit.

    Raises:
        VQSchemeError, VQConfigError: a module that is named does not fit, or none fits.
    """
    modules, named = dict(candidates(model)), set(named)
    why: dict[str, VQSchemeError | VQConfigError] = {}
    for name, schemes in wanted.items():
        try:
            for scheme in schemes:
                check_fits(modules[name], scheme, where=name)
        except (VQSchemeError, VQConfigError) as error:
            if name in named:
                raise
            why[name] = error
    if why and len(why) == len(wanted):
        raise next(iter(why.values()))
    if why:
        sizes = {n: sum(p.numel() for p in modules[n].parameters()) for n in wanted}
        share = sum(sizes[name] for name in why) / sum(sizes.values())
        logger.warning(
            "hf_vq: %d of %d layers (%.1f %% of their weights) stay dense, because the scheme does "
            "not fit them: %s. To be silent about them, add them to "
            "VQConfig(modules_to_not_convert=[...]).",
            len(why), len(wanted), 100 * share, _listed(why, modules),
        )  # fmt: skip
    return list(why)


def _listed(names: Iterable[str], modules: Mapping[str, nn.Module]) -> str:
    """Names with their sizes; layers that differ in their number only are one."""

    def described(name: str) -> str:
        shapes = " and ".join(str(list(weight.shape)) for weight in modules[name].parameters())
        return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) + f" {shapes}"

    counts = Counter(map(described, names))
    return ", ".join(f"{what} ({n})" if n > 1 else what for what, n in counts.items())
