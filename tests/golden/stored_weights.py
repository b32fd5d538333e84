"""What `save_pretrained` writes of a model of every scheme, found without a number that a processor
could round in its own way.

A tiny model is quantized, which says which tensors the file has. Their numbers are then replaced by
seeded ones, in a file as hf_vq wrote it before there were digests; it is loaded and saved. All that
is recorded is of that second file, so that no fit decides about it.
"""

import hashlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import hf_vq
from hf_vq import VQConfig
from hf_vq.formats import QOQ_SCHEMES, WEIGHT_SCHEMES
from hf_vq.hf.checkpoint import by_layer
from tests.fixtures.random_weights import scaled_models
from tests.golden.recorded import OLDER
from tests.golden.seeded import (
    seeded_bytes,
    seeded_floats,
    seeded_integers,
    seeded_scales,
    short_text,
    tensor_row,
)

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,  # 3 x 32: a smaller scale group and rotation block
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama-tied": lambda: LlamaConfig(**{**_SIZES, "tie_word_embeddings": True}),
    "moe": lambda: Qwen3MoeConfig(
        **_SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32
    ),
}
_SKIPS = ["lm_head", "v_proj", "o_proj", "gate_proj", "up_proj"]
_EXPERTS = ["lm_head", "self_attn", "mlp.gate"]
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vq-4, seed 7, search norm": ("llama", {"scheme": "vq-4", "seed": 7, "search": "norm"}),
    "vq-4, vq-2 in a layer": ("llama", {"scheme": "vq-4", "layers": {"q_proj": "vq-2"}}),
    "vq-4, qoq-w4a8 in a layer": ("llama", {"scheme": "vq-4", "layers": {"q_proj": "qoq-w4a8"}}),
    "vq-4, embeddings int8": ("llama-tied", {"scheme": "vq-4", "embeddings": "int8"}),
    "vq-4, embeddings int4": ("llama-tied", {"scheme": "vq-4", "embeddings": "int4"}),
    "vq-4, experts": ("moe", {"scheme": "vq-4", "modules_to_not_convert": _EXPERTS}),
    "aqlm-2, experts": ("moe", {"scheme": "aqlm-2", "modules_to_not_convert": _EXPERTS}),
    **{
        f"turboquant {stages} 4+4": (
            "llama",
            {"scheme": f"vq1x4r2-universal-g128-random_hadamard128-{stages}"},
        )
        for stages in ("rerotated", "shared")
    },
    **{
        f"{name}-scaled": ("llama", {"scheme": f"{name}-scaled"})
        for name in ("vq-4", "quip-sharp-2", "turboquant-4+2")
    },
    "vq-4-scaled, experts": ("moe", {"scheme": "vq-4-scaled", "modules_to_not_convert": _EXPERTS}),
    "vq-4, vq-2-scaled in a layer": (
        "llama",
        {"scheme": "vq-4", "layers": {"q_proj": "vq-2-scaled"}},
    ),
    "turboquant rerotated 4+4, scaled": (
        "llama",
        {"scheme": "vq1x4r2-universal-g128-scaled_hadamard128-rerotated"},
    ),
    "hadamard of the whole row": ("llama", {"scheme": "vq2x8r1-universal-g0-hadamard0"}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("llama", {"scheme": name}) for name in (*WEIGHT_SCHEMES, *QOQ_SCHEMES)},
    **_OTHERS,
}
"""A model and arguments of `VQConfig`, by name: the whole catalogue, and what else a file may hold.

QR rotations are left out: their numbers come from a float QR decomposition.
"""

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "vptq": (
        {
            "method": "vptq", "vector": 8, "centroids": 256, "residual": 16, "groups": 1,
            "group_size": 64, "outliers": 0, "outlier_vector": 0, "outlier_centroids": 0,
            "norm": True, "perm": True, "dtype": "float16",
        },
        {
            "weight": seeded_bytes("vptq", 1, 8, 24, 4).view(torch.int32).squeeze(-1),
            "vq_centroids": seeded_floats("centroids", 1, 2048, dtype=torch.float16),
            "vq_res_centroids": seeded_floats("residual", 1, 128, dtype=torch.float16),
            "vq_weight_scale": seeded_scales("scale", 64),
            "vq_weight_bias": seeded_floats("bias", 64, dtype=torch.float16),
            "vq_perm": (torch.arange(64) * 13 % 64).to(torch.int16),
        },
    ),
}  # fmt: skip
"""Layers as other projects store them, which no scheme can: what config.json says of `q_proj`, and
its tensors."""


