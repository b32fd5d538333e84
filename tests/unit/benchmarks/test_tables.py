"""Tables in the pages are those of the records; records tell nothing of the machine's owner."""

import functools
import json
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import suites
from benchmarks.__main__ import build_parser, main
from benchmarks.cpu import linear as cpu_linear
from benchmarks.records import RESULTS, path_of, read_record
from benchmarks.tables import pages as tables
from hf_vq import VQError
from hf_vq.evaluation.record import make_record, read, write_record
from hf_vq.evaluation.text_tables import markdown_table, significant, text_table
from tests.fixtures import ROOT


@pytest.mark.parametrize("page", tables.pages(ROOT), ids=lambda page: page.name)
def test_tables_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert tables.update(text) == text, "run `python -m benchmarks tables`"


def test_the_tables_of_this_checkout_are_written():
    assert build_parser().parse_args(["tables"]).root == ROOT


def test_every_table_is_on_one_page():
    shown = [name for page in tables.pages(ROOT) for name in tables.marked(page.read_text("utf-8"))]
    assert sorted(shown) == sorted(tables.TABLES)


def test_old_tables_are_found_and_replaced(tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- env -->\nold\n<!-- /env -->\nb\n")
    assert main(["tables", "--check", "--root", str(tmp_path)]) == 1
    assert "README.md" in capsys.readouterr().err and "old" in page.read_text()
    assert main(["tables", "--root", str(tmp_path)]) == 0
    assert "HF_VQ_BACKEND" in page.read_text() and "old" not in page.read_text()
    assert main(["tables", "--check", "--root", str(tmp_path)]) == 0
    with pytest.raises(VQError, match="no table"):
        tables.update("<!-- results:nothing -->\n<!-- /results:nothing -->")


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.jsonl")), ids=lambda path: path.name)
def test_records_are_clean(path):
    text, record = path.read_text(encoding="utf-8"), read(path)
    assert read_record(path.stem) == record
    isa = record["settings"].get("isa")  # that of another instruction set is named after it
    # A suite that is made for GPUs first has the record of a CPU beside it.
    # Runs of one subject, or on one device, lie beside those of all.
    model = record["settings"].get("model")
    parts = {isa, "cpu", record["settings"].get("device"), model, f"{isa}-{model}"}
    parts |= {row.get("name") for row in record["results"].get("rows", ())}
    assert path.stem in {record["suite"]} | {f"{record['suite']}-{part}" for part in parts}
    assert record["format"] == 1 or (record["format"] == 2 and record["complete"])
    assert not re.search(r'"/|/home|/root|/tmp|localhost|\\\\', text)


def test_a_record_is_whole_or_not_written(tmp_path):
    path = tmp_path / "r.json"
    write_record(make_record("s", "c", {}, {"x": 1.5}), path)
    with pytest.raises(ValueError, match="Out of range"):
        write_record(make_record("s", "c", {}, {"x": float("nan")}), path)
    assert json.loads(path.read_text())["results"] == {"x": 1.5}


@pytest.mark.parametrize(
    "results", [{"rows": [{"us": 0.1}, {"us": 1.0}], "x": 1}, {"rows": []}, {}]
)
def test_a_record_has_one_row_a_line(results, tmp_path):
    path = tmp_path / "r.jsonl"
    record = make_record("s", "c", {"a": 1}, results, "abc")
    write_record(record, path)
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = results.get("rows", [])
    assert [json.loads(line) for line in lines[1:]] == rows
    assert read(path) == record
    if rows:
        path.write_text("\n".join(lines[:-1]), encoding="utf-8")
        with pytest.raises(ValueError, match="has 1 rows and should have 2"):
            read(path)


def test_records_lie_where_they_are_looked_for():
    for suite in (*suites.TIMED, *suites.QUALITY):
        assert path_of(suite).is_file() == (read_record(suite) is not None), suite


def test_rows_of_a_run_that_is_stopped_are_kept(tmp_path, monkeypatch, capsys):
    path, kept = tmp_path / "cpu-linear.jsonl", tmp_path / "cpu-linear.jsonl.unfinished"
    arguments = ["cpu-linear", "--threads", "1", "--out", str(path), "--revision", "abc"]

    def run(*, threads, report, rows):
        for us in range(rows):
            report({"us": us})
            found = read(kept)
            assert found["results"]["rows"][-1] == {"us": us} and not found["complete"]
        if rows == 3:
            raise KeyboardInterrupt
        return {"rounds": 1}, {"rows": [{"us": us} for us in range(rows)]}

    monkeypatch.setattr(cpu_linear, "run", functools.partial(run, rows=2))
    assert main(arguments) == 0 and not kept.exists()
    whole = path.read_text()
    monkeypatch.setattr(cpu_linear, "run", functools.partial(run, rows=3))
    assert main(arguments) == 130 and str(kept) in capsys.readouterr().err
    assert path.read_text() == whole, "the record of the run before is left alone"
    whole, part = read(path), read(kept)
    assert whole["complete"] and whole["settings"] == {"rounds": 1}
    assert len(whole["results"]["rows"]) == 2 and len(part["results"]["rows"]) == 3
    for same in ("format", "suite", "command", "revision", "machine", "versions"):
        assert whole[same] == part[same]


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_a_record(tmp_path):
    """SIGTERM while rows are written: what is there can be read, at any time."""
    path, kept = tmp_path / "r.jsonl", tmp_path / "r.jsonl.unfinished"
    endless = f"""
from pathlib import Path
from hf_vq.evaluation.record import Recorder
recorder = Recorder(Path({str(path)!r}), "s", "c", "abc")
print("began", flush=True)
while True:
    recorder.add({{"us": 1.0}})
"""
    with subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        while not kept.exists():
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == -signal.SIGTERM
    found = read(kept)
    assert found["results"]["rows"][0] == {"us": 1.0} and not found["complete"]
    assert not path.exists()


def test_tables_are_of_whole_runs(monkeypatch):
    part = {**make_record("demo", "c", {}, {"rows": []}), "complete": False}
    monkeypatch.setattr(tables, "read_record", lambda suite: part)
    with pytest.raises(VQError, match="did not end"):
        tables.demo_table()


def test_numbers_and_tables():
    assert [significant(x) for x in (0.0245336, 0.03, 1.2, 12345.0, 0.0, None)] == [
        *("0.0245", "0.0300", "1.20", "12345", "0", "-")
    ]
    assert significant(1.2e-5) == "0.0000120"
    assert text_table(["a", "b"], [["x", "10"]]) == "a   b\n-  --\nx  10"
    assert markdown_table(["a", "b"], [["x", "1"]]) == "| a | b |\n|---|---:|\n| x | 1 |"
