"""The store under everything that can happen to a folder."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest

from hf_vq import env
from hf_vq.codegen.jit import kernel_store as store_module
from hf_vq.codegen.jit.kernel_store import Store, default_store
from hf_vq.formats.hidden import hidden_folder

IMAGE = bytes(range(256)) * 40


def never():
    raise AssertionError("found in the store")


def test_made_once_and_found_by_the_next_process(tmp_path):
    folder = tmp_path / "a" / "b"
    made = []
    store = Store(folder)
    for _ in range(2):
        assert store.fetch("key", lambda: made.append(1) or IMAGE) == IMAGE
    assert made == [1]
    assert Store(folder).fetch("key", never) == IMAGE
    assert [path.name for path in folder.iterdir()] == ["key.kernel"]
    if os.name == "posix":
        assert folder.stat().st_mode & 0o777 == 0o700


def test_nothing_is_touched_before_the_first_kernel(tmp_path):
    Store(tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"\x7fELF, of someone else\n" + data,
        lambda data: data.replace(b"kernel 1", b"kernel 2", 1),
    ],
    ids=["short", "header", "empty", "long", "bit", "foreign", "version"],
)
def test_a_damaged_entry_is_made_again(tmp_path, damage):
    store = Store(tmp_path)
    store.fetch("key", lambda: IMAGE)
    path = store.path("key")
    path.write_bytes(damage(path.read_bytes()))
    made = []
    assert Store(tmp_path).fetch("key", lambda: made.append(1) or IMAGE) == IMAGE
    assert made == [1]
    assert Store(tmp_path).fetch("key", never) == IMAGE


def test_an_entry_that_is_a_folder(tmp_path):
    Store(tmp_path).path("key").mkdir()
    with pytest.warns(RuntimeWarning, match="Set HF_VQ_STORE"):
        assert Store(tmp_path).fetch("key", lambda: IMAGE) == IMAGE


def test_a_compile_that_fails_leaves_nothing(tmp_path):
    def fail():
        raise RuntimeError("does not compile")

    store = Store(tmp_path)
    with pytest.raises(RuntimeError, match="does not compile"):
        store.fetch("key", fail)
    assert not list(tmp_path.iterdir())
    assert store.fetch("key", lambda: IMAGE) == IMAGE


KILLED = """
import os, sys
from pathlib import Path
from hf_vq.codegen.jit import kernel_store as store
def stop(*arguments):
    print("writing", flush=True)
    import time; time.sleep(60)
