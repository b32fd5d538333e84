"""Cases of every bucket of the choosers (`tests.buckets`), run through public ops.

The parent process finds the cases once and writes them to a file, which its workers read.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import Case
from torch import Tensor

from hf_vq.codegen.jit.device import Arch, device_arch
from hf_vq.codegen.plan import Plan
from tests.buckets.case import Case as Problem
from tests.buckets.every import CASES, DOMAINS

ROOT = Path(__file__).resolve().parents[2]
FOUND: list[Path] = []
"""The file, where there is one."""
SKIPPED: list[bool] = []
"""Not empty: products that PyTorch leaves to cuBLAS are not computed (`run`)."""


def size(problem: Problem) -> int:
    """About how much there is to do: the product of all of its numbers."""
    values = [getattr(problem, field.name) for field in fields(problem)]  # type: ignore[arg-type]
    numbers = [n for value in values for n in (value if isinstance(value, tuple) else (value,))]
    return math.prod(n for n in numbers if type(n) is int and n > 0)


def of_kernel(kernel: str, arch: Arch) -> list[Problem]:
    """A problem for each plan that the tests' problems of a kernel have, the smallest of all that
    are looked at. In front those that have a value of a feature which none before them has."""
    wanted = {plan for problem in CASES[kernel](arch) for plan in problem.plans(arch)}
    chosen: list[Problem] = []
    for problem in sorted(dict.fromkeys((*CASES[kernel](arch), *DOMAINS[kernel](arch))), key=size):
        plans = set(problem.plans(arch))
        if wanted & plans:
            wanted -= plans
            chosen.append(problem)
    seen: set[object] = set()
    first, rest = [], []
    for problem in chosen:
        features = problem.features(arch).items()
        own = {value for value in features if not value[0].startswith("each kernel")}
        (rest if own <= seen else first).append(problem)
        seen |= own
    return first + rest


def smallest(arch: Arch) -> list[Problem]:
    """Problems of all kernels, interleaved so that a short run covers every kernel."""
    with ProcessPoolExecutor(
        min(len(CASES), os.cpu_count() or 1), multiprocessing.get_context("spawn")
    ) as pool:
        queues = list(pool.map(partial(of_kernel, arch=arch), CASES))
    longest = max(map(len, queues))
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def choosers() -> str:
    """A digest of the code that decides which problems there are, and which plans they launch."""
    digest = hashlib.sha256()
    for folder in (ROOT / "tests" / "buckets", ROOT / "hf_vq", Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def keep(path: Path) -> list[tuple[str, frozenset[Plan]]]:
    """Write the problems of this GPU to a file, unless it has them: the name of each, and the plans
    that it launches."""
    arch = device_arch(0)
    wanted = (choosers(), arch)
    if path.exists():
        _, found, *known = pickle.loads(path.read_bytes())
        if known == list(wanted):
            return found  # type: ignore[no-any-return]
    problems = smallest(arch)
    found = [(problem.name, frozenset(problem.plans(arch))) for problem in problems]
    path.write_bytes(pickle.dumps((problems, found, *wanted)))
    return found


def found() -> Iterator[Case]:
    """All problems, the most important first."""
    problems: list[Problem] = pickle.loads(FOUND[0].read_bytes())[0]
    for problem in problems:
        yield problem.name, partial(run, problem)


def run(problem: Problem) -> None:
    """One call of the op; what it computes is compared by tests/gpu/test_buckets.py."""
    inputs = problem.inputs(torch.device("cuda", 0))
    if not SKIPPED:
        problem.run(inputs)
        return
    mm, addmm = torch.mm, torch.addmm
    torch.mm = torch.addmm = _nothing  # type: ignore[assignment]
    try:
        problem.run(inputs)
    finally:
        torch.mm, torch.addmm = mm, addmm


def _nothing(*factors: Tensor, out: Tensor, **_: Any) -> Tensor:
    """Replacement of a matrix product that does nothing."""
    return out.zero_()


MAKERS = {"buckets": found}
