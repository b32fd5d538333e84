"""Caches and codebooks in files are what was saved: or an error, whichever bit changed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from hf_vq.cache import KVCodebooks, VQCache
from hf_vq.cache.codebooks import FILE_NAME
from hf_vq.cli import main
from hf_vq.errors import VQFormatError
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.digests import KEY, Header
from hf_vq.formats.tensors import kv_codebook_spec

Saved = tuple[Path, Callable[[], Any]]


@pytest.fixture(params=["u4", "cq-4", "codebooks"])
def saved(
    request: pytest.FixtureRequest, config: LlamaConfig, tokens: Any, feed: Any, tmp_path: Path
) -> Saved:
    """A file, and what loads it: a cache with universal or learned codebooks, or codebooks."""
    scheme = KV_SCHEMES["u4" if request.param == "u4" else "cq-4"]
    books = None
    if request.param != "u4":
        shape = kv_codebook_spec(scheme.key, 2, 16).shape
        keys, values = ([torch.randn(shape).half() for _ in range(2)] for _ in "kv")
        books = KVCodebooks(scheme, keys, values, [None, None])
    if request.param == "codebooks":
        assert books is not None
        books.save(tmp_path / FILE_NAME)
        return tmp_path / FILE_NAME, lambda: KVCodebooks.load(tmp_path / FILE_NAME)
    cache = VQCache(config, scheme, window=8, codebooks=books)
    feed(cache, tokens(30), 0, 30)
    path = tmp_path / "cache"
    cache.save(path)
    return path, lambda: VQCache.load(path, config)


def test_any_bit_of_the_file(saved: Saved) -> None:
    """Of tensors, of their names and places, of the description, of the digests, of blanks."""
    path, load = saved
    load()
    raw, start = path.read_bytes(), Header(path).start
    bits = [random.randrange(8 * start) for _ in range(80)]
    bits += [random.randrange(8 * start, 8 * len(raw)) for _ in range(20)]
    for bit in bits:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(VQFormatError, match=re.escape(str(path))):
            load()


def test_any_tensor(saved: Saved) -> None:
    path, load = saved
    raw = path.read_bytes()
    for part in Header(path).parts.values():
        if part.nbytes:
            damaged = bytearray(raw)
            damaged[random.randrange(part.begin, part.end)] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(VQFormatError, match=f"{re.escape(part.name)} is not what was"):
                load()


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    tensors, metadata = load_file(path), Header(path).metadata
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def test_any_field_of_the_description(saved: Saved) -> None:
    path, load = saved
    raw = path.read_bytes()
    key = next(key for key in Header(path).metadata if key.startswith("hf_vq_") and key != KEY)
    fields = json.loads(Header(path).metadata[key])
    for name, value in fields.items():
        other: Any = not value if isinstance(value, bool) else 7 if name != "digests" else "none"
        for text in ({**fields, name: other}, {n: v for n, v in fields.items() if n != name}):
            path.write_bytes(raw)
            rewrite(
                path, lambda tensors, metadata, text=text: metadata.update({key: json.dumps(text)})
            )
            with pytest.raises(VQFormatError, match=re.escape(str(path))):
                load()


def test_swapped_and_removed_tensors(saved: Saved) -> None:
    path, load = saved
    raw = path.read_bytes()
    shapes: dict[Any, list[str]] = {}
    for part in Header(path).parts.values():
        shapes.setdefault((part.shape, part.dtype), []).append(part.name)
    for one, other, *_ in [names for names in shapes.values() if len(names) > 1]:
        path.write_bytes(raw)
        tensors = load_file(path)
        if torch.equal(tensors[one], tensors[other]):
            continue
        rewrite(path, lambda t, m, one=one, other=other: t.update({one: t[other], other: t[one]}))
        with pytest.raises(VQFormatError, match=f"{one} is not what was saved"):
            load()
        path.write_bytes(raw)
        rewrite(path, lambda t, m, one=one: t.pop(one))
        with pytest.raises(VQFormatError, match=one):
            load()


def forget(path: Path) -> None:
    """As an older hf_vq wrote it."""
    header = Header(path)
    key = next(key for key in header.metadata if key.startswith("hf_vq_") and key != KEY)
    description = json.loads(header.metadata[key])
    del description["digests"]
    save_file(load_file(path), path, {key: json.dumps(description), "format": "pt"})


def test_an_older_file_loads_with_one_line(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    path, load = saved
    forget(path)
    load()
    assert len(caplog.records) == 1 and f"{path} carries no digests" in caplog.text


def test_a_file_that_lost_its_digests(saved: Saved) -> None:
    path, load = saved
    rewrite(path, lambda tensors, metadata: metadata.pop(KEY))
    with pytest.raises(VQFormatError, match="lost the digests"):
        load()


def test_checking_can_be_left_out(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, load = saved
    part = max(Header(path).parts.values(), key=lambda part: part.nbytes)
    raw = bytearray(path.read_bytes())
    raw[part.begin] ^= 1
    path.write_bytes(raw)
    monkeypatch.setenv("HF_VQ_VERIFY", "0")
    load()
    rewrite(path, lambda tensors, metadata: metadata.pop(KEY))
    load()
    assert not caplog.records


def test_equal_files_are_equal_bytes(saved: Saved) -> None:
    """Metadata of several keys is written in an order of its own."""
    path, load = saved
    loaded, raw = load(), path.read_bytes()
    for _ in range(4):
        loaded.save(path)
        assert path.read_bytes() == raw


def test_verify(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = saved
    count = len(Header(path).parts)
    assert main(["verify", str(path)]) == 0
    assert f"compared {count} tensors" in capsys.readouterr().out
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert main(["verify", str(path)]) == 1
    assert "is not what was saved" in capsys.readouterr().out
    forget(path)
    assert main(["verify", str(path)]) == 3
    assert f"no digests: {path}" in capsys.readouterr().out
