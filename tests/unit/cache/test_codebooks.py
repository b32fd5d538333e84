"""Learned codebooks of a cache: what is accepted, what is stored, where they are found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from hf_vq.cache import KVCodebooks, VQCache, attend
from hf_vq.cache.codebooks import FILE_NAME
from hf_vq.errors import VQCacheError, VQFormatError
from hf_vq.formats import digests
from hf_vq.formats.catalog import KV_SCHEMES, KVScheme
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import encode_kv

Tokens = Callable[..., tuple[Tensor, Tensor]]
Feed = Callable[..., Any]
CENTRED = KVScheme(KV_SCHEMES["cq-4"].key, KV_SCHEMES["u4"].value, centre_keys=True)


def codebooks_for(
    scheme: KVScheme, layers: int = 2, heads: int = 2, dim: int = 16, means: bool | None = None
) -> KVCodebooks:
    """Random codebooks of the scheme."""

    def side(part: Any) -> list[Tensor | None]:
        if part.codebook == "universal":
            return [None] * layers
        shape = kv_codebook_spec(part, heads, dim).shape
        return [torch.randn(shape).half() for _ in range(layers)]

    centred = scheme.centre_keys if means is None else means
    mean = [torch.randn(heads, dim) if centred else None for _ in range(layers)]
    return KVCodebooks(scheme, side(scheme.key), side(scheme.value), mean)


def equal(a: KVCodebooks, b: KVCodebooks) -> bool:
    mine, other = a.tensors(), b.tensors()
    same = mine.keys() == other.keys() and all(torch.equal(mine[n], other[n]) for n in mine)
    return same and a.scheme == b.scheme


@pytest.mark.parametrize(
    "scheme", ["nomad-4", "nomad-1", "cq-4", "cq-1", "learned-2", "nomad-u4", CENTRED]
)
def test_a_file(scheme: Any, tmp_path: Path) -> None:
    scheme = KV_SCHEMES.get(scheme, scheme) if isinstance(scheme, str) else scheme
    books = codebooks_for(scheme, 11)
    path = tmp_path / FILE_NAME
    books.save(path)
    loaded = KVCodebooks.load(path)
    assert equal(loaded, books) and len(loaded) == 11
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["hf_vq_kv"]) == {
            "format_version": 1,
            "key_scheme": scheme.key.spec(),
            "value_scheme": scheme.value.spec(),
            "centre_keys": scheme.centre_keys,
            "digests": "blake3",
        }
    with pytest.raises(VQCacheError, match="cannot be written"):
        books.save(tmp_path / "absent" / "file")


def test_layers_without_codebooks(tmp_path: Path) -> None:
    books = codebooks_for(KV_SCHEMES["cq-2"], 4)
    for layer in (0, 3):
        books.keys[layer] = books.values[layer] = None
    books.save(tmp_path / "file")
    assert len(KVCodebooks.load(tmp_path / "file")) == 3
    assert equal(KVCodebooks.load(tmp_path / "file"), books)


def wrong(**changes: Any) -> dict[str, Any]:
    return changes


good = torch.zeros(2, 8, 256, 2).half()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (wrong(keys=[None]), "lists of one length"),
        (wrong(keys=(good, good)), "lists of one length"),
        (wrong(keys=[good, None]), "layer 1 has codebooks of its values only"),
        (wrong(keys=[good, good.float()]), r"layer 1, keys: .*float16 .*got torch.float32"),
        (
            wrong(keys=[good[0], good]),
            r"layer 0, keys: codebooks of VQ<2,8,1> .*got.*\[8, 256, 2\]",
        ),
        (wrong(keys=[good[:, :, :16], good]), "hf-vq calibrate"),
        (wrong(keys=[good[:0], good]), r"layer 0, keys.*\[0, 8, 256, 2\]"),
        (wrong(keys=[good, 7]), "got int"),
        (wrong(values=[good[:1], good]), "2 heads of keys and 1 of values"),
        (wrong(values=[good, good + torch.nan]), "layer 1, values: NaN"),
        (wrong(sinks=-1), "sinks of KVCodebooks are a number of tokens; got -1"),
        (wrong(sinks=True), "sinks of KVCodebooks"),
        (wrong(key_means=[None, torch.zeros(2, 16)]), "does not centre keys"),
        (wrong(keys=[None, None], values=[None, None]), "no codebook and no mean"),
        (wrong(scheme=KV_SCHEMES["u4"]), "layer 0, keys: codebooks were given, but.*universal"),
        (
            wrong(scheme=CENTRED, values=[None, None]),
            "layer 0 has codebooks of centred keys but no",
        ),
        (
            wrong(scheme=CENTRED, values=[None, None], key_means=[torch.zeros(2, 8)] * 2),
            r"layer 0: the mean of the keys is float32 \[heads, head_dim\]; got.*\[2, 8\]",
        ),
        (
            wrong(scheme=CENTRED, values=[None, None], key_means=[torch.zeros(2, 16).half()] * 2),
            "got torch.float16",
        ),
        (
            wrong(
                scheme=CENTRED, values=[None] * 2, key_means=[torch.full((2, 16), torch.inf)] * 2
            ),
            "layer 0, mean of the keys: NaN or infinity",
        ),
    ],
)
def test_bad_codebooks(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "scheme": KV_SCHEMES["cq-4"], "keys": [good, good], "values": [good, good],
        "key_means": [None, None],
    }  # fmt: skip
    KVCodebooks(**arguments)
    with pytest.raises(VQFormatError, match=message):
        KVCodebooks(**{**arguments, **changes})


DAMAGE: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "newer": (lambda d, t: d.update(format_version=4), "upgrade hf_vq"),
    "version": (lambda d, t: d.pop("format_version"), "format_version None"),
    "no scheme": (lambda d, t: d.pop("key_scheme"), "lacks 'key_scheme'"),
    "scheme": (lambda d, t: d.update(key_scheme="vq9"), "'vq9' is not a scheme"),
    "scheme number": (lambda d, t: d.update(value_scheme=7), "value_scheme is 7"),
    "centred": (lambda d, t: d.update(centre_keys=1), "centre_keys is 1"),
    "extra": (lambda d, t: t.update(x=torch.zeros(1)), r"unexpected tensors \['x'\]"),
    "other name": (lambda d, t: t.update({"layers.00.key": good}), "unexpected tensors"),
    "half missing": (
        lambda d, t: t.pop("layers.1.value"),
        "layer 1 has codebooks of its keys only",
    ),
    "cut": (lambda d, t: t.update({"layers.1.key": good[..., :1].clone()}), "layer 1, keys"),
    "empty": (lambda d, t: t.clear(), "no codebook"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(tmp_path: Path, damage: str) -> None:
    path = tmp_path / FILE_NAME
    codebooks_for(KV_SCHEMES["cq-4"]).save(path)
    with safe_open(path, "pt") as file:
        description = json.loads(file.metadata()["hf_vq_kv"])
    tensors = load_file(path)
    change, message = DAMAGE[damage]
    change(description, tensors)
    save_file(tensors, path, {"hf_vq_kv": json.dumps(description)})
    digests.record([path])  # what has digests that are right must be looked at too
    with pytest.raises(VQFormatError, match=message) as caught:
        KVCodebooks.load(path)
    assert str(path) in str(caught.value)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(VQFormatError, match="cannot be read as KV codebooks"):
        KVCodebooks.load(tmp_path / "absent")
    save_file({"a": good}, tmp_path / "plain")
    with pytest.raises(VQFormatError, match="not written by `hf-vq calibrate`"):
        KVCodebooks.load(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nomad-2", "cq-4", "cq-1", "learned-2", "centred"])
def test_a_cache_codes_with_them(
    config: LlamaConfig, tokens: Tokens, feed: Feed, tmp_path: Path, name: str
) -> None:
    scheme = CENTRED if name == "centred" else KV_SCHEMES[name]
    books = codebooks_for(scheme)
    cache = VQCache(config, scheme, window=8, codebooks=books)
    states = tokens(330)
    feed(cache, states, 0, 300)
    handles = feed(cache, states, 300, 301)
    for index, layer in enumerate(cache.layers):
        assert layer.k.mean is None or torch.equal(layer.k.mean[1, :, 0], books.key_means[index])
        keys = states[0][:, :, :293] - (0 if layer.k.mean is None else layer.k.mean)
        codes, scale = encode_kv(keys, books.keys[index], scheme.key)
        assert torch.equal(layer.k.codes.rows(), codes)
        assert torch.equal(layer.k.codes.scales(), scale)
    vectors = 16 // scheme.key.vector_size
    bits = vectors * scheme.key.entry_bits + 8 * layer.v.codes.width
    bits += 16 * (scheme.key.has_scale + scheme.value.has_scale)
    assert cache.bits_per_element == bits / 32
    out = attend(torch.randn(2, 4, 1, 16), *handles)
    assert out is not None and out.isfinite().all()

    cache.save(tmp_path / "c")
    loaded = VQCache.load(tmp_path / "c", config)
    assert loaded.codebooks is not None and equal(loaded.codebooks, books)
    for begin, end in ((301, 302), (302, 330)):
        a, b = feed(cache, states, begin, end), feed(loaded, states, begin, end)
        assert torch.equal(a[0] + 0, b[0] + 0) and torch.equal(a[1] + 0, b[1] + 0)
    cache.reset()
    cache.save(tmp_path / "c")
    loaded = VQCache.load(tmp_path / "c", config)
    assert loaded.codebooks is not None and equal(loaded.codebooks, books)


def test_means_of_universal_codebooks(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    books = codebooks_for(KV_SCHEMES["u4"])
    caches = [
        VQCache(config, window=8, codebooks=books),
        VQCache(config, window=8, key_means=books.key_means),
    ]
    states = tokens(40)
    for cache in caches:
        feed(cache, states, 0, 40)
    a, b = (cache.layers[1].k for cache in caches)
    assert torch.equal(a.codes.rows(), b.codes.rows()) and torch.equal(a.mean, b.mean)


def test_codebooks_of_another_model(config: LlamaConfig, tokens: Tokens) -> None:
    nomad = KV_SCHEMES["nomad-4"]
    keys, values = tokens(10)
    for books, message in (
        (
            codebooks_for(KV_SCHEMES["cq-4"]),
            "are of cq-4, the cache is of nomad-4; learn them with",
        ),
        (codebooks_for(nomad, 3), "codebooks for 3 layers, the model has 2"),
        (codebooks_for(nomad, 1), "no codebooks for the keys of layer 1, which nomad-4 needs"),
    ):
        with pytest.raises(VQCacheError, match=f"{message}.*"):
            VQCache(config, "nomad-4", codebooks=books)
    for heads, dim in ((4, 16), (2, 32)):
        cache = VQCache(config, "nomad-4", codebooks=codebooks_for(nomad, heads=heads, dim=dim))
        with pytest.raises(VQCacheError, match=rf"layer 0 .* {heads} heads of {dim}.*hf-vq calib"):
            cache.update(keys, values, 0)
    with pytest.raises(VQCacheError, match="not both"):
        means = [None, torch.zeros(2, 16)]
        VQCache(config, CENTRED, codebooks=codebooks_for(CENTRED), key_means=means)


def test_sliding_layers_need_none(feed: Feed) -> None:
    config = Gemma3TextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    books = codebooks_for(KV_SCHEMES["nomad-4"])
    books.keys[0] = None
    VQCache(config, "nomad-4", codebooks=books)
    with pytest.raises(VQCacheError, match="no codebooks for the keys of layer 0"):
        VQCache(config, "nomad-4", codebooks=books, quantize_sliding=True)


def test_from_pretrained(tinybooks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tinybooks / "config.json", folder)
    assert VQCache.from_pretrained(folder).options.scheme == KV_SCHEMES["u4"]
    assert VQCache.from_pretrained(str(folder), "u2", window=3).options.window == 3
    with pytest.raises(VQCacheError, match=r"nomad-4 needs learned codebooks.*hf-vq calibrate"):
        VQCache.from_pretrained(folder, "nomad-4")

    config = AutoConfig.from_pretrained(folder)
    sizes = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    books = codebooks_for(KV_SCHEMES["nomad-4"], *sizes)
    books.save(folder / FILE_NAME)
    for options in ({}, {"scheme": "nomad-4"}):
        cache = VQCache.from_pretrained(folder, sinks=2, **options)
        assert cache.options.scheme == KV_SCHEMES["nomad-4"] and cache.options.sinks == 2
        assert cache.codebooks is not None and equal(cache.codebooks, books)
    other = VQCache.from_pretrained(folder, "u4")
    assert other.codebooks is None and other.options.scheme == KV_SCHEMES["u4"]
    with pytest.raises(VQCacheError, match="holds codebooks of nomad-4, not of cq-4"):
        VQCache.from_pretrained(folder, "cq-4")

    config.name_or_path = ""
    model = LlamaForCausalLM(config)
    assert VQCache.from_pretrained(model).codebooks is None
    model.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    assert VQCache.from_pretrained(model).options.scheme == KV_SCHEMES["nomad-4"]
    (folder / FILE_NAME).write_bytes(b"cut")
    with pytest.raises(VQFormatError, match=FILE_NAME):
        VQCache.from_pretrained(model)
    shutil.rmtree(folder)
    assert VQCache.from_pretrained(model).options.scheme == KV_SCHEMES["u4"]
    with pytest.raises(VQCacheError, match=r"needs a model, its folder or its name.*got int"):
        VQCache.from_pretrained(3)  # type: ignore[arg-type]
