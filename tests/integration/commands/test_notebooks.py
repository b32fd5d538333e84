"""Every notebook runs from top to bottom, and what is committed was run."""

from pathlib import Path

import pytest

from tests.fixtures import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def name(path: Path) -> str:
    return path.name


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
@pytest.mark.filterwarnings("ignore")  # of the kernel's own machinery
def test_a_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_what_is_committed_was_run_and_tells_nothing_of_the_machine(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(
        str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", "")) for o in outputs
    )
    assert str(ROOT) not in text
    assert "/home/" not in text and "/tmp/" not in text
