"""Mutated checkpoints, loaded whole: an error, or exactly the logits of the original."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import models
import torch
from campaign import Finding, Try, outcome_of_error
from mutations import change_json, change_safetensors

OTHER = {
    "attention_bias", "attention_dropout", "hidden_act", "initializer_range", "rms_norm_eps",
    "rope_parameters", "pretraining_tp", "dtype", "num_attention_heads", "num_key_value_heads",
    "head_dim", "norm_topk_prob", "num_experts_per_tok", "model_type", "architectures",
    "tie_word_embeddings", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types",
    "decoder_sparse_step", "mlp_only_layers", "output_router_logits", "max_position_embeddings",
    "attn_implementation", "mlp_bias", "rope_theta", "rope_scaling", "quantization_config",
    "output_attentions", "return_dict", "is_decoder", "use_cache", "is_encoder_decoder",
}  # fmt: skip
"""Fields of config.json at the top that describe another model of the same tensors: Transformers'
own, which hf_vq does not judge. Without `quantization_config` it is no checkpoint of ours."""


def prepare(folder: Path) -> Try:
    """Save one checkpoint of each kind."""
    known: dict[str, tuple[dict[str, bytes], torch.Tensor]] = {}
    for kind, saved in models.checkpoints(folder.parent / "models").items():
        files = {n: data for n, data in models.files_of(saved).items() if n != "README.md"}
        known[kind] = files, models.logits(models.load(saved))

    def attempt(rng: random.Random, number: int) -> str:
        kind = models.choose(rng, known)
        files, expected = known[kind]
        where = rng.choice(["config", "config", "tensors", "tensors", "tensors"])
        name, allowed = "config.json", False
        if where == "config":
            ours = rng.random() < 0.85
            tree = json.loads(files[name])
            tree, what = change_json(tree, rng, ("quantization_config",) if ours else ())
            data = json.dumps(tree).encode()
            field = what.split(":")[0].split(".")
            allowed = field[0] in OTHER and len(field) <= (1 if ours else 9)
            allowed |= not ours and field[0] in OTHER
        else:
            name = "model.safetensors"
            data, what = change_safetensors(files[name], rng)
            if what.startswith("data"):
                coded = "vq_" in what or "proj" in what
                where = f"data of {what.rpartition('.')[2] if coded else 'a dense tensor'}"
        target = folder / f"try-{os.getpid()}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for file, content in files.items():
            (target / file).write_bytes(data if file == name else content)
        return judged(target, expected, f"{kind}, {what}", where, allowed)

    return attempt


def judged(target: Path, expected: Any, what: str, where: str, allowed: bool) -> str:
    """The outcome of loading a mutated checkpoint."""
    try:
        model = models.load(target)
        found = models.logits(model)
    except Exception as error:
        try:
            return outcome_of_error(error)
        except Finding as finding:
            raise Finding(finding.kind, f"{what}: {finding}") from error
    if torch.equal(found, expected):
        return "same"
    if allowed:
        return "another model"
    raise Finding(f"silent change, {where}", what)
