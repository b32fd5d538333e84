"""Files stay small and their names say what is in them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {"utils", "common", "core", "misc", "legacy"}
FOLDERS = ("benchmarks", "hf_vq", "kernels", "plugins", "scripts", "tests")
SUFFIXES = {".py": 500, ".cpp": 600, ".h": 600, ".cuh": 600, ".cu": 600}


def sources() -> list[Path]:
    found = list(ROOT.glob("*.py"))
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted(found)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_size_and_name(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= SUFFIXES[path.suffix], f"{path} has {lines} lines: split it by meaning"
    parts = {part.split(".")[0] for part in path.relative_to(ROOT).parts}
    assert not parts & FORBIDDEN, f"{path}: name it after what it holds"


def test_all_kinds_were_read():
    assert {".py", ".cpp", ".h"} <= {path.suffix for path in sources()}
    assert ROOT / "hf_vq" / "env.py" in sources()


def test_autoload_stays_tiny():
    assert (ROOT / "hf_vq_autoload.py").read_text(encoding="utf-8").count("\n") < 70
