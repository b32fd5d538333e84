"""The golden data: where it lies, and what a failure says.

data/<part>.json   one entry for each scheme or name, as `write.py` found it
data/older         files of earlier versions, which wrote them; never written again
"""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
OLDER = DATA / "older"
COMMAND = "python -m tests.golden.write"
_ON_PURPOSE = (
    f"If this change is on purpose, run `{COMMAND}`, look at `git diff tests/golden/data`, and say "
    "in CHANGELOG.md what changed and what becomes of existing files."
)
_MOST = 12  # changes in one message


def write(part: str, found: dict[str, Any]) -> None:
    """Record one part, with a line for each leaf, so that a diff says what changed."""
    text = json.dumps(found, indent=0, ensure_ascii=False)
    (DATA / f"{part}.json").write_text(text + "\n", encoding="utf-8")


def recorded(part: str) -> dict[str, Any]:
    """The golden data of one part, by scheme or name."""
    found: dict[str, Any] = json.loads((DATA / f"{part}.json").read_text(encoding="utf-8"))
    return found


def changes(old: Any, new: Any, where: str = "") -> list[str]:
    """What differs between two trees of dicts and lists, a line each, `where: old -> new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{where} / {key}" if where else str(key)
            if key not in new:
                found.append(f"{inner}: {_short(old[key])} -> (gone)")
            elif key not in old:
                found.append(f"{inner}: (none) -> {_short(new[key])}")
            else:
                found += changes(old[key], new[key], inner)
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, (a, b) in pairs for line in changes(a, b, f"{where} / {i}")]
    if isinstance(old, list) and isinstance(new, list):
        gone, more = ([i for i in a if i not in b] for a, b in ((old, new), (new, old)))
        found = [f"{where}: {_short(item)} -> (gone)" for item in gone]
        found += [f"{where}: (none) -> {_short(item)}" for item in more]
        return found or [f"{where}: {len(old)} items -> {len(new)} items"]
    # True is not 1.
    same = type(old) is type(new) and old == new
    return [] if same else [f"{where}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def check(what: str, old: Any, new: Any) -> None:
    """Fail with every change between what was recorded and what was found.

    Args:
        what: the scheme, file or interface, for the message.
        new: of JSON types.
    """
    found = changes(old, json.loads(json.dumps(new)))
    if found:
        shown = "\n  ".join(found[:_MOST])
        more = f"\n  and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise AssertionError(f"{what} changed:\n  {shown}{more}\n{_ON_PURPOSE}")
