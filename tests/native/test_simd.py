"""The SIMD sets of kernels/cpu/simd: one meaning, four implementations, all tested in C++.

The tests themselves are C++ (`kernels/cpu/tests/run`): this file sees to it that nothing
is left out of them.
"""

import re
from pathlib import Path

import pytest

from tests.fixtures import ROOT

CPU = ROOT / "kernels" / "cpu"
SETS = sorted(path.stem for path in (CPU / "simd").glob("*.h"))
CONSTANTS = {"kBytes", "kFloats", "kLevelBias", "kWeightBits"}


def code(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text(encoding="utf-8"))


def functions(name: str) -> set[str]:
    """What a set declares, as `name(types)`, without the names of the parameters."""
    found = set()
    text = code(CPU / "simd" / f"{name}.h")
    for function, parameters in re.findall(
        r"\binline [\w<>, ]+?[ &*]*\b(operator\S|\w+)\(([^{;]*)\) \{", text
    ):
        types = [re.sub(r"\(?&?\w+\)?(\[\w*\])?$", "", p).strip() for p in parameters.split(",")]
        found.add(f"{function}({', '.join(types)})")
    return found


def constants(name: str) -> set[str]:
    return set(re.findall(r"constexpr (?:int|bool) (k\w+) =", code(CPU / "simd" / f"{name}.h")))


def test_the_reader_reads():
    assert SETS == ["avx2", "avx512", "neon", "scalar"]
    assert {"dot(Ints, Bytes, Bytes)", "operator+(Floats, Floats)", "zero_ints()"} <= functions(
        "scalar"
    )
    assert constants("scalar") >= CONSTANTS


@pytest.mark.parametrize("name", [name for name in SETS if name != "scalar"])
def test_every_set_has_every_name(name):
    """With the same types: what compiles for one target compiles for all."""
    assert functions("scalar") - functions(name) == set()
    assert constants("scalar") == constants(name)


def test_every_function_is_tested():
    tests = code(CPU / "tests" / "simd_test.cpp")
    names = {function.split("(")[0] for function in functions("scalar")}
    missing = set()
    for name in names:
        if name.startswith("operator"):
            used = re.search(rf"\(v {re.escape(name[8:])} w\)", tests)
        else:
            used = re.search(rf"\b{name}(<[^>()]*>)?\(", tests)
        if used is None:
            missing.add(name)
    assert missing == set()


def test_every_op_is_tested():
    """Every function of the C ABI is called by the test program, unless torch has to call it."""
    api = (CPU / "api.h").read_text(encoding="utf-8")
    api = re.sub(r"// -- torch's dispatcher -+\n.*?\n// -- ", "", api, flags=re.DOTALL)
    declared = set(re.findall(r"^HF_VQ_API .*?\bhf_vq_(\w+)\(", api, flags=re.MULTILINE))
    calls = "".join(code(path) for path in (CPU / "tests" / "api").glob("api_*.cpp"))
    assert declared - set(re.findall(r"library\.(\w+)\(", calls)) == set()


def test_every_target_is_built():
    targets = {path.stem for path in (CPU / "targets").glob("*.cpp")}
    cmake = (CPU / "CMakeLists.txt").read_text(encoding="utf-8")
    listed = re.findall(r"(?:set|list)\((?:APPEND )?HF_VQ_ISAS ([\w ]+)\)", cmake)
    assert targets == set(" ".join(listed).split())
    of_another_set = {"dotprod", "zen4"}  # NEON, and AVX-512, with other instructions
    assert targets - of_another_set == set(SETS)
