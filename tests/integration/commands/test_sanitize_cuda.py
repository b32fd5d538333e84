"""scripts/sanitize_cuda without a GPU: which problems it takes, what it makes of what tools say."""

import argparse
import importlib
import importlib.util
import sys
import time

import pytest
import torch

from benchmarks.tables import reliability as fuzz_tables
from hf_vq.codegen.jit.device import named_arch
from hf_vq.evaluation.record import read
from tests.buckets.every import CASES
from tests.fixtures import ROOT

FOLDER = ROOT / "scripts/sanitize_cuda"
HOPPER = named_arch("sm_90a")
NOTHING = "========= ERROR SUMMARY: 0 errors"
# Six cases: one is reported, one ends the tool, one does not end.
CHILD = """
import pathlib, sys, time
claims, tool = pathlib.Path(sys.argv[1]), sys.argv[2]
print("========= COMPUTE-SANITIZER")
for number in range(6):
    try:
        (claims / str(number)).touch(exist_ok=False)
    except FileExistsError:
        continue
    print("case", number, "linear" if number < 4 else "vptq", "2 x 3", flush=True)
    if tool == "initcheck" and number == 1:
        print("========= Uninitialized __global__ memory read of size 4 bytes")
        print("=========     at linear+0x10", flush=True)
    if number == 0:
        print("========= Warning: Detected overflow of tracked cuda::barrier structures.")
    if tool == "racecheck" and number == 2:
        print("========= Internal Sanitizer Error: in another kernel", flush=True)
        sys.exit(255)
    if tool == "racecheck" and number == 4:
        time.sleep(60)
print("end")
print("========= ERROR SUMMARY: 0 errors")
"""


