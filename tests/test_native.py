"""The compiled CPU library: it loads, it is the one we were written for, and it is sealed."""

import ctypes
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hf_vq import paths
from hf_vq.backends import native

ROOT = Path(__file__).resolve().parent.parent
API = (ROOT / "kernels" / "cpu" / "api.h").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def library() -> Path:
    """The library. It may be missing only where the install was asked to leave it out."""
    try:
        wheel = metadata.distribution("hf-vq").read_text("WHEEL") or ""
    except metadata.PackageNotFoundError:
        pytest.skip("hf_vq is not installed: nothing was compiled")
    if "Root-Is-Purelib: true" in wheel:
        pytest.skip("installed with HF_VQ_NO_NATIVE=1")
    path = paths.cpu_library()
    assert path is not None, "a native install without libhf_vq_cpu"
    return path


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(type letter, name) of every symbol that a file defines."""
    nm = shutil.which("nm")
    if nm is None or not sys.platform.startswith("linux"):
        pytest.skip("reads ELF files with nm")
    done = subprocess.run(
        [nm, "--defined-only", *options, str(path)], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(parts[-2], parts[-1]) for parts in lines if len(parts) >= 2]


def test_the_header_and_python_agree():
    versions = re.findall(r"#define HF_VQ_ABI_VERSION (\d+)", API)
    assert versions == [str(native.ABI_VERSION)]


def test_it_loads_once_with_our_abi(library):
    assert native.why_not() == ""
    assert isinstance(native.load(), ctypes.CDLL)
    assert native.load() is native.load()
    assert native.abi_version() == native.ABI_VERSION


def test_it_exports_the_header_and_nothing_else(library):
    declared = set(re.findall(r"^HF_VQ_API .*?\b(hf_vq_\w+)\(", API, flags=re.MULTILINE))
    assert "hf_vq_abi_version" in declared
    assert {name for _, name in symbols(library, "--dynamic")} == declared


def test_no_object_emits_a_weak_symbol(library):
    """One from a file with ISA flags could be picked by the linker for every CPU."""
    objects = sorted(ROOT.glob("build/*/kernels/cpu/CMakeFiles/*.dir/**/*.o"))
    if not objects:
        pytest.skip("installed from a wheel: no object files here")
    seen = [(path.name, *symbol) for path in objects for symbol in symbols(path)]
    assert any(name == "hf_vq_abi_version" for _, _, name in seen)
    assert not [entry for entry in seen if entry[1] in "WVwvu"]


@pytest.fixture
def reopened():
    native._open.cache_clear()
    yield
    native._open.cache_clear()


@pytest.mark.usefixtures("reopened")
def test_a_missing_library_is_no_error(monkeypatch):
    monkeypatch.setattr(paths, "cpu_library", lambda: None)
    assert native.load() is None
    assert native.abi_version() is None
    assert "compiler" in native.why_not()


@pytest.mark.usefixtures("reopened")
def test_a_broken_library_is_no_error(monkeypatch, tmp_path):
    broken = tmp_path / "libhf_vq_cpu.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(paths, "cpu_library", lambda: broken)
    assert native.load() is None
    assert "does not load" in native.why_not()


@pytest.mark.usefixtures("reopened")
def test_a_library_of_another_abi_is_refused(library, monkeypatch):
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    assert native.load() is None
    assert "reinstall" in native.why_not()
