"""Output of processes under compute-sanitizer, parsed into cases, reports and a table.

A process prints a line before each case (`case`), for each case without time (`left`), and at its
end (`end`). The lines of the tool between them begin with `=`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        ops: first words of the names of problems that are run; None: of all.
    """

    problems: list[tuple[str, frozenset[Any]]]
    ops: frozenset[str] | None = None
    kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    reported: set[tuple[str, int]] = field(default_factory=set)
    silent: dict[str, set[int]] = field(default_factory=dict)
    """By tool, cases that ended without a report, of earlier runs too."""
    earlier: dict[tuple[str, str], list[dict[str, str]]] = field(default_factory=dict)
    """By tool and kernel, revision and GPU of earlier runs that are counted in."""

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
                why = own[1] if own else SLOW if said.status is None else BROKEN
                found.left[why.strip()] += 1
                continue
            self._ended(tool, kernel, number)
            if not errors:
                self.silent.setdefault(tool, set()).add(number)

    def _ended(self, tool: str, kernel: str, number: int) -> None:
        found = self.kernels.setdefault((tool, kernel), Kernel())
        found.problems += 1
        found.plans |= self.problems[number][1] if self.problems else {number}

    def numbers(self) -> dict[str, list[int]]:
        """Numbers of the problems of each kernel that is run."""
        found: dict[str, list[int]] = {}
        for number, (name, _) in enumerate(self.problems):
            kernel = name.split()[0]
            if self.ops is None or kernel in self.ops:
                found.setdefault(kernel, []).append(number)
        return found

    def passed_over(self, tool: str) -> set[int]:
        """Problems that need no run: a tool was silent in them, or they are of other ops."""
        wanted = {number for every in self.numbers().values() for number in every}
        return set(range(len(self.problems))) - wanted | self.silent.get(tool, set())

    def resume(self, path: Path, sources: Mapping[str, str], tools: Iterable[str]) -> None:
        """Count what a record says was silent: of kernels whose problems and sources are the same.

        Args:
            path: of a record; without it nothing is known.
            sources: `digests` of the kernels.
            tools: that will be run; `write` keeps the rows of others.
        """
        before = read(path) if path.exists() else {"settings": {}}
        numbers = self.numbers()
        same = [op for op in _same(before["settings"].get("sources"), sources) if op in numbers]
        for tool in set(tools) & set(before["settings"].get("silent", ())):
            self.silent[tool] = set()
            self.seconds[tool] = before["results"]["seconds"].get(tool, 0.0)
            for kernel in same:
                bits = int(before["settings"]["silent"][tool].get(kernel, "0"), 16)
                for place, number in enumerate(numbers[kernel]):
                    if bits >> place & 1:
                        self.silent[tool].add(number)
                        self.reported.add((tool, number))
                        self._ended(tool, kernel, number)
                if bits:
                    self.earlier[tool, kernel] = _runs_of(before, tool, kernel)

    def close(self, tool: str) -> None:
        """All processes of a tool have ended: what none of them told is left out."""
        for kernel, every in self.numbers().items():
            for number in every:
                if (tool, number) not in self.reported:
                    found = self.kernels.setdefault((tool, kernel), Kernel())
                    found.left[TIME] += 1

    def rows(self) -> list[dict[str, Any]]:
        """A row for each tool and kernel."""
        return [
            {
                "tool": tool, "kernel": kernel, "kernels": len(found.plans),
                "problems": found.problems, "errors": found.errors, "left": dict(found.left),
            } | ({"earlier": runs} if (runs := self.earlier.get((tool, kernel))) else {})
            for (tool, kernel), found in sorted(self.kernels.items())
        ]  # fmt: skip

    def _masks(self) -> dict[str, dict[str, str]]:
        """By tool and kernel, in hex: bit n is set if the tool was silent in its problem n."""
        return {
            tool: {
                kernel: f"{sum(1 << place for place, n in enumerate(every) if n in silent):x}"
                for kernel, every in self.numbers().items()
            }
            for tool, silent in sorted(self.silent.items())
        }

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
        """Write the record; rows of other tools and ops stay, each with its revision and GPU, if
        they are of the same sources and versions.

        Args:
            settings: with `sources`, the `digests` of the kernels.
            revision: of the source; None asks git.
        """
        settings = {**settings, "silent": self._masks()}
        results = {"rows": self.rows(), "notes": dict(self.notes), "seconds": self.seconds}
        record = make_record(SUITE, command, settings, results, revision, device="cuda")
        if path.exists():
            _keep_others(record, read(path))
        write_record(record, path)


def reasons(left: Mapping[str, int]) -> str:
    """Numbers of omitted cases, by reason."""
    return ", ".join(f"{count} ({why})" for why, count in sorted(left.items())) or "0"


def _same(before: object, now: Mapping[str, str]) -> list[str]:
    """Kernels with the same digest in both; an older record has one digest of all kernels."""
    known = before if isinstance(before, dict) else {}
    return [kernel for kernel, digest in now.items() if known.get(kernel) == digest]


def _run_of(record: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    """Revision and GPU of a row: its own, or those of its record."""
    of_record = {"revision": record["revision"], "gpu": record["machine"].get("gpu", "")}
    return {key: row.get(key, value) for key, value in of_record.items()}


def _runs_of(record: dict[str, Any], tool: str, kernel: str) -> list[dict[str, str]]:
    """All runs that a row of a record counts."""
    for row in record["results"]["rows"]:
        if (row["tool"], row["kernel"]) == (tool, kernel):
            return [*row.get("earlier", ()), _run_of(record, row)]
    return []


def _keep_others(record: dict[str, Any], before: dict[str, Any]) -> None:
    """Copy the rows of other tools and ops from the previous record, if their sources are the
    same: so is their machine code, on every model of GPU."""
    same = _same(before["settings"].get("sources"), record["settings"]["sources"])
    ran = [(one["suite"], one["versions"]) for one in (before, record)]
    if ran[0] != ran[1]:
        return
    now, was = record["results"], before["results"]
    there = {(row["tool"], row["kernel"]) for row in now["rows"]}
    kept = [
        {**_run_of(before, row), **row}
        for row in was["rows"]
        if row["kernel"] in same and (row["tool"], row["kernel"]) not in there
    ]
    now["rows"] = sorted(kept + now["rows"], key=lambda row: (row["tool"], row["kernel"]))
    tools = {row["tool"] for row in kept}
    notes = {note: count for note, count in was["notes"].items() if note.split(":")[0] in tools}
    now["notes"] = {**notes, **now["notes"]}
    now["seconds"] = {**{tool: was["seconds"][tool] for tool in sorted(tools)}, **now["seconds"]}
    silent = record["settings"]["silent"]
    for tool, masks in before["settings"].get("silent", {}).items():
        others = {op: mask for op, mask in masks.items() if (tool, op) not in there and op in same}
        if others:
            silent[tool] = {**others, **silent.get(tool, {})}
    record["command"] = f"{before['command']}; {record['command']}" if kept else record["command"]
