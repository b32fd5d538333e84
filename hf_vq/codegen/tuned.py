"""Measured plans: for each kind of GPU a small table, shipped with the package or made here.

    {"version": 2,
     "sm_90a/132": {"vq2x8r1-universal-g128-.. 1x4096x4096 float16": {"threads": 256, ...}}}

`python -m benchmarks cuda-tune` measures plans and writes a table to the kernel store. That table
takes precedence over the shipped one. The key of a GPU is its target and its number of SMs.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..formats.hidden import hidden_file
from .jit.kernel_store import default_store

if TYPE_CHECKING:
    from .families.linear import LinearProblem
    from .plan import LinearPlan

KNOBS = ("threads", "blocks_per_sm", "replicas", "interleaved", "unit", "split_k_warps",
         "row_tiles", "pipeline_depth", "rotate", "prefetch_x", "cluster_size")  # fmt: skip
VERSION = 2  # raised when a knob changes its name or meaning: older tables are ignored
_SHIPPED = Path(__file__).with_name("tuned.json")

Table = dict[str, dict[str, dict[str, int]]]


def gpu(problem: LinearProblem) -> str:
    """Key of a kind of GPU in the table."""
    return f"{problem.arch.name}/{problem.arch.sms}"


def name(problem: LinearProblem) -> str:
    """Key of a problem in the table; tokens are rounded up to their bucket, a scaled scheme is the
    plain one, which takes as long, and inputs are floats."""
    tokens = 1 if problem.tokens == 1 else -(-problem.tokens // 8) * 8
    shape = f"{tokens}x{problem.rows}x{problem.in_features}"
    return f"{problem.scheme.unscaled().with_activations(16).spec()} {shape} {problem.dtype.value}"


def knobs(plan: LinearPlan) -> dict[str, int]:
    """Tunable fields of a plan; the others follow from the problem."""
    return {knob: int(getattr(plan, knob)) for knob in KNOBS}


def find(problem: LinearProblem) -> dict[str, int] | None:
    """Look up the fastest measured knobs; None if the problem was not measured."""
    for table in (_on_disk(), _shipped()):
        found = table.get(gpu(problem), {}).get(name(problem), {})
        if set(found) == set(KNOBS):
            return found
    return None


def keep(found: dict[LinearProblem, LinearPlan], path: Path | None = None) -> Path:
    """Add measured plans atomically to the table on disk, or to the one at `path`.

    Raises:
        OSError: the table cannot be written.
    """
    path = path or _path()
    table = _read(path)
    for problem, plan in found.items():
        table.setdefault(gpu(problem), {})[name(problem)] = knobs(plan)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with hidden_file(path) as temporary:
        temporary.touch(mode=0o600)  # tables that others may write to are not trusted
        temporary.write_text(text(table), encoding="utf-8")
    _on_disk.cache_clear()
    _shipped.cache_clear()
    return path


def text(table: Table) -> str:
    """Format a table as JSON, one plan a line."""
    gpus = [f'"version": {VERSION}']
    for kind, plans in sorted(table.items()):
        lines = [f"  {json.dumps(key)}: {json.dumps(plan)}" for key, plan in sorted(plans.items())]
        gpus.append(f"{json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{" + ",\n".join(gpus) + "}\n"


def _path() -> Path:
    return default_store().folder / "tuned.json"


@functools.cache
def _on_disk() -> Table:
    return _read(_path()) if default_store().trusts(_path()) else {}


@functools.cache
def _shipped() -> Table:
    return _read(_SHIPPED)


def _read(path: Path) -> Table:
    """Read the table of a file; empty if it is missing, malformed or of another version."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = (
        isinstance(found, dict)
        and found.pop("version", None) == VERSION
        and all(
            isinstance(plans, dict) and all(isinstance(plan, dict) for plan in plans.values())
            for plans in found.values()
        )
    )
    return found if whole else {}
