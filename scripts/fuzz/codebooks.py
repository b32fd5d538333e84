"""Mutated kv_codebooks.safetensors: an error of hf_vq, or exactly the same codebooks."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
from caches import dense_model, learned
from campaign import Finding, Try, outcome_of_error
from mutations import change_safetensors

from hf_vq import VQCache
from hf_vq.cache.codebooks import KVCodebooks


def prepare(folder: Path) -> Try:
    """Learn and save some."""
    model = dense_model()
    known = []
    for scheme in ("nomad-4", "cq-2", "learned-2", "u4"):
        books = learned(model, scheme)
        books.save(folder / scheme)
        known.append(((folder / scheme).read_bytes(), books))

    def attempt(rng: random.Random, number: int) -> str:
        data, books = rng.choice(known)
        changed, what = change_safetensors(data, rng, description="hf_vq_kv")
        path = folder / f"try-{os.getpid()}"
        path.write_bytes(changed)
        try:
            found = KVCodebooks.load(path)
            VQCache(model.config, found.scheme, codebooks=found)
        except Exception as error:
            return outcome_of_error(error)
        old, new = books.tensors(), found.tensors()
        same = found.scheme == books.scheme and old.keys() == new.keys()
        if same and all(torch.equal(new[name], old[name]) for name in old):
            return "same"
        kind = "data" if what.startswith("data") else "structure"
        raise Finding(f"silent change, {kind}", f"{books}, {what}")

    return attempt
