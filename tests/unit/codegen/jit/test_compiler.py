"""Every kernel compiles for every architecture, without a GPU and without local memory."""

import dataclasses

import pytest

from hf_vq import paths
from hf_vq.codegen.__main__ import _plans, main
from hf_vq.codegen.families import linear as choose_linear
from hf_vq.codegen.families.dequantize import DecodeProblem, choose, rotate_plan
from hf_vq.codegen.families.dequantize_rotated import dense_plan
from hf_vq.codegen.families.encode import encodable, encode_plan, round_plan, roundable
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.jit.kernel_store import Store
from hf_vq.codegen.plan import Diagonal, Dtype
from hf_vq.errors import VQBackendError
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme, weight_scheme

pytest.importorskip("cuda.bindings.nvrtc")
pytestmark = pytest.mark.slow  # every test compiles
if compiler.why_not():
    pytest.skip(compiler.why_not(), allow_module_level=True)

ODD = [
    ("vq1x3r1-tensor-g0-none", 7, 77),
    ("vq1x16r4-tensor-g0-none", 64, 256),
    ("vq2x5r3-tensor-g16-none", 9, 48),
    ("vq4x7r2-tensor-g4-none", 33, 52),
    ("vq8x16r1-tensor-g0-none", 4096, 4096),
    ("vq16x1r1-tensor-g0-none", 5, 112),
    ("vq16x9r4-tensor-g128-none", 300, 384),
    ("vq4x8r1-tile24x20-g0-none", 50, 92),
    ("vq8x12r1-tile1x8-g0-none", 3, 40),
]


def plan_for(scheme, rows=4096, columns=4096, out=Dtype.FLOAT16, arch="sm_90a"):
    return choose(DecodeProblem(scheme, rows, columns, out, ARCHES[arch]))


def checked(plan, arch):
    image, found = compiler.compile_plan(plan, arch)
    assert image.startswith(b"\x7fELF")
    shared = 4 * 32 if plan.kernel == "rotate_int8" else 0  # a word for each warp
    assert (found.stack, found.spilled, found.shared) == (0, 0, shared), plan
    assert 0 < found.registers * plan.threads * plan.blocks_per_sm <= 65536