def file_facts(folder: Path) -> dict[str, Any]:
    """Of a saved model: names of the files; `quantization_config`; metadata and tensors of
    model.safetensors, by layer, but for dense tensors, of which there is a number."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = dict(file.metadata() or {})
        rows = {name: tensor_row(file.get_tensor(name)) for name in sorted(file.keys())}
    coded = {name: row for name, row in rows.items() if "vq_" in name or "float" not in row}
    layers: dict[str, dict[str, str]] = {}
    for name, row in coded.items():
        layer, _, attribute = name.rpartition(".")
        layers.setdefault(layer, {})[attribute] = row
    return {
        "files": " ".join(sorted(path.name for path in folder.iterdir())),
        "config": config_lines(folder),
        "metadata": {key: short_text(text) for key, text in sorted(metadata.items())},
        "tensors": layers,
        "dense tensors": len(rows) - len(coded),
    }


def config_lines(folder: Path) -> dict[str, Any]:
    """`quantization_config` as config.json holds it: its SHA-256, and its lines that the block of
    `USUAL` lacks, without indentation. The version of hf_vq is masked, and nothing else.

    Raises:
        AssertionError: the file is not in the form that Transformers gives it.
    """
    text = (folder / "config.json").read_text(encoding="utf-8")
    usual = json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert text == usual, f"{folder}/config.json is no longer JSON with sorted keys, indented by 2"
    block = re.search(r'^  "quantization_config": \{$.*?^  \}', text, re.M | re.S)
    assert block is not None, f"{folder}/config.json has no quantization_config"
    masked = block[0].replace(f'"hf_vq": "{hf_vq.__version__}"', '"hf_vq": "VERSION"')
    lines = [line.strip() for line in masked.split("\n")]
    found = hashlib.sha256(masked.encode()).hexdigest()[:16]
    return {"sha256": found, "lines": [line for line in lines if line not in _USUAL]}


# Lines that nearly all have: they are in the SHA-256, and need not be in the data again.
_USUAL_LINES = """
"quantization_config": {
"calibration": null,
"modules_to_not_convert": [
"gate_proj",
"lm_head",
"model.layers.0.mlp.gate_proj",
"model.layers.0.mlp.up_proj",
"model.layers.0.self_attn.o_proj",
"model.layers.0.self_attn.v_proj",
"o_proj",
"up_proj",
"v_proj"
],
"provenance": {
"base_model": null,
"codebooks": {
},
"hf_vq": "VERSION"
}
"quant_method": "vq",
"scheme": {
"codebook_bits": 16,
"lattice": null,
"rotation_block": 128,
"tile": [
256,
256
]
"search": "search",
"seed": 0
"""
_USUAL = frozenset(_USUAL_LINES.splitlines())


def save_dense(model: str, folder: Path) -> None:
    """Save the dense model that is quantized, of seeded numbers in float32."""
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(MODELS[model](), dtype=torch.float32)
    shapes = {name: tensor.shape for name, tensor in found.state_dict().items()}
    found = found.to_empty(device="cpu")
    seeded = {name: seeded_floats(name, *shape) / 16 for name, shape in shapes.items()}
    found.load_state_dict(seeded)
    found.tie_weights()
    found.save_pretrained(folder)


def saved_case(name: str, dense: Path, work: Path) -> Path:
    """The folder of a case's model, saved with seeded numbers (see the module).

    Args:
        dense: folder of `save_dense` of the case's model.
    """
    options = {"modules_to_not_convert": _SKIPS, **CASES[name][1]}
    with scaled_models():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*loses much quality")
            asked = VQConfig(activations=None, **options)
        model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=asked)
    model.save_pretrained(work / "fitted")
    config = json.loads((work / "fitted" / "config.json").read_text(encoding="utf-8"))
    provenance = config["quantization_config"]["provenance"]
    for digest in ("digests", by_layer.DIGEST):
        provenance.pop(digest)
    errors = json.loads((work / "fitted" / by_layer.FILE).read_text())["relative_error"]
    provenance["relative_error"] = {layer: i / 1000 for i, layer in enumerate(sorted(errors), 1)}
    tensors = load_file(work / "fitted" / "model.safetensors")
    for key, tensor in tensors.items():
        if key.startswith("vq_"):
            continue  # universal: no weight decides it
        tensors[key] = _seeded_like(key, tensor)
    return save_again(tensors, config, work)


def saved_layout(method: str, dense: Path, work: Path) -> Path:
    """The folder of a llama with one layer in another project's layout, loaded and saved."""
    layout, own = LAYOUTS[method]
    layer = "model.layers.0.self_attn.q_proj"
    tensors = load_file(dense / "model.safetensors")
    del tensors[f"{layer}.weight"]
    tensors |= {f"{layer}.{attribute}": tensor for attribute, tensor in own.items()}
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    about = VQConfig(layouts={layer: layout}, activations=None).to_dict()
    others = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    skips = ["lm_head", *(name for name in others if name != layer)]
    config["quantization_config"] = {**about, "modules_to_not_convert": skips}
    return save_again(tensors, config, work)


def save_again(tensors: dict[str, Tensor], config: dict[str, Any], work: Path) -> Path:
    """Write a checkpoint as hf_vq did before there were digests; load it, and save that."""
    old, new = work / "old", work / "new"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, old / "model.safetensors", {"format": "pt"})
    AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)
    return new


