"""Output of processes under compute-sanitizer, parsed into cases, reports and a table.

A process prints a line before each case (`case`), for each case without time (`left`), and at its
end (`end`). The lines of the tool between them begin with `=`.
"""

from __future__ import annotations

import base64
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sources import DIGEST_BYTES, Identity

from hf_vq.evaluation.record import make_record, read, write_record
from hf_vq.evaluation.text_tables import text_table

SUITE = "cuda-sanitizers"
TIME, SLOW, BROKEN = "no time", "not done in time", "the process ended"
_LINES = re.compile(r"^(case|left) (\d+) (\S+)", re.MULTILINE)
_END = re.compile(r"^end$", re.MULTILINE)
# Details of a report are indented.
_HEAD = re.compile(
    r"^=+ (?!COMPUTE-SANITIZER|[A-Z]+ SUMMARY|Target application|Error: process)(\S.*)$",
    re.MULTILINE,
)
_NOTE = re.compile(r"warning: (?!.*(?:race|hazard))", re.IGNORECASE)
_OWN_ERROR = re.compile(r"^=+ .*(Internal Sanitizer Error.*)$", re.MULTILINE)
_SUMMARY = re.compile(r"SUMMARY: (\d+)")


@dataclass
class Said:
    """Output of one process.

    Args:
        text: the whole output.
        status: exit status; None: it was killed.
    """

    text: str
    status: int | None

    @property
    def complete(self) -> bool:
        """True if the process reached its end."""
        return bool(_END.search(self.text))

    def clean(self, tool: str) -> bool:
        """True if nothing is wrong. Every count in the tool's summary is an error. A tool without a
        summary did not check; "none" has no summary."""
        looked = tool == "none" or set(_SUMMARY.findall(self.text)) == {"0"}
        return self.complete and self.status == 0 and looked and not self._errors()

    def _errors(self) -> list[str]:
        return [line for line in _HEAD.findall(self.text) if not _NOTE.match(line)]

    def cases(self) -> list[tuple[str, int, str, str]]:
        """Lines of the process: kind, number, first word of the name, and the output after it."""
        reported = list(_LINES.finditer(self.text))
        ends = [one.start() for one in reported] + [len(self.text)]
        return [
            (one[1], int(one[2]), one[3], self.text[one.end() : end])
            for one, end in zip(reported, ends[1:], strict=True)
        ]


@dataclass
class Kernel:
    """Results of the cases of a kernel under a tool."""

    problems: int = 0
    errors: int = 0
    plans: set[Any] = field(default_factory=set)
    left: Counter[str] = field(default_factory=Counter)


