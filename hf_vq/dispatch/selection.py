"""Selection from the table: the first entry that supports a problem runs it; cached per problem.

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
    """Result of one entry for a problem; `reason` is empty for the entry that runs."""

    entry: Entry
    chosen: bool
    reason: str


def cached_by_table(function: Function) -> Function:
    """Cache the results of `function`, which depend on the table, until `invalidate`."""
    memory = lru_cache(maxsize=4096)(function)
    _memories.append(memory)
    return cast(Function, memory)


def clear_with_table(memory: Any) -> None:
    """Call `memory.cache_clear()`, as long as it lives, when other entries are asked."""
    _owned.add(memory)


def invalidate() -> None:
    """Drop all cached selections."""
    global generation
    generation += 1
    for memory in (*_memories, *_owned):
        memory.cache_clear()


@contextmanager
def using(entries: Iterable[Entry]) -> Iterator[None]:
    """Replace the table by `entries`, in this order, within the block."""
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
    """Put one more entry before all others, within the block."""
    with using((entry, *_entries)):
        yield


def entries(op: str | None = None) -> tuple[Entry, ...]:
    """The entries of one op, or all (None), in the order of the table."""
    return tuple(entry for entry in _entries if op in (None, entry.op))


def select(problem: Problem) -> Entry:
    """The entry that runs `problem`; cached per problem.

    Raises:
        VQBackendError: no entry supports it, or not the backend that HF_VQ_BACKEND forces.
    """
    return _select(problem, env.BACKEND.get())


@cached_by_table
def _select(problem: Problem, forced: str) -> Entry:
    reasons = []
    for entry in entries(problem.op):  # stops at the first that supports the problem
        reason = entry.refusal(problem, forced)
        if reason is None:
            return entry
        reasons.append(f"{entry.name}: {reason}")
    found = "; ".join(reasons) or "the table is empty"
    cure = f" Unset HF_VQ_BACKEND={forced}." if forced else ""
    raise VQBackendError(f"no kernel runs {problem}: {found}.{cure}")


def bind(problem: Problem) -> Bound | None:
    """The bound kernel of the entry that runs `problem`, if any; raises as `select` does."""
    return _bind(problem, env.BACKEND.get())


@cached_by_table
def _bind(problem: Problem, forced: str) -> Bound | None:
    return _select(problem, forced).implementation.bind(problem)


def explain(problem: Problem) -> list[Verdict]:
    """List a verdict for every entry of the problem's op, in the order of the table."""
    forced = env.BACKEND.get()
    verdicts: list[Verdict] = []
    taken = False
    for entry in entries(problem.op):
        reason = entry.refusal(problem, forced)
        chosen = reason is None and not taken
        if reason is None and taken:
            reason = "an entry above runs it"
        taken |= chosen
        verdicts.append(Verdict(entry, chosen, reason or ""))
    return verdicts
