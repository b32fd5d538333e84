"""Progress of long work: a bar in a terminal or notebook, some lines in a log file."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

from transformers.utils import logging

logger = logging.get_logger("hf_vq")

_LOADER = "Loading weights"  # label of Transformers' bar
_MINUTE = 60.0
_BAR = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"


class Progress:
    """Show what is done, and the time left; silent where Transformers' bars are.

    Without a terminal it is a line for each tenth, and at most one a second.

    Args:
        label: what is done.
        total: amount of all parts, in any unit that takes equal time.
        advice: what to do instead; said with an estimate if the first part shows that all will take
            a minute or more.
    """

    def __init__(self, label: str, total: int, advice: str = "") -> None:
        self.label, self.total, self.advice, self.count = label, total, advice, 0
        self._before = self._amount = 0
        self._bar: Any = None
        self._began = self._said = 0.0
        self._tenths = 0

    def skip(self, count: int) -> None:
        """Count parts that were done before: they say nothing of the time left."""
        self._before += count
        self.count += count

    def start(self, name: str, amount: int = 1) -> None:
        """Say which part comes next, and its share of the total."""
        self._amount = amount
        if not self._began:
            self._began = self._said = time.monotonic()
            self._tenths = 10 * self.count // max(1, self.total)
            if _shows_bars():
                self._bar = logging.tqdm(
                    total=self.total, initial=self._before, desc=self.label, leave=False,
                    smoothing=0, bar_format=_BAR,
                )  # fmt: skip
        if self._bar is not None:
            self._bar.set_postfix_str(name)

    def done(self) -> None:
        """Count the part that was started."""
        first = self.count == self._before
        self.count += self._amount
        if self._bar is not None:
            self._bar.update(self._amount)
        now = time.monotonic()
        left = (now - self._began) * (self.total - self.count) / (self.count - self._before or 1)
        if first and self.advice and left >= _MINUTE:
            logger.warning(
                "hf_vq: %s: %s left, by the time that the first part took. %s",
                self.label, _rounded(left), self.advice,
            )  # fmt: skip
        tenths = 10 * self.count // max(1, self.total)
        silent = self._bar is not None or not logging.is_progress_bar_enabled()
        if tenths > self._tenths and now - self._said >= 1 and not silent:
            self._tenths, self._said = tenths, now
            line = f"{self.label}: {100 * self.count // self.total} %"
            print(f"{line}, {_rounded(left)} left" if left else line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._began = None, 0.0

    def replace_loaders_bar(self) -> None:
        """Have Transformers not show its bar of the next load next to this one."""
        install = getattr(logging, "set_tqdm_hook", None)
        if install is None:  # Transformers 5.17
            return
        mine = weakref.ref(self)

        def hook(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs.get("desc") == _LOADER or mine() is None:  # or that load has failed
                install(before)
                factory = factory if mine() is None else logging.EmptyTqdm
            return factory(*args, **kwargs) if before is None else before(factory, args, kwargs)

        before = install(hook)


def bar(items: Any, label: str, progress: bool) -> Iterator[Any]:
    """Iterate over `items`, which have a length, and show the progress if `progress` is True."""
    if not progress:
        yield from items
        return
    shown = Progress(label, len(items))
    try:
        for item in items:
            shown.start("")
            yield item
            shown.done()
    finally:
        shown.close()


def _shows_bars() -> bool:
    """True for a terminal, a notebook, and a program that shows bars in its own way."""
    kinds = [kind.__module__ for kind in logging.tqdm_lib.tqdm.__mro__]
    hooked = getattr(logging, "_tqdm_hook", None) is not None
    return hooked or "tqdm.notebook" in kinds or sys.stderr.isatty()


def _rounded(seconds: float) -> str:
    """A time as people say it: 40 s, 7 minutes, 2.5 hours."""
    if seconds < 1.5 * _MINUTE:
        return f"{max(1, round(seconds))} s"
    minutes = seconds / _MINUTE
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
