"""Which attention a model has: `vq_paged` while a manager needs it, its own otherwise.

Several managers may run on one model. The first switches, the last switches back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from .attention import NAME, register


class _Held:
    """Who needs `vq_paged` of one model, and what it had before."""

    def __init__(self, before: str) -> None:
        self.before, self.managers = before, WeakSet[Any]()


_LOCK = threading.RLock()
_held: WeakKeyDictionary[Any, _Held] = WeakKeyDictionary()


def hold(model: Any, manager: Any) -> None:
    """Give a model `vq_paged` until `manager` releases it; a second call does nothing."""
    with _LOCK:
        now = model.config._attn_implementation
        if now != NAME:
            register()
            model.set_attn_implementation(NAME)
        if model not in _held:
            _held[model] = _Held(now)
        elif now != NAME:
            _held[model].before = now
        _held[model].managers.add(manager)


def release(model: Any, manager: Any) -> None:
    """`manager` needs no `vq_paged` any more: the last one to say so gives the model its own
    attention back. A second call does nothing."""
    with _LOCK:
        held = _held.get(model)
        if held is None or manager not in held.managers:
            return
        held.managers.discard(manager)
        if not held.managers:
            del _held[model]
            if model.config._attn_implementation == NAME:
                model.set_attn_implementation(held.before)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """A model with its own attention for a while, during which its managers wait."""
    with ExitStack() as waiting, _LOCK:
        held = _held.get(model)
        if held is None or model.config._attn_implementation != NAME:
            yield
            return
        for manager in list(held.managers):
            if manager.is_running():
                with suppress(RuntimeError):  # its loop has just ended, and waits for the lock
                    waiting.enter_context(manager.pause())
        model.set_attn_implementation(held.before)
        try:
            yield
        finally:
            model.set_attn_implementation(NAME)
