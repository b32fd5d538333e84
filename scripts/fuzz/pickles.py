"""Pickles in place of QServe's files: none of their code runs."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import torch
from campaign import Finding, Try, outcome_of_error

from hf_vq.interop.pickled import load_tensors


class Call:
    """Object that calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def prepare(folder: Path) -> Try:
    """Make pickles that would leave a mark, and good ones to damage."""
    mark = folder / "it-ran"
    storage = torch.zeros(2).untyped_storage()
    attacks = [
        Call(os.system, f"touch {mark}"), Call(os.mkdir, str(mark)),
        Call(eval, f"open({str(mark)!r}, 'w')"), Call(exec, f"open({str(mark)!r}, 'w')"),
        Call(builtins.open, str(mark), "w"), Call(Path.touch, mark),
        Call(torch.save, 1, str(mark)), Call(torch.load, str(mark)),
        Call(bytearray, 1 << 40), Call(torch.zeros, 1 << 45),
        Call(torch._utils._rebuild_tensor_v2, storage, 0, (1 << 30,), (1,), False, {}),
    ]  # fmt: skip
    tensors = {
        f"model.layers.0.{n}.qweight": torch.randint(0, 9, (8, 8)).to(torch.int8) for n in "abc"
    }
    good = []
    for legacy in (True, False):
        buffer = io.BytesIO()
        torch.save(tensors, buffer, _use_new_zipfile_serialization=not legacy)
        good.append(buffer.getvalue())

    def attack(rng: random.Random) -> bytes:
        chosen = rng.choice(attacks)
        found: Any = rng.choice([chosen, {"a": chosen}, [chosen] * 3, {**tensors, "z": chosen}])
        how, buffer = rng.randrange(3), io.BytesIO()
        if how == 0:
            return (
                pickle.dumps(found, protocol=rng.randint(0, 5))
                if found is chosen
                else pickle.dumps([chosen])
            )
        torch.save(found, buffer, _use_new_zipfile_serialization=how == 1)
        return buffer.getvalue()

    def damage(rng: random.Random) -> bytes:
        data = bytearray(rng.choice(good))
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])

    def attempt(rng: random.Random, number: int) -> str:
        hostile = rng.random() < 0.3
        path = folder / f"try-{os.getpid()}.pt"
        path.write_bytes(attack(rng) if hostile else damage(rng))
        try:
            load_tensors(str(path))
            outcome = "read"
        except Exception as error:
            outcome = outcome_of_error(error)
        if mark.exists():
            raise Finding("a pickle was run")
        if hostile and outcome == "read":
            raise Finding("a pickle that calls a function was read")
        return outcome

    return attempt