@pytest.fixture
def script(monkeypatch):
    """Modules of the script by name, `__main__` as `main`."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False) if name != "__main__" else None
    spec = importlib.util.spec_from_file_location("main", FOLDER / "__main__.py")
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    found = {name: sys.modules[name] for name in names if name != "__main__"}
    yield argparse.Namespace(main=main, **found)
    for name in found:
        sys.modules.pop(name, None)


def run(script, monkeypatch, tools, seconds, processes=2):
    """A run over the cases of `CHILD`."""
    monkeypatch.setattr(
        script.main, "command_of",
        lambda tool, args, part: [sys.executable, "-c", CHILD, str(args.claims), tool],
    )  # fmt: skip
    args = argparse.Namespace(tools=tools, processes=processes, end=time.time() + seconds)
    problems = [("linear 2 x 3" if n < 4 else "vptq 2 x 3", frozenset({n // 2})) for n in range(6)]
    report = script.report.Report(problems, identities(script, range(3)))
    return script.main.run_tools(args, report), report


def test_what_a_tool_reports_is_an_error_and_its_own_failures_are_left_out(script, monkeypatch):
    failed, report = run(script, monkeypatch, ["none", "initcheck", "racecheck"], 9, processes=1)
    assert failed
    rows = {(row["tool"], row["kernel"]): row for row in report.rows()}
    assert [row["errors"] for row in rows.values()] == [1, 0, 0, 0, 0, 0]
    clean = rows["none", "linear"]
    assert (clean["kernels"], clean["problems"], clean["left"]) == (2, 4, {})
    assert rows["initcheck", "linear"]["problems"] == 4 and not rows["initcheck", "vptq"]["left"]
    race = rows["racecheck", "linear"]
    assert race["problems"] == 3 and race["kernels"] == 2
    assert race["left"] == {"Internal Sanitizer Error: in another kernel": 1}
    # One is ended, and nobody took the last.
    assert rows["racecheck", "vptq"]["left"] == {script.report.SLOW: 1, script.report.TIME: 1}
    assert rows["racecheck", "vptq"]["problems"] == 0
    assert sum("overflow" in note for note in report.notes) == 3
    assert "Uninitialized" not in report.table() and "overflow" in report.table()


def test_silent_tools_are_a_success(script, monkeypatch):
    failed, report = run(script, monkeypatch, ["memcheck"], 60)
    assert not failed and not any(row["left"] for row in report.rows())
    assert sum(row["problems"] for row in report.rows()) == 6


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("case 0 a b\nend\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)", True),
        ("case 0 a b\nend\n========= ERROR SUMMARY: 3 errors", False),
        ("case 0 a b\n========= Error: Race reported between Write access at a+0x1\nend", False),
        ("case 0 a b\n========= Warning: Race reported between Write access at a\nend", False),
        (
            f"case 0 a b\nend\n{NOTHING}\n========= Warning: Detected overflow of x",
            True,
        ),
        ("case 0 a b\nend\n", False),  # the tool did not look, or wrote elsewhere
        (f"case 0 a b\n{NOTHING}\n", False),
    ],
)
def test_reports_are_known(script, text, clean):
    assert script.report.Said(text, 0).clean("racecheck") == clean
    assert not script.report.Said(text, 1).clean("racecheck")


def test_a_run_without_a_tool_needs_no_summary(script):
    assert script.report.Said("case 0 a b\nend\n", 0).clean("none")


def test_processes_share_cases_and_begin_none_too_late(script, monkeypatch, tmp_path, capsys):
    done = []
    cases = [(f"linear {n}", lambda n=n: done.append(n)) for n in range(5)]
    monkeypatch.setitem(script.main.MAKERS, "linear", lambda: cases)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    args = argparse.Namespace(part=0, kernels=["linear"], claims=tmp_path, until=time.time() + 60)
    assert script.main.taken(tmp_path, 1)
    script.main.run_part(args)
    assert done == [0, 2, 3, 4] and capsys.readouterr().out.endswith("end\n")
    script.main.run_part(args)
    assert done == [0, 2, 3, 4]
    late = argparse.Namespace(**{**vars(args), "claims": tmp_path / "late", "until": time.time()})
    late.claims.mkdir()
    capsys.readouterr()
    script.main.run_part(late)
    told = script.report.Said(capsys.readouterr().out, 0).cases()
    assert [what for what, *_ in told] == ["left"] * 5 and len(done) == 4


def test_every_plan_is_run_by_its_smallest_problem(script):
    tested = CASES["vptq"](HOPPER)
    chosen = script.buckets.of_kernel("vptq", HOPPER)

    def plans(problems):
        return {plan for problem in problems for plan in problem.plans(HOPPER)}

    assert plans(tested) <= plans(chosen) and len(chosen) <= len(tested)
    for plan in plans(tested):
        least = min(script.buckets.size(one) for one in tested if plan in one.plans(HOPPER))
        assert any(
            plan in one.plans(HOPPER) and script.buckets.size(one) <= least for one in chosen
        )


def test_products_that_pytorch_leaves_to_cublas_are_not_computed(script, monkeypatch):
    asked = []

    class Problem:
        def inputs(self, device):
            return torch.ones(2, 2)

        def run(self, x):
            asked.append(torch.mm(x, x, out=torch.empty(2, 2)))
            asked.append(torch.addmm(x[0], x, x, out=torch.empty(2, 2)))

    script.buckets.run(Problem())
    monkeypatch.setattr(script.buckets, "SKIPPED", [True])
    script.buckets.run(Problem())
    assert [int(y.sum()) for y in asked] == [8, 12, 0, 0]
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).item() == 1


def identities(script, plans, source="linear/linear 00"):
    """Of plans that are numbers."""
    return {n: script.report.Identity(source, f"{n:010x}") for n in plans}


def recorded(script, monkeypatch, path):
    """The record, and its table."""
    record = read(path)
    monkeypatch.setattr(fuzz_tables, "read_record", {script.report.SUITE: record}.get)
    return record, fuzz_tables.sanitizers()


def test_a_record_keeps_other_tools(script, monkeypatch, tmp_path):
    path = tmp_path / "record.jsonl"
    problems = [("linear", frozenset({1})), ("linear", frozenset({2}))]
    known = identities(script, (1, 2))
    for tool in ("memcheck", "racecheck"):
        report = script.report.Report(problems, known)
        report.resume(path, [tool], again=True)
        report.add(tool, script.report.Said("case 0 linear x\nend\n", 0))
        report.notes[f"{tool}: overflow"] += 1
        report.seconds[tool] = 1.5
        report.write(path, f"--tools {tool}", {"sanitizer": "1"}, "a" * 12)
    record, table = recorded(script, monkeypatch, path)
    for tool in ("memcheck", "racecheck"):
        assert f"| {tool} | 1 | 1 | 0 | 1 (no time) |" in table
        assert record["results"]["notes"][f"{tool}: overflow"] == 1
    assert "In part at aaaaaaa." in table
    assert [run["command"] for run in record["settings"]["runs"]] == ["--tools memcheck"]
    assert record["complete"] and record["suite"] == script.report.SUITE
    report = script.report.Report(problems, identities(script, (1, 2), "linear/linear 01"))
    report.resume(path, [], again=False)
    assert not any(report.silent.values()) and not report.runs
    assert all(row["left"] == {"no time": 2} for row in report.rows())


def test_a_run_goes_on_where_the_last_one_ended(script, monkeypatch, tmp_path):
    path = tmp_path / "record.jsonl"
    failed, report = run(script, monkeypatch, ["initcheck"], 60, processes=1)
    # Number 1 was reported; 0 has the same kernel.
    assert failed and {plan for _, plan in report.silent["initcheck"]} == {
        f"{n:010x}" for n in (1, 2)
    }
    report.write(path, "", {"sanitizer": "1"}, "a" * 12)
    again = script.report.Report(report.problems, report.identity)
    again.resume(path, ["initcheck"], again=True)
    assert not again.kernels
    again.resume(path, ["memcheck"], again=False)
    (row,) = again.kept.values()
    assert row["errors"] == 1 and row in again.rows()
    others = script.report.Report(report.problems, report.identity, frozenset({"vptq"}))
    others.resume(path, ["initcheck"], again=True)
    assert row in others.rows()  # faults of ops that do not run stay
    again = script.report.Report(report.problems, report.identity)
    again.resume(path, ["initcheck"], again=False)
    assert [row["problems"] for row in again.rows()] == [2, 2]
    args = argparse.Namespace(tools=["initcheck"], processes=1, end=time.time() + 60)
    assert script.main.run_tools(args, again)  # 1 is reported again
    assert [row["problems"] for row in again.rows()] == [4, 2]
    assert [row["errors"] for row in again.rows()] == [1, 0]
    assert not any(row["left"] for row in again.rows())


def test_kernels_of_another_gpu_count(script, monkeypatch, tmp_path):
    """GPUs of a target choose some plans alike, and have the same machine code for them."""
    path = tmp_path / "record.jsonl"
    known = identities(script, range(4))
    for gpu, plans in ("A", (0, 1, 2)), ("B", (1, 2, 3)), ("A", (0, 1, 2)):
        problems = [(f"linear {n} x 3", frozenset({n})) for n in plans]
        report = script.report.Report(problems, known)
        report.resume(path, ["racecheck"], again=False)
        passed = report.passed_over("racecheck")
        said = "".join(f"case {n} linear x\n" for n in range(3) if n not in passed)
        report.add("racecheck", script.report.Said(f"{said}end\n", 0))
        report.seconds["racecheck"] = 1.0
        report.write(path, gpu, {"sanitizer": "1"}, gpu * 12)
        (row,) = report.rows()
        assert row["problems"] == 3 and not row["left"]
    assert passed == {0, 1, 2}
    record, table = recorded(script, monkeypatch, path)
    assert [run["command"] for run in record["settings"]["runs"]] == ["A", "B"]
    assert "In part at AAAAAAA, BBBBBBB." in table


def test_comments_and_layout_do_not_count_as_sources(script, monkeypatch):
    bare = script.sources.without_comments
    text = '// x\n#define A "//"  /* y\n */ \n\n  int   b = A; // z\n'
    assert bare(text) == '#define A "//"\nint b = A;'
    assert bare(text.replace("b", "c")) != bare(text)


def test_an_identity_covers_what_decides_machine_code(script, monkeypatch):
    compiler = script.sources.compiler
    monkeypatch.setattr(compiler, "version", lambda: (13, 0))
    plans = {
        plan
        for kernel in ("vptq", "append")
        for problem in CASES[kernel](HOPPER)[:3]
        for plan in problem.plans(HOPPER)
    }
    first = script.sources.identities(plans, "sm_90a")
    assert len(set(first.values())) == len(plans)
    texts = dict(compiler.sources())

    def changed(file, text):
        monkeypatch.setattr(compiler, "sources", lambda: {**texts, file: text})
        now = script.sources.identities(plans, "sm_90a")
        return {plan.template for plan in plans if now[plan] != first[plan]}

    every = {plan.template for plan in plans}
    vptq = {"vptq/vptq", "vptq/vptq_dequantize"}  # that include it
    assert changed("vptq/vptq.cuh", texts["vptq/vptq.cuh"] + "\n// A comment.\n") == set()
    assert changed("vptq/vptq.cuh", texts["vptq/vptq.cuh"] + "\nint x;\n") == vptq < every
    header = "primitives/numbers.cuh"  # included by all
    assert changed(header, texts[header] + "\nint x;\n") == every
    monkeypatch.setattr(compiler, "sources", lambda: texts)
    assert script.sources.identities(plans, "sm_80") != first
    monkeypatch.setattr(compiler, "version", lambda: (13, 1))
    assert script.sources.identities(plans, "sm_90a") != first
    monkeypatch.undo()


def test_buckets_are_found_once(script, monkeypatch, tmp_path):
    problems, calls = CASES["vptq"](HOPPER)[:4], []

    def find(arch):
        calls.append(arch)
        return problems

    monkeypatch.setattr(script.buckets, "smallest", find)
    monkeypatch.setattr(script.buckets, "device_arch", lambda ordinal: HOPPER)
    path = tmp_path / "problems"
    kept = [script.buckets.keep(path) for _ in range(2)]
    assert calls == [HOPPER] and kept[0] == kept[1]
    monkeypatch.setattr(script.buckets, "FOUND", [path])
    assert [name for name, _ in script.buckets.found()] == [name for name, _ in kept[0]]
    monkeypatch.setattr(script.buckets, "choosers", lambda: "others")
    script.buckets.keep(path)
    monkeypatch.setattr(script.buckets, "device_arch", lambda ordinal: named_arch("sm_80"))
    script.buckets.keep(path)
    assert len(calls) == 3


def test_a_run_of_some_ops_keeps_the_rows_of_others(script, monkeypatch, tmp_path):
    path, known = tmp_path / "record.jsonl", identities(script, (0, 1))
    problems = [("linear 2 x 3", frozenset({0})), ("vptq 2 x 3", frozenset({1}))]
    for number, op in enumerate(("linear", "vptq")):
        report = script.report.Report(problems, known, frozenset({op}))
        assert report.passed_over("memcheck") == {1 - number}
        report.resume(path, ["memcheck"], again=True)
        report.add("memcheck", script.report.Said(f"case {number} {op} x\nend\n", 0))
        report.seconds["memcheck"] = 1.0
        report.write(path, op, {"sanitizer": "1"})
    record = read(path)
    assert [row["kernel"] for row in record["results"]["rows"]] == ["linear", "vptq"]
    assert all(row["problems"] == 1 and not row["left"] for row in record["results"]["rows"])
