"""Records whose sources were edited since are listed."""

import subprocess

import pytest

from benchmarks import stale
from benchmarks.__main__ import main
from benchmarks.records import RESULTS
from hf_vq.evaluation.record import make_record, write_record


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit, and what runs git in it."""

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    git("init", "-q")
    for name in ("kernels/cpu/a.cpp", "kernels/cpu/b.cpp", "docs/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n" * 20)
    git("add", ".")
    git("commit", "-qm", "one")
    return tmp_path, git


def test_edits_count_and_moves_do_not(checkout):
    root, git = checkout
    revision, sources = git("rev-parse", "HEAD"), ("kernels/cpu/",)
    assert stale.edited(root, revision, sources) == []
    (root / "docs/c.md").write_text("other\n")
    git("mv", "kernels/cpu/a.cpp", "kernels/cpu/moved.cpp")
    git("commit", "-qam", "two")
    assert stale.edited(root, revision, sources) == []
    with (root / "kernels/cpu/b.cpp").open("a") as file:
        file.write("more\n")
    assert stale.edited(root, revision, sources) == ["kernels/cpu/b.cpp"]  # not yet committed
    git("mv", "kernels/cpu/b.cpp", "docs/b.cpp")
    assert stale.edited(root, revision, sources) == []  # no longer a source
    assert stale.edited(root, "0" * 12, sources) is None
    assert stale.edited(root, None, sources) is None


def test_the_table_has_what_may_be_stale(checkout):
    root, git = checkout
    results = root / "results" / "cpu"
    results.mkdir(parents=True)
    old = git("rev-parse", "--short=12", "HEAD")
    (root / "kernels/cpu/a.cpp").write_text("new\n")
    git("commit", "-qam", "two")
    for name, revision in (("old", old), ("new", git("rev-parse", "HEAD")), ("lost", "0" * 12)):
        write_record(make_record(name, "c", {}, {}, revision), results / f"{name}.jsonl")
    _, _, lost, found = stale.table(root, root / "results").splitlines()
    assert lost.startswith("lost") and lost.endswith("revision unknown")
    assert found.split()[0] == "old" and found.split()[2:] == [old, "1", "kernels/cpu/a.cpp"]


@pytest.mark.slow
def test_every_folder_of_records_has_its_sources(capsys):
    assert {path.name for path in RESULTS.iterdir()} == set(stale.SOURCES)
    assert main(["stale"]) == 0
    assert "edited since" in capsys.readouterr().out
