"""The store: compiled kernels on disk, by the hash of everything that determines them.

    <folder>/<key>.kernel  =  "hf_vq kernel 1 <bytes> <sha256>\\n" + machine code

An entry is written atomically: to a hidden folder, then renamed. Two processes that compile the
same kernel write the same entry, and either may win. A truncated, damaged or foreign file is
compiled and written again. If the folder cannot be written, kernels live as long as the process.
The store evicts the least recently used entries when there are too many.

An entry is a program that the GPU will run, and its hash does not prove who wrote it. Therefore a
folder or an entry that another user owns, or that others may write to, is not used (like ssh
keys).
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ... import env
from ...formats.hidden import hidden_file, remove_leftovers

LIMIT = 256 << 20  # bytes on disk; a kernel takes 5 to 50 KB
_SUFFIX = ".kernel"
_MAGIC = b"hf_vq kernel 1"


class Store:
    """Machine code by key, in memory and in a folder.

    Args:
        folder: made when the first entry is written, for its owner alone.
        limit: bytes of all entries.
    """

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder = folder
        self.limit = limit
        self._images: dict[str, bytes] = {}
        self._usable = True
        self._tidied = False

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The image of `key`; where there is none, what `make()` gives, kept from now on."""
        if not self._tidied:  # once a process: what was killed may never be asked for again
            self._tidied = True
            if self._trusts_folder():
                with suppress(OSError):
                    self._evict()
        image = self._images.get(key) or self._read(key)
        if image is None:
            image = make()
            self._write(key, image)
        self._images[key] = image
        return image

    def trusts(self, path: Path) -> bool:
        """True if no other user can have written the file `path` of the folder."""
        try:
            return self._trusts_folder() and _foreign(os.stat(path)) is None
        except OSError:
            return False

    def _trusts_folder(self) -> bool:
        """True if no other user can add entries to the folder; warns once if one can."""
        if self._usable:
            # Of the folder itself, not of a link to it: whoever owns the link may only choose
            # another folder of this user's own.
            with suppress(OSError):  # there is none yet
                if why := _foreign(os.stat(self.folder)):
                    self._give_up(
                        f"does not use compiled kernels in {self.folder}, which {why}",
                        f"Run `chmod go-w {self.folder}` if it is yours, or set HF_VQ_STORE to a "
                        "folder of your own.",
                    )
        return self._usable

    def _give_up(self, what: str, cure: str) -> None:
        self._usable = False
        warnings.warn(
            f"hf_vq {what}: every process compiles them again. {cure}", RuntimeWarning, stacklevel=2
        )

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self.folder / f"{key}{_SUFFIX}"

    def _read(self, key: str) -> bytes | None:
        if not self._trusts_folder():
            return None
        path = self.path(key)
        try:
            with path.open("rb") as file:
                if _foreign(os.fstat(file.fileno())):  # is made again, under this user's name
                    return None
                header, _, image = file.read().partition(b"\n")
        except OSError:
            return None
        if header != _header(image):
            return None
        with suppress(OSError):
            os.utime(path)
        return image

    def _write(self, key: str, image: bytes) -> None:
        if not self._usable:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._trusts_folder():  # which may be there only now
                return
            with hidden_file(self.path(key)) as path:
                path.touch(mode=0o600)
                path.write_bytes(_header(image) + b"\n" + image)
            self._evict()
        except OSError as error:
            self._give_up(
                f"cannot keep compiled kernels in {self.folder} ({error.strerror})",
                "Set HF_VQ_STORE to a folder that can be written.",
            )

    def _evict(self) -> None:
        """Remove the oldest entries beyond the limit, and what killed processes left."""
        remove_leftovers(self.folder, None)
        entries, total = [], 0
        for path in self.folder.iterdir():
            if path.suffix == _SUFFIX:
                try:
                    status = path.stat()
                except OSError:  # another process was faster
                    continue
                entries.append((status.st_mtime, path, status.st_size))
                total += status.st_size
        for _, path, size in sorted(entries):
            if total <= self.limit:
                break
            with suppress(OSError):
                path.unlink()
            total -= size


def _foreign(status: os.stat_result) -> str | None:
    """Why another user may have written a file or folder; None if none can have.

    Files of root are trusted: root can change the library itself, too. Windows has neither owners
    in this sense nor modes; its user folders are closed to others.
    """
    user = os.geteuid() if hasattr(os, "geteuid") else None
    if user is None:
        return None
    if status.st_uid not in (user, 0):
        return f"belongs to another user (uid {status.st_uid}; this process has uid {user})"
    if stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _header(image: bytes) -> bytes:
    return b"%s %d %s" % (_MAGIC, len(image), hashlib.sha256(image).hexdigest().encode())


def default_store() -> Store:
    """The store in HF_VQ_STORE, by default next to Hugging Face's own caches."""
    from huggingface_hub.constants import HF_HOME

    return _open(env.STORE.get() or os.path.join(HF_HOME, "hf_vq", "kernels"))


@functools.cache
def _open(folder: str) -> Store:
    return Store(Path(folder).expanduser())
