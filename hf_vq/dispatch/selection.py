"""Ask the table: the first entry that runs a problem is the one that does, remembered per problem.

>>> explain(LinearProblem("cpu", "float32", spec, tokens=1, out_features=4096, in_features=4096))
cpu.linear   no    built without the native library
reference    yes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast
from weakref import WeakSet

from .. import env
from ..errors import VQBackendError
from .entry import Bound, Entry
from .problem import Problem
from .table import ENTRIES

_entries: tuple[Entry, ...] = ENTRIES
generation = 0  # counts `invalidate`: what was found in the table before is not asked any more
_memories: list[Any] = []
_owned: WeakSet[Any] = WeakSet()
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Verdict:
    """What the table says of one entry: `reason` is empty for the one that runs."""

    entry: Entry
    chosen: bool
    reason: str


def cached_by_table(function: Function) -> Function:
    """Remember what `function` finds in the table, until other entries are asked."""
    memory = lru_cache(maxsize=4096)(function)
    _memories.append(memory)
    return cast(Function, memory)


def clear_with_table(memory: Any) -> None:
    """Call `memory.cache_clear()`, as long as it lives, when other entries are asked."""
    _owned.add(memory)


def invalidate() -> None:
    """Ask the table anew from now on."""
    global generation
    generation += 1
    for memory in (*_memories, *_owned):
        memory.cache_clear()


@contextmanager
def using(entries: Iterable[Entry]) -> Iterator[None]:
    """Ask these entries, in this order, instead of those of the table, within the block."""
    global _entries
    before, _entries = _entries, tuple(entries)
    invalidate()
    try:
        yield
    finally:
        _entries = before
        invalidate()


@contextmanager
def preferred(entry: Entry) -> Iterator[None]:
    """Ask one more entry before all others, within the block."""
    with using((entry, *_entries)):
        yield


def entries(op: str | None = None) -> tuple[Entry, ...]:
    """The entries of one op, or all, in the order in which they are asked."""
    return tuple(entry for entry in _entries if op in (None, entry.op))


def select(problem: Problem) -> Entry:
    """The entry that runs `problem`, remembered per problem.

    Raises:
        VQBackendError: none can, or the backend forced by HF_VQ_BACKEND cannot.
    """
    return _select(problem, env.BACKEND.get())


@cached_by_table
def _select(problem: Problem, forced: str) -> Entry:
    reasons = []
    for entry in entries(problem.op):  # those below the first that can are not asked
        reason = entry.refusal(problem, forced)
        if reason is None:
            return entry
        reasons.append(f"{entry.name}: {reason}")
    found = "; ".join(reasons) or "the table is empty"
    cure = f" Unset HF_VQ_BACKEND={forced}." if forced else ""
    raise VQBackendError(f"no kernel runs {problem}: {found}.{cure}")


def bind(problem: Problem) -> Bound | None:
    """The shorter way of the entry that runs `problem`, if it has one; raises as `select` does."""
    return _bind(problem, env.BACKEND.get())


@cached_by_table
def _bind(problem: Problem, forced: str) -> Bound | None:
    return _select(problem, forced).implementation.bind(problem)


def explain(problem: Problem) -> list[Verdict]:
    """What the table says of every entry of the problem's op, in order."""
    forced = env.BACKEND.get()
    verdicts: list[Verdict] = []
    taken = False
    for entry in entries(problem.op):
        reason = entry.refusal(problem, forced)
        chosen = reason is None and not taken
        if reason is None and taken:
            reason = "a row above runs it"
        taken |= chosen
        verdicts.append(Verdict(entry, chosen, reason or ""))
    return verdicts
