"""Sliding-window layers as codes, for `VQCache(quantize_sliding=True)`."""

from __future__ import annotations

from torch import Tensor

from ..errors import VQCacheError
from .key_means import Calibrated
from .layer import SLACK, LayerOptions, VQCacheLayer
from .prompt import Prompt


class VQSlidingCacheLayer(VQCacheLayer):
    """Codes of the last `sliding_window - 1` tokens; there are no sinks, as they leave the window.

    It shows attention what `DynamicSlidingWindowLayer` shows: the tokens in front of the update
    that its first query may still see, and the update.

    Args:
        sliding_window: tokens that a query may see, itself included.
    """

    is_sliding = True

    def __init__(
        self,
        options: LayerOptions,
        prompt: Prompt,
        index: int,
        calibrated: Calibrated | None = None,
        codebooks: tuple[Tensor | None, Tensor | None] = (None, None),
        *,
        sliding_window: int,
    ) -> None:
        super().__init__(options, prompt, index, calibrated, codebooks)
        self.sinks, self.window = 0, min(options.window, sliding_window)
        self.sliding_window, self.past = sliding_window, sliding_window - 1
        self.tail_length = min(self.window + SLACK, max(self.past, self.window))

    def _trim(self, keys: Tensor, values: Tensor) -> None:
        super()._trim(keys, values)
        if not self.record_past:
            self._forget_past()

    def _forget_past(self) -> None:
        super()._forget_past()
        if self.is_initialized:
            drop = self.length - (self.sliding_window - 1) - self.first_code
            drop = min(max(drop, 0), len(self.k.codes))
            for store in (self.k, self.v):
                store.codes.drop(drop)
            self.first_code += drop

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that an update with `query_length` tokens will return."""
        past = min(self.length, self.sliding_window - 1)
        return past + query_length, self.length - past

    def get_max_length(self) -> int:
        """The sliding window."""
        return self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        """As for full attention; needs `activate_past_recording` once the window was full.

        Raises:
            VQCacheError: the tokens that would come back into the window are gone.
        """
        full = self.is_initialized and self.length >= self.sliding_window
        if full and tokens_to_remove and not self.record_past:
            raise VQCacheError(
                f"{self.where} slid past its first tokens and cannot go back; call "
                "cache.activate_past_recording() before the update that will be cropped."
            )
        super().crop(tokens_to_remove)
