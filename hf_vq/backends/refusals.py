"""Reasons that several entries of the dispatch table give: each takes what a problem says and gives
None, or the sentence that `explain` prints."""

from __future__ import annotations

from collections.abc import Collection

from ..formats.scheme import VQScheme

FLOATS = ("float32", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")
NO_PLAN = "no plan: shared memory or registers do not suffice"


def dtype(found: str, known: Collection[str], what: str = "inputs") -> str | None:
    """A reason unless `known` has the dtype of the inputs."""
    return None if found in known else f"{what} are {found}"


def many_tokens(tokens: int, most: int) -> str | None:
    """A reason where a weight is used so often that it is decoded once for all tokens."""
    return f"{tokens} tokens: decoded rows are used often enough" if tokens > most else None


def few_tokens(tokens: int, fewest: int) -> str | None:
    """A reason where a kernel for many tokens does not pay."""
    return f"{tokens} tokens are few" if tokens < fewest else None


def no_plan(plan: object | None, tokens: int) -> str | None:
    """A reason where a chooser found no plan for so many tokens."""
    if plan is not None:
        return None
    return f"no plan for {tokens} tokens: shared memory or registers do not suffice"


def qr(scheme: VQScheme) -> str | None:
    """A reason where a rotation is a dense matrix."""
    if scheme.is_scaled:
        return "a diagonal is not multiplied by kernels"
    return "a QR rotation is a matrix product" if scheme.rotation == "qr" else None


def mode(scheme: VQScheme) -> str | None:
    """A reason where a scale is not that of the least squared error."""
    if scheme.mode == "unbiased":
        return None
    return f"mode {scheme.mode!r} is not computed by kernels"


def zero(scheme: VQScheme) -> str | None:
    """A reason where rows have a zero point."""
    return "rows have a zero" if scheme.has_zero else None
