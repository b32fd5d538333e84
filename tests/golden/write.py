"""Record anew what tests/golden compares with: `python -m tests.golden.write`.

For a change of a file, a number or a name that is made on purpose. No test runs it. It prints what
changed since the data was written; read that, and `git diff tests/golden/data`, before you commit.
"""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.golden import exact_results, interface, stored_caches, stored_weights
from tests.golden.recorded import DATA, changes, recorded, write


def in_folders(names: list[str], find: Callable[[str, Path], Any]) -> dict[str, Any]:
    """What `find` finds of every name, with an empty folder to work in."""
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as work:
            found[name] = find(name, Path(work))
    return found


def weights() -> dict[str, Any]:
    """data/weights.json."""
    with tempfile.TemporaryDirectory() as folder:
        return in_folders(
            list(stored_weights.ALL),
            lambda name, work: stored_weights.facts(name, Path(folder), work),
        )


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "weights": weights,
    "caches": lambda: in_folders(list(stored_caches.ALL), stored_caches.facts),
    "results": lambda: in_folders(list(exact_results.ALL), exact_results.facts),
    "interface": lambda: {name: find() for name, find in interface.PARTS.items()},
}


def main() -> None:
    """Write every part."""
    logging.disable(logging.WARNING)
    for part, find in PARTS.items():
        found = find()
        before = recorded(part) if (DATA / f"{part}.json").exists() else {}
        print(
            "\n".join(f"{part}: {line}" for line in changes(before, found)) or f"{part}: as it was"
        )
        write(part, found)


if __name__ == "__main__":
    main()
