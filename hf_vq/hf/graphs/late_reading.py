"""The host learns one step late that a text has ended, while the GPU computes the next token."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...cache.static_layer import VQStaticLayer
from . import cuda_graphs


def reading_late(before: Any) -> Any:
    """`DeferredStopCheck`, which Transformers has for MPS, for captured models: the host learns
    one step late that a text has ended."""

    class LateStopCheck(before):
        @staticmethod
        def is_supported(*args: Any, **kwargs: Any) -> bool:
            known = inspect.signature(before.is_supported).bind(*args, **kwargs).arguments
            late = cuda_graphs.reads_late() and not known.get("is_assistant")
            if not late or known["device"].type not in cuda_graphs.GPUS:
                return bool(before.is_supported(*args, **kwargs))
            return not known.get("cache_is_returned", True) or forgets(known["cache"])

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bound = inspect.signature(before).bind(*args, **kwargs)
            known = bound.arguments
            self.coded, self.place = None, known["input_ids"].device
            if known.get("cache_is_returned") and forgets(known["cache"]):
                self.coded, known["cache_is_returned"] = known["cache"], False
            super().__init__(*bound.args, **bound.kwargs)

        def __call__(self, *args: Any) -> bool:
            with on(self.place):
                return bool(super().__call__(*args))

        def finish(self) -> int:
            with on(self.place):
                undone: int = super().finish()
                if undone and self.coded is not None:
                    self.coded.crop(-undone)
            return undone

    return LateStopCheck


def on(device: torch.device) -> AbstractContextManager[Any]:
    """An event is recorded on the current device, whichever it was made for."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forgets(cache: Any) -> bool:
    """True if the cache can forget its last tokens, and nothing need be asked for it before."""
    layers = getattr(cache, "layers", ())
    return bool(layers) and all(type(layer) is VQStaticLayer for layer in layers)
