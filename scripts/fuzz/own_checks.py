"""Mutated checkpoints, read by hf_vq's own checks only: one of hf_vq's errors, or none."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import models
from campaign import Try, outcome_of_error
from mutations import change_json, change_safetensors

from hf_vq.hf import VQConfig
from hf_vq.hf.checkpoint.headers import Checkpoint


def prepare(folder: Path) -> Try:
    """Save one checkpoint of each kind."""
    found = models.checkpoints(folder.parent / "models")
    known = {kind: models.files_of(saved) for kind, saved in found.items()}

    def attempt(rng: random.Random, number: int) -> str:
        files = known[models.choose(rng, known)]
        path = folder / f"try-{os.getpid()}.safetensors"
        try:
            if rng.random() < 0.6:
                tree = json.loads(files["config.json"])["quantization_config"]
                config = VQConfig.from_dict(change_json(tree, rng)[0])
                config.to_dict()
                config.schemes()
            else:
                path.write_bytes(change_safetensors(files["model.safetensors"], rng)[0])
                checkpoint = Checkpoint([str(path)])
                for name in checkpoint.entries:
                    checkpoint.read(name)
        except Exception as error:
            return outcome_of_error(error)
        return "accepted"

    return attempt
