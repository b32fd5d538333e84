"""The frequencies with which a model's rotary position embeddings (RoPE) turn its keys.

A cache is handed keys and nothing else, so that they come from the config of the model, by the
functions of Transformers. Whether keys do turn like that is measured (`ops.rotary_mean`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LEAST = {"cpu": 0.0, "cuda": 48.0}
"""By type of device, see `least_strength`. Some layers of Qwen2.5-Coder (0.5B, 1.5B) have 60 to
10,000. All of SmolLM2-135M and Gemma-3-270M stay below 20 on prose, and SmolLM2's below 40 on
tables of numbers, too."""
TOGETHER = {"cuda": 16}
"""By type of device: pairs of a head whose turning takes as long as that of one."""
_NOT_LIKE_THAT = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)


def least_strength(device: torch.device) -> float:
    """How many times the energy that is left to a head's codes its rotary mean must have, so that
    the keys of a layer turn.

    On a CPU rotary means cost next to nothing. Attention on a GPU takes longer with them, so they
    must be worth it there. On other devices none is measured: infinity. Calibrated ones are used
    everywhere.
    """
    return LEAST.get(device.type, math.inf)


def turning_together(device: torch.device) -> int:
    """How many pairs of channels attention turns at once (`ops.rotary_mean.KeyMoments.means`)."""
    return TOGETHER.get(device.type, 1)


class RopeFrequencies:
    """The frequencies of a model's layers, on their devices: layers of a type share them.

    Args:
        config: of the model; None = unknown, no key turns.
    """

    def __init__(self, config: PreTrainedConfig | None = None) -> None:
        self.config = config
        self._kept: dict[tuple[Any, ...], tuple[int, Tensor | None]] = {}  # of the last length

    def __getstate__(self) -> dict[str, Any]:
        """The config alone: memory of a device is found again."""
        return {"config": self.config, "_kept": {}}

    def of(self, layer: int, keys: Tensor) -> Tensor | None:
        """`inverse_frequencies` of keys [B, H, n, D], on their device."""
        if self.config is None:
            return None
        text, (_, _, length, head_dim) = self.config.get_text_config(decoder=True), keys.shape
        kinds = getattr(text, "layer_types", None) or ()
        kind = kinds[layer] if layer < len(kinds) else None
        of = kind, _turns(text, layer), head_dim, keys.device
        known = self._kept.get(of)
        if known is None or known[0] != length:
            found = inverse_frequencies(self.config, layer, head_dim, length)
            known = length, None if found is None else found.to(keys.device)
            self._kept[of] = known
        return known[1]


def inverse_frequencies(
    config: PreTrainedConfig | None, layer: int, head_dim: int, length: int
) -> Tensor | None:
    """Radians per token of each pair of channels of a layer's keys: float32 [r], 2 r <= head_dim.

    Args:
        config: of the model; None = unknown.
        layer: number of the layer; layers may differ, as in Gemma 3.
        head_dim: numbers of a key.
        length: tokens of the prompt, which decide where a model has frequencies for long ones.

    Returns:
        None where keys do not turn, or nothing says how: layers without RoPE, embeddings that are
        no `rope_parameters`, and keys whose last channels turn (DeepSeek).
    """
    if config is None:
        return None
    text = config.get_text_config(decoder=True)
    if hasattr(text, "qk_rope_head_dim") or not _turns(text, layer):
        return None
    try:
        found = _of_type(text, layer, length)
    except _NOT_LIKE_THAT:  # a config that means something else by these names
        return None
    usable = found.ndim == 1 and 0 < 2 * len(found) <= head_dim and bool(found.isfinite().all())
    return found.float() if usable else None


def _turns(text: Any, layer: int) -> bool:
    """Whether a layer has RoPE at all: SmolLM3 and Llama 4 leave it out of some."""
    turning = getattr(text, "no_rope_layers", None)
    if isinstance(turning, (list, tuple)) and layer < len(turning):
        return bool(turning[layer])
    return True


def _of_type(text: Any, layer: int, length: int) -> Tensor:
    """The frequencies that the config's parameters say.

    Raises:
        KeyError, ...: they are missing, or of a type that Transformers does not have.
    """
    parameters: Mapping[str, Any] = text.rope_parameters
    kinds, options = getattr(text, "layer_types", None) or (), {}
    if layer < len(kinds) and isinstance(parameters.get(kinds[layer]), Mapping):
        parameters, options = parameters[kinds[layer]], {"layer_type": kinds[layer]}
    name = parameters.get("rope_type", "default")
    with torch.device("cpu"):
        if name != "default":
            frequencies: Tensor = ROPE_INIT_FUNCTIONS[name](
                text, torch.device("cpu"), seq_len=length, **options
            )[0]
            return frequencies
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        count = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
        powers = torch.arange(0, count, 2, dtype=torch.int64).float() / count
        slowest: Tensor = 1.0 / (parameters["rope_theta"] ** powers)
        return slowest
