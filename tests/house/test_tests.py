"""Tests lie where they are looked for: by what they need, and in folders that can be read."""

import re

from tests.fixtures import ROOT

TESTS = ROOT / "tests"
WIDEST = 16  # files and folders of a folder
FOLDERS = {
    "buckets",
    "fixtures",
    "golden",
    "gpu",
    "house",
    "integration",
    "models",
    "native",
    "unit",
    "vllm",
}
MARKED = re.compile(r"\bmark\.gpu\b")


def test_every_test_has_a_folder():
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert folders <= FOLDERS


def test_tests_of_a_gpu_are_in_its_folder():
    """And nothing else is there: `pytest -m gpu tests/gpu` runs all of them."""
    here = {p for p in TESTS.rglob("test_*.py") if MARKED.search(p.read_text(encoding="utf-8"))}
    assert here == set((TESTS / "gpu").rglob("test_*.py"))


def test_no_folder_is_wide():
    for folder in {TESTS, *(path.parent for path in TESTS.rglob("*.py"))}:
        inside = {path.relative_to(folder).parts[0] for path in folder.rglob("*.py")}
        inside -= {"__init__.py"}
        assert len(inside) <= WIDEST, f"{folder} has {len(inside)} files and folders"


def test_no_path_is_added_for_tests_to_be_imported():
    for path in TESTS.rglob("*.py"):
        found = re.findall(r"^\s*sys\.path\.(?:append|insert)\(", path.read_text("utf-8"), re.M)
        assert not found, f"{path}: import it by its name, `from tests...`"
