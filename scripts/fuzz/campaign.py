"""Fuzzing campaign: tries run in worker processes that may crash, hang or exhaust memory.

    this process      imports modules, and makes the subject
      worker          forked from it; runs one try after the other and reports each.
                      It is killed if a try takes longer than LIMIT; the next worker continues

A try is decided by the seed and its number alone.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import hf_vq
from hf_vq.errors import VQError

LIMIT = 10.0  # seconds of one try, without those that it waited for a processor; more is a hang
MEMORY = 3 << 30  # bytes that a worker may ask for, beyond what it began with
OURS = str(Path(hf_vq.__file__).parent)


class Tried(NamedTuple):
    """Result of one call of a `Try` that made several tries."""

    outcome: str
    count: int


Try = Callable[[random.Random, int], "str | Tried"]
"""One try, from a generator and its number: what came of it, in a word or two. A `Finding` or any
other exception is a finding."""


class Finding(Exception):
    """A result that must not be.

    Args:
        kind: what to count it as.
        text: the details.
    """

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind


@dataclass
class Report:
    """Results of one subject."""

    name: str
    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, number: int, outcome: str, finding: str = "", count: int = 1) -> None:
        """Count a try; `finding` has the details of one, of the kind `outcome`."""
        self.tried += count
        self.outcomes[outcome] += count
        if finding:
            self.findings.setdefault(outcome, []).append((number, finding))

    def row(self) -> dict[str, object]:
        """Row of the record."""
        found = {kind: len(each) for kind, each in self.findings.items()}
        crashes = sum(n for kind, n in found.items() if kind.startswith("crash"))
        return {
            "name": self.name, "tried": self.tried, "crashes": crashes,
            "hangs": found.get("hang", 0),
            "findings": sum(found.values()) - crashes - found.get("hang", 0),
            "kinds": found, "outcomes": dict(self.outcomes), "seconds": round(self.seconds, 1),
        }  # fmt: skip

    def line(self) -> str:
        """One line for a person."""
        row = self.row()
        rate = self.tried / max(self.seconds, 1e-9)
        seen = ", ".join(f"{n} {kind}" for kind, n in self.outcomes.most_common())
        return (
            f"{self.name}: {self.tried} tried, {row['crashes']} crashes, {row['hangs']} hangs, "
            f"{row['findings']} findings, {self.seconds:.0f} s ({rate:.1f} a second): {seen}"
        )


def outcome_of_error(error: BaseException, what: str = "") -> str:
    """Classify the error of a hostile input in one word.

    Args:
        what: the change of the input, for the details.

    Raises:
        Finding: the error came through this package but is not one of its errors.
    """
    if isinstance(error, VQError):
        return "refused"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, Finding):
        raise error
    inside = [frame for frame in frames if frame.filename.startswith(OURS)]
    if not inside:
        return "refused by others"
    last = inside[-1]
    where = f"{Path(last.filename).name}:{last.name}"
    raise Finding(f"{type(error).__name__} at {where}", f"{what}: {error!s:.300}") from error


def run(
    name: str,
    attempt: Try,
    seed: int,
    seconds: float,
    tries: int | None,
    processes: int,
    limit: float = LIMIT,
    memory: bool = True,
) -> Report:
    """Make tries until the time is over or all are made.

    Args:
        seconds: of all tries.
        tries: how many; None = as many as there is time for.
        processes: number of parallel workers.
        limit: seconds of a call of `attempt`; more is a hang.
        memory: whether workers may ask for no more than `MEMORY`.
    """
    report = Report(name)
    start = time.monotonic()
    deadline = start + seconds
    workers = [_Worker(attempt, seed, name, first, processes, memory) for first in range(processes)]
    for worker in workers:
        worker.start(deadline, tries)
    while alive := [worker for worker in workers if worker.pid]:
        ready, _, _ = select.select([worker.pipe for worker in alive], [], [], 0.2)
        for worker in alive:
            if worker.pipe in ready:
                worker.read(report)
            elif worker.silence() > limit:
                worker.lost(report, "hang")
            if not worker.pid and time.monotonic() < deadline and worker.more(tries):
                worker.start(deadline, tries)
    report.seconds = time.monotonic() - start
    return report


class _Worker:
    """Run every `step`-th try; a new process replaces one that ended."""

    def __init__(
        self, attempt: Try, seed: int, name: str, first: int, step: int, memory: bool
    ) -> None:
        self.attempt, self.seed, self.name, self.memory = attempt, seed, name, memory
        self.next, self.step = first, step
        self.pid = 0
        self.pipe = -1  # where it tells of its tries, a line each
        self.results = b""  # of a line that has no end yet
        self.heard, self.waited = 0.0, 0.0
        self.done = False

    def more(self, tries: int | None) -> bool:
        return not self.done and (tries is None or self.next < tries)

    def start(self, deadline: float, tries: int | None) -> None:
        if not self.more(tries):
            return
        sys.stdout.flush()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            with os.fdopen(writing, "w", buffering=1) as results:
                self._work(results, deadline, tries)
            os._exit(0)
        os.close(writing)
        self.pid, self.pipe, self.results = pid, reading, b""
        self.hear()

    def hear(self) -> None:
        self.heard, self.waited = time.monotonic(), waited(self.pid)

    def silence(self) -> float:
        """Seconds since a try ended, without those in which others had all processors."""
        return time.monotonic() - self.heard - (waited(self.pid) - self.waited)

    def _work(self, results: IO[str], deadline: float, tries: int | None) -> None:
        os.setpgid(0, 0)
        if self.memory:
            limit_memory(MEMORY)
        for number in range(self.next, sys.maxsize if tries is None else tries, self.step):
            if time.monotonic() > deadline:
                return
            outcome, finding, count = made(self.attempt, self.seed, self.name, number)
            results.write(json.dumps([number, outcome, finding, count]) + "\n")

    def read(self, report: Report) -> None:
        data = os.read(self.pipe, 1 << 16)
        if not data:
            self.lost(report, "")
            return
        *lines, self.results = (self.results + data).split(b"\n")
        for line in lines:
            number, *found = json.loads(line)
            report.add(number, *found)
            self.next = number + self.step
            self.hear()

    def lost(self, report: Report, reason: str) -> None:
        """The worker is gone, or has to go; the try that it was at is what did it."""
        if reason:
            os.killpg(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.pipe)
        self.pid = 0
        if status == 0:
            self.done = True
            return
        reason = reason or f"crash, signal {status & 0x7F}, status {status >> 8}"
        report.add(self.next, reason, reason)
        self.next += self.step


def made(attempt: Try, seed: int, name: str, number: int) -> tuple[str, str, int]:
    """The outcome of one try, the details if it is a finding, and what it counts as."""
    try:
        found = attempt(random.Random(f"{seed} {name} {number}"), number)
        return (found, "", 1) if isinstance(found, str) else (found.outcome, "", found.count)
    except Finding as finding:
        return finding.kind, "".join(traceback.format_exception(finding)), 1
    except Exception as error:  # neither refused nor right
        details = "".join(traceback.format_exception(error))
        return f"{type(error).__name__} in the campaign", details, 1


def waited(pid: int) -> float:
    """Seconds that the first thread of a process was ready to run and had no processor."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # not Linux, or built without this
        return 0.0


def limit_memory(more: int) -> None:
    """Let this process ask for so many bytes beyond what it has."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return
    size = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
