"""Hidden folders: what a kill leaves is removed by the next writer, and only that."""

import os
import signal
import sys

import pytest

from hf_vq.formats.hidden import hidden_file, hidden_folder, leftovers, remove_leftovers

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "fcntl.flock")


def killed(work, after):
    """Run `work` in a process that is killed at a file event; whether it was."""
    child = os.fork()
    if child == 0:
        count = iter(range(after))

        def hook(event, arguments):
            if event in EVENTS and next(count, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_file_is_old_or_new_and_nothing_is_left(tmp_path):
    path = tmp_path / "file"

    def write(text):
        with hidden_file(path) as temporary:
            temporary.write_text(text)

    events = 0
    while True:
        path.write_text("old")
        again = killed(lambda: write("new"), events)
        assert path.read_text() in (("old", "new") if again else ("new",))
        assert again or os.listdir(tmp_path) == ["file"]
        write("next")
        assert path.read_text() == "next" and os.listdir(tmp_path) == ["file"]
        if not again:
            break
        events += 1
    assert events >= 6  # lock, folder, file, and all three again


def test_folders_of_others_stay(tmp_path):
    with hidden_folder(tmp_path, "a") as alive:
        (tmp_path / ".a.hf_vq-12.lock").touch()
        (tmp_path / ".a.hf_vq-12").mkdir()
        (tmp_path / ".b.hf_vq-12.lock").touch()
        assert [path.name for path in leftovers(tmp_path, "a")] == [".a.hf_vq-12"]
        left = {".b.hf_vq-12.lock", alive.name, f"{alive.name}.lock"}
        assert set(os.listdir(tmp_path)) == left
        remove_leftovers(tmp_path, None)
        assert set(os.listdir(tmp_path)) == left - {".b.hf_vq-12.lock"}
    assert not os.listdir(tmp_path)


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), hidden_file(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert not os.listdir(tmp_path)
    with pytest.raises(FileNotFoundError), hidden_file(tmp_path / "absent" / "file"):
        pass


def test_what_is_needed_is_kept_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), hidden_folder(tmp_path, "a", lambda f: True) as work:
        (work / "commit").touch()
        raise KeyboardInterrupt
    assert (work / "commit").is_file()
    assert list(leftovers(tmp_path, "a")) == [work]
    assert not os.listdir(tmp_path)


def test_a_link_is_no_leftover(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "commit").touch()
    (tmp_path / ".a.hf_vq-12.lock").touch()
    (tmp_path / ".a.hf_vq-12").symlink_to(other)
    remove_leftovers(tmp_path, "a")
    assert (other / "commit").is_file()
