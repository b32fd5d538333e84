"""Saving: all files or none, other files stay, and a killed save can be repeated."""

import copy
import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_vq.errors import VQFormatError
from hf_vq.formats.hidden import hidden_folder
from hf_vq.hf.checkpoint import atomic_dir as module
from hf_vq.hf.checkpoint import save
from hf_vq.hf.checkpoint.atomic_dir import exchange, replacing
from tests.fixtures import PROCESSES, ROOT

LOAD = AutoModelForCausalLM.from_pretrained
SCRIPT = PROCESSES / "killed_save.py"


def contents(folder):
    """Every file below a folder, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fill(folder, quantized):
    """A folder with a 4-bit model, and a file and a folder of the user's."""
    LOAD(quantized("llama", "vq-4")).save_pretrained(folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "logs").mkdir()
    (folder / "logs" / "one.txt").write_text("mine too")
    return folder


@pytest.fixture
def saved(quantized, tmp_path):
    return fill(tmp_path / "parent" / "model", quantized)


def test_other_files_stay(saved, quantized):
    before = contents(saved)
    inode = (saved / "notes.txt").stat().st_ino
    LOAD(quantized("llama", "vq-3")).save_pretrained(saved)
    after = contents(saved)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == [
        "README.md", "config.json", "hf_vq_provenance.json", "model.safetensors",
    ]  # fmt: skip
    assert (saved / "notes.txt").stat().st_ino == inode  # linked, not copied
    assert os.listdir(saved.parent) == ["model"]
    assert LOAD(saved).config.quantization_config.scheme_name == "vq-3"


def test_a_model_can_be_saved_over_itself(saved):
    before = contents(saved)
    LOAD(saved).save_pretrained(saved)
    assert contents(saved) == before


def test_a_failed_save_changes_nothing(saved, quantized, monkeypatch):
    before = contents(saved)
    model = LOAD(quantized("llama", "vq-3"))

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "model_card", full)
    with pytest.raises(OSError, match="No space"):
        model.save_pretrained(saved)
    with pytest.raises(OSError, match="No space"):
        model.save_pretrained(saved.parent / "new")
    assert contents(saved.parent) == {f"model/{name}": data for name, data in before.items()}


POINTS = [
    "config", "half weights", "weights", "card", "before exchange", "after exchange",
    "between the renames",
]  # fmt: skip


@pytest.fixture(scope="module")
def killed(quantized, tmp_path_factory):
    """By point: a folder with a 4-bit model where a save of a 3-bit one was killed."""
    parent = tmp_path_factory.mktemp("killed")
    folders = {point: fill(parent / point / "model", quantized) for point in POINTS}
    new = quantized("llama", "vq-3")
    deaths = [f"{point}={folder}" for point, folder in folders.items()]
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(new), *deaths],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{point} {int(signal.SIGKILL)}" for point in POINTS]
    return folders


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_save_leaves_the_old_model_or_the_new_one(saved, killed, quantized, point):
    target, new = killed[point], quantized("llama", "vq-3")
    if point == "between the renames":
        assert len(os.listdir(target.parent)) == 2 and not target.exists()
        module.recover(target)  # as the next save begins
        assert contents(target.parent) == contents(saved.parent)
        return
    now = contents(target)
    if point == "after exchange":
        written = contents(new)
        assert all(now[name] == data for name, data in written.items())
        assert now["notes.txt"] == b"mine" and now["logs/one.txt"] == b"mine too"
    else:
        assert now == contents(saved)
    assert len(os.listdir(target.parent)) == 3  # the dead process's hidden folder and its lock
    LOAD(new).save_pretrained(target)
    assert os.listdir(target.parent) == ["model"]
    assert LOAD(target).config.quantization_config.scheme_name == "vq-3"