os.replace = stop
store.Store(Path(sys.argv[1])).fetch("key", lambda: b"half a kernel")
"""


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_a_process_killed_while_writing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2 and left[1] == f"{left[0]}.lock"
    with hidden_folder(tmp_path, "other.kernel") as alive:
        assert Store(tmp_path).fetch("third", lambda: IMAGE) == IMAGE
        found = {path.name for path in tmp_path.iterdir()}
        assert found == {"third.kernel", alive.name, f"{alive.name}.lock"}


def test_a_process_that_only_reads_removes_what_was_killed(tmp_path):
    Store(tmp_path).fetch("key", lambda: IMAGE)
    (tmp_path / ".other.kernel.hf_vq-12345678").mkdir()
    (tmp_path / ".other.kernel.hf_vq-12345678.lock").touch()
    assert Store(tmp_path).fetch("key", never) == IMAGE
    assert [path.name for path in tmp_path.iterdir()] == ["key.kernel"]


def _fetch_many(folder, barrier, answers):
    store = Store(folder)
    barrier.wait()
    keys = [f"key{i}" for i in range(20)]
    answers.put(all(store.fetch(key, lambda: IMAGE) == IMAGE for key in keys))


def test_processes_that_make_the_same_kernels_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    workers = [
        context.Process(target=_fetch_many, args=(tmp_path, barrier, answers)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=900) for _ in workers] == [True] * 2
    for worker in workers:
        worker.join()
    assert len(list(tmp_path.iterdir())) == 20
    fresh = Store(tmp_path)
    assert all(fresh.fetch(f"key{i}", never) == IMAGE for i in range(20))


def test_a_folder_that_cannot_be_written_warns_once(tmp_path):
    """Permissions do not stop root, a file in the way of the folder stops everyone."""
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "store")
    with pytest.warns(RuntimeWarning, match="cannot keep compiled kernels") as caught:
        assert store.fetch("a", lambda: IMAGE) == IMAGE
        assert store.fetch("b", lambda: IMAGE) == IMAGE
    assert len(caught) == 1
    assert store.fetch("a", never) == IMAGE


@pytest.mark.parametrize("number", ["ENOSPC", "EROFS", "EDQUOT"])
def test_a_full_or_read_only_disk(tmp_path, monkeypatch, number):
    import errno

    def refuse(*arguments, **keywords):
        raise OSError(getattr(errno, number), "the disk says no")

    store = Store(tmp_path)
    monkeypatch.setattr(store_module.os, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="the disk says no"):
        assert store.fetch("key", lambda: IMAGE) == IMAGE
    assert not list(tmp_path.iterdir())  # not even the unfinished file
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.fetch("key", never) == IMAGE


as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
posix = pytest.mark.skipif(os.name != "posix", reason="Windows has no such modes")


def of_others(path):
    os.chown(path, 65534, -1)


def for_others(path):
    path.chmod(path.stat().st_mode | 0o002)


def for_the_group(path):
    path.chmod(path.stat().st_mode | 0o020)


FOREIGN = [
    pytest.param(of_others, marks=as_root),
    pytest.param(for_others, marks=posix),
    pytest.param(for_the_group, marks=posix),
]


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("give_away", FOREIGN)
def test_a_folder_of_others_is_not_used(tmp_path, give_away, link):
    """Anyone could have put an entry with the right hash there."""
    folder = tmp_path / "store"
    Store(folder).fetch("key", lambda: b"somebody's kernel")
    give_away(folder)
    if link:
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    before = sorted(folder.iterdir())
    store = Store(folder)
    with pytest.warns(RuntimeWarning, match=rf"{folder}, which .*HF_VQ_STORE") as caught:
        assert store.fetch("key", lambda: IMAGE) == IMAGE
        assert store.fetch("other", lambda: IMAGE) == IMAGE
    assert len(caught) == 1
    assert store.fetch("key", never) == IMAGE
    assert sorted(folder.iterdir()) == before
    assert not store.trusts(store.path("key"))


@pytest.mark.parametrize("give_away", FOREIGN)
def test_an_entry_of_others_is_made_again(tmp_path, give_away):
    store = Store(tmp_path)
    store.fetch("key", lambda: b"somebody's kernel")
    give_away(store.path("key"))
    assert not store.trusts(store.path("key"))
    assert Store(tmp_path).fetch("key", lambda: IMAGE) == IMAGE
    assert Store(tmp_path).fetch("key", never) == IMAGE
    assert store.trusts(store.path("key"))


@as_root
def test_files_of_root_are_trusted(tmp_path, monkeypatch):
    """An administrator may fill a store for all users."""
    Store(tmp_path).fetch("key", lambda: IMAGE)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Store(tmp_path).fetch("key", never) == IMAGE


def test_where_there_are_no_owners(tmp_path, monkeypatch):
    """Windows."""
    Store(tmp_path).fetch("key", lambda: IMAGE)
    monkeypatch.delattr(os, "geteuid", raising=False)
    tmp_path.chmod(0o777)
    assert Store(tmp_path).fetch("key", never) == IMAGE


def test_the_oldest_entries_go_first(tmp_path):
    size = len(IMAGE) + 100
    store = Store(tmp_path, limit=3 * size)
    for age, key in enumerate(["c", "b", "a"]):
        store.fetch(key, lambda: IMAGE)
        then = time.time() - 100 * (3 - age)
        os.utime(store.path(key), (then, then))
    Store(tmp_path, limit=3 * size).fetch("c", never)  # read: now the youngest
    store.fetch("d", lambda: IMAGE)
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "c", "d"}


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    Store(tmp_path, limit=0).fetch("key", lambda: IMAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_where_it_is(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.delenv("HF_VQ_STORE", raising=False)
    assert str(default_store().folder) == os.path.join(constants.HF_HOME, "hf_vq", "kernels")
    monkeypatch.setenv("HF_VQ_STORE", str(tmp_path))
    assert default_store().folder == tmp_path
    assert default_store() is default_store()
    assert env.STORE.get() == str(tmp_path)
