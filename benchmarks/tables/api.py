"""The API reference: public names with signature, summary and arguments, from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import hf_vq
from hf_vq.evaluation.text_tables import markdown_table

_FIRST = ("VQConfig", "VQCache", "explain")  # what most users need; others by name
_SECTION = re.compile(r"^(Args|Raises|Returns):\n((?:[ ]{4}.*\n|\n)*)", re.MULTILINE)
_ITEM = re.compile(r"^[ ]{4}(\w[\w, ]*): (.*(?:\n[ ]{8,}.*)*)", re.MULTILINE)
_PARENTHESES = re.compile(r"\([^()]*\)|\{[^{}]*\}")
_COLON = re.compile(r":(?=\s)(?![^{]*\})")
_MANY = 9  # words of a sentence that is cut at its colon
_FEW = 3  # words of a text that says no more than the name: `dtype`: of the input
_END = re.compile(r"[.;](?=\s|$)")


def reference() -> str:
    """Markdown of every name of `hf_vq.__all__`."""
    errors, others = [], []
    for name in hf_vq.__all__:
        value = getattr(hf_vq, name)
        if isinstance(value, type) and issubclass(value, Exception):
            errors.append((name, value))
        elif callable(value):
            others.append((name, value))
    others.sort(key=lambda item: (item[0] not in _FIRST, _FIRST.index(item[0])
                                  if item[0] in _FIRST else 0, item[0].lower()))  # fmt: skip
    parts = [_entry(name, value) for name, value in others]
    rows = [[f"`{name}`", sentence(_docstring(value))] for name, value in errors]
    parts.append("## Errors\n\n" + markdown_table(["error", "raised for"], rows))
    return "\n\n".join(parts)


def signature(name: str, value: Any) -> str:
    """A call of `value` with its parameters and their defaults, as Python without annotations."""
    found = inspect.signature(value)
    shown = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
        if not parameter.name.startswith("_") and parameter.kind != inspect.Parameter.VAR_KEYWORD
    ]
    return name + str(inspect.Signature(shown))


def arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """(names, first sentence) of every item of the section `Args` of a docstring."""
    for title, body in _SECTION.findall(docstring + "\n"):
        if title == "Args":
            for names, text in _ITEM.findall(body):
                said = sentence(text)
                if len(said.split()) > _MANY:
                    said = _COLON.split(said, maxsplit=1)[0]
                yield names, said


def sentence(text: str) -> str:
    """The first sentence, or clause before a semicolon outside of parentheses, on one line."""
    text = " ".join(text.partition("\n\n")[0].split())
    hidden = _PARENTHESES.sub(lambda match: "-" * len(match[0]), text)
    found = _END.search(hidden)
    return text[: found.start()] if found else text.rstrip(":")


def _entry(name: str, value: Any) -> str:
    docstring = _docstring(value)
    lines = [f"## {name}", f"    {signature(name, value)}", sentence(docstring) + "."]
    said = ((names, text) for names, text in arguments(docstring) if len(text.split()) > _FEW)
    if items := [f"- `{names}`: {text}" for names, text in said]:
        lines.append("\n".join(items))
    return "\n\n".join(lines)


def _docstring(value: Any) -> str:
    return inspect.getdoc(value) or ""
