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
    report = script.report.Report(problems)
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


def test_a_record_keeps_other_tools_of_the_same_revision(script, monkeypatch, tmp_path):
    path = tmp_path / "record.jsonl"
    for tool in ("memcheck", "racecheck"):
        report = script.report.Report([("linear", frozenset({1}))])
        report.add(tool, script.report.Said("case 0 linear x\nend\n", 0))
        report.seconds[tool] = 1.5
        report.write(path, f"--tools {tool}", {"sanitizer": "1", "sources": "a"})
    record = read(path)
    monkeypatch.setattr(fuzz_tables, "read_record", {script.report.SUITE: record}.get)
    assert "| racecheck | 1 | 1 | 0 | 0 |" in fuzz_tables.sanitizers()
    assert record["complete"] and record["suite"] == script.report.SUITE
    assert [row["tool"] for row in record["results"]["rows"]] == ["memcheck", "racecheck"]
    assert record["command"] == "--tools memcheck; --tools racecheck"
    monkeypatch.setattr(script.report, "make_record", lambda *_, **__: {
        **record, "settings": {"sources": "b", "silent": {}}, "command": "new",
        "results": {"rows": [], "notes": {}, "seconds": {}},
    })  # fmt: skip
    report.write(path, "", {})
    assert read(path)["results"]["rows"] == []


def test_a_run_goes_on_where_the_last_one_ended(script, monkeypatch, tmp_path):
    path = tmp_path / "record.jsonl"
    failed, report = run(script, monkeypatch, ["initcheck"], 60, processes=1)
    assert failed and report.silent == {"initcheck": {0, 2, 3, 4, 5}}  # 1 was reported
    report.write(path, "", {"sanitizer": "1", "sources": "a"})
    again = script.report.Report(report.problems)
    again.resume(path, "b")  # other kernels
    assert not again.silent and not again.kernels
    again.resume(path, "a")
    assert [row["problems"] for row in again.rows()] == [3, 2]
    args = argparse.Namespace(tools=["initcheck"], processes=1, end=time.time() + 60)
    assert script.main.run_tools(args, again)  # 1 is reported again, and nothing else is run
    assert [row["problems"] for row in again.rows()] == [4, 2]
    assert [row["errors"] for row in again.rows()] == [1, 0]
