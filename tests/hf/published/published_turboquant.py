"""Tiny folders as turboquant-model saves them. Nothing here knows hf_vq (`published_models`)."""

import json
from pathlib import Path

import numpy
import torch
from published_models import linear_names, published_names, type_of
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM


def turboquant_rotation(size: int, seed: int, hadamard: bool) -> numpy.ndarray:
    """Pi [size, size] in float64 of a seed: rows times its transpose are rotated."""
    generator = torch.Generator().manual_seed(seed)
    if not hadamard:
        q, r = numpy.linalg.qr(torch.randn(size, size, generator=generator).double().numpy())
        return q * numpy.sign(numpy.diag(r))
    signs = torch.randint(0, 2, (size,), generator=generator).numpy() * 2.0 - 1
    walsh = [[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    return numpy.array(walsh) / size**0.5 * signs


def turboquant_pass(
    weight: numpy.ndarray, bits: int, group: int, seed: int, hadamard: bool
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Nibbles, norms and codebook of a matrix in float64, and what they stand for."""
    out, size = weight.shape
    table = numpy.sort(numpy.random.randn(1 << bits)).astype(numpy.float32)
    codes = numpy.zeros((out, size), numpy.uint8)
    norms = numpy.zeros((out, size // group), numpy.float32)
    decoded = numpy.zeros((out, size))
    for number, first in enumerate(range(0, size, group)):
        columns = slice(first, first + group)
        turn = turboquant_rotation(group, seed + first, hadamard)
        norms[:, number] = numpy.linalg.norm(weight[:, columns], axis=1)
        unit = weight[:, columns] / norms[:, number : number + 1] @ turn.T * group**0.5
        codes[:, columns] = numpy.abs(unit[..., None] - table).argmin(-1)
        entries = table[codes[:, columns]].astype(numpy.float64) / group**0.5
        decoded[:, columns] = entries @ turn * norms[:, number : number + 1]
    packed = numpy.zeros((out, size // 2), numpy.uint8)
    for column in range(size):
        packed[:, column // 2] |= codes[:, column] << 4 * (column % 2)
    return packed, norms[:, 0] if size == group else norms, table, decoded


def make_turboquant(
    folder: Path,
    name: str = "llama",
    *,
    bits: int = 4,
    residual: int | None = None,
    group: int | None = 32,
    rotation: str = "qr",
    strategy: str = "different",
    half_norms: bool = False,
    embeddings: str = "none",
    head: bool = True,
) -> dict[str, torch.Tensor]:
    """Write a folder of `turboquant-model`; its weights, decoded, by name in the model."""
    config, tensors = published_names(name)
    dense, coded = dict(tensors), {}
    biases = {key for key in tensors if key.endswith(".bias")}
    names = linear_names(tensors)
    if head:  # a head that is tied is a layer of its own there
        names.append("lm_head")
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    for number, layer in enumerate(in_module_order(config, names)):
        weight = tensors.pop(f"{layer}.weight").double().numpy()
        apart = 10007 * number if strategy == "per_layer" else 0
        safe = layer.replace(".", "_")
        total = 0.0
        for prefix, width, seed in (("", bits, 42), ("pass2_", residual, 1042)):
            if width is None:
                continue
            seed = (42 if strategy == "shared" else seed) + apart
            state = numpy.random.get_state()
            numpy.random.seed(width + len(prefix))  # one codebook for all layers
            packed, norms, table, found = turboquant_pass(
                weight - total, width, group or weight.shape[1], seed, rotation == "hadamard"
            )
            numpy.random.set_state(state)
            if half_norms and not prefix:
                ratio = norms.astype(numpy.float16).astype(numpy.float64) / norms
                found = found * numpy.repeat(ratio, group, axis=1)
                norms = norms.astype(numpy.float16)
            coded[f"{safe}.{prefix}indices"] = torch.from_numpy(packed)
            coded[f"{safe}.{prefix}norms"] = torch.from_numpy(norms)
            if prefix:
                coded[f"{safe}.{prefix}codebook"] = torch.from_numpy(table)
            else:
                coded["codebook"] = torch.from_numpy(table)
            total = total + found
        dense[f"{layer}.weight"] = torch.from_numpy(total)
        if f"{layer}.bias" in biases:
            coded[f"{safe}.bias"] = tensors.pop(f"{layer}.bias").float()
    if embeddings != "none":
        table = tensors.pop("model.embed_tokens.weight")
        parts, dense["model.embed_tokens.weight"] = coded_embedding(table.numpy(), embeddings)
        coded |= {f"model_embed_tokens.{key}": part for key, part in parts.items()}
    tensors["model.rotary_emb.inv_freq"] = torch.rand(8)
    folder.mkdir(parents=True, exist_ok=True)
    found = {**config.to_dict(), "architectures": [type_of(config)], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(found))
    about = {
        "bit_width": bits, "group_size": group, "seed": 42, "skip_embeddings": False,
        "skip_lm_head": not head, "residual_bit_width": residual, "residual_seed": 1042,
        "rotation": rotation, "rotation_strategy": strategy,
        "norm_codec": "fp16" if half_norms else "fp32", "entropy_coding": False,
        "cpu_offload_pass2": False, "embedding_quant": embeddings, "embedding_group_size": 32,
    }  # fmt: skip
    (folder / "turboquant_config.json").write_text(json.dumps(about))
    save_file(coded, folder / "model.safetensors")
    save_file(tensors, folder / "non_quantized.safetensors")
    return dense


def in_module_order(config, names: list[str]) -> list[str]:
    """Layers in the order of the model's modules, which `turboquant-model` counts."""
    model = AutoModelForCausalLM.from_config(config)
    order = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert set(names) <= set(order)
    return [name for name in order if name in names]


def coded_embedding(
    table: numpy.ndarray, mode: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """An embedding of integers, and what `turboquant-model` computes of it: bfloat16."""
    rows, size = table.shape
    meta = torch.tensor([rows, size, 32, -1])
    parts = {"qe_mode": torch.tensor([ord(c) for c in mode]).byte(), "qe_meta": meta}
    if mode == "int8":
        scale = numpy.abs(table).max(1) / numpy.float32(127)
        codes = numpy.round(table / scale[:, None]).astype(numpy.int8)
        parts |= {"weight_int8": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scale)}
        return parts, torch.from_numpy(codes.astype(numpy.float32) * scale[:, None]).bfloat16()
    groups = table.reshape(rows, -1, 32)
    least = numpy.minimum(groups.min(2), 0)
    step = (groups.max(2) - least) / 15
    codes = numpy.round((groups - least[..., None]) / step[..., None]).clip(0, 15).astype("uint8")
    step, least = step.astype(numpy.float16), (-least).astype(numpy.float16)
    exact = codes.astype(numpy.float16) * step[..., None] - least[..., None]
    flat = codes.reshape(rows, size)
    parts["weight_packed"] = torch.from_numpy(flat[:, 0::2] | flat[:, 1::2] << 4)
    parts |= {"weight_scale": torch.from_numpy(step), "weight_min": torch.from_numpy(least)}
    return parts, torch.from_numpy(exact.reshape(rows, size)).bfloat16()
