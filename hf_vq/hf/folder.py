"""Writing a folder: all files or none.

The new files are made in a hidden folder beside the target, which then takes the target's place in
one step: a killed save leaves the old folder or the new one. Where a folder cannot be replaced (it
is a mount point, the working directory, or its parent is read-only) they are made in a hidden
folder inside it and moved one by one: each file is the old one or the new one.

    .model.hf_vq-x1y2/lock      locked while its process lives
    .model.hf_vq-x1y2/new       the files that are being written
    .model.hf_vq-x1y2/old       the target, between two renames
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_AT_FDCWD = -100
_EXCHANGE = {"linux": ("renameat2", 2), "darwin": ("renamex_np", 2)}
_LOCKED = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_NOT_REPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)


@contextmanager
def replacing(target: Path, variant: str | None = None, writes: bool = True) -> Iterator[Path]:
    """A new folder that takes the place of `target` if the block succeeds.

    Files of `target` that were not written anew are kept, except weights of an earlier save.

    Args:
        variant: `save_pretrained`'s; part of the names of the weights.
        writes: False on ranks that only take part in gathering: their folder is thrown away.
    """
    if not writes:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    _recover(target)
    beside = not _must_stay(target)
    with _hidden_folder(target, beside) as work:
        new = work / "new"
        new.mkdir()
        yield new
        if not target.exists():
            new.rename(target)
            return
        written = [path.relative_to(new) for path in new.rglob("*") if path.is_file()]
        if not beside:
            _move_files(new, target, written, variant)
            return
        _keep_other_files(target, new, variant)
        shutil.copymode(target, new)
        if exchange(new, target) or _rename_twice(new, target):
            return
        with _hidden_folder(target, beside=False) as inside:
            for name in written:
                (inside / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(new / name, inside / name)
            _move_files(inside, target, written, variant)


def exchange(one: Path, other: Path) -> bool:
    """Swap two paths of one file system in a single step; False where that is not possible."""
    name, flag = _EXCHANGE.get(sys.platform, ("", 0))
    call = getattr(ctypes.CDLL(None), name, None) if name else None
    if call is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if name == "renameat2":
        failed = call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], flag)
    else:
        failed = call(*paths, flag)
    return not failed


def _must_stay(target: Path) -> bool:
    """Whether a folder is known to be one that cannot, or should not, be replaced."""
    if not target.is_dir():
        return False
    try:
        current = Path(os.path.realpath(os.getcwd()))
    except OSError:  # it was deleted
        current = Path()
    # Replacing the folder of a process would leave it in a deleted one.
    used = target == current or target in current.parents
    return used or os.path.ismount(target) or not os.access(target.parent, os.W_OK)


@contextmanager
def _hidden_folder(target: Path, beside: bool) -> Iterator[Path]:
    """A new locked folder beside `target` or inside it, removed at the end."""
    parent, prefix = (target.parent, f".{target.name}.") if beside else (target, ".")
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}hf_vq-", dir=parent))
        try:
            with (folder / "lock").open("wb") as held:
                lock(held, wait=True)
                if os.path.exists(held.name):
                    yield folder
                    return
                # Another process took it for a leftover, just before it was locked.
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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


def _recover(target: Path) -> None:
    """Remove what killed saves to `target` left; put the target back if one died renaming it."""
    beside = re.compile(re.escape(f".{target.name}.hf_vq-") + r"\w+")
    inside = re.compile(r"\.hf_vq-\w+")
    for folder, pattern in ((target.parent, beside), (target, inside)):
        try:
            found = [entry for entry in folder.iterdir() if pattern.fullmatch(entry.name)]
        except OSError:  # it does not exist, or may not be listed
            continue
        for entry in found:
            try:
                held = (entry / "lock").open("r+b")
            except OSError:  # it was just made, or belongs to somebody else
                continue
            with held:
                dead = lock(held)
                if dead and (entry / "old").is_dir() and not target.exists():
                    (entry / "old").rename(target)
            if dead:
                shutil.rmtree(entry, ignore_errors=True)


def _rename_twice(new: Path, target: Path) -> bool:
    """Replace a folder where the file system cannot exchange; False if it must stay in its place.

    A kill between the renames leaves both folders; the next save puts the old one back.
    """
    old = new.with_name("old")
    try:
        target.rename(old)
    except OSError as error:
        if error.errno in _NOT_REPLACEABLE:
            return False
        raise
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    return True


def _move_files(source: Path, target: Path, names: list[Path], variant: str | None) -> None:
    """Move files into a folder one by one: config.json last, just after the weights."""
    weights = _weights(variant)

    def order(name: Path) -> tuple[bool, bool, bool]:
        is_weight = weights.fullmatch(name.name) is not None
        return name.name == "config.json", is_weight, name.suffix == ".json"

    for name in sorted(names, key=order):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).replace(target / name)
    for entry in list(target.iterdir()):
        if weights.fullmatch(entry.name) and Path(entry.name) not in names:
            entry.unlink()


def _keep_other_files(source: Path, destination: Path, variant: str | None) -> None:
    weights = _weights(variant)
    for entry in source.iterdir():
        copy = destination / entry.name
        if os.path.lexists(copy) or weights.fullmatch(entry.name):
            continue
        if entry.is_symlink():
            copy.symlink_to(os.readlink(entry))
        elif entry.is_dir():
            shutil.copytree(entry, copy, symlinks=True, copy_function=_link)
        else:
            _link(entry, copy)


def _weights(variant: str | None) -> re.Pattern[str]:
    """The names of the weights that a save of a variant writes."""
    part = rf"\.{re.escape(variant)}" if variant else ""
    index = rf"model\.safetensors\.index{part}\.json"
    return re.compile(rf"{index}|model{part}(-\d{{5}}-of-\d{{5}})?\.safetensors")


def _link(source: str | Path, destination: str | Path) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, destination)
