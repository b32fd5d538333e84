"""Digests of what decides the machine code of problems, by the kernel that their names begin with.

A digest covers the target, NVRTC's version and options, the plans as rendered, the names of the
problems, and the text of the templates with all headers that they include. Comments and the layout
of lines are left out: they do not change machine code, so a record stays good after their edits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from hf_vq.codegen.jit import compiler
from hf_vq.codegen.plan import Plan, render

_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


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


def digests(problems: Iterable[tuple[str, Iterable[Plan]]], arch: str) -> dict[str, str]:
    """A digest for each first word of the problems' names.

    Args:
        problems: name and plans of each, in their order.
        arch: the compiler's target.
    """
    texts = {name: without_comments(text) for name, text in compiler.sources().items()}
    every: dict[str, list[str]] = {}
    templates: dict[str, set[str]] = {}
    for name, plans in problems:
        kernel = name.split()[0]
        every.setdefault(kernel, []).append(f"{name} {sorted(map(render, plans))}")
        templates.setdefault(kernel, {"primitives/numbers.cuh"}).update(
            f"{plan.template}.cu" for plan in plans
        )
    found = {}
    for kernel, said in every.items():
        digest = hashlib.sha256(repr((arch, compiler.version(), compiler.OPTIONS)).encode())
        for template in sorted(templates[kernel]):
            digest.update(repr(closure(template, texts)).encode())
        digest.update("\0".join(said).encode())
        found[kernel] = digest.hexdigest()[:32]
    return found
