"""The cost of encoding a model again: its predictions before and after, on one text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ..calibration.text import context_of, find_text, read_text, sequences_of
from ..errors import VQError
from ..hf.calibration_options import CPU_TOKENS, SHIPPED
from .score import Reference, Score, model_forward, score

TOKENS, CONTEXT = 4096, 512
_FEWEST = 2  # sequences: with fewer there is no standard error
_ROOM = 2 << 30  # bytes of predictions that are kept
_HELD_OUT = 1 / 8  # of the packaged text, at its end, that is measured on


class Recoding:
    """Keep what a model of codes predicts, then score what becomes of it.

    Args:
        model: as it is before it changes; the same object is scored.
        tokenizer: its own.
        text: UTF-8 file; None is the end of the text that is packaged for calibration.

    Raises:
        VQError: the text is too short.
    """

    def __init__(self, model: Any, tokenizer: Any, text: str | None = None) -> None:
        words = _packaged()[1] if text is None else read_text(text)
        self.text = "the packaged text" if text is None else Path(text).name
        context = min(CONTEXT, context_of(model, None))
        kept = 4 * context * model.config.get_text_config().vocab_size  # bytes of one sequence
        count = min(TOKENS // context, max(_FEWEST, _ROOM // kept))
        ids = tokenizer(words, add_special_tokens=False, verbose=False).input_ids
        count = min(count, len(ids) // context)
        if count < _FEWEST:
            raise VQError(
                f"{self.text} gives {len(ids)} tokens, {_FEWEST * context} are needed: give a "
                "longer --text, or --no-kld."
            )
        sequences = torch.tensor(ids[-count * context :]).reshape(count, context)
        self.forward = model_forward(model)
        self.before = Reference(self.forward, sequences, keep_bytes=count * kept)
        for index in range(count):
            self.before[index]  # while the model is what it was

    def cost(self) -> Score:
        """Distance of the model, as it is now, from what it was.

        Raises:
            VQError: it gives NaN.
        """
        return score(self.forward, self.before)

    def sentence(self, found: Score) -> str:
        """A line for a terminal."""
        spread = "" if math.isnan(found.kld_se) else f" ± {found.kld_se:.1g}"
        return (
            f"KL divergence from the model of codes {found.kld:.3g}{spread}, top-1 agreement "
            f"{found.top1:.1f} %: {self.before.sequences.numel()} tokens of {self.text}"
        )


def calibration_tokens(model: Any, tokenizer: Any, text: str) -> torch.Tensor:
    """Token ids [sequences, tokens] to calibrate a format on; of the packaged text, none that
    `Recoding` measures on.

    Args:
        text: as in `calibration`'s options; `SHIPPED` without its end.

    Raises:
        VQError: the text is too short, or there is none.
    """
    words = _packaged()[0] if text == SHIPPED else find_text(text, CPU_TOKENS * 12)[0]
    context = context_of(model, None)
    return sequences_of(model, words, tokenizer, CPU_TOKENS, context, 0, False)


def _packaged() -> tuple[str, str]:
    """The packaged text without its end, and its end."""
    words, _ = find_text(SHIPPED, 0)
    assert words is not None
    cut = int(len(words) * (1 - _HELD_OUT))
    return words[:cut], words[cut:]