@dataclass
class Report:
    """All that processes said.

    Args:
        problems: name and plans of each case, by its number; without any, a case is a plan.
        identity: of each plan.
        ops: first words of the names of problems that are run; None: of all.
    """

    problems: list[tuple[str, frozenset[Any]]]
    identity: Mapping[Any, Identity] = field(default_factory=dict)
    ops: frozenset[str] | None = None
    kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    reported: set[tuple[str, int]] = field(default_factory=set)
    silent: dict[str, set[Identity]] = field(default_factory=dict)
    """By tool, kernels of which it said nothing, of earlier runs too."""
    faulty: defaultdict[str, set[Identity]] = field(default_factory=lambda: defaultdict(set))
    """By tool, kernels of which it said something."""
    kept: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """By tool and kernel, rows of an earlier run that found something, and are not run again."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Revision, GPU and command of the earlier runs."""

    def add(self, tool: str, said: Said) -> None:
        """Add the output of one process.

        A case in which the process ended counts as omitted, unless the tool reported an error.
        """
        cases = said.cases()
        for place, (what, number, kernel, text) in enumerate(cases):
            found = self.kernels.setdefault((tool, kernel), Kernel())
            self.reported.add((tool, number))
            if what == "left":
                found.left[TIME] += 1
                continue
            errors, own = 0, _OWN_ERROR.search(text)
            for line in _HEAD.findall(text):
                if _NOTE.match(line):
                    self.notes[f"{tool}: {line}"] += 1
                elif not own or "Internal Sanitizer Error" not in line:
                    errors += 1
            found.errors += errors
            if place + 1 == len(cases) and not said.complete:
                self.faulty[tool].update(self._identities(number))
                self.silent.get(tool, set()).difference_update(self.faulty[tool])
                why = own[1] if own else SLOW if said.status is None else BROKEN
                found.left[why.strip()] += 1
                continue
            self._ended(tool, kernel, number)
            reported, silent = self.faulty[tool], self.silent.setdefault(tool, set())
            (reported if errors else silent).update(self._identities(number))
            silent -= reported

    def _ended(self, tool: str, kernel: str, number: int) -> None:
        found = self.kernels.setdefault((tool, kernel), Kernel())
        found.problems += 1
        found.plans |= self.problems[number][1] if self.problems else {number}

    def _identities(self, number: int) -> set[Identity]:
        """Kernels of a problem."""
        return (
            {self.identity[plan] for plan in self.problems[number][1]} if self.problems else set()
        )

    def numbers(self) -> dict[str, list[int]]:
        """Numbers of the problems of each op."""
        found: dict[str, list[int]] = {}
        for number, (name, _) in enumerate(self.problems):
            found.setdefault(name.split()[0], []).append(number)
        return found

    def _runs(self, number: int) -> bool:
        return self.ops is None or self.problems[number][0].split()[0] in self.ops

    def passed_over(self, tool: str) -> set[int]:
        """Problems that are not run: a tool was silent in all their kernels, or they are of other
        ops."""
        silent = self.silent.get(tool, set())
        return {
            number
            for number in range(len(self.problems))
            if not self._runs(number) or self._identities(number) <= silent
        }

    def resume(self, path: Path, running: Collection[str], again: bool) -> None:
        """Count what a record says.

        Args:
            path: of a record; without it nothing is known.
            running: tools that will run.
            again: they run everything again, not only what the record does not say.
        """
        if not path.exists():
            return
        before = read(path)
        known = before["settings"].get("plans", {})
        current = {identity.source for identity in self.identity.values()}
        for tool, masks in before["settings"].get("silent", {}).items():
            silent = {
                Identity(source, plan)
                for source in known.keys() & masks.keys() & current
                for place, plan in enumerate(_plans(known[source]))
                if int(masks[source], 16) >> place & 1
            }
            for number in range(len(self.problems)):
                if tool in running and again and self._runs(number):
                    silent -= self._identities(number)
            self.silent[tool] = silent
            if silent:
                self.runs = [*before["settings"].get("runs", ()), _run_of(before)]
                self.seconds[tool] = before["results"]["seconds"].get(tool, 0.0)
            for kernel, numbers in self.numbers().items():
                for number in numbers:
                    if self._identities(number) <= silent:
                        self.reported.add((tool, number))
                        self._ended(tool, kernel, number)
        for row in before["results"]["rows"]:
            faults = row["errors"] or row["left"].keys() - {TIME}
            runs = row["tool"] in running and (self.ops is None or row["kernel"] in self.ops)
            if faults and not runs:
                self.kept[row["tool"], row["kernel"]] = row
        for note, count in before["results"]["notes"].items():
            if note.split(":")[0] not in running or not again:
                self.notes[note] += count

    def rows(self) -> list[dict[str, Any]]:
        """A row for each tool and kernel; problems of which nobody told are left out."""
        for tool in {tool for tool, _ in self.kernels}:
            for kernel in self.numbers():
                self.kernels.setdefault((tool, kernel), Kernel())
        for pair in self.kept:
            self.kernels.setdefault(pair, Kernel())
        return [
            self.kept.get((tool, kernel))
            or {
                "tool": tool, "kernel": kernel, "kernels": len(found.plans),
                "problems": found.problems, "errors": found.errors,
                "left": dict(found.left + self._untold(tool, kernel)),
            }
            for (tool, kernel), found in sorted(self.kernels.items())
        ]  # fmt: skip

    def _untold(self, tool: str, kernel: str) -> Counter[str]:
        numbers = self.numbers().get(kernel, ())
        return +Counter({TIME: sum((tool, number) not in self.reported for number in numbers)})

    def _settings(self) -> dict[str, Any]:
        """The kernels of which tools said nothing, by source: digests of their plans in base64, and
        by tool in hex: bit n is set if it said nothing of plan n."""
        every = set().union(*self.silent.values())
        plans = {
            source: sorted(plan for of, plan in every if of == source)
            for source in sorted({identity.source for identity in every})
        }
        silent = {
            tool: {
                source: f"{sum(((source, plan) in found) << n for n, plan in enumerate(some)):x}"
                for source, some in plans.items()
            }
            for tool, found in sorted(self.silent.items())
        }
        digests = {
            source: base64.b64encode(bytes.fromhex("".join(some))).decode()
            for source, some in plans.items()
        }
        return {"runs": self.runs, "plans": digests, "silent": silent}

    def table(self) -> str:
        """The rows as text, and what the tools remarked."""
        rows = [
            [
                row["tool"], row["kernel"], str(row["kernels"]), str(row["problems"]),
                str(row["errors"]), reasons(row["left"]),
            ]
            for row in self.rows()
        ]  # fmt: skip
        head = ["tool", "op", "kernels", "problems", "errors", "left out"]
        notes = [f"{count} times {note}" for note, count in self.notes.most_common()]
        return "\n".join([text_table(head, rows), *notes])

    def write(
        self, path: Path, command: str, settings: dict[str, Any], revision: str | None = None
    ) -> None:
        """Write the record.

        Args:
            revision: of the source; None asks git.
        """
        results = {"rows": self.rows(), "notes": dict(self.notes), "seconds": self.seconds}
        settings = {**settings, **self._settings()}
        write_record(make_record(SUITE, command, settings, results, revision, device="cuda"), path)


def reasons(left: Mapping[str, int]) -> str:
    """Numbers of omitted cases, by reason."""
    return ", ".join(f"{count} ({why})" for why, count in sorted(left.items())) or "0"


def _run_of(record: dict[str, Any]) -> dict[str, Any]:
    """Revision, GPU and command of the run that made a record."""
    gpu = record["machine"].get("gpu", "")
    sanitizer = record["settings"]["sanitizer"]
    return {
        "revision": record["revision"], "gpu": gpu, "sanitizer": sanitizer,
        "command": record["command"],
    }  # fmt: skip


def _plans(text: str) -> list[str]:
    """The digests that `_settings` wrote."""
    digests, size = base64.b64decode(text).hex(), 2 * DIGEST_BYTES
    return [digests[at : at + size] for at in range(0, len(digests), size)]
