"""The means of the keys of each layer, before there is a request.

Means are subtracted from keys before they are coded, and requests share pages, so they are the same
for all: those of `hf-vq calibrate`, or of one sequence of random words. Of these keys are not what
they are of a text, but their means are nearly (docs/serving.md), and it costs a single forward.
"""

from __future__ import annotations

from typing import Any

import torch

from ..cache import VQCache, VQCacheLayer
from ..calibration.kv_codebooks import calibrate_kv
from ..errors import VQCacheError
from .attention_switch import own_attention

WORDS = 512
_CENTRED = "u4"  # any scheme that only needs a mean


def template_of(model: Any, scheme: Any) -> VQCache:
    """An empty cache of a model, whose layers say how each is coded, means included.

    Args:
        model: whose keys are measured, unless its calibrated means are found.
        scheme: as for `VQCache.from_pretrained`.

    Raises:
        VQCacheError: the keys of random words are not finite.
    """
    template = VQCache.from_pretrained(model, scheme, sinks=0, window=0)
    layers = {i: each for i, each in enumerate(template.layers) if isinstance(each, VQCacheLayer)}
    missing = [
        index
        for index, layer in layers.items()
        if layer.scheme.centre_keys and layer.calibrated is None
    ]
    if missing:
        config = model.config.get_text_config(decoder=True)
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(config.vocab_size, (WORDS,), generator=generator)
        context = min(WORDS, getattr(config, "max_position_embeddings", None) or WORDS)
        sequences = words[: WORDS // context * context].view(-1, context)
        try:
            with own_attention(model):
                found = calibrate_kv(
                    model, _CENTRED, sequences, tokens=sequences.numel(), context=context,
                    progress=False,
                )  # fmt: skip
        except VQCacheError as error:
            raise VQCacheError(
                f"{error} The keys of {WORDS} random words were to say what the mean of the keys "
                "is. `hf-vq calibrate --kv` finds it from a text."
            ) from error
        for index in missing:
            layers[index].calibrated = found.means[index]
    return template
