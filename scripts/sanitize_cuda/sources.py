"""Digests of what decides the machine code of a kernel, on any GPU of a target.

The digest of a source covers the target, NVRTC's version and options, and the text of a template
with all headers that it includes; that of a plan what is rendered of it. Comments and the layout of
lines are left out: they do not change machine code, so a record stays good after their edits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hf_vq.codegen.jit import compiler
from hf_vq.codegen.plan import Plan, render

DIGEST_BYTES = 5

_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class Identity(NamedTuple):
    """A kernel: its template with a digest of the source, and a digest of its plan."""

    source: str
    plan: str


def without_comments(source: str) -> str:
    """A source without comments, with one space where there are several, and no empty lines."""
    bare = _TOKEN.sub(lambda found: found["text"] or " ", source)
    lines = (" ".join(line.split()) for line in bare.splitlines())
    return "\n".join(line for line in lines if line)


def closure(name: str, sources: Mapping[str, str]) -> dict[str, str]:
    """A source and all that it includes, by name. A header that is rendered is not among them."""
    found = {name: sources[name]}
    left = _INCLUDE.findall(sources[name])
    while left:
        if (one := left.pop()) in sources and one not in found:
            found[one] = sources[one]
            left += _INCLUDE.findall(sources[one])
    return dict(sorted(found.items()))


def identities(plans: Iterable[Plan], arch: str) -> dict[Plan, Identity]:
    """Digests of what decides the machine code of each plan's kernel.

    Args:
        arch: the compiler's target.
    """
    texts = {name: without_comments(text) for name, text in compiler.sources().items()}
    setting = repr((arch, compiler.version(), compiler.OPTIONS))
    sources: dict[str, str] = {}
    found = {}
    for plan in plans:
        if (template := plan.template) not in sources:
            parts = closure(f"{template}.cu", texts), closure("primitives/numbers.cuh", texts)
            sources[template] = f"{template} {_digest(repr((setting, *parts)))}"
        found[plan] = Identity(sources[template], _digest(render(plan)))
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * DIGEST_BYTES]
