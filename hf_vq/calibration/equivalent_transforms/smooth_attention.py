"""`smooth_attention`: SmoothAttention (QServe, section 4.2), folded into a model's own weights.

    no norm behind the projections      rows of q_proj times l, rows of k_proj over l, biases too
    QK-norm with a weight               its weight, for all heads at once or channel by channel

The logits stay bit-identical: l is a power of two, and the two channels of a RoPE pair share one.
This is verified: the logits on a piece of text must be equal, with the channel pairs of one kind of
RoPE or of the other. If they are not, the weights are restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.codebooks import SINKS
from ...errors import VQCalibrationError
from ...hf.calibration_options import MIN_CONTEXT
from ...progress import bar
from ...transforms.smoothing import ALPHA, PAIRINGS, partners, smoothing_factors
from ..kv_codebooks import TOKENS, check_number, checked_context, run_recorded
from ..text import sequences_of

_PROBE = 64  # tokens on which the logits must be equal


@torch.no_grad()
def smooth_attention(
    model: Any,
    text: str | Sequence[int] | Tensor | None = None,
    tokenizer: Any = None,
    *,
    alpha: float = ALPHA,
    tokens: int = TOKENS,
    context: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> dict[int, Tensor]:
    """Smooth the channels of a model's keys, in place; its outputs stay the same.

    For KV caches that do not rotate keys (`qserve-kv4`, `nomad-*`, `cq-*` learned afterwards).
    Save the model as always: it has the same tensors and config as before.

    Args:
        model: a decoder-only language model that is not quantized, in any dtype.
        text, tokenizer, tokens, context, seed, progress: as for `calibrate_kv`.
        alpha: strength of the smoothing, from 0 (none) to 1 (all channels equal).

    Returns:
        Divisors of the keys by layer: float32 [kv heads, head_dim].

    Raises:
        VQCalibrationError: the text is too short, the model's attention has no separate `q_proj`
            and `k_proj`, is quantized, or is of a kind that smoothing would change.
        VQCacheError: as `calibrate_kv`.
    """
    if not 0 <= alpha <= 1:
        raise VQCalibrationError(f"smooth_attention(alpha=...) must be in [0, 1]; got {alpha!r}.")
    _layers_of(model)  # raises before the model runs
    check_number("tokens", tokens, MIN_CONTEXT)
    context = min(checked_context(model, context), tokens)
    was_training = model.training
    model.eval()
    try:
        sequences = sequences_of(model, text, tokenizer, tokens, context, seed, progress)
        largest = Largest()
        for ids in bar(sequences, "recording", progress):
            run_recorded(model, ids, largest)
        return apply_smoothing(model, largest.of, sequences[0], alpha)
    finally:
        model.train(was_training)


class Largest:
    """The largest absolute key of every layer, head and channel."""

    sinks = SINKS

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Update the maxima with keys [B, H, n, D], without the sinks."""
        found = keys.abs().amax((0, 2)).float().cpu()
        self.of[layer] = torch.maximum(found, self.of.get(layer, found))


@torch.no_grad()
def apply_smoothing(
    model: Any, largest: Mapping[int, Tensor], probe: Tensor, alpha: float = ALPHA
) -> dict[int, Tensor]:
    """Apply `smooth_attention` with maxima of the keys that are already measured.

    Args:
        largest: max |K| by layer [kv heads, head_dim].
        probe: token ids [tokens]; logits on the first ones must not change.
        alpha: strength of the smoothing.

    Returns:
        Divisors of the keys by layer: float32 [kv heads, head_dim].
    """
    layers = _layers_of(model)
    ids = probe[None, :_PROBE].to(model.device)
    before = model(ids, use_cache=False).logits
    if not bool(before.isfinite().all()):
        raise VQCalibrationError(
            "the model predicts NaN or infinity. Load it in bfloat16 or float32."
        )
    for layer in layers:
        if layer.index not in largest:  # it reads the keys of another layer
            raise VQCalibrationError(
                f"{layer.name} reads the keys of another layer. SmoothAttention does not support "
                "keys that several layers share."
            )
    kept = [layer.weights() for layer in layers]
    for pairing in PAIRINGS:
        factors, same = {}, False
        try:
            for layer in layers:
                most = largest[layer.index]
                pairs = partners(most.shape[1], rotated_channels(model, most.shape[1]), pairing)
                factors[layer.index] = layer.smooth(most, pairs, alpha)
            same = torch.equal(model(ids, use_cache=False).logits, before)
        finally:  # also where it was interrupted
            if not same:
                for layer, weights in zip(layers, kept, strict=True):
                    layer.restore(weights)
        if same:
            return factors
    raise VQCalibrationError(
        f"SmoothAttention would change what {type(model).__name__} computes: its attention does "
        "more with queries and keys than RoPE. Use a scheme that rotates keys, such as u4, which "
        "needs no smoothing."
    )


