"""Largest inputs of layers, which the transforms need: one pass of the float model over text."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import VQCalibrationError
from ...progress import bar
from ..kv_codebooks import run_recorded
from .smooth_attention import Largest

TOKENS = 1 << 14  # a maximum over more hardly grows


@torch.no_grad()
def largest_inputs(
    model: Any, sequences: Tensor, layers: Iterable[str], keys: bool, progress: bool = True
) -> dict[str, Tensor]:
    """Measure the largest absolute value of every channel, float32 on the CPU.

    Args:
        sequences: token ids [sequences, tokens]; the first TOKENS tokens are read.
        layers: names of linear layers whose inputs [in] count.
        keys: whether keys count, too.

    Returns:
        Maxima [in] by the layer's name; those of keys, [kv heads, head_dim], by `keys.NUMBER` of
        the layer.

    Raises:
        VQCalibrationError: an input is not finite.
        VQCacheError: `keys` is True and the model has no cache of keys and values.
    """
    found: dict[str, Tensor] = {}
    count = max(1, TOKENS // sequences.shape[1])
    largest = Largest()
    with ExitStack() as stack:
        for name in layers:
            layer = model.get_submodule(name)
            hook = partial(_record, found, name)
            stack.callback(layer.register_forward_pre_hook(hook).remove)
        for ids in bar(sequences[:count], "looking for outliers", progress):
            run_recorded(model, ids, largest)
    for name, channels in found.items():
        if not bool(channels.isfinite().all()):
            raise VQCalibrationError(
                f"the inputs of {name} hold NaN or infinity on the calibration text. Load the "
                "model in bfloat16 or float32."
            )
    if keys:
        found |= {f"keys.{index}": of for index, of in sorted(largest.of.items())}
    return found


def _record(found: dict[str, Tensor], name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
    channels = args[0].detach().abs().flatten(0, -2).amax(0).float().cpu()
    before = found.get(name)
    found[name] = channels if before is None else torch.maximum(channels, before)
