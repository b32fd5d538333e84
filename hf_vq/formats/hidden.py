"""Hidden folders, in which files are written before they are renamed to their final path.

    .NAME.hf_vq-x1y2z3w4.lock   made first and removed last; locked while its process lives
    .NAME.hf_vq-x1y2z3w4/       what is being made

After a crash, the next process that writes NAME finds the lock free and removes the folder, then
the lock. A power cut is not covered: nothing here calls fsync, so files of the last seconds may be
empty or truncated.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_LOCKED = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_LOCK = ".lock"


@contextmanager
def hidden_folder(
    parent: Path, name: str = "", keep: Callable[[Path], bool] = lambda folder: False
) -> Iterator[Path]:
    """A new folder in `parent` for what will be `name`, removed at the end.

    Args:
        name: of the file or folder that is made; empty = of `parent` itself.
        keep: whether an error left in the folder what the next writer needs, who then finds it as
            one of a killed process.

    Raises:
        OSError: `parent` does not exist or cannot be written.
    """
    while True:
        folder = parent / f"{_prefix(name)}{secrets.token_hex(4)}"
        path = folder.with_name(folder.name + _LOCK)
        try:
            lock_file = path.open("xb")
        except FileExistsError:
            continue
        try:
            with lock_file:
                lock(lock_file, wait=True)
                if not _is_at(lock_file, path):
                    continue  # another process took it for a leftover, just before it was locked
                folder.mkdir()
                yield folder
                return
        finally:
            if not keep(folder):
                _remove(folder, path)


@contextmanager
def hidden_file(path: Path) -> Iterator[Path]:
    """Yield a new path in a hidden folder next to `path`, which replaces `path` at the end.

    Leftovers of killed processes that wrote the same file are removed.

    Raises:
        OSError: it cannot be written.
    """
    remove_leftovers(path.parent, path.name)
    with hidden_folder(path.parent, path.name) as folder:
        yield folder / path.name
        os.replace(folder / path.name, path)


def leftovers(parent: Path, name: str | None = "") -> Iterator[Path]:
    """Hidden folders in `parent` whose process is dead; each is removed once it was looked at.

    Each is locked meanwhile. The folder itself may not exist.

    Args:
        name: as for `hidden_folder`; None = of any.
    """
    start = r"\.(.+\.)?hf_vq-" if name is None else re.escape(_prefix(name))
    for path in _listed(parent, re.compile(start + r"\w+" + re.escape(_LOCK))):
        try:
            lock_file = path.open("r+b")
        except OSError:  # removed meanwhile, or it belongs to somebody else
            continue
        with lock_file:
            if not lock(lock_file) or not _is_at(lock_file, path):
                continue
            folder = path.with_name(path.name.removesuffix(_LOCK))
            if folder.is_symlink():  # we make none
                continue
            yield folder
            # While it is locked: whoever waits for the lock finds another file, or none, there.
            _remove(folder, path)
        if sys.platform == "win32":  # which removes no open file
            _remove(folder, path)


def remove_leftovers(parent: Path, name: str | None = "") -> None:
    """Remove the hidden folders in `parent` whose process is dead."""
    for _ in leftovers(parent, name):
        pass


def lock(file: IO[bytes], wait: bool = False) -> bool | None:
    """Lock a file until it is closed or the process ends, whatever machine others ask from.

    Returns:
        False if another process holds it, None on a file system without locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _LOCKED else None
    return True


def _prefix(name: str) -> str:
    return f".{name}.hf_vq-" if name else ".hf_vq-"


def _listed(parent: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return [parent / name for name in os.listdir(parent) if pattern.fullmatch(name)]
    except OSError:  # it does not exist, or may not be listed
        return []


def _is_at(lock_file: IO[bytes], path: Path) -> bool:
    """True if an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(lock_file.fileno()), path.stat())
    except OSError:
        return False


def _remove(folder: Path, path: Path) -> None:
    """Remove a folder, and then its lock: what a kill leaves of it is found again."""
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        with suppress(OSError):  # Windows removes no open file; the next process does
            path.unlink()
