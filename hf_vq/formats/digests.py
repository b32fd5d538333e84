"""Digests in safetensors files, which show whether a file has changed since it was written.

    metadata["hf_vq_digests"]   JSON, {name: BLAKE3 of (name, dtype, shape, meaning, bytes)}
                                of every tensor, and of the rest of the metadata

For a tensor of more than SEGMENT bytes, the BLAKE3 digests of its segments replace its bytes, so
that several threads can hash one tensor.

A tensor's meaning is a string that the writer and the reader derive separately, such as the spec of
its scheme. A changed meaning gives another digest. Other readers of safetensors ignore metadata,
so such files are no new format.

A digest is cut to 128 bits: damage goes unnoticed with a probability of 2^-128, and finding other
bytes with a given digest takes 2^128 trials. It is no signature: anyone who can write the file can
write its digests.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from .. import env
from ..errors import VQFormatError

ALGORITHM = "blake3"
KEY = "hf_vq_digests"
CURE = "Download or copy it again, or make it anew."
_METADATA = "__metadata__"  # no tensor may have this name
_DIGITS = 32  # hexadecimal, 128 bits
SEGMENT = 1 << 25  # bytes
_PIECE = 1 << 20  # bytes of one read: fits a core's cache, and locks are rare
_MOST_THREADS = 16
_SHOWN = 8  # problems in one message
_MOUNTS = "/proc/self/mountinfo"
_LOCAL = {b"erofs", b"ext2", b"ext3", b"ext4", b"f2fs", b"overlay", b"squashfs", b"tmpfs", b"xfs"}
"""File systems whose files are mapped. Others, as btrfs, number devices in another way."""

logger = logging.getLogger("hf_vq")


@dataclass(frozen=True)
class Part:
    """One tensor in a header; `begin` and `end` are bytes of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


