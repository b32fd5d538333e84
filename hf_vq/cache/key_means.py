"""What a layer subtracts from its keys before they are coded, and multiplies them by.

    mean, rotary mean   A constant in all keys of a head shifts all logits of a query alike, so
                        softmax does not see it, but a code would have to hold it. What is constant
                        before rotary position embeddings turns with the position after them
                        (`ops.rotary_mean`). Decided by keys.
    smoothing           Channels in which queries are large have smaller errors
                        (`transforms.key_smoothing`). Decided by keys and queries of the prompt.

All are decided once per row, and never change.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..dispatch import KeyMeansProblem, KeySmoothingProblem, select
from ..errors import VQBackendError, VQCacheError
from ..formats.scheme import VQScheme
from ..ops import kv_append
from ..ops.library import attention_problem, name_of
from ..ops.reference.codes import mean_of
from ..ops.rotary_mean import PromptMeans, rotated
from ..transforms.key_smoothing import FEWEST
from .kv_side import SideBuffers
from .rotary import RopeFrequencies, least_strength, turning_together
from .token_buffer import storing

if TYPE_CHECKING:
    from .layer import VQCacheLayer


@dataclass(frozen=True)
class Calibrated:
    """Means of a layer's keys, and factors, that are known before the prompt.

    Args:
        mean: [H, D].
        rotary_mean: float32 [H, D], at position 0; None = 0.
        interleaved: as of `ops.rotary_mean.rotated`.
        smoothing: float32 [H, D], by which keys less their means are multiplied, of schemes that
            are `smoothable`; None = 1: the prompt decides nothing.
    """

    mean: Tensor
    rotary_mean: Tensor | None = None
    interleaved: bool = False
    smoothing: Tensor | None = None


@dataclass(frozen=True)
class Rotary:
    """How the keys of a layer turn.

    Args:
        inv_freq: float32 [r] on the layer's device, radians per token of each pair of channels.
        interleaved: pairs are channels (2 p, 2 p + 1), else (p, p + r); None = not measured yet.
    """

    inv_freq: Tensor
    interleaved: bool | None = None

    @classmethod
    def of(
        cls, rope: RopeFrequencies, layer: int, keys: Tensor, known: Calibrated | None
    ) -> Rotary | None:
        """What a model's config says, and calibrated means; None: keys do not turn.

        Args:
            rope: the model's.
            layer: number of the layer.
            keys: [B, H, n, D] of the prompt.
            known: None = nothing is.

        Raises:
            VQCacheError: a rotary mean is known, but not how keys turn, or other channels turn.
        """
        turning = None if known is None else known.rotary_mean
        if turning is None and least_strength(keys.device) == math.inf:
            return None
        found = rope.of(layer, keys)
        if turning is not None:
            what = "the config does not say how they turn with the position"
            if found is not None:
                what = f"it is not 0 in channels from {2 * len(found)} on, which do not turn"
            if found is None or bool(turning[..., 2 * len(found) :].any()):
                raise VQCacheError(
                    f"there is a rotary mean of the keys of layer {layer}, but {what}: the "
                    "codebooks are of another model. Make them with `hf-vq calibrate` and this "
                    "model."
                )
        interleaved = None if known is None else known.interleaved
        return None if found is None else cls(found, interleaved)

    @torch.compiler.disable
    def means(self, keys: Tensor, first: int) -> PromptMeans:
        """What keys [B, H, n, D] from position `first` decide, with the layout of pairs that they
        show unless it is known; rows below `least_strength` stand, and weak pairs where
        `turning_together` says what turning costs."""
        asked = KeyMeansProblem(keys.device.type, name_of(keys.dtype), keys.shape[3])
        least, together = least_strength(keys.device), turning_together(keys.device)
        found: PromptMeans = select(asked).run(
            keys, first, self.inv_freq, self.interleaved, least, together
        )
        return found

    @torch.compiler.disable
    def smoothing(
        self,
        query: Tensor,
        keys: Tensor,
        mean: Tensor,
        turning: Tensor | None,
        shown: Tensor | bool,
    ) -> Tensor:
        """Factors of keys, as `ops.reference.key_means.prompt_smoothing`."""
        asked = KeySmoothingProblem(keys.device.type, name_of(keys.dtype), keys.shape[3])
        pairs = len(self.inv_freq)
        factors: Tensor = select(asked).run(query, keys, mean, turning, pairs, shown)
        return factors


def rotary_of(
    rope: RopeFrequencies,
    layer: int,
    keys: Tensor,
    sides: tuple[SideBuffers, SideBuffers],
    known: Calibrated | None,
) -> Rotary | None:
    """`Rotary.of`, but None where means would be measured and attention on a GPU has a kernel for
    keys without a rotary mean only.

    Args:
        sides: keys and values; the others as there.

    Raises:
        VQCacheError: as there.
    """
    if known is None and 0 < least_strength(keys.device) < math.inf:
        k, v = sides
        of = k.spec, v.spec, k.dim, v.dim, 1, 0, k.codes.layout, v.codes.layout
        asked = [
            attention_problem(keys.device, keys.dtype, *of, rotary=turns) for turns in (False, True)
        ]
        try:
            names = {select(problem).name for problem in asked}
        except VQBackendError:  # a backend was forced that has no such kernel
            return None
        if len(names) > 1:
            return None
    return Rotary.of(rope, layer, keys, known)


def freeze_means(layer: VQCacheLayer, keys: Tensor, prompt: int) -> None:
    """Decide the means of each row whose first token after the sinks is about to be encoded.

    They are those of the prompt if that is longer than sinks + window, else of the first half of
    the first window. Neither contains a candidate that can still be rejected (unless window / 2 of
    them are in flight), so assisted decoding finds the means of greedy decoding.

    Args:
        keys: floats [B, H, n, D] of the n newest tokens.
        prompt: tokens of the prompt, if these are all of it; else 0.
    """
    origin, end = layer.length - keys.shape[2], layer.length - layer.window
    for row, (rows, start) in enumerate(_rows(layer)):
        first = max(start + layer.sinks, origin)
        if layer._frozen[row] or end <= first:
            continue
        last = prompt if prompt > first + layer.window else first + max(layer.window // 2, 1)
        tokens = keys[rows, :, first - origin : last - origin]
        _measure(layer, rows, tokens, first)
        layer._frozen[row] = True
    layer._bound = None  # other kernels, if keys turn


def _rows(layer: VQCacheLayer) -> list[tuple[slice, int]]:
    """Rows of the batch that begin together, and the position of their first token."""
    if layer._start is None:
        return [(slice(None), 0)]
    return [(slice(row, row + 1), start) for row, start in enumerate(layer._start)]


def _measure(layer: VQCacheLayer, rows: slice, tokens: Tensor, first: int) -> None:
    """Set the means of some rows.

    Args:
        layer: the tensors of its keys' means are replaced, not written to.
        rows: of the batch.
        tokens: keys [rows, H, n, D] of these rows, without sinks: theirs are unlike all others.
        first: position of the first of them.
    """
    side, rotary = layer.k, layer._rotary
    assert side.mean is not None
    if rotary is None:
        side.mean = _with_rows(side.mean, rows, mean_of(tokens))
        return
    mean, turning, shown = rotary.means(tokens, first)
    interleaved, turns = shown.tolist()  # a GPU waits here
    layer._rotary = Rotary(rotary.inv_freq, bool(interleaved))
    layer._pairs = None if layer._pairs is None else layer._rotary
    side.mean, before = _with_rows(side.mean, rows, mean), side.rotary_mean
    if before is None and not turns:  # no layer pays for what no head needs
        return
    before = torch.zeros_like(side.mean) if before is None else before
    side.rotary_mean = _with_rows(before, rows, turning)


def _with_rows(tensor: Tensor, rows: slice, part: Tensor) -> Tensor:
    """`tensor` [B, H, 1, D] with other rows."""
    if part.shape == tensor.shape:
        return part
    changed = tensor.clone()
    changed[rows] = part
    return changed


def pairs_of(layer: VQCacheLayer, keys: Tensor) -> Rotary | None:
    """How keys [B, H, n, D] turn, if they can be smoothed: what later positions turn into what must
    be known."""
    if layer.k.mean is None or layer.calibrated is not None or not smoothable(layer.k.scheme):
        return None
    return layer._rotary or Rotary.of(layer.options.rope, layer.index, keys, None)


def smoothable(scheme: VQScheme) -> bool:
    """True if all channels of a key share the errors of its code, which has one scale."""
    rotated = scheme.codebook == "universal" and scheme.rotation != "none"
    return rotated and scheme.mode != "product" and not scheme.scale_group and scheme.residuals == 1


class SeesQueries(Protocol):
    """Who may `ask_for_queries`."""

    version: int
    """Queries that were asked for under another one are not shown."""

    def see_queries(self, query: Tensor, keys: Tensor) -> None:
        """Receive queries [B, Hq, n, D] over keys [B, H, n, D]."""


_asking: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Keys of prompts that wait for their queries: who wants these, and its `version` then."""


