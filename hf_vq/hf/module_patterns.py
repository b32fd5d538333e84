"""Modules of a model that an entry of `VQConfig` selects: by name, part of a name, or pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from ..errors import VQConfigError, shown


def check_pattern(argument: str, entry: str) -> str:
    """The entry itself.

    Raises:
        VQConfigError: it is no regular expression.
    """
    try:
        re.compile(entry)
    except (re.error, RecursionError, OverflowError) as error:
        raise VQConfigError(
            f"{argument}: {shown(entry)} is not a regular expression: {error}."
        ) from None
    return entry


def matches(name: str, entry: str) -> bool:
    """True if `entry` selects the module `name` or a parent of it.

    Always up to a dot: "layers.1" does not mean layers.11. (Transformers' own matching did before
    5.23.)
    """
    start = re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name)
    return start is not None or f".{entry}." in f".{name}."


def check_entries(argument: str, entries: Iterable[str], names: list[str], model: Any) -> None:
    """Raise if an entry means none of the modules `names`.

    Raises:
        VQConfigError: names the entry, and modules with names like it; or it is no pattern.
    """
    known = set(names)
    for entry in entries:
        check_pattern(argument, entry)  # a dict that is given as a config is not checked before
        if entry not in known and not any(matches(name, entry) for name in names):
            near = get_close_matches(entry, names, 3, 0.3)
            raise VQConfigError(
                f"{argument}: {entry!r} matches no module of {type(model).__name__}. Near names: "
                f"{', '.join(near) or 'none'}."
            )


def check_pass2(
    pass2: str | dict[str, str] | None, names: list[str], model: Any, scheme: str
) -> None:
    """Raise if a policy of `VQConfig(pass2=...)` has no second pass to place.

    Args:
        names: of the layers with two passes.
        scheme: name of the model's.

    Raises:
        VQConfigError: there are none, or an entry means none of them.
    """
    if pass2 not in (None, "resident") and not names:
        raise VQConfigError(
            f"no layer of {type(model).__name__} has a second pass to place: {scheme} has one "
            "pass. Leave pass2 out."
        )
    if isinstance(pass2, dict):
        check_entries("pass2", pass2, names, model)