class Header:
    """The header of a safetensors file.

    Raises:
        VQFormatError: the file is missing, truncated or no safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            with open(path, "rb") as file:
                self.start = 8 + int.from_bytes(file.read(8), "little")
                size = os.fstat(file.fileno()).st_size
                if self.start > size:
                    raise ValueError("its header ends behind the file")
                self.json: dict[str, Any] = json.loads(file.read(self.start - 8))
            self.metadata: dict[str, str] = dict(self.json.get(_METADATA) or {})
            self.parts = {
                name: Part(
                    name, str(about["dtype"]), tuple(map(int, about["shape"])),
                    *(self.start + int(offset) for offset in about["data_offsets"]),
                )
                for name, about in self.json.items()
                if name != _METADATA
            }  # fmt: skip
            if any(not self.start <= p.begin <= p.end <= size for p in self.parts.values()):
                raise ValueError("a tensor lies outside of it")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise VQFormatError(
                f"{self.path} is truncated or corrupted ({error}). {CURE}"
            ) from error

    @cached_property
    def table(self) -> dict[str, str] | None:
        """The recorded digests by name; None where the file carries none.

        Raises:
            VQFormatError: they cannot be read.
        """
        text = self.metadata.get(KEY, "")
        if not isinstance(text, str) or not text.strip():
            return None
        try:
            return {str(name): str(found) for name, found in json.loads(text).items()}
        except (ValueError, AttributeError, RecursionError) as error:
            raise VQFormatError(f"{self.path}: its digests are damaged ({error}). {CURE}") from None

    def of_metadata(self) -> str:
        """The digest of the metadata, the recorded digests left out."""
        rest = {key: text for key, text in self.metadata.items() if key != KEY}
        return _start([_METADATA, rest]).hexdigest()[:_DIGITS]


def _start(facts: list[Any]) -> Any:
    """A hash that has read JSON; what follows it cannot be taken for a part of it."""
    return blake3(json.dumps(["hf_vq", 1, *facts], sort_keys=True).encode() + b"\0")


def room(names: Iterable[str]) -> dict[str, str]:
    """Metadata as long as the digests of tensors of these names: `record` then rewrites the header
    of a file in place, and moves no tensor."""
    return {KEY: " " * (len(json.dumps(_text(dict.fromkeys(names, "0" * _DIGITS), "0"))) - 2)}


def _text(table: Mapping[str, str], metadata: str) -> str:
    found = {**table, _METADATA: metadata.ljust(_DIGITS)}
    return json.dumps(found, separators=(",", ":"), sort_keys=True)


def record(
    files: Iterable[str | os.PathLike[str]],
    meanings: Callable[[list[Header]], Mapping[str, str]] = lambda headers: {},
) -> str:
    """Write the digests of files into their headers, which then are in one order of keys.

    A file without `room` is written anew, its tensors copied.

    Args:
        files: of one checkpoint.
        meanings: of tensors, by name, from the headers; those that are not there have none.

    Returns:
        The digest of all digests (`root`).
    """
    headers = [Header(file) for file in files]
    for header, table in zip(headers, _Hashing(headers, meanings(headers)).wait(), strict=True):
        _write(header, _text(table, header.of_metadata()))
    return root([Header(header.path) for header in headers])


def root(headers: Iterable[Header]) -> str:
    """The digest of all recorded digests of files, however tensors are spread over them."""
    entries = sorted(entry for header in headers for entry in (header.table or {}).items())
    return f"{ALGORITHM}:{_start([entries]).hexdigest()[:_DIGITS]}"


def _write(header: Header, table: str) -> None:
    metadata = dict(sorted({**header.metadata, KEY: table}.items()))
    text = json.dumps({**header.json, _METADATA: metadata}, separators=(",", ":")).encode()
    size = header.start - 8
    if len(text) <= size:
        with open(header.path, "r+b") as file:
            file.seek(8)
            file.write(text.ljust(size))
        return
    new = Path(f"{header.path}.partial")
    text = text.ljust(-len(text) % 8 + len(text))
    try:
        with open(header.path, "rb") as source, new.open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            source.seek(header.start)
            shutil.copyfileobj(source, target, 1 << 22)
        shutil.copymode(header.path, new)
        new.replace(header.path)
    finally:
        new.unlink(missing_ok=True)


class Check:
    """Compares files with their digests, in threads, when the caller asks for `problems`.

    Args:
        files: of one checkpoint.
        meanings: of tensors, by name, from the headers; those that are not there have none.
        done: progress callback, called with the bytes read of a tensor or of a part of a large
            one; calls do not overlap.
        loaded: True if the caller maps the files to load them. They are then mapped here, too,
            where that is safe: reading copies each byte.

    Raises:
        VQFormatError: a header cannot be read.
    """

    def __init__(
        self,
        files: Iterable[str | os.PathLike[str]],
        meanings: Callable[[list[Header]], Mapping[str, str]] = lambda headers: {},
        done: Callable[[int], object] = lambda nbytes: None,
        loaded: bool = False,
    ) -> None:
        self.headers = [Header(file) for file in files]
        self.names = ", ".join(header.path for header in self.headers)
        self.has_digests = any(header.table is not None for header in self.headers)
        known = self.headers if self.has_digests else []
        self.meanings = meanings(known)
        self._hashing = _Hashing(known, self.meanings, done, loaded)

    @property
    def parts(self) -> list[Part]:
        """All tensors."""
        return [part for header in self.headers for part in header.parts.values()]

    def problems(
        self,
        expected: bool = False,
        recorded: str | None = None,
        optional: Callable[[str], bool] = lambda name: False,
    ) -> list[str]:
        """List the changes since the files were written, one line each; waits for the threads.

        Args:
            expected: True if the files must have digests.
            recorded: the expected `root`, if it is known.
            optional: (name) -> True if the tensor may be missing.

        Raises:
            VQFormatError: a file cannot be read.
        """
        if not self.has_digests:
            lost = f"{self.names} lost the digests that it was saved with"
            older = (
                f"if an older hf_vq saved it again, load it with {env.VERIFY.name}=0 and save it"
            )
            return [f"{lost}; {older}"] if expected else []
        problems = []
        for header, found in zip(self.headers, self._hashing.wait(), strict=True):
            table = header.table
            if table is None:
                problems.append(f"{header.path} carries no digests, as the other files do")
                continue
            found = {**found, _METADATA: header.of_metadata()}
            for name in sorted({*found, *table}):
                what = "its metadata" if name == _METADATA else name
                if name not in found:
                    if not optional(name):
                        problems.append(f"{header.path} lacks {name}, which was saved")
                elif name not in table:
                    problems.append(f"{header.path}: {what} was not saved with the others")
                elif found[name] != table[name]:
                    meaning = self.meanings.get(name)
                    change = f" (its bytes, or {meaning}, changed)" if meaning else ""
                    problems.append(f"{header.path}: {what} is not what was saved{change}")
        if not problems and recorded not in (None, root(self.headers)):
            problems.append(f"{self.names}: not the files that config.json was saved with")
        return problems

    def finish(self, *arguments: Any, **options: Any) -> None:
        """Wait for the end; say in one line if there are no digests. Arguments: of `problems`.

        Raises:
            VQFormatError: names what is not as it was written.
        """
        problems = self.problems(*arguments, **options)
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise VQFormatError(
                f"{'; '.join(problems[:_SHOWN])}{more}. {CURE} ({env.VERIFY.name}=0 loads it "
                "without looking.)"
            )
        if not self.has_digests:
            logger.warning(
                "%s carries no digests, so damage to it cannot be noticed: an older hf_vq, or "
                "another program, wrote it. Save it once more to add them.",
                self.names,
            )


@dataclass(frozen=True)
class _Segment:
    """Bytes `begin` to `end` of a file, part of one tensor: the work of one thread."""

    file: int  # which
    path: str
    part: Part
    begin: int
    end: int


def _segments(headers: list[Header]) -> Iterator[_Segment]:
    """File by file, in the order of their bytes: a disk is read from its beginning on."""
    for number, header in enumerate(headers):
        for part in sorted(header.parts.values(), key=lambda part: part.begin):
            for begin in range(part.begin, max(part.end, part.begin + 1), SEGMENT):
                yield _Segment(number, header.path, part, begin, min(begin + SEGMENT, part.end))


class _Hashing:
    """The threads of a `Check` or of `record`."""

    def __init__(
        self,
        headers: list[Header],
        meanings: Mapping[str, str],
        done: Callable[[int], object] = lambda nbytes: None,
        loaded: bool = False,
    ) -> None:
        self.meanings, self.done = meanings, done
        self._mapped = loaded and _are_local(header.path for header in headers)
        self.found: list[dict[str, str]] = [{} for _ in headers]
        self.failed: Exception | None = None
        self.stopped = False
        self._left = _segments(headers)
        self._large: dict[tuple[int, str], dict[int, bytes]] = defaultdict(dict)  # by `begin`
        self._lock = threading.Lock()
        most = sum(-(-part.nbytes // SEGMENT) or 1 for h in headers for part in h.parts.values())
        self._most = min(_MOST_THREADS, _cores(), most)

    def wait(self) -> list[dict[str, str]]:
        """The digests by name, of each file.

        Raises:
            VQFormatError: a file cannot be read.
        """
        # Not before: a single thread that hashes during a load of 2.8 GB on 16 cores made the whole
        # take .34 s, and hashing after the load .19 s.
        threads = [threading.Thread(target=self._run, name=KEY) for _ in range(self._most)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Control-C: a program that ends waits for its threads
            self.stopped = True
            raise
        if self.failed is not None:
            raise VQFormatError(f"a file could not be read: {self.failed}. {CURE}")
        return self.found

    def _run(self) -> None:
        """Hash one segment after the other, until there are none."""
        files: dict[str, _Read | _Mapped] = {}
        try:
            while True:
                with self._lock:
                    segment = next(self._left)
                if segment.path not in files:
                    files[segment.path] = (_Mapped if self._mapped else _Read)(segment.path)
                if not self._hash(segment, files[segment.path]):
                    return
        except StopIteration:
            pass
        except Exception as error:  # it is raised where the threads are waited for
            self.failed = error
        finally:
            for file in files.values():
                file.close()

    def _hash(self, segment: _Segment, file: _Read | _Mapped) -> bool:
        """Hash one segment; False if nobody waits for it any more."""
        part = segment.part
        meaning = self.meanings.get(part.name, "")
        whole = _start([part.name, part.dtype, part.shape, meaning])
        hashed = whole if part.nbytes <= SEGMENT else blake3()
        for piece in file.pieces(segment.begin, segment.end):
            if self.stopped:
                return False
            with piece:  # or the mapping could not be closed after an error
                hashed.update(piece)
        with self._lock:
            self.done(segment.end - segment.begin)
            if hashed is not whole:
                known = self._large[segment.file, part.name]
                known[segment.begin] = hashed.digest()
                if len(known) * SEGMENT < part.nbytes:
                    return True
                whole.update(b"".join(known[begin] for begin in sorted(known)))
            self.found[segment.file][part.name] = whole.hexdigest()[:_DIGITS]
        return True


class _Read:
    """A file that one thread reads. A file that is cut meanwhile is an error."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._buffer = memoryview(bytearray(_PIECE))

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes from `begin` to `end`; each piece ends when the next one is taken."""
        self._file.seek(begin)
        while begin < end:
            count = self._file.readinto(self._buffer[: end - begin])
            if not count:
                raise OSError(f"{self._file.name} ends before byte {end}")
            yield self._buffer[:count]
            begin += count

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Mapped:
    """A file that one thread reads through a mapping, as the loader does. Both end the process
    (SIGBUS) if the file is cut at the wrong moment."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes from `begin` to `end`, if there are any."""
        if os.fstat(self._file.fileno()).st_size < end:
            raise OSError(f"{self._file.name} ends before byte {end}")
        if begin < end:
            yield memoryview(self._map)[begin:end]

    def close(self) -> None:
        """Close the mapping and the file."""
        self._map.close()
        self._file.close()


def _are_local(paths: Iterable[str]) -> bool:
    """True if the kernel itself reads all files: page faults of several threads may wait for each
    other where a program (FUSE, as hf-mount) or a network does. False where nobody can tell."""
    try:
        with open(_MOUNTS, "rb") as file:
            mounts = [line.split(b" ") for line in file]
        devices = {os.stat(path).st_dev for path in paths}
        numbers = {f"{os.major(device)}:{os.minor(device)}".encode() for device in devices}
        kinds = defaultdict(set)
        for mount in mounts:
            kinds[mount[2]].add(mount[mount.index(b"-") + 1])
    except (OSError, ValueError, IndexError):  # not Linux, or none of its usual forms
        return False
    return all(kinds[number] and kinds[number] <= _LOCAL for number in numbers)


def _cores() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