def ask_for_queries(keys: Tensor, layer: SeesQueries) -> None:
    """Ask attention over the keys of a prompt for the queries, which no update brings.

    Only models that run eagerly, with attention of Transformers, show them.
    """
    if not torch.compiler.is_compiling():
        _asking[keys] = weakref.ref(layer), layer.version


def see_queries(query: Tensor, keys: Any) -> None:
    """Give queries [B, Hq, n, D] to the layer that asked for those of `keys` [B, H, n, D], if one
    did."""
    if torch.compiler.is_compiling() or not isinstance(keys, Tensor) or not _asking:
        return
    reference, version = _asking.pop(keys, (None, None))
    layer = None if reference is None else reference()
    if layer is None or layer.version != version:
        return
    if query.shape[0] == keys.shape[0] and query.shape[2:] == keys.shape[2:]:
        layer.see_queries(query, keys)


@torch.no_grad()
def smooth(layer: VQCacheLayer, query: Tensor, keys: Tensor) -> None:
    """Let the queries of a prompt decide what its keys are multiplied by, and encode these again.

    Args:
        layer: holds the prompt, and nothing else.
        query: [B, Hq, n, D] of the prompt.
        keys: [B, H, n, D] of the prompt.
    """
    few = min(keys.shape[2], layer.prompt.length or keys.shape[2]) - layer.sinks < FEWEST
    if few or layer._pairs is None or layer.length != keys.shape[2]:
        return
    offloaded = layer.k.sinks.device != keys.device  # by the cache, right after the update
    if offloaded:
        torch.cuda.synchronize(keys.device)
        layer.prefetch()
    with storing(keys.device):
        factors = _factors(layer, layer._pairs, query, keys)
        if keys.device.type != "cpu" or bool((factors != 1).any()):  # a GPU would have to wait
            layer.version += 1
            layer.k.smoothing = factors
            if len(layer.k.codes):
                tails, coded = (layer.k.tail.view(), layer.v.tail.view()), layer.coded
                view = layer._view(*tails, layer.first_code, 0)
                kv_append(keys[:, :, layer.first_code : coded], tails[1][:, :, :0], view)
    if offloaded:
        layer.offload()


