"""Output of processes under compute-sanitizer, parsed into cases, reports and a table.

A process prints a line before each case (`case`), for each case without time (`left`), and at its
end (`end`). The lines of the tool between them begin with `=`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
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
    """

    problems: list[tuple[str, frozenset[Any]]]
    kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    reported: set[tuple[str, int]] = field(default_factory=set)
    silent: dict[str, set[int]] = field(default_factory=dict)
    """By tool, cases that ended without a report, of earlier runs too."""

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

    def resume(self, path: Path, sources: str) -> None:
        """Count what a record says was silent: the same problems of the same sources.

        Args:
            path: of a record; without it nothing is known.
            sources: the digest of what kernels are made of, and of the problems.
        """
        before = read(path) if path.exists() else {}
        if before.get("settings", {}).get("sources") != sources:
            return
        for tool, bits in before["settings"]["silent"].items():
            done = int(bits, 16)
            self.silent[tool] = {n for n in range(len(self.problems)) if done >> n & 1}
            for number in self.silent[tool]:
                self.reported.add((tool, number))
                self._ended(tool, self.problems[number][0].split()[0], number)
            self.seconds[tool] = before["results"]["seconds"].get(tool, 0.0)

    def close(self, tool: str) -> None:
        """All processes of a tool have ended: what none of them told is left out."""
        for number, (name, _) in enumerate(self.problems):
            if (tool, number) not in self.reported:
                found = self.kernels.setdefault((tool, name.split()[0]), Kernel())
                found.left[TIME] += 1

    def rows(self) -> list[dict[str, Any]]:
        """A row for each tool and kernel."""
        return [
            {
                "tool": tool, "kernel": kernel, "kernels": len(found.plans),
                "problems": found.problems, "errors": found.errors, "left": dict(found.left),
            }
            for (tool, kernel), found in sorted(self.kernels.items())
        ]  # fmt: skip

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

    def write(self, path: Path, command: str, settings: dict[str, Any]) -> None:
        """Write the record; rows of other tools, of the same sources on the same machine, stay."""
        masks = {tool: sum(1 << n for n in done) for tool, done in sorted(self.silent.items())}
        settings = {**settings, "silent": {tool: f"{mask:x}" for tool, mask in masks.items()}}
        results = {"rows": self.rows(), "notes": dict(self.notes), "seconds": self.seconds}
        record = make_record(SUITE, command, settings, results, device="cuda")
        if path.exists():
            _keep_others(record, read(path))
        write_record(record, path)


def reasons(left: Mapping[str, int]) -> str:
    """Numbers of omitted cases, by reason."""
    return ", ".join(f"{count} ({why})" for why, count in sorted(left.items())) or "0"


def _keep_others(record: dict[str, Any], before: dict[str, Any]) -> None:
    """Copy the rows of other tools from the previous record."""
    same = "suite", "machine", "versions"
    sources = [one["settings"].get("sources") for one in (before, record)]
    if sources[0] != sources[1] or any(before.get(key) != record[key] for key in same):
        return
    now, was = record["results"], before["results"]
    others = set(was["seconds"]) - set(now["seconds"])
    now["rows"] = [row for row in was["rows"] if row["tool"] in others] + now["rows"]
    kept = {note: count for note, count in was["notes"].items() if note.split(":")[0] in others}
    now["notes"] = {**kept, **now["notes"]}
    now["seconds"] = {**{tool: was["seconds"][tool] for tool in sorted(others)}, **now["seconds"]}
    for tool in others & set(before["settings"].get("silent", ())):
        record["settings"]["silent"][tool] = before["settings"]["silent"][tool]
    record["command"] = f"{before['command']}; {record['command']}" if others else record["command"]
