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
from hf_vq.backends.cpu import library as native
from hf_vq.errors import VQBackendError
from tests.fixtures import ROOT

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


def read_elf(tool: str, *arguments: str) -> list[str]:
    """Lines that a tool of binutils prints about a file."""
    program = shutil.which(tool)
    if program is None or not sys.platform.startswith("linux"):
        pytest.skip(f"reads ELF files with {tool}")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(type letter, name) of the symbols of a file, by default of those that it defines."""
    lines = read_elf("nm", *(options or ("--defined-only",)), str(path))
    return [(parts[-2], parts[-1]) for parts in map(str.split, lines) if len(parts) >= 2]


@pytest.fixture(scope="module")
def objects(library) -> list[Path]:
    """The object files of the installed library."""
    found = sorted(ROOT.glob("build/*/kernels/cpu/CMakeFiles/hf_vq_cpu.dir/**/*.o"))
    if not found:
        pytest.skip("installed from a wheel: no object files here")
    return found


@pytest.fixture(scope="module")
def targets(objects) -> dict[str, Path]:
    """The object file of every instruction set."""
    return {path.name.split(".")[0]: path for path in objects if path.parent.name == "targets"}


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
    assert {name for _, name in symbols(library, "--dynamic", "--defined-only")} == declared


def test_python_declares_every_function(library):
    """ctypes would guess the types of one that it does not know, and cut pointers to 32 bits."""
    declared = re.findall(r"^HF_VQ_API .*?\b(hf_vq_\w+)\(", API, flags=re.MULTILINE)
    loaded = native.load()
    unknown = [name for name in declared if getattr(loaded, name).argtypes is None]
    assert unknown == []


def test_it_needs_the_c_library_and_nothing_else(library):
    """No C++ runtime, no OpenMP: a second one in the process of torch is what fails elsewhere."""
    lines = read_elf("readelf", "--dynamic", "--wide", str(library))
    needed = {name for line in lines for name in re.findall(r"\(NEEDED\).*\[(.*)\]", line)}
    assert needed
    assert all(re.match(r"(libc|libm|ld-linux[\w-]*)\.so", name) for name in needed), needed


def test_no_object_emits_a_weak_symbol(objects):
    """One from a file with ISA flags could be picked by the linker for every CPU."""
    seen = [(path.name, *symbol) for path in objects for symbol in symbols(path)]
    assert any(name == "hf_vq_abi_version" for _, _, name in seen)
    assert not [entry for entry in seen if entry[1] in "WVwvu"]


def test_a_target_exports_its_table_and_nothing_else(targets):
    assert {"scalar", *native.isas()} <= set(targets)
    for isa, path in targets.items():
        exported = [name for _, name in symbols(path, "--defined-only", "--extern-only")]
        assert exported == [f"_ZN5hf_vq{len(isa) + 8}{isa}_kernelsE"]


def test_a_target_calls_the_c_library_and_dispatch_only(targets):
    """Whatever else it called would be code that somebody compiled for another processor."""
    known = {"memcpy", "memmove", "memset", "memcmp", "malloc", "free", "__stack_chk_fail"}
    for isa, path in targets.items():
        called = {name for _, name in symbols(path, "--undefined-only")}
        ours = {name for name in called if name.startswith("_ZN5hf_vq")}
        assert called - ours - known - {"_GLOBAL_OFFSET_TABLE_"} == set(), isa
        assert {name for name in ours if "kernels" in name} == set(), isa


def test_the_processor_runs_scalar_kernels_at_least(library):
    assert native.isas()[-1] == "scalar"
    assert set(native.isas()) <= {"zen4", "avx512", "avx2", "dotprod", "neon", "scalar"}


@pytest.fixture
def chosen(library):
    """Gives the choice of this process back after a test."""
    before = native.isa()
    yield before
    native.use_isa(before)


def test_use_isa(chosen):
    for isa in native.isas():
        native.use_isa(isa)
        assert native.isa() == isa
    native.use_isa("")
    assert native.isa() == native.isas()[0]


@pytest.mark.parametrize("name", ["mmx", "AVX2", "scalar ", "avx2 scalar"])
def test_use_isa_refuses_what_there_is_not(chosen, name):
    with pytest.raises(VQBackendError, match=r"no CPU kernels for .*scalar"):
        native.use_isa(name)
    assert native.isa() == chosen


def foreign_isa() -> str:
    """One that has kernels, but not for processors like this."""
    return "neon" if "neon" not in native.isas() else "avx2"


@pytest.fixture
def reopened():
    native._open.cache_clear()
    native.load.cache_clear()
    yield
    native._open.cache_clear()
    native.load.cache_clear()


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


ISA_IN_USE = """
import os
from hf_vq.backends.cpu import library as native
for isa in {names}:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    os.environ["HF_VQ_CPU_ISA"] = isa
    print(native.isa(), flush=True)
    os._exit(0)
"""


def test_the_environment_forces_an_isa(library, run_python):
    """Of a process that opens it: one for each, made after the import, which takes seconds."""
    names = [*native.isas(), ""]
    assert run_python(ISA_IN_USE.format(names=names)).split() == [*names[:-1], names[0]]


@pytest.mark.usefixtures("reopened")
@pytest.mark.parametrize("name", ["sse9", "foreign"])
def test_an_isa_that_cannot_run_is_an_error(library, monkeypatch, name):
    """Never a silent fallback: who forces an ISA wants to know what was measured."""
    name = foreign_isa() if name == "foreign" else name
    names = ", ".join(native.isas())
    native._open.cache_clear()
    native.load.cache_clear()
    monkeypatch.setenv("HF_VQ_CPU_ISA", name)
    for _ in range(2):  # not only the first time
        with pytest.raises(VQBackendError, match=f"HF_VQ_CPU_ISA={name}: .* {names}"):
            native.load()
