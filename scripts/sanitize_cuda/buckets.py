"""Cases of every bucket of the choosers (`tests.buckets`), as tests run them, by public ops.

They are found once, by the process that starts the others, which read them from a file.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from cases import Case

from hf_vq.codegen.device import device_arch
from tests.buckets.case import Case as Problem
from tests.buckets.every import CASES

FOUND: list[Path] = []
"""The file, where there is one."""


def ranked() -> list[Problem]:
    """Of all kernels in turn, those in front that have a value of a feature which none before them
    has: what is left out for want of time has only pairs that are new."""
    arch, queues = device_arch(0), []
    for maker in CASES.values():
        seen: set[object] = set()
        first, rest = [], []
        for case in maker(arch):
            own = set(case.features(arch).items())
            (rest if own <= seen else first).append(case)
            seen |= own
        queues.append(first + rest)
    longest = max(map(len, queues))
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def keep(path: Path) -> None:
    """Write all problems to a file."""
    path.write_bytes(pickle.dumps(ranked()))


def found() -> Iterator[Case]:
    """All problems, the most important first."""
    problems: list[Problem] = pickle.loads(FOUND[0].read_bytes()) if FOUND else ranked()
    for problem in problems:
        yield problem.name, partial(run, problem)


def run(problem: Problem) -> None:
    """One call of the op; what it computes is compared by tests/test_cuda_buckets.py."""
    problem.run(problem.inputs(torch.device("cuda", 0)))


MAKERS = {"buckets": found}
