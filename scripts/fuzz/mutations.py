"""Mutations of a file, one per try, drawn from a generator."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 63, 64, 65, 127, 128, 256, 1 << 16, 1 << 31,
    1 << 40, 1 << 63, 1 << 70, 0.0, 0.5, -1.5, 1e308, "", "a", "vq-4", "vq-2", "none", "hadamard",
    "qr", "random_hadamard", "absent", "offload", "../../etc/passwd", "\0", "é" * 50, "(a+)+$",
    [], {}, [1], [[]], [None], {"": None}, {"a": {"b": []}}, ["lm_head"], list(range(40)),
]  # fmt: skip


HOW = 3 * ["bits"] + 2 * ["header"] + ["swap", "rename", "cut", "size", "raw"]
"""What is done to a safetensors file."""


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every node of JSON but the root."""
    found = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        found.append((*prefix, key))
        if isinstance(value, (dict, list)):
            found += paths(value, (*prefix, key))
    return found


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    """The node at the end of a path."""
    for key in path:
        tree = tree[key]
    return tree


def change_json(tree: Any, rng: random.Random, prefix: tuple[Any, ...] = ()) -> tuple[Any, str]:
    """A copy of JSON with one change below `prefix`, and what was changed."""
    tree = copy.deepcopy(tree)
    places = paths(at(tree, prefix), prefix)
    if not places:
        return tree, "nothing"
    path = rng.choice(places)
    parent, key = at(tree, path[:-1]), path[-1]
    where = ".".join(map(str, path))
    how = rng.choice(["value", "number", "remove", "rename", "swap", "text"])
    old = parent[key]
    if how == "remove":
        del parent[key]
    elif how == "rename" and isinstance(parent, dict):
        parent[key + rng.choice("_x2")] = parent.pop(key)
    elif how == "swap" and len(places) > 1:
        other = rng.choice(places)
        parent[key] = copy.deepcopy(at(tree, other))
    elif how == "number" and isinstance(old, (int, float)) and not isinstance(old, bool):
        parent[key] = rng.choice(
            [old + 1, old - 1, old * 2, old // 2, -old, old << 40 if isinstance(old, int) else old]
        )
    elif how == "text" and isinstance(old, str) and old:
        place = rng.randrange(len(old))
        parent[key] = old[:place] + rng.choice("0123456789abcxyz-_") + old[place + 1 :]
    else:
        parent[key] = copy.deepcopy(rng.choice(VALUES))
    new = "removed" if how == "remove" else repr(at(tree, path) if how != "rename" else "renamed")
    return tree, f"{where}: {old!r:.60} -> {new:.60}"


def change_json_file(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A file of JSON with one change, and what was changed."""
    how = rng.random()
    if how < 0.04:
        return data[: rng.randrange(len(data))], "cut"
    if how < 0.06:
        return b"[" * 5000 + b"]" * 5000, "nested brackets"
    if how < 0.1:
        return json.dumps(rng.choice(VALUES)).encode(), "another value"
    tree, what = change_json(json.loads(data), rng)
    return json.dumps(tree).encode(), what


def change_safetensors(
    data: bytes, rng: random.Random, description: str | None = None
) -> tuple[bytes, str]:
    """A safetensors file with one change, and what was changed.

    Args:
        description: key of JSON in its metadata, whose fields are changed too.
    """
    size = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + size], data[8 + size :]
    how = rng.choice(HOW + 4 * ["description"] if description else HOW)
    tree = json.loads(header)
    if description and how == "description":
        fields, what = change_json(json.loads(tree["__metadata__"][description]), rng)
        tree["__metadata__"][description] = json.dumps(fields)
        return joined(tree, body), f"description: {what}"
    names = [name for name in tree if name != "__metadata__"]
    if how == "bits" and body:
        name = rng.choice(names)
        first, last = tree[name]["data_offsets"]
        if first == last:
            return data, "nothing"
        changed = bytearray(body)
        place = rng.randrange(first, last)
        if rng.random() < 0.7:
            changed[place] ^= 1 << rng.randrange(8)
        else:
            count = rng.randint(1, min(16, last - place))
            changed[place : place + count] = rng.randbytes(count)
        if bytes(changed) == body:
            return data, "nothing"
        return data[: 8 + size] + bytes(changed), f"data of {name}"
    if how == "swap" and len(names) > 1:
        same = {}
        for name in names:
            same.setdefault((tree[name]["dtype"], tuple(tree[name]["shape"])), []).append(name)
        groups = [group for group in same.values() if len(group) > 1]
        one, other = rng.sample(rng.choice(groups), 2) if groups else rng.sample(names, 2)
        tree[one], tree[other] = tree[other], tree[one]
        return joined(tree, body), f"names of {one} and {other} swapped"
    if how == "rename" and names:
        name = rng.choice(names)
        new = (
            name + rng.choice(["x", "_2", ".weight"])
            if rng.random() < 0.5
            else name[: rng.randrange(len(name))]
        )
        tree[new] = tree.pop(name)
        return joined(tree, body), f"{name} renamed to {new}"
    if how == "cut":
        return data[: rng.randrange(len(data))], "cut"
    if how == "size":
        return struct.pack(
            "<Q", rng.choice([0, 1, size - 1, size + 1, len(data), 1 << 40, (1 << 64) - 1])
        ) + data[8:], "size of the header"
    if how == "raw":
        changed = bytearray(data)
        changed[8 + rng.randrange(size)] = rng.randrange(256)
        return bytes(changed), "a byte of the header"
    tree, what = change_json(tree, rng)
    return joined(tree, body), f"header: {what}"


def joined(header: Any, body: bytes) -> bytes:
    """A safetensors file of a header and its data."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body
