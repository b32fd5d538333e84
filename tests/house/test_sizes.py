"""Files stay small and their names say what is in them."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.fixtures import ROOT

FORBIDDEN = {"utils", "common", "core", "misc", "legacy"}
FOLDERS = ("benchmarks", "hf_vq", "kernels", "plugins", "scripts", "tests")
NARROW = ("benchmarks", "hf_vq", "kernels")  # whose folders hold at most WIDEST files
WIDEST = 16
SUFFIXES = {".py": 500, ".cpp": 600, ".h": 600, ".cuh": 600, ".cu": 600}


def sources() -> list[Path]:
    found = list(ROOT.glob("*.py"))
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted(found)


def complaints(path: Path) -> Iterator[str]:
    """What is wrong with the length or the name of a file."""
    name, lines = path.relative_to(ROOT), path.read_text(encoding="utf-8").count("\n")
    if lines > SUFFIXES[path.suffix]:
        yield f"{name} has {lines} lines: split it by meaning"
    if FORBIDDEN & {part.split(".")[0] for part in name.parts}:
        yield f"{name}: name it after what it holds"


def test_files_are_short_and_named_after_what_they_hold():
    found = [complaint for path in sources() for complaint in complaints(path)]
    assert not found, "\n".join(found)


def test_long_files_and_forbidden_names_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "utils.py").write_text("\n" * 501)
    (tmp_path / "scripts" / "fine.py").write_text("\n" * 500)
    found = [list(complaints(path)) for path in sources()]
    assert [len(each) for each in found] == [0, 2]


def widths(root: Path) -> dict[Path, int]:
    """Number of files in each folder below `root`, without caches of Python."""
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return dict(Counter(path.parent for path in files))


def test_no_folder_is_wide():
    wide = {
        str(folder.relative_to(ROOT)): count
        for top in NARROW
        for folder, count in widths(ROOT / top).items()
        if count > WIDEST
    }
    assert not wide, f"folders with more than {WIDEST} files: {wide}; split them by meaning"


def test_a_wide_folder_is_seen(tmp_path):
    for number in range(WIDEST + 1):
        (tmp_path / f"file_{number}.py").touch()
    assert widths(tmp_path) == {tmp_path: WIDEST + 1}


def test_all_kinds_were_read():
    assert {".py", ".cpp", ".h"} <= {path.suffix for path in sources()}
    assert ROOT / "hf_vq" / "env.py" in sources()


def test_autoload_stays_tiny():
    assert (ROOT / "hf_vq_autoload.py").read_text(encoding="utf-8").count("\n") < 95
