"""Who runs an op: one table, read from the top; the first row that can, does.

>>> explain(Problem("linear", "cpu", "float32", spec, tokens=1, n=4096, k=4096))
cpu.vq_linear   no    built without the native library
reference       yes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from .. import env
from ..errors import VQBackendError


class Problem(NamedTuple):
    """What is asked of an op; everything a row may look at when it decides.

    A tuple, because one is made at every call of an op: a frozen dataclass takes ten times as long.

    Args:
        op: `linear`, `published_linear`, `w4a8_linear`, `encode`, `decode`, `rotate`, `append`,
            `attention`, `encode_weight`, of a static cache `store` or `attention_static`, of pages
            `append_paged` or `attention_paged`.
        device: device type of the input, e.g. `cpu`.
        dtype: dtype of the input, e.g. `bfloat16`.
        scheme: spec string, of published_linear that of the layout; for attention and store, that
            of the keys and of the values, with a space.
        tokens: rows of the input, or queries of each row, rounded up to a power of two.
        n: output features, or tokens in the cache (of a static one, its capacity), rounded up to a
            power of two; for encode_weight, candidates of a scale.
        k: input features, or head_dim.
        value_dim: head_dim of the values, for attention and store.
        layout: of the codes in a KV cache (`ops.layout`), for append; for attention and store,
            that of the keys and of the values, with a space. Empty when a new cache asks what it
            should be.
        page: tokens of a page, for append_paged and attention_paged.
    """

    op: str
    device: str
    dtype: str
    scheme: str
    tokens: int = 1
    n: int = 0
    k: int = 0
    value_dim: int = 0
    layout: str = ""
    page: int = 0


Direct = Callable[..., Tensor | None]
"""What a shorter way is called with, and None for tensors that it does not take:

linear      (x, codes, codebook, scale, rotation, bias) -> y
append      (x, mean, codebook, codes, scale, at) -> a tensor, of no meaning
attention   (query, cached, scaling, softcap) -> out, without mask, padding and s_aux
"""


class Fused(NamedTuple):
    """How a row of w4a8_linear takes inputs that were rounded before.

    Args:
        tokens: (x) -> x as `linear` reads it.
        norm: (x, weight, eps) -> RMSNorm of x as `linear` reads it.
        gated: (gate, up) -> SiLU(gate) * up as `linear` reads it.
        linear: (rounded, x, codes, scale, zero, step, bias, scheme) -> y; x is only described.
    """

    tokens: Callable[..., Any]
    norm: Callable[..., Any]
    gated: Callable[..., Any]
    linear: Callable[..., Tensor]


@dataclass(frozen=True)
class Kernel:
    """One row: who, for which op, what it needs and what it accepts.

    Args:
        name: `backend.kernel`, e.g. `cpu.vq_linear`; unique per op.
        op: the op it runs.
        run: called with the op's arguments.
        device: device type, or `any`.
        needs: None if this machine has what it takes, else the reason why not.
        accepts: None if it can solve the problem, else the reason why not.
        layouts: for attention, the layouts of keys and of values that it wants in a new cache.
        direct: a shorter way to `run`, if there is one; for linear only with weights of one pass.
        together: for linear, runs several weights with one input (the op `hf_vq::linears`).
        fused: for w4a8_linear, how it takes inputs that are rounded already.
        remark: what `explain` says of a problem that it runs, but not well.
    """

    name: str
    op: str
    run: Callable[..., Any]
    device: str = "any"
    needs: Callable[[], str | None] = lambda: None
    accepts: Callable[[Problem], str | None] = lambda problem: None
    layouts: Callable[[Problem], tuple[str, str]] = lambda problem: ("rows", "rows")
    direct: Callable[[Problem], Direct | None] = lambda problem: None
    together: Callable[..., list[Tensor]] | None = None
    fused: Fused | None = None
    remark: Callable[[Problem], str | None] = lambda problem: None


@dataclass(frozen=True)
class Verdict:
    """What the table says of one row: `reason` is empty for the row that runs."""

    kernel: Kernel
    chosen: bool
    reason: str


_table: list[Kernel] = []
_memories: list[Any] = []
Function = TypeVar("Function", bound=Callable[..., Any])


def remembered(function: Function) -> Function:
    """What `function` finds in the table is kept until a row is registered."""
    memory = lru_cache(maxsize=4096)(function)
    _memories.append(memory)
    return cast(Function, memory)


def register(kernel: Kernel, *, first: bool = False) -> None:
    """Add a row at the end of the table or at its top, instead of one with its op and name."""
    _table[:] = [row for row in _table if (row.op, row.name) != (kernel.op, kernel.name)]
    _table.insert(0 if first else len(_table), kernel)
    forget()


@contextmanager
def preferred(kernel: Kernel) -> Iterator[None]:
    """Ask one more row before all others, within the block."""
    register(kernel, first=True)
    try:
        yield
    finally:
        _table.remove(kernel)
        forget()


def forget() -> None:
    """Ask the table anew from now on."""
    for memory in _memories:
        memory.cache_clear()


def rows(op: str) -> list[Kernel]:
    """The rows of one op, in the order in which they are asked."""
    return [row for row in _table if row.op == op]


def select(problem: Problem) -> Kernel:
    """The row that runs `problem`, remembered per problem.

    Raises:
        VQBackendError: none can, or the backend forced by HF_VQ_BACKEND cannot.
    """
    return _select(problem, env.BACKEND.get())


@remembered
def _select(problem: Problem, forced: str) -> Kernel:
    reasons = []
    for row in rows(problem.op):  # those below the first that can are not asked
        reason = _objection(row, problem, forced)
        if reason is None:
            return row
        reasons.append(f"{row.name}: {reason}")
    found = "; ".join(reasons) or "the table is empty"
    cure = f" Unset HF_VQ_BACKEND={forced}." if forced else ""
    raise VQBackendError(f"no kernel runs {problem}: {found}.{cure}")


def direct(problem: Problem) -> Direct | None:
    """The shorter way of the row that runs `problem`, if it has one; raises as `select` does."""
    return _direct(problem, env.BACKEND.get())


@remembered
def _direct(problem: Problem, forced: str) -> Direct | None:
    return _select(problem, forced).direct(problem)


def explain(problem: Problem) -> list[Verdict]:
    """What the table says of every row of the problem's op, in order."""
    forced = env.BACKEND.get()
    verdicts: list[Verdict] = []
    taken = False
    for row in rows(problem.op):
        reason = _objection(row, problem, forced)
        chosen = reason is None and not taken
        if reason is None and taken:
            reason = "a row above runs it"
        taken |= chosen
        verdicts.append(Verdict(row, chosen, reason or ""))
    return verdicts


def _objection(row: Kernel, problem: Problem, forced: str) -> str | None:
    if forced and not (row.name == forced or row.name.startswith(forced + ".")):
        return f"HF_VQ_BACKEND={forced}"
    if row.device not in ("any", problem.device):
        return f"tensor is on {problem.device}"
    return row.needs() or row.accepts(problem)


def bucket(count: int) -> int:
    """`count` rounded up to a power of two: problems that differ less share a row."""
    return 1 << max(count - 1, 0).bit_length()
