"""Atomic writing of a folder: all files or none.

The new files are written to a hidden folder next to the target, which then replaces the target in
one step: a killed save leaves the old folder or the new one. A mount point, the working directory
or a folder with a read-only parent cannot be replaced. There the files are written to a hidden
folder inside the target and moved one by one once all are complete. If the process is killed during
the moves, the next save or load finishes them (`recover`).

    .model.hf_vq-x1y2.lock      locked while its process lives, see `formats.hidden`
    .model.hf_vq-x1y2/new       the files that are being written
    .model.hf_vq-x1y2/old       the target, between two renames
    .model.hf_vq-x1y2/commit    inside the target: all files are in `new`, the save has happened
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import VQFormatError
from ...formats.hidden import hidden_folder, leftovers

_AT_FDCWD = -100
_EXCHANGE = {"linux": ("renameat2", 2), "darwin": ("renamex_np", 2)}
_NOT_REPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
_COMMIT = "commit"


@contextmanager
def replacing(target: Path, variant: str | None = None, writes: bool = True) -> Iterator[Path]:
    """Give the block a new folder, which replaces `target` if the block succeeds.

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
    recover(target)
    replaceable = not _must_stay(target)

    def keep(work: Path) -> bool:
        """True if `recover` can still use what an error left in `work`."""
        return (work / _COMMIT).is_file() or ((work / "old").is_dir() and not target.exists())

    place = (target.parent, target.name) if replaceable else (target, "")
    with hidden_folder(*place, keep) as work:
        new = work / "new"
        new.mkdir()
        yield new
        if not target.exists():
            new.rename(target)
            return
        if not replaceable:
            _commit(work, target, variant)
            return
        written = [path.relative_to(new) for path in new.rglob("*") if path.is_file()]
        _keep_other_files(target, new, variant)
        shutil.copymode(target, new)
        if exchange(new, target) or _rename_twice(new, target):
            return
        with hidden_folder(target, keep=keep) as inside:
            for name in written:
                (inside / "new" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(new / name, inside / "new" / name)
            _commit(inside, target, variant)


def recover(target: Path) -> bool:
    """Finish or undo what killed saves to `target` began, and remove what they left.

    Returns:
        True if a save into the folder itself was finished: its files have changed.

    Raises:
        OSError: it cannot be finished.
    """
    target = Path(os.path.realpath(target))
    for work in leftovers(target.parent, target.name):
        if (work / "old").is_dir() and not target.exists():
            (work / "old").rename(target)
    finished = False
    for work in leftovers(target):
        if (work / _COMMIT).is_file():
            _finish(work, target)
            finished = True
    return finished


def check_whole(folder: Path) -> None:
    """Raise if a save into `folder` was interrupted or is still running; finish an interrupted one.

    Raises:
        VQFormatError: the folder has changed, or changes now.
    """
    try:
        if not any(folder.glob(f".hf_vq-*/{_COMMIT}")):
            return
        done = recover(folder)
    except OSError as error:
        raise VQFormatError(
            f"a save into {folder} was interrupted, and cannot be finished: {error.strerror}. "
            "Load it once with an account that may write there, or save again."
        ) from None
    raise VQFormatError(
        f"a save into {folder} was interrupted, and has been finished now. Load it again."
        if done
        else f"another process saves into {folder}. Load it again when that is done."
    )


def exchange(one: Path, other: Path) -> bool:
    """Swap two paths of one file system atomically; False if the system cannot."""
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
    """True for a mount point, the working directory, or a folder with a read-only parent."""
    if not target.is_dir():
        return False
    try:
        current = Path(os.path.realpath(os.getcwd()))
    except OSError:  # it was deleted
        current = Path()
    # Replacing the folder of a process would leave it in a deleted one.
    used = target == current or target in current.parents
    return used or os.path.ismount(target) or not os.access(target.parent, os.W_OK)


def _rename_twice(new: Path, target: Path) -> bool:
    """Replace a folder on a file system that cannot exchange; False if it cannot be renamed.

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


def _commit(work: Path, target: Path, variant: str | None) -> None:
    """Put the files of `work / "new"` into a folder, and remove weights of an earlier save."""
    weights, new = _weights(variant), work / "new"
    gone = [
        entry.name
        for entry in target.iterdir()
        if weights.fullmatch(entry.name) and not (new / entry.name).exists()
    ]
    partial = work / "partial"
    partial.write_text(json.dumps({"gone": gone}), encoding="utf-8")
    partial.replace(work / _COMMIT)  # from here on the save has happened
    _finish(work, target)


def _finish(work: Path, target: Path) -> None:
    """Move the files of `work / "new"`, config.json first: a reader then meets `check_whole`.

    The folder is untrusted: nothing outside of `target` is written or removed.
    """
    try:
        gone = json.loads((work / _COMMIT).read_text(encoding="utf-8"))["gone"]
    except (ValueError, KeyError, TypeError, RecursionError):
        gone = []  # nothing that a save wrote
    new = work / "new"
    found = [path.relative_to(new) for path in new.rglob("*") if not path.is_dir()]
    for name in sorted(found, key=lambda name: (name.name != "config.json", name)):
        place = target / name
        if not all(p.resolve().is_relative_to(target) for p in (place.parent, (new / name).parent)):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        (new / name).replace(place)
    for name in gone if isinstance(gone, list) else []:
        if isinstance(name, str) and _ANY_WEIGHTS.fullmatch(name):
            (target / name).unlink(missing_ok=True)
    (work / _COMMIT).unlink()


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
    """Pattern of the names of weight files that a save of `variant` writes."""
    part = rf"\.{re.escape(variant)}" if variant else ""
    index = rf"model\.safetensors\.index{part}\.json"
    return re.compile(rf"{index}|model{part}(-\d{{5}}-of-\d{{5}})?\.safetensors")


_ANY_WEIGHTS = re.compile(r"model[\w.-]*\.safetensors|model\.safetensors\.index[\w.-]*\.json")


def _link(source: str | Path, destination: str | Path) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, destination)
