"""Digests in safetensors files: what they cover, how they are written, what is said of damage."""

import json
import os
import random
import re
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vq.errors import VQFormatError
from hf_vq.formats import digests
from hf_vq.formats.digests import Check, Header, record, room
from hf_vq.formats.digests import _Mapped as Mapped

TENSORS = {
    "a.weight": torch.arange(96, dtype=torch.uint8).reshape(8, 12),
    "a.vq_scale": torch.arange(8, dtype=torch.float16).reshape(8, 1),
    "b.weight": torch.arange(96, 192, dtype=torch.uint8).reshape(8, 12),
    "empty": torch.empty(0, 4),
    "ü.bias": torch.ones(3, dtype=torch.bfloat16),
}


def meanings(headers):
    return {"a.weight": "scheme one"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.safetensors"
    save_file(TENSORS, path, {"format": "pt", "more": "text", **room(TENSORS)})
    record([path], meanings)
    return path


def compare(path, meant=meanings, **known):
    """Read and mapped, if the tests' folder can be: both say the same."""
    found = Check([path], meant, loaded=True).problems(**known)
    assert Check([path], meant).problems(**known) == found
    Check([path], meant).finish(**known)


def rewrite(path, change):
    """Change the JSON of a header, and no tensor."""
    header = Header(path)
    change(header.json)
    text = json.dumps(header.json, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[header.start :])


def test_a_file_is_still_one_for_everybody(file):
    compare(file)
    loaded = load_file(file)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert set(Header(file).table) == {*TENSORS, "__metadata__"}


def test_the_header_is_rewritten_in_place(tmp_path):
    """What `room` takes is what `record` writes: tensors stay where they are, and equal files are
    equal bytes, in whatever order safetensors writes the metadata."""
    ascii_names = {name.replace("ü", "u"): tensor for name, tensor in TENSORS.items()}
    bytes_of = set()
    for number in range(4):
        path = tmp_path / str(number)
        save_file(ascii_names, path, {"format": "pt", **room(ascii_names)})
        before, inode = Header(path), path.stat().st_ino
        record([path])
        assert path.stat().st_ino == inode and Header(path).start == before.start
        record([path])
        compare(path, lambda headers: {})
        bytes_of.add(path.read_bytes())
    assert len(bytes_of) == 1


def test_a_file_without_room_is_written_anew(tmp_path):
    path = tmp_path / "file"
    save_file(TENSORS, path, {"format": "pt"})
    path.chmod(0o640)
    record([path], meanings)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    compare(path)
    assert all(torch.equal(load_file(path)[name], tensor) for name, tensor in TENSORS.items())


def test_any_bit_of_the_tensors(file):
    raw, start = file.read_bytes(), Header(file).start
    for _ in range(200):
        bit = random.randrange(8 * start, 8 * len(raw))
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        parts = Header(file).parts.values()
        (name,) = (p.name for p in parts if p.begin <= bit // 8 < p.end)
        with pytest.raises(VQFormatError, match=f"some.*{re.escape(name)} is not what was saved"):
            compare(file)


def test_a_meaning(file):
    for meant in ({}, {"a.weight": "scheme two"}, {"a.weight": "scheme one", "b.weight": "x"}):
        name = "b.weight" if "b.weight" in meant else "a.weight"
        with pytest.raises(VQFormatError, match=f"{name} is not what was saved"):
            compare(file, lambda headers, meant=meant: meant)


def swap(header):
    """The bytes of one under the name of the other: names are part of the digest."""
    a, b = header["a.weight"], header["b.weight"]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]


def rename(header):
    header["c.weight"] = header.pop("b.weight")


def drop_entry(header):
    table = json.loads(header["__metadata__"][digests.KEY])
    del table["b.weight"]
    header["__metadata__"][digests.KEY] = json.dumps(table)


HEADERS = {
    "swapped": (swap, "a.weight is not what was saved.*b.weight is not what was saved"),
    "renamed": (rename, "lacks b.weight.*c.weight was not saved with the others"),
    "shape": (
        lambda h: h["b.weight"].update(shape=[12, 8]), "b.weight is not what was saved"
    ),
    "dtype": (lambda h: h["b.weight"].update(dtype="I8"), "b.weight is not what was saved"),
    "no digest": (drop_entry, "b.weight was not saved with the others"),
    "metadata": (
        lambda h: h["__metadata__"].update(more="other"), "its metadata is not what was saved"
    ),
    "metadata more": (lambda h: h["__metadata__"].update(x=""), "its metadata"),
    "no JSON": (lambda h: h["__metadata__"].update({digests.KEY: "{"}), "digests are damaged"),
    "no table": (lambda h: h["__metadata__"].update({digests.KEY: "[]"}), "digests are damaged"),
}  # fmt: skip


@pytest.mark.parametrize("change", HEADERS)
def test_a_header(file, change):
    edit, says = HEADERS[change]
    rewrite(file, edit)
    with pytest.raises(VQFormatError, match=says) as caught:
        compare(file)
    assert str(file) in str(caught.value) and "again" in str(caught.value)


def test_a_removed_tensor(file):
    rest = {name: tensor for name, tensor in TENSORS.items() if name != "b.weight"}
    save_file(rest, file, Header(file).metadata)
    with pytest.raises(VQFormatError, match=r"lacks b\.weight, which was saved"):
        compare(file)


def test_a_file_without_digests(file, caplog):
    save_file(TENSORS, file, {"format": "pt", **room(TENSORS)})  # as one that was not finished
    for _ in range(2):
        caplog.clear()
        compare(file)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"{file} carries no digests" in caplog.text
    with pytest.raises(VQFormatError, match="lost the digests"):
        compare(file, expected=True)


def test_files_of_one_checkpoint(tmp_path):
    """The digest of all digests: of the tensors, and not of how they are spread over files."""

    def write(folder, *shards):
        folder.mkdir()
        files = [folder / str(number) for number in range(len(shards))]
        for path, names in zip(files, shards, strict=True):
            save_file({name: TENSORS[name] for name in names}, path, room(names))
        return files, record(files, meanings)

    names = list(TENSORS)
    files, root = write(tmp_path / "two", names[:2], names[2:])
    check = Check(files, meanings)
    assert check.problems(True, root) == []
    assert check.problems(True, "blake3:0")[0].endswith(
        "not the files that config.json was saved with"
    )
    assert Check(files[:1], meanings).problems(True, root)
    save_file({name: TENSORS[name] for name in names[2:]}, files[1])
    (said,) = Check(files, meanings).problems()
    assert said == f"{files[1]} carries no digests, as the other files do"


@pytest.mark.parametrize("data", [b"", b"\x10", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]"])
def test_what_is_no_such_file(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(VQFormatError, match="truncated or corrupted"):
        Check([tmp_path / "x"])
    with pytest.raises(VQFormatError, match="truncated or corrupted"):
        Check([tmp_path / "absent"])


def hashing_threads():
    return [thread for thread in threading.enumerate() if thread.name == digests.KEY]


def test_nothing_is_hashed_before_somebody_asks(file):
    """Beside a load, it would slow both."""
    seen = []
    check = Check([file], meanings, lambda nbytes: seen.append(len(hashing_threads())))
    assert not hashing_threads()
    assert check.problems() == check.problems() == []
    assert min(seen) >= 1 and not hashing_threads()


def test_threads_end_when_the_wait_is_interrupted(file, monkeypatch):
    """A program that ends waits for no digests of a large file."""
    slow, go = threading.Event(), threading.Event()

    def done(nbytes):
        slow.set()
        go.wait(60)

    def interrupted(thread):
        assert slow.wait(60)
        raise KeyboardInterrupt

    check = Check([file], meanings, done)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            check.problems()
    assert check._hashing.stopped
    threads = hashing_threads()
    go.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch, loaded):
    monkeypatch.setattr(digests, "_MOST_THREADS", 1)
    monkeypatch.setattr(digests, "_are_local", lambda paths: True)
    path = tmp_path / "cut"
    tensors = {name: torch.zeros(1 << 16, dtype=torch.uint8) for name in "ab"}
    save_file(tensors, path, room(tensors))
    record([path])
    start = Header(path).start
    end = start + (1 << 16) + 100

    def cut(nbytes):
        with path.open("r+b") as opened:
            opened.truncate(end)

    with pytest.raises(VQFormatError, match=f"cut ends before byte {start + (2 << 16)}"):
        Check([path], done=cut, loaded=loaded).finish()


MOUNTS = """22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 {device} / / rw,relatime shared:1 - {kind} /dev/vda rw
"""


@pytest.mark.parametrize(
    ("kind", "local"),
    [("ext4", True), ("overlay", True), ("fuse.hf-mount", False), ("nfs4", False)],
)
def test_files_of_a_local_file_system_are_mapped(file, tmp_path, monkeypatch, kind, local):
    """Page faults of a file that a program or a network serves may wait for each other."""
    status = file.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(device=f"{os.major(status)}:{os.minor(status)}", kind=kind))
    monkeypatch.setattr(digests, "_MOUNTS", str(mounts))
    opened = []
    monkeypatch.setattr(digests, "_Mapped", lambda path: opened.append(path) or Mapped(path))
    for loaded in (False, True):
        opened.clear()
        assert Check([file], meanings, loaded=loaded).problems() == []
        assert bool(opened) == (loaded and local)
    mounts.write_text(MOUNTS.format(device="999:999", kind=kind))  # of another file system
    opened.clear()
    assert Check([file], meanings, loaded=True).problems() == [] and not opened
    mounts.unlink()  # not Linux
    assert Check([file], meanings, loaded=True).problems() == [] and not opened


def test_a_segment_is_part_of_the_format(tmp_path):
    """Files with large tensors are read by every version."""
    assert digests.SEGMENT == 32 << 20
    data = (torch.arange(digests.SEGMENT + 5) % 251).to(torch.uint8)
    save_file({"a": data}, tmp_path / "file", room(["a"]))
    record([tmp_path / "file"])
    assert Header(tmp_path / "file").table["a"] == "35dd01792b3f4eea4a150a60ddaae277"


@pytest.mark.parametrize("nbytes", [63, 64, 65, 128, 200])
def test_a_tensor_of_several_segments(tmp_path, monkeypatch, nbytes):
    """One digest, whoever reads which segment first; a changed bit or two swapped segments show."""
    monkeypatch.setattr(digests, "SEGMENT", 64)
    generator = torch.Generator().manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    path, tensors = tmp_path / "file", {"a": data, "b": torch.arange(3)}
    save_file(tensors, path, room(tensors))
    record([path])
    read: list[int] = []
    monkeypatch.setattr(digests, "_are_local", lambda paths: True)
    for threads in (1, 2, 16):
        monkeypatch.setattr(digests, "_MOST_THREADS", threads)
        for loaded in (False, True):
            Check([path], done=read.append, loaded=loaded).finish()
    assert sum(read) == 6 * (nbytes + 24)
    whole, begin = path.read_bytes(), Header(path).parts["a"].begin
    for at in range(begin, begin + nbytes, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(VQFormatError, match="a is not what was saved"):
            Check([path]).finish()
    if nbytes >= 128:
        first, second = whole[begin : begin + 64], whole[begin + 64 : begin + 128]
        path.write_bytes(whole[:begin] + second + first + whole[begin + 128 :])
        with pytest.raises(VQFormatError, match="a is not what was saved"):
            Check([path]).finish()


def test_a_thread_that_outlives_the_main_one(tmp_path):
    """An interpreter that ends waits for it: what it compares is whole."""
    save_file({"a": torch.arange(9)}, tmp_path / "file")
    script = f"""
import threading
from hf_vq.formats import digests
digests.record([{str(tmp_path / "file")!r}])

def compare():
    threading.main_thread().join()
    print(digests.Check([{str(tmp_path / "file")!r}]).problems(expected=True))

threading.Thread(target=compare).start()
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