def _factors(layer: VQCacheLayer, pairs: Rotary, query: Tensor, keys: Tensor) -> Tensor:
    """Factors of the keys, 1 for rows with less than FEWEST tokens behind the sinks:
    [B, H, 1, D]."""
    side, end = layer.k, min(keys.shape[2], layer.prompt.length or keys.shape[2])
    assert side.mean is not None
    factors, shown = [], cast("bool | Tensor | None", pairs.interleaved)
    for row, (rows, start) in enumerate(_rows(layer)):
        first = start + layer.sinks
        mean, turning = side.mean[rows], side.rotary_mean
        if end - first < FEWEST:
            factors.append(torch.ones_like(mean))
            continue
        tokens, turning = keys[rows, :, first:end], None if turning is None else turning[rows]
        decided = layer._frozen[row]
        if not decided or shown is None:  # means that are decided later are of fewer tokens
            found = pairs.means(tokens, first)
            shown = found.shown if shown is None else shown
            mean, turning = (mean, turning) if decided else (found.mean, found.rotary_mean)
        asking = query[rows, :, first:end]
        factors.append(pairs.smoothing(asking, tokens, mean, turning, shown))
    return factors[0] if len(factors) == 1 else torch.cat(factors)


def use_calibrated(
    side: SideBuffers, known: Calibrated, rotary: Rotary | None, start: Tensor | None, where: str
) -> None:
    """Set the means of all rows to those that are known.

    Args:
        side: the keys.
        rotary: how they turn.
        start: int64 [B], the position of each row's first token, which is turned by nothing; None =
            all 0.
        where: the layer, for messages.

    Raises:
        VQCacheError: they are of other heads.
    """
    assert side.mean is not None
    heads, dim = side.mean.shape[1], side.mean.shape[3]
    for name, mean in (
        ("key_means", known.mean), ("key_rotary_means", known.rotary_mean),
        ("key_smoothings", known.smoothing),
    ):  # fmt: skip
        if mean is not None and tuple(mean.shape) != (heads, dim):
            raise VQCacheError(
                f"{name} of {where} is {list(mean.shape)}, the model's keys need "
                f"[{heads}, {dim}] (heads, head_dim)."
            )
    if known.smoothing is not None and smoothable(side.scheme):
        side.smoothing = known.smoothing.to(side.mean)[None, :, None].expand_as(side.mean).clone()
    side.mean = known.mean.to(side.mean)[None, :, None].expand_as(side.mean).clone()
    if known.rotary_mean is None or rotary is None:
        return
    turning = known.rotary_mean.to(side.mean)[None, :, None].expand_as(side.mean)
    if start is not None:
        turning = rotated(turning, rotary.inv_freq, bool(rotary.interleaved), -start[:, None])
    side.rotary_mean = turning.clone()
