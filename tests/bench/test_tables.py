"""Tables in the pages are those of the records; records tell nothing of the machine's owner."""

import json
import re
from pathlib import Path

import pytest

from hf_vq import VQError
from hf_vq.bench import tables
from hf_vq.bench.__main__ import main
from hf_vq.bench.record import RESULTS, make_record, write_record
from hf_vq.bench.show import markdown_table, significant, text_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", tables.pages(ROOT), ids=lambda page: page.name)
def test_tables_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert tables.update(text) == text, "run `python -m hf_vq.bench tables`"


def test_every_table_is_on_a_page():
    shown = {name for page in tables.pages(ROOT) for name in tables.marked(page.read_text("utf-8"))}
    assert shown == set(tables.TABLES)


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


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_records_are_clean(path):
    text = path.read_text(encoding="utf-8")
    record = json.loads(text)
    isa = record["settings"].get("isa")  # that of another instruction set is named after it
    assert path.stem in (record["suite"], f"{record['suite']}-{isa}") and record["format"] == 1
    assert not re.search(r'"/|/home|/root|/tmp|localhost|\\\\', text)


def test_a_record_is_whole_or_not_written(tmp_path):
    path = tmp_path / "r.json"
    write_record(make_record("s", "c", {}, {"x": 1.5}), path)
    with pytest.raises(ValueError, match="Out of range"):
        write_record(make_record("s", "c", {}, {"x": float("nan")}), path)
    assert json.loads(path.read_text())["results"] == {"x": 1.5}


def test_numbers_and_tables():
    assert [significant(x) for x in (0.0245336, 0.03, 1.2, 12345.0, 0.0, None)] == [
        *("0.0245", "0.0300", "1.20", "12345", "0", "-")
    ]
    assert significant(1.2e-5) == "0.0000120"
    assert text_table(["a", "b"], [["x", "10"]]) == "a   b\n-  --\nx  10"
    assert markdown_table(["a", "b"], [["x", "1"]]) == "| a | b |\n|---|---:|\n| x | 1 |"
