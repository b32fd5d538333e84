"""Mutated checkpoints of other projects through `convert`, and the result loaded again.

Their formats have no digests: a change that keeps the format valid is another model. It must be
refused, or be converted to a checkpoint that loads.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import models
import torch
from campaign import Finding, Try, outcome_of_error
from mutations import change_json_file, change_safetensors

from hf_vq.interop.convert import convert
from tests.fixtures import published_models as make
from tests.fixtures.models.published_turboquant import make_turboquant

KINDS: dict[str, Any] = {
    "aqlm": lambda to: make.make_aqlm(to, shards=3),
    "vptq": lambda to: make.make_vptq(to),
    "vptq, residuals": lambda to: make.make_vptq(to, residual=16),
    "qoq": lambda to: make.make_qoq(to, "wide", grouped=True),
    "higgs": lambda to: make.make_higgs(to, bits=2, template=11, tile=32),
    "turboquant": lambda to: make_turboquant(to, residual=4, head=False),
}


def prepare(folder: Path) -> Try:
    """Make one checkpoint of each kind, and convert it."""
    known = {}
    for number, (kind, made) in enumerate(KINDS.items()):
        source = folder / str(number)
        made(source)
        convert(str(source), str(folder / f"{number}-out"))
        expected = models.logits(models.load(folder / f"{number}-out"))
        known[kind] = models.files_of(source), expected

    def attempt(rng: random.Random, number: int) -> str:
        kind = models.choose(rng, known)
        files, expected = known[kind]
        source, out = (folder / f"{what}-{os.getpid()}" for what in ("in", "out"))
        for path in (source, out, Path(f"{out}.unfinished")):
            shutil.rmtree(path, ignore_errors=True)
        source.mkdir()
        name = rng.choice([name for name in sorted(files) if name.endswith((".json", "tensors"))])
        change = change_json_file if name.endswith(".json") else change_safetensors
        data, what = change(files[name], rng)
        for file, content in files.items():
            (source / file).write_bytes(data if file == name else content)
        try:
            convert(str(source), str(out))
        except Exception as error:
            return outcome_of_error(error, f"{kind}, {name}, {what}")
        try:
            model = models.load(out)
        except Exception as error:
            text = f"{kind}, {name}, {what}: {type(error).__name__}: {error}"
            raise Finding("converted, but does not load", text) from error
        try:
            found = models.logits(model)
        except Exception as error:  # a config that Transformers' own code cannot run
            return outcome_of_error(error, f"{kind}, {name}, {what}")
        same = found.shape == expected.shape and torch.equal(found, expected)
        return "same" if same else "another model"

    return attempt