@pytest.mark.parametrize("arch", ARCHES)
def test_the_matrix_compiles_into_the_store(arch, tmp_path, capsys):
    names = ["vq-4", "vq-3", "vq-2", "turboquant-4", "turboquant-8", "quip-sharp-2",
             "quip-sharp-4", "aqlm-2", "aqlm-3", "aqlm-2-int7", "aqlm-3-int7",
             "gptvq-2"]  # fmt: skip
    start = ["compile", "--arches", arch, "--store", str(tmp_path), "--schemes"]
    assert main([*start, *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(" decode " in line for line in lines) >= 11
    assert sum(" linear" in line for line in lines) >= 16
    assert sum(" tiles" in line for line in lines) >= 2
    assert sum(" vptq" in line for line in lines) >= 10
    assert sum(" w4a8 " in line for line in lines) >= 6
    assert sum(" w4a8_wgmma" in line for line in lines) >= (3 if arch == "sm_90a" else 0)
    assert sum(" encode" in line for line in lines) == 8
    assert sum(" round" in line for line in lines) == 7
    assert sum(" wide" in line for line in lines) >= (16 if arch == "sm_90a" else 0)
    assert sum(" int8" in line for line in lines) >= (16 if arch == "sm_90a" else 0)
    assert all(line.startswith(arch) and line.endswith("  0 local") for line in lines)
    assert len(list(tmp_path.glob("*.kernel"))) == len(lines)
    # What a process with a GPU asks for is there.
    plan = plan_for(WEIGHT_SCHEMES["vq-4"], arch=arch)
    fetched = Store(tmp_path).fetch(compiler.key(plan, arch), lambda: pytest.fail("compiled again"))
    assert fetched.startswith(b"\x7fELF")


@pytest.mark.parametrize("out", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("name", ["vq-4", "aqlm-3", "quip-sharp-4", "gptvq-2", "turboquant-3"])
def test_other_dtypes(name, out):
    checked(plan_for(WEIGHT_SCHEMES[name], out=out), "sm_90a")


@pytest.mark.parametrize(("spec", "rows", "columns"), ODD)
def test_odd_schemes(spec, rows, columns):
    checked(plan_for(VQScheme.parse(spec), rows, columns), "sm_80")


@pytest.mark.parametrize("rows", [1, 64, 1024, 1 << 17])
def test_other_numbers_of_rows(rows):
    checked(plan_for(WEIGHT_SCHEMES["vq-4"], rows), "sm_86")


@pytest.mark.parametrize(
    ("spec", "columns"),
    [
        ("vq1x3r1-tensor-g16-none", 48),
        ("vq2x1r1-tensor-g32-none", 160),
        ("vq8x12r1-tensor-g128-none", 256),
        ("vq16x5r1-tensor-g16-none", 128),
        ("vq4x6r1-tensor-g0-none", 4480),
        ("vq8x16r2-e8p-g0-none", 1280),
        ("vq16x8r2-tensor-g0-none", 4096),
        ("vq1x2r2-tensor-g16-none", 96),
    ],
)
@pytest.mark.parametrize(("candidates", "refit"), [(1, False), (1, True), (8, False)])
def test_odd_schemes_encoded(spec, columns, candidates, refit):
    scheme = VQScheme.parse(spec)
    assert encodable(scheme, columns, ARCHES["sm_80"]) is None
    checked(encode_plan(scheme, columns, candidates, refit), "sm_80")


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("spec", ["vq1x3r1-tensor-g16-none", "vq16x5r1-tensor-g16-none",
                                  "vq8x16r2-e8p-g0-none", "vq16x8r2-tensor-g0-none"])  # fmt: skip
def test_odd_schemes_rounded(spec, size):
    scheme = VQScheme.parse(spec)
    assert roundable(scheme, size, ARCHES["sm_80"]) is None
    checked(round_plan(scheme, size), "sm_80")


@pytest.mark.parametrize("diagonal", Diagonal)
@pytest.mark.parametrize("block", [1, 2, 4, 8, 32, 256, 512, 1024])
def test_rotations(block, diagonal):
    for inverse in (False, True):
        checked(rotate_plan(Dtype.BFLOAT16, Dtype.FLOAT32, block, diagonal, inverse), "sm_80")


@pytest.mark.parametrize("arch", ARCHES)
def test_scaled_schemes_compile(arch):
    """Every kernel that multiplies by a diagonal."""
    names = ["vq-4-scaled", "turboquant-8-scaled", "quip-sharp-2-scaled"]
    schemes = {name: weight_scheme(name) for name in names}
    kernels = set()
    for _, plan in _plans(schemes, arch, [Dtype.BFLOAT16]):
        if getattr(plan, "scaled", False) or getattr(plan, "diagonal", None) is Diagonal.HALVES:
            checked(plan, arch)
            kernels.add(plan.kernel)
    hopper = {"rotate_int8"} if arch == "sm_90a" else set()
    assert kernels == {"linear", "dequantize_rotated", "rotate"} | hopper


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
@pytest.mark.parametrize("name", ["vq-4", "turboquant-4+4", "quip-sharp-2"])
def test_a_diagonal_takes_no_more_registers_than_signs(name, dtype):
    plain, arch = WEIGHT_SCHEMES[name], ARCHES["sm_90a"]
    found = []
    for scheme in (plain, plain.scaled()):
        few = choose_linear.LinearProblem(scheme, 1, 4096, 4096, dtype, arch)
        dense = dense_plan(DecodeProblem(scheme, 4096, 4096, dtype, arch))
        plans = (choose_linear.choose(few), dense)
        assert plans[0].rotate and plans[0].scaled == scheme.is_scaled
        found.append([compiler.compile_plan(plan, "sm_90a")[1] for plan in plans])
    for signs, diagonal in zip(*found, strict=True):
        assert diagonal.registers <= signs.registers
        assert (diagonal.stack, diagonal.spilled) == (0, 0)


def test_an_error_shows_the_line_and_the_plan(monkeypatch):
    broken = dict(compiler.sources())
    broken["linear/rotate.cu"] = broken["linear/rotate.cu"].replace(
        "transform(value, lane);", "transfrom();"
    )
    monkeypatch.setattr(compiler, "sources", lambda: broken)
    line = next(
        n for n, text in enumerate(broken["linear/rotate.cu"].splitlines(), 1) if "from()" in text
    )
    plan = rotate_plan(Dtype.FLOAT16, Dtype.FLOAT16, 128, Diagonal.SIGNS, False)
    with pytest.raises(VQBackendError) as error:
        compiler.compile_plan(plan, "sm_80")
    message = str(error.value)
    assert f"rotate.cu({line}): error" in message and "transfrom" in message
    assert "RotatePlan(threads=256" in message
    assert "static constexpr int block = 128;" in message


@pytest.mark.parametrize(
    "spec",
    [
        "vq8x16r1-tensor-g0-none",
        "vq2x5r3-tensor-g256-none",
        "vq2x8r1-universal-g32-random_hadamard32",
        "vq16x4r1-tensor-g0-none",
        "vq4x10r2-tensor-g0-none",
        "vq4x4r3-tensor-int7-g256-none",
        "vq8x16r1-tensor-int7-g0-none",
    ],
)
def test_odd_schemes_multiplied(spec):
    problem = choose_linear.LinearProblem(
        VQScheme.parse(spec), 1, 300, 4352, Dtype.BFLOAT16, ARCHES["sm_90a"]
    )
    plan = choose_linear.choose(problem)
    assert plan is not None
    image, found = compiler.compile_plan(plan, "sm_90a")
    assert image.startswith(b"\x7fELF") and found.spilled == 0


@pytest.mark.parametrize("matrices", [2, 4])
@pytest.mark.parametrize("tokens", [1, 16])
def test_several_matrices_in_one_launch(tokens, matrices):
    problem = choose_linear.LinearProblem(
        WEIGHT_SCHEMES["vq-4"], tokens, 6144, 4096, Dtype.BFLOAT16, ARCHES["sm_90a"]
    )
    plan = choose_linear.choose(problem)
    assert plan is not None
    checked(dataclasses.replace(plan, matrices=matrices), "sm_90a")


def test_an_unknown_target_is_refused():
    plan = rotate_plan(Dtype.FLOAT16, Dtype.FLOAT16, 128, Diagonal.SIGNS, False)
    with pytest.raises(VQBackendError, match="sm_999"):
        compiler.compile_plan(plan, "sm_999")


def test_a_key_has_all_that_decides(monkeypatch):
    plan = plan_for(WEIGHT_SCHEMES["vq-4"])
    keys = {compiler.key(plan, "sm_80"), compiler.key(plan, "sm_86")}
    keys.add(compiler.key(dataclasses.replace(plan, pipeline_depth=1), "sm_80"))
    assert compiler.key(plan, "sm_80") in keys
    edited = {**compiler.sources(), "primitives/codes.cuh": "// another"}
    monkeypatch.setattr(compiler, "sources", lambda: edited)
    keys.add(compiler.key(plan, "sm_80"))
    monkeypatch.setattr(compiler, "version", lambda: (1, 0))
    keys.add(compiler.key(plan, "sm_80"))
    monkeypatch.setattr(compiler, "FORMAT", 0)
    keys.add(compiler.key(plan, "sm_80"))
    assert len(keys) == 6


def test_templates_need_no_header_of_cuda():
    for path in (paths.kernel_sources() / "cuda").rglob("*.cu*"):
        assert "#include <" not in path.read_text(encoding="utf-8"), path


def test_explain_names_the_choice(capsys):
    assert main(["explain", "decode", "vq-4", "--n", "4096", "--k", "4096", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "cycles  bound" in out and out.count("\n*") == 1 and "chosen: DecodePlan(" in out
    assert main(["explain", "decode", "vq-4", "--arch", "sm_1"]) == 2
    assert main(["explain", "linear", "vq-4", "--m", "16", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n*") == 1 and "chosen: LinearPlan(" in out and "save memory" not in out
    assert main(["explain", "linear", "vq8x16r1-tensor-g0-none"]) == 0
    assert "save memory, not time" in capsys.readouterr().out
    assert main(["explain", "linear", "gptvq-2", "--m", "16", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n*") == 1 and "chosen: TilePlan(" in out
    assert main(["explain", "linear", "vq4x8r1-tile24x20-g0-none", "--k", "80"]) == 2
    assert "whole words" in capsys.readouterr().err
    assert main(["explain", "decode", "turboquant-4+4"]) == 2
    assert "second pass" in capsys.readouterr().err