def test_without_an_exchange_it_takes_two_steps(saved, quantized, monkeypatch):
    monkeypatch.setattr(module, "exchange", lambda *paths: False)
    LOAD(quantized("llama", "vq-3")).save_pretrained(saved)
    assert os.listdir(saved.parent) == ["model"]
    assert LOAD(saved).config.quantization_config.scheme_name == "vq-3"


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_two_folders_are_exchanged(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    assert not exchange(tmp_path / "a", tmp_path / "c")


def test_a_link_to_a_folder_is_followed(saved, quantized, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(saved, target_is_directory=True)
    LOAD(quantized("llama", "vq-3")).save_pretrained(link)
    assert link.is_symlink()
    assert LOAD(saved).config.quantization_config.scheme_name == "vq-3"


def test_variants_live_side_by_side(quantized, tmp_path):
    model = LOAD(quantized("llama", "vq-4"))
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, variant="b")
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == ["model.b.safetensors", "model.safetensors"]


def test_arguments_of_transformers_still_work(quantized, tmp_path):
    model = LOAD(quantized())
    model.save_pretrained(str(tmp_path / "a"), True, None, False, max_shard_size="20KB")
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert "vq_codebook.gauss_2x8" in index["weight_map"]
    model.save_pretrained(tmp_path / "b", is_main_process=False)
    assert not (tmp_path / "b").exists()


def test_files_can_be_read_by_others(quantized):
    mask = os.umask(0)
    os.umask(mask)
    folder = quantized()
    for path in (folder, folder / "config.json", folder / "README.md"):
        expected = (0o777 if path.is_dir() else 0o666) & ~mask
        assert path.stat().st_mode & 0o777 == expected, path


def test_copies_and_pickles_are_saved_with_a_card(quantized, tmp_path):
    model = LOAD(quantized())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for name, again in (
        ("copy", copy.deepcopy(model)),
        ("pickle", torch.load(buffer, weights_only=False)),
    ):
        again.model.norm.weight.data.fill_(2)
        again.save_pretrained(tmp_path / name)
        assert (tmp_path / name / "README.md").exists()
        assert (LOAD(tmp_path / name).model.norm.weight == 2).all()


# The same without a model: what is written into a folder, and how it takes the place of another.


@pytest.fixture
def small(tmp_path):
    """A folder of an earlier save in two shards, with a file of the user's."""
    target = tmp_path / "parent" / "small"
    target.mkdir(parents=True)
    for name in ("config.json", "model.safetensors.index.json", "notes.txt"):
        (target / name).write_text("old")
    for part in (1, 2):
        (target / f"model-0000{part}-of-00002.safetensors").write_text("old")
    return target


NEW = {name: b"new" for name in ("README.md", "config.json", "model.safetensors", "a/b.py")}


def write_new(folder):
    for name, data in NEW.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def refused(number):
    def call(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("place", ["parent", "cwd", "below cwd", "mount", "read-only", "busy"])
def test_a_folder_that_must_stay_in_its_place(small, monkeypatch, place):
    inode = small.stat().st_ino
    if place == "cwd":
        monkeypatch.chdir(small)
    elif place == "below cwd":
        (small / "logs").mkdir()
        monkeypatch.chdir(small / "logs")
    elif place == "mount":
        monkeypatch.setattr(os.path, "ismount", lambda path: path == small)
    elif place == "read-only":
        monkeypatch.setattr(os, "access", lambda path, mode: path != small.parent)
    elif place == "busy":  # a mount that looks like a folder
        monkeypatch.setattr(module, "exchange", lambda *paths: False)
        monkeypatch.setattr(Path, "rename", refused(errno.EBUSY))
    with replacing(Path() if place == "cwd" else small) as folder:
        write_new(folder)
    assert (small.stat().st_ino == inode) == (place != "parent")
    (small / "logs").exists() and (small / "logs").rmdir()
    assert contents(small) == {**NEW, "notes.txt": b"old"}
    assert sorted(os.listdir(small)) == [
        "README.md",
        "a",
        "config.json",
        "model.safetensors",
        "notes.txt",
    ]
    assert os.listdir(small.parent) == ["small"]


def test_a_failed_save_in_place_changes_nothing(small, monkeypatch):
    monkeypatch.chdir(small)
    before = contents(small)
    with pytest.raises(KeyboardInterrupt), replacing(small) as folder:
        write_new(folder)
        raise KeyboardInterrupt
    assert contents(small) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("moved", range(5))
def test_a_save_in_place_that_was_killed_is_finished(small, monkeypatch, moved):
    """By whoever comes next; before all files are there, it is undone."""
    before = contents(small)
    monkeypatch.chdir(small)
    child = os.fork()
    if child == 0:
        replace, done = Path.replace, []

        def count(source, target):
            if len(done) == moved:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(target)
            return replace(source, target)

        Path.replace = count
        with replacing(small) as folder:
            write_new(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    if moved == 0:
        module.check_whole(small)
        assert not module.recover(small) and contents(small) == before
        return
    if moved > 1:
        assert (small / "config.json").read_bytes() == b"new"  # so that hf_vq is asked
    with pytest.raises(VQFormatError, match=r"has been finished now\. Load it again"):
        module.check_whole(small)
    module.check_whole(small)
    assert contents(small) == {**NEW, "notes.txt": b"old"}
    assert not [name for name in os.listdir(small) if name.startswith(".")]


def test_a_folder_that_is_saved_into_is_not_loaded(saved, monkeypatch):
    """Half of its files may be new; what was killed there is finished first."""
    new = contents(saved)
    with replacing(saved, writes=False):
        pass
    with hidden_folder(saved) as work:
        (work / "new").mkdir()
        (saved / "config.json").rename(work / "new" / "config.json")
        (saved / "config.json").write_bytes(new["config.json"].replace(b"vq2x8", b"vq4x8"))
        (work / "commit").write_text('{"gone": []}')
        with pytest.raises(VQFormatError, match="another process saves"):
            LOAD(saved)
        monkeypatch.setattr("hf_vq.formats.hidden._remove", lambda *paths: None)  # as if killed
    monkeypatch.undo()
    with pytest.raises(VQFormatError, match="Load it again"):
        LOAD(saved)
    LOAD(saved)
    assert contents(saved) == new


@pytest.mark.parametrize("place", ["new", "new/a", "a"])
def test_nothing_outside_of_a_folder_is_moved(small, tmp_path, place):
    """A hidden folder may come from anywhere, with links and names of its own."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    work = small / ".hf_vq-00000000"
    (work / "new").mkdir(parents=True)
    (small / ".hf_vq-00000000.lock").touch()
    (work / "commit").write_text(json.dumps({"gone": ["../outside/mine", "notes.txt", 7]}))
    if place == "new":
        (work / "new").rmdir()
        (work / "new").symlink_to(outside)
    elif place == "new/a":
        (work / "new" / "a").symlink_to(outside)
    else:
        (small / "a").symlink_to(outside)
        (work / "new" / "a").mkdir()
        (work / "new" / "a" / "mine").write_text("theirs")
    module.recover(small)
    assert contents(outside) == {"mine": b"mine"} and (small / "notes.txt").exists()


@pytest.mark.parametrize("inside", [False, True])
def test_only_folders_of_dead_processes_are_removed(small, monkeypatch, inside):
    dead = small / ".hf_vq-dead" if inside else small.parent / ".small.hf_vq-dead"
    foreign = small.parent / ".small.hf_vq-foreign"
    for folder in (dead, foreign):
        folder.mkdir()
    lock = dead.with_name(dead.name + ".lock")
    lock.touch()
    with replacing(small, writes=False):
        pass  # another rank of the same save removes nothing
    assert dead.exists()
    if inside:
        monkeypatch.chdir(small)
    with replacing(small) as first:
        with replacing(small) as second:
            assert first.is_dir() and second != first and not dead.exists() and not lock.exists()
            (second / "config.json").write_text("second")
        (first / "config.json").write_text("first")
    assert (small / "config.json").read_text() == "first"
    assert foreign.exists() and not [n for n in os.listdir(small) if n.startswith(".")]


def test_an_error_between_two_renames_loses_nothing(tmp_path, monkeypatch):
    """The next save puts the old folder back."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    monkeypatch.setattr(module, "exchange", lambda *paths: False)
    rename, count = Path.rename, iter(range(2))

    def interrupted(self, to):
        if next(count, None) == 1:
            raise KeyboardInterrupt
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt), replacing(target) as new:
            (new / "new").touch()
    assert not target.exists()
    with replacing(target) as new:
        (new / "newer").touch()
    assert sorted(path.name for path in target.iterdir()) == ["newer", "old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_after_the_commit_is_finished_later(tmp_path, monkeypatch):
    """Of a folder that stays in its place: whoever saves or loads next goes on."""
    (tmp_path / "model.safetensors").write_text("old")
    monkeypatch.chdir(tmp_path)
    replace = Path.replace

    def refused(self, to):
        if Path(to).name == "model.safetensors":
            raise PermissionError
        return replace(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refused)
        with pytest.raises(PermissionError), replacing(tmp_path) as new:
            (new / "config.json").write_text("new")
            (new / "model.safetensors").write_text("new")
    with pytest.raises(VQFormatError, match="has been finished now"):
        module.check_whole(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "config.json": "new", "model.safetensors": "new",
    }  # fmt: skip
