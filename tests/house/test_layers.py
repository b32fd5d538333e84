"""Each layer imports only the layers below it: the arrows of docs/architecture.md, enforced."""

import ast
import re
from pathlib import Path

import pytest

from tests.fixtures import ROOT

PACKAGE = ROOT / "hf_vq"

LEAVES = {"errors", "env", "paths", "patches", "progress"}
"""Everyone may import them; they import nobody."""
ALLOWED: dict[str, set[str]] = {
    "formats": set(),
    "transforms": {"formats"},
    "dispatch": set(),
    "ops": {"formats", "transforms", "dispatch"},
    "codegen": {"formats"},
    "backends": {"formats", "ops", "dispatch", "codegen"},
    "fit": {"formats", "transforms", "dispatch", "ops"},
    "nn": {"formats", "transforms", "dispatch", "ops"},
    "cache": {"formats", "transforms", "dispatch", "ops"},
    "hf": {"formats", "transforms", "dispatch", "ops", "fit", "nn", "cache"},
}
ALLOWED["calibration"] = ALLOWED["interop"] = ALLOWED["hf"] | {"hf"}
ALLOWED["serving"] = ALLOWED["calibration"] | {"calibration"}
ALLOWED["vllm"] = ALLOWED["serving"] | {"serving"}
ALLOWED["__init__"] = set(ALLOWED)
ALLOWED["evaluation"] = set(ALLOWED)
ALLOWED["cli"] = set(ALLOWED)
ALLOWED["bench"] = {"evaluation"}  # its old name
ALLOWED["__main__"] = {"cli"}
ALLOWED = {unit: below | LEAVES | {unit} for unit, below in ALLOWED.items()}
ALLOWED |= {leaf: {leaf} for leaf in LEAVES}

# The one name that any layer may take from the package itself.
PUBLIC_TO_ALL = {"__version__"}


def unit_of(path: Path) -> str:
    """The layer a file belongs to: its folder, or its own name at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def absolute(node: ast.ImportFrom, path: Path) -> list[str]:
    """The module an import-from names, relative ones resolved, as its parts."""
    module = node.module.split(".") if node.module else []
    if node.level == 0:
        return module
    package = ["hf_vq", *path.relative_to(PACKAGE).parent.parts]
    return package[: len(package) - node.level + 1] + module


def imported(source: str, path: Path) -> set[str]:
    """The layers that a file imports anywhere: at the top, in a function, by import_module."""
    modules: list[list[str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, path)
            if base == ["hf_vq"]:
                names = [alias.name for alias in node.names if alias.name not in PUBLIC_TO_ALL]
                modules += [[*base, name] for name in names]
            else:
                modules.append(base)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__"):
                modules.append(str(node.args[0].value).split("."))
    units = {
        (parts[1] if len(parts) > 1 else "__init__") for parts in modules if parts[0] == "hf_vq"
    }
    # `from hf_vq import VQConfig` names no layer: it comes from the package itself.
    return {unit if unit in ALLOWED else "__init__" for unit in units}


FILES = sorted(PACKAGE.rglob("*.py"))


def test_there_is_a_package_to_read():
    assert {"errors", "env", "paths", "backends"} <= {unit_of(path) for path in FILES}


def test_every_file_imports_only_lower_layers():
    wrong = []
    for path in FILES:
        unit = unit_of(path)
        assert unit in ALLOWED, f"{path}: say in ALLOWED where {unit} stands"
        higher = imported(path.read_text(encoding="utf-8"), path) - ALLOWED[unit]
        if higher:
            wrong.append(f"{path}: {unit} must not import {sorted(higher)}")
    assert not wrong, "\n".join(wrong)


def test_the_package_does_without_the_checkout():
    """An installed package has neither benchmarks nor tests."""
    outside = re.compile(r"^\s*(?:from|import) (?:benchmarks|tests)\b", re.MULTILINE)
    assert outside.search("    from benchmarks.timing import interleave")
    found = [path.name for path in FILES if outside.search(path.read_text(encoding="utf-8"))]
    assert not found, f"they import benchmarks or tests: {found}"


def test_the_rules_that_are_easy_to_lose():
    assert "backends" not in ALLOWED["ops"] | ALLOWED["dispatch"]
    assert not {"fit", "cache", "hf"} & ALLOWED["nn"]
    assert not {"nn", "cache", "hf"} & ALLOWED["fit"]
    assert not {"nn", "fit", "hf"} & ALLOWED["cache"]
    assert not {"calibration", "serving", "interop"} & ALLOWED["hf"]
    assert "serving" not in ALLOWED["calibration"] | ALLOWED["interop"]
    for unit, below in ALLOWED.items():
        assert "cli" not in below - {unit} or unit == "__main__"
        assert "evaluation" not in below - {unit} or unit in ("cli", "bench")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import hf_vq.hf.config", {"hf"}),
        ("from hf_vq.hf import config", {"hf"}),
        ("from hf_vq import hf", {"hf"}),
        ("from hf_vq import VQConfig", {"__init__"}),
        ("from hf_vq import __version__", set()),
        ("import hf_vq", {"__init__"}),
        ("from .linear import VQLinear", {"nn"}),
        ("from . import linear", {"nn"}),
        ("from .. import hf, paths", {"hf", "paths"}),
        ("from ..cache.layers import X", {"cache"}),
        ("def f():\n    from ..fit import kmeans", {"fit"}),
        ("from ..calibration.equivalent_transforms import apply", {"calibration"}),
        ("import importlib\nimportlib.import_module('hf_vq.cli')", {"cli"}),
        ("import torch\nfrom transformers import cache_utils", set()),
    ],
)
def test_every_form_of_import_is_seen(source, found):
    assert imported(source, PACKAGE / "nn" / "planted.py") == found
