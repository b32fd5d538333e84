"""The problems of all kernels, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from hf_vq.codegen.jit.device import Arch

from . import append, attention, linear, rows, store, vptq, w4a8
from .case import Case

Maker = Callable[[Arch], Sequence[Case]]

CASES: dict[str, Maker] = {
    "attention": attention.cases,
    **{
        f"linear-{family}": functools.partial(linear.cases, family=family)
        for family in linear.families()
    },
    "w4a8": w4a8.cases,
    "append": append.cases,
    "store": store.cases,
    "vptq": vptq.cases,
    "rows": rows.cases,
}
"""Problems that are run."""

DOMAINS: dict[str, Maker] = {
    "attention": attention.domain,
    **{
        f"linear-{family}": functools.partial(linear.domain, family=family)
        for family in linear.families()
    },
    "w4a8": w4a8.domain,
    "append": append.domain,
    "store": store.domain,
    "vptq": vptq.domain,
    "rows": rows.domain,
}
"""All problems that are looked at, of which those that are run have every feature."""
