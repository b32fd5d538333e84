"""`allocate_kv`: choose the bits of the keys and of the values of each layer in a KV cache.

    minimize    sum_u  s_u d(b_u) / d(2)        subject to    mean of b_u <= target_bits

u       the keys of a layer, or its values
s_u     the divergence of the model's predictions when only u is coded with 2 bits; measured
d(b)    error of the universal codebook of b = 2, 3, 4 bits on Gaussian data (TurboQuant)

Every kernel supports the result: each layer has one scheme, independent of the other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..cache import VQCache
from ..cache.argument import cache_argument
from ..cache.codebooks import KVCodebooks
from ..cache.key_means import Calibrated
from ..errors import VQCacheError, VQCalibrationError, shown
from ..fit.allocation import allocate
from ..formats.catalog import KVScheme, kv_scheme
from ..formats.scheme import VQScheme
from ..formats.universal import universal_mse
from ..progress import bar
from .kv_codebooks import calibrate_kv, check_number, checked_context
from .text import sequences_of

TOKENS = 4096
WINDOW = 64  # exact tokens of the measured cache; sensitivities depend on it
LEVELS = {2: kv_scheme("u2").key, 3: kv_scheme("u3").key, 4: kv_scheme("u4").key}
_EXACT = replace(LEVELS[4], vector_size=1, entry_bits=8)


@torch.no_grad()
def allocate_kv(
    model: Any,
    text: str | Sequence[int] | Tensor | None = None,
    tokenizer: Any = None,
    *,
    target_bits: float = 3.0,
    tokens: int = TOKENS,
    context: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> KVCodebooks:
    """Choose a scheme for each layer of a KV cache by the measured cost of coding it.

        codebooks = allocate_kv(model, open("book.txt").read(), tokenizer, target_bits=3)
        cache = VQCache(model.config, codebooks.scheme, codebooks=codebooks)

    The model runs on the text once for the keys and once for the values of each layer.

    Args:
        model, text, tokenizer, context, seed, progress: as for `calibrate_kv`.
        target_bits: mean bits of a coded number, without scales, over the layers that the cache
            codes; from 2 to 4.
        tokens: number of tokens of the text to run each time.

    Returns:
        The schemes, the means and smoothing of the keys, and the measured `sensitivity`.

    Raises:
        VQCalibrationError, VQCacheError: as `calibrate_kv`; or target_bits is out of range.
    """
    number = isinstance(target_bits, (int, float)) and not isinstance(target_bits, bool)
    if not number or not min(LEVELS) <= target_bits <= max(LEVELS):
        raise VQCacheError(
            f"allocate_kv(target_bits=...) must be from {min(LEVELS)} to {max(LEVELS)}; got "
            f"{shown(target_bits)}."
        )
    check_number("tokens", tokens, 2 * WINDOW)
    context = min(checked_context(model, context), tokens)
    if context <= WINDOW:
        raise VQCalibrationError(
            f"with a context of {context} nothing leaves the window of {WINDOW} tokens. Use longer "
            "sequences."
        )
    if not VQCache(model.config, "u4").coded_layers:
        raise VQCacheError(
            f"VQCache codes no layer of {type(model).__name__}: none attends to all tokens. Use "
            "the model without allocate_kv."
        )
    options: dict[str, Any] = {"tokens": tokens, "context": context, "seed": seed}
    known = calibrate_kv(model, "u4", text, tokenizer, progress=progress, **options)
    was_training = model.training
    model.eval()
    try:
        sequences = sequences_of(model, text, tokenizer, tokens, context, seed, progress)
        sensitivity = _sensitivity(model, sequences, known.means, progress)
    finally:
        model.train(was_training)
    coded = [layer for layer, costs in enumerate(sensitivity) if costs]
    units = [max(cost, 0.0) for layer in coded for cost in sensitivity[layer]]
    errors = [universal_mse(part.vector_size, part.entry_bits) for part in LEVELS.values()]
    costs = [[cost * error for error in errors] for cost in units]
    budget = int(target_bits * len(units) + 1e-9)
    chosen = allocate([list(LEVELS)] * len(units), costs, budget)
    assert chosen is not None, "the fewest bits fit"
    parts = iter(list(LEVELS.values())[index] for index in chosen)
    schemes = [kv_scheme("u4") for _ in sensitivity]
    for layer in coded:
        schemes[layer] = KVScheme(next(parts), next(parts))
    none: list[Tensor | None] = [None] * len(schemes)
    more: list[Tensor | None] = [None] * (len(schemes) - len(known))
    turning, smoothing = (
        None if found is None else [*found, *more]
        for found in (known.key_rotary_means, known.key_smoothings)
    )
    return KVCodebooks(
        tuple(schemes), none, none, [*known.key_means, *more], sensitivity, turning,
        known.rotary_interleaved, key_smoothings=smoothing,
    )  # fmt: skip


def _sensitivity(
    model: Any, sequences: Tensor, means: list[Calibrated | None], progress: bool
) -> list[list[float]]:
    """Measure the divergence that coding the keys, or the values, of each layer adds.

    Returns:
        [keys, values] for each layer, in nats per token; [] for layers that the cache does not
        code.

    Raises:
        VQCalibrationError: the model predicts NaN.
    """
    exact = KVScheme(_EXACT, _EXACT)
    coded = {layer.index for layer in VQCache(model.config, exact).coded_layers}
    layers = len(VQCache(model.config, exact).layers)
    means = [*means, *[None] * (layers - len(means))]
    units = [(layer, side) for layer in sorted(coded) for side in ("key", "value")]
    total = dict.fromkeys(units, 0.0)
    for ids in sequences:
        row = ids[None].to(model.device)
        wanted = model(row, use_cache=False).logits
        base = _divergence(model, row, wanted, (exact,) * layers, means)
        for layer, side in bar(units, "measuring", progress):
            schemes = [exact] * layers
            schemes[layer] = _with(exact, side, LEVELS[2])
            found = _divergence(model, row, wanted, tuple(schemes), means)
            total[layer, side] += (found - base) / len(sequences)
    return [[total[u] for u in units if u[0] == layer] for layer in range(layers)]


def _with(scheme: KVScheme, side: str, part: VQScheme) -> KVScheme:
    return replace(scheme, key=part) if side == "key" else replace(scheme, value=part)


def _divergence(
    model: Any,
    ids: Tensor,
    wanted: Tensor,
    schemes: tuple[KVScheme, ...],
    means: list[Calibrated | None],
) -> float:
    """Mean KL divergence, in nats per token, of predictions with a cache.

    Args:
        ids: token ids [1, tokens]; the model reads them window by window.
        wanted: logits without a cache, [1, tokens, vocabulary].
        schemes: schemes of the cache, one for each layer.
    """
    cache = VQCache(model.config, schemes, window=WINDOW, key_means=means, static=False)
    total = 0.0
    for piece, target in zip(ids.split(WINDOW, 1), wanted.split(WINDOW, 1), strict=True):
        found = model(piece, **{cache_argument(model): cache}, use_cache=True).logits
        ours, theirs = (logits.float().log_softmax(-1) for logits in (found, target))
        total += float((theirs.exp() * (theirs - ours)).sum(dtype=torch.float64))
    if total != total:
        raise VQCalibrationError(
            "the model predicts NaN or infinity. Load it in bfloat16 or float32."
        )
    return total / ids.shape[1]