def _layers_of(model: Any) -> list[_Attention]:
    """All attention modules; raises if one of them cannot be smoothed."""
    layers = [_Attention(*each) for each in model.named_modules() if _is_attention(each[1])]
    if not layers:
        raise VQCalibrationError(
            f"{type(model).__name__} has no attention with separate q_proj and k_proj, which "
            "SmoothAttention needs."
        )
    for layer in layers:
        layer.check()
    return layers


def rotated_channels(model: Any, head_dim: int) -> int:
    """Number of a key's channels that RoPE rotates."""
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "rotary_dim", None)
    if isinstance(count, int):
        return count
    found = getattr(config, "rope_parameters", None) or {}
    factor = getattr(config, "partial_rotary_factor", None) or found.get("partial_rotary_factor")
    return int(head_dim * factor) if isinstance(factor, float) else head_dim


def _is_attention(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in ("q_proj", "k_proj"))


@dataclass
class _Attention:
    """An attention module, and the weights that scale its queries and keys."""

    name: str
    module: Any

    @property
    def index(self) -> int:
        """Its number in the cache."""
        return int(getattr(self.module, "layer_idx", -1))

    @property
    def ends(self) -> tuple[Any, Any]:
        """Last modules of queries and keys before RoPE: their norms, or the projections."""
        query, key = (getattr(self.module, f"{side}_norm", None) for side in "qk")
        if query is not None and key is not None:
            return query, key
        return self.module.q_proj, self.module.k_proj

    def check(self) -> None:
        """Raise VQCalibrationError if factors cannot be folded into the weights."""
        for end in self.ends:
            weight = getattr(end, "weight", None)
            if weight is None or not weight.is_floating_point() or weight.is_meta:
                kind = "has no weight" if weight is None else "is quantized or offloaded"
                raise VQCalibrationError(
                    f"{self.name}: a {type(end).__name__} in front of RoPE {kind}, so "
                    "SmoothAttention cannot be folded into it. Fold before you quantize."
                )

    def weights(self) -> list[Tensor]:
        """Copies of the tensors that `smooth` changes."""
        return [part.clone() for end in self.ends for part in _parts(end)]

    def restore(self, kept: list[Tensor]) -> None:
        """Undo `smooth`."""
        parts = [part for end in self.ends for part in _parts(end)]
        for part, before in zip(parts, kept, strict=True):
            part.copy_(before)

    def smooth(self, largest: Tensor, pairs: Tensor, alpha: float) -> Tensor:
        """Multiply queries and divide keys by smoothing factors.

        Args:
            largest: max |K| of the channels, [kv heads, D].
            pairs: the partner of each channel under RoPE, [D].

        Returns:
            The factors, [kv heads, D].
        """
        heads, dim = largest.shape
        queries, keys = self.ends
        if keys.weight.shape[0] == dim:  # one norm for all heads
            largest = largest.amax(0, keepdim=True).expand_as(largest)
        factors = smoothing_factors(largest, pairs, alpha)
        for end, each in ((queries, factors), (keys, 1 / factors)):
            count = end.weight.shape[0] // dim
            each = each[:1] if count == 1 else each.repeat_interleave(count // heads, 0)
            for part in _parts(end):
                part.mul_(each.flatten().to(part).reshape(-1, *[1] * (part.ndim - 1)))
        return factors


def _parts(end: Any) -> list[Tensor]:
    return [part for part in (end.weight, getattr(end, "bias", None)) if part is not None]
