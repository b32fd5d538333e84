"""The store: compiled kernels on disk, found by the hash of all that decided them.

    <folder>/<key>.kernel  =  "hf_vq kernel 1 <bytes> <sha256>\\n" + machine code

An entry appears whole or not at all: it is written in a hidden folder and renamed. Two processes
that compile the same kernel write the same entry, and either may win. What is not an entry, because
it was cut short, damaged or made by someone else, is compiled and written again. Where nothing can
be written, kernels live as long as the process. The oldest entries go when there are too many;
an entry that is read counts as new.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .. import env
from ..formats.hidden import hidden_file, remove_leftovers

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
        self._writable = True
        self._tidied = False

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The image of `key`; where there is none, what `make()` gives, kept from now on."""
        if not self._tidied:  # once a process: what was killed may never be asked for again
            self._tidied = True
            with suppress(OSError):
                self._evict()
        image = self._images.get(key) or self._read(key)
        if image is None:
            image = make()
            self._write(key, image)
        self._images[key] = image
        return image

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self.folder / f"{key}{_SUFFIX}"

    def _read(self, key: str) -> bytes | None:
        path = self.path(key)
        try:
            header, _, image = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        if header != _header(image):
            return None
        with suppress(OSError):
            os.utime(path)
        return image

    def _write(self, key: str, image: bytes) -> None:
        if not self._writable:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with hidden_file(self.path(key)) as path:
                path.touch(mode=0o600)
                path.write_bytes(_header(image) + b"\n" + image)
            self._evict()
        except OSError as error:
            self._writable = False
            warnings.warn(
                f"hf_vq cannot keep compiled kernels in {self.folder} ({error.strerror}): every "
                "process compiles them again. Set HF_VQ_STORE to a folder that can be written.",
                RuntimeWarning,
                stacklevel=2,
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


def _header(image: bytes) -> bytes:
    return b"%s %d %s" % (_MAGIC, len(image), hashlib.sha256(image).hexdigest().encode())


def default_store() -> Store:
    """The store in HF_VQ_STORE, or beside Hugging Face's own caches."""
    from huggingface_hub.constants import HF_HOME

    return _open(env.STORE.get() or os.path.join(HF_HOME, "hf_vq", "kernels"))


@functools.cache
def _open(folder: str) -> Store:
    return Store(Path(folder).expanduser())