def saved_older(name: str, work: Path) -> Path:
    """The folder of a model that an earlier version wrote, loaded and saved."""
    AutoModelForCausalLM.from_pretrained(OLDER / name).save_pretrained(work / "new")
    return work / "new"


def _seeded_like(key: str, tensor: Tensor) -> Tensor:
    """Numbers in the place of `tensor`, such as its kind may hold."""
    attribute = key.rpartition(".")[2]
    shape = tensor.shape
    if attribute == "vq_step":
        return seeded_integers(key, 1, 8, *shape).to(tensor.dtype)
    if attribute == "vq_zero":  # of a group at most that of the least step
        return seeded_integers(key, 0, 7, *shape).to(tensor.dtype)
    if attribute.startswith("vq_scale") or "diagonal" in attribute:
        return seeded_scales(key, *shape).to(tensor.dtype)
    if tensor.dtype == torch.int8:
        return seeded_integers(key, -63, 63, *shape).to(torch.int8)
    if tensor.dtype == torch.uint8:
        return seeded_bytes(key, *shape)
    return seeded_floats(key, *shape, dtype=tensor.dtype)


def facts(name: str, dense: Path, work: Path) -> dict[str, Any]:
    """What is recorded of one of `ALL`; of older files not their tensors, which they hold.

    Args:
        dense: a folder where dense models are kept from one call to the next.
        work: an empty folder.
    """
    kind, _, rest = name.partition(": ")
    if kind == "older":
        found = file_facts(saved_older(rest, work))
        return {key: found[key] for key in ("files", "config", "metadata")}
    model = CASES[name][0] if name in CASES else "llama"
    if not (dense / model).exists():
        save_dense(model, dense / model)
    if kind == "layout":
        return file_facts(saved_layout(rest, dense / model, work))
    return file_facts(saved_case(name, dense / model, work))


OLDER_MODELS = sorted(path.name for path in OLDER.iterdir() if path.is_dir())
ALL = [
    *CASES,
    *(f"layout: {method}" for method in LAYOUTS),
    *(f"older: {name}" for name in OLDER_MODELS),
]
"""Names of all that data/weights.json has."""
