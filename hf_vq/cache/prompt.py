"""What a cache is told about the prompt before it comes; all its layers read the same object."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import VQCacheError


@dataclass
class Prompt:
    """The prompt that an empty cache is about to receive. `model.generate` fills this in.

    Args:
        length: tokens of the prompt, padding included. The first update may bring more: candidates
            of assisted decoding, which may be rejected and must not decide the mean of the keys.
        start: position of the first real token of each row (left padding); None = all 0.
        warned: whether a row of keys or values was said to be beyond what codes can hold.
    """

    length: int | None = None
    start: list[int] | None = None
    warned: bool = False

    def expect(self, attention_mask: Tensor | None, length: int | None) -> None:
        """Take the facts from an attention mask [B, T] (nonzero = real) or a plain length."""
        self.length, self.start = length, None
        if attention_mask is None:
            return
        if attention_mask.ndim != 2:
            raise VQCacheError(
                f"expect_prompt needs an attention mask [batch, tokens]; got "
                f"{list(attention_mask.shape)}."
            )
        self.length = attention_mask.shape[1] if length is None else length
        # argmax finds the first 1; a row without any counts as unpadded.
        start: list[int] = (attention_mask != 0).int().argmax(1).tolist()
        self.start = start if any(start) else None

    def starts_for(self, batch: int) -> list[int] | None:
        """`start` for a batch of `batch` rows.

        Raises:
            VQCacheError: it was said of another batch.
        """
        if self.start is not None and len(self.start) != batch:
            raise VQCacheError(
                f"the cache was told of a prompt with {len(self.start)} rows (attention mask), but "
                f"the first update brings {batch}; call expect_prompt with the mask of these rows, "
                "repeated for beams and return sequences."
            )
        return self.start
