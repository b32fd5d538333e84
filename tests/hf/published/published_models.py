"""Tiny checkpoints as other projects publish them, written from the description of their formats.

Nothing here knows hf_vq: packing and decoding are this file's own, so that a reader that misreads a
layout is found.
"""

import json
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from tiny import CONFIGS
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

MIXTRAL = dict(
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=64,
    num_local_experts=3,
    num_experts_per_tok=2,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    tie_word_embeddings=False,
)


def _wide() -> LlamaConfig:
    """Rows that hold groups of 128."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return LlamaConfig(**{**CONFIGS["llama"]().to_dict(), **sizes})


def published_names(name: str) -> tuple[object, dict[str, torch.Tensor]]:
    """Config and tensors of a random model, under the names that its published checkpoints use."""
    known = {**CONFIGS, "mixtral": lambda: MixtralConfig(**MIXTRAL), "wide": _wide}
    config = known[name]()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if name == "mixtral":
        for layer in range(config.num_hidden_layers):
            old, new = f"model.layers.{layer}.mlp", f"model.layers.{layer}.block_sparse_moe"
            tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")
            gate_up = tensors.pop(f"{old}.experts.gate_up_proj")
            down = tensors.pop(f"{old}.experts.down_proj")
            for expert in range(config.num_local_experts):
                gate, up = gate_up[expert].chunk(2)
                for part, weight in (("w1", gate), ("w3", up), ("w2", down[expert])):
                    tensors[f"{new}.experts.{expert}.{part}.weight"] = weight.clone()
    return config, tensors


def linear_names(tensors: dict[str, torch.Tensor], head: bool = False) -> list[str]:
    """Layers that published checkpoints code: projections, without embedding, router and norms."""
    return [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.ndim == 2
        and not name.endswith(("embed_tokens.weight", ".gate.weight"))
        and (head or not name.startswith("lm_head"))
    ]  # fmt: skip


def aqlm_layer(
    out: int, size: int, *, books: int, bits: int, group: int, rows: int = 1, dtype=torch.float16
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of one AQLM layer, and its weight in float32."""
    unsigned = numpy.random.randint(0, 1 << bits, (out // rows, size // group, books))
    codebooks = (torch.randn(books, 1 << bits, rows, group) / size**0.5).to(dtype)
    scales = (torch.rand(out // rows, 1, 1, 1) + 0.5).to(dtype)
    weight = numpy.zeros((out, size), numpy.float32)
    table, factor = codebooks.float().numpy(), scales.float().numpy().reshape(-1)
    for i in range(out // rows):
        for j in range(size // group):
            entry = table[0, unsigned[i, j, 0]]
            for k in range(1, books):
                entry = entry + table[k, unsigned[i, j, k]]
            weight[i * rows : (i + 1) * rows, j * group : (j + 1) * group] = entry * factor[i]
    signed = numpy.where(unsigned >= 1 << (bits - 1), unsigned - (1 << bits), unsigned)
    codes = torch.from_numpy(signed.astype(numpy.int8 if bits <= 8 else numpy.int16))
    tensors = {"codes": codes, "codebooks": codebooks, "scales": scales}
    return tensors, torch.from_numpy(weight)


def save_published(
    folder: Path, config, tensors: dict[str, torch.Tensor], quantization: dict, shards: int = 1
) -> Path:
    """Write a checkpoint: config.json, and its tensors spread over `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {**config.to_dict(), "architectures": [type_of(config)], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**found, "quantization_config": quantization}))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    index = {}
    for shard in range(shards):  # the tensors of a layer lie in different files
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder


def type_of(config) -> str:
    """Name of the class that a config belongs to."""
    return type(AutoModelForCausalLM.from_config(config)).__name__


def make_aqlm(
    folder: Path,
    name: str = "llama",
    *,
    books: int = 1,
    bits: int = 8,
    group: int = 8,
    rows: int = 1,
    head: bool = False,
    dtype=torch.float16,
    shards: int = 1,
    skips: list[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Write an AQLM checkpoint of a tiny model; its weights, decoded, by published name."""
    config, tensors = published_names(name)
    dense = dict(tensors)
    for layer in linear_names(tensors, head):
        out, size = tensors.pop(f"{layer}.weight").shape
        coded, weight = aqlm_layer(
            out, size, books=books, bits=bits, group=group, rows=rows, dtype=dtype
        )
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in coded.items()}
        dense[f"{layer}.weight"] = weight
    # As AQLM's converter writes it: names of parameters, norms and all.
    skips = skips or [key for key in tensors if key.endswith(".weight")]
    quantization = {
        "quant_method": "aqlm",
        "nbits_per_codebook": bits,
        "num_codebooks": books,
        "in_group_size": group,
        "out_group_size": rows,
        "linear_weights_not_to_quantize": skips,
    }
    save_published(folder, config, tensors, quantization, shards)
    return dense


def dense_twin(folder: Path, name: str, dense: dict[str, torch.Tensor]) -> nn.Module:
    """The model of decoded weights, as Transformers loads it from a dense checkpoint."""
    config, _ = published_names(name)
    save_published(folder, config, dense, {})
    path = folder / "config.json"
    found = json.loads(path.read_text())
    del found["quantization_config"]
    path.write_text(json.dumps(found))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def pack_stream(main, rest, bits: tuple[int, int]) -> numpy.ndarray:
    """Codes [groups, vectors, columns] as int32 words, bit by bit; the residual's come second."""
    groups, vectors, columns = main.shape
    total = sum(bits)
    words = numpy.zeros((groups, vectors, -(-columns * total // 32)), numpy.uint32)
    for column in range(columns):
        code = main[..., column] | (rest[..., column] << bits[0] if bits[1] else 0)
        for bit in range(total):
            place = column * total + bit
            value = ((code >> bit) & 1).astype(numpy.uint32)
            words[..., place // 32] |= value << numpy.uint32(place % 32)
    return words.view(numpy.int32)


def vptq_layer(
    out: int,
    size: int,
    *,
    vector: int = 8,
    count: int = 256,
    residual: int = 0,
    groups: int = 1,
    outliers: int = 0,
    norm: bool = True,
    perm: bool = True,
    dtype=torch.float16,
) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict]:
    """Random tensors of one VPTQ layer, its weight in float32, and its part of config.json."""
    columns, vectors = (size - outliers) // groups, -(-out // vector)
    bits = int(count - 1).bit_length(), int(max(residual - 1, 0)).bit_length()
    main = numpy.random.randint(0, count, (groups, vectors, columns))
    rest = numpy.random.randint(0, max(residual, 1), main.shape)
    number = {"dtype": dtype}
    tensors = {
        "indices": torch.from_numpy(pack_stream(main, rest, bits)),
        "centroids.weight": torch.randn(groups, count * vector).mul(size**-0.5).to(**number),
    }
    if residual:
        table = torch.randn(groups, residual * vector).mul(size**-0.5 / 4).to(**number)
        tensors["res_centroids.weight"] = table
    stored = numpy.zeros((out, size), numpy.float32)
    for group in range(groups):
        book = tensors["centroids.weight"][group].float().numpy().reshape(count, vector)
        for i in range(vectors):
            rows = slice(i * vector, min((i + 1) * vector, out))
            for column in range(columns):
                entry = book[main[group, i, column]]
                if residual:
                    second = tensors["res_centroids.weight"][group].float().numpy()
                    entry = entry + second.reshape(residual, vector)[rest[group, i, column]]
                where = outliers + group * columns + column
                stored[rows, where] = entry[: rows.stop - rows.start]
    if outliers:
        ov, oc = 4, 300
        codes = numpy.random.randint(0, oc, (1, -(-out // ov), outliers))
        book = torch.randn(1, oc * ov).mul(size**-0.5 * 3).to(**number)
        tensors["outlier_indices"] = torch.from_numpy(codes.astype(numpy.uint16).view(numpy.int16))
        tensors["outlier_centroids.weight"] = book
        table = book[0].float().numpy().reshape(oc, ov)
        for i in range(codes.shape[1]):
            rows = slice(i * ov, min((i + 1) * ov, out))
            for column in range(outliers):
                stored[rows, column] = table[codes[0, i, column]][: rows.stop - rows.start]
    order = numpy.random.permutation(size) if perm else numpy.arange(size)
    weight = numpy.zeros_like(stored)
    for column, true in enumerate(order):
        weight[:, true] = stored[:, column]
    if perm:
        tensors["perm"] = torch.from_numpy(order.astype(numpy.uint16).view(numpy.int16))
    if norm:
        tensors["weight_scale"] = torch.rand(size).add(0.5).to(**number)
        tensors["weight_bias"] = torch.randn(size).mul(0.01).to(**number)
        weight = weight * tensors["weight_scale"].float().numpy()
        weight = weight + tensors["weight_bias"].float().numpy()
    about = {
        "vector_lens": [4 if outliers else -1, vector],
        "num_centroids": [300 if outliers else -1, count],
        "num_res_centroids": [-1, residual or -1],
        "group_num": groups,
        "group_size": columns,
        "outlier_size": outliers,
        "indices_as_float": False,
        "enable_norm": norm,
        "enable_perm": perm,
        "is_indice_packed": True,
    }
    return tensors, torch.from_numpy(weight), about


def make_vptq(
    folder: Path, name: str = "llama", *, shared: bool = False, shards: int = 1, **options
) -> dict[str, torch.Tensor]:
    """Write a VPTQ checkpoint of a tiny model; its weights, decoded, by published name.

    Args:
        shared: what layers are is said once for all layers of a kind.
    """
    config, tensors = published_names(name)
    dense, layers = dict(tensors), {}
    for layer in linear_names(tensors):
        out, size = tensors.pop(f"{layer}.weight").shape
        coded, dense[f"{layer}.weight"], about = vptq_layer(out, size, **options)
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in coded.items()}
        layers[layer.rpartition(".")[2] if shared else layer] = about
    where = "shared_layer_config" if shared else "config_for_layers"
    save_published(folder, config, tensors, {"quant_method": "vptq", where: layers}, shards)
    return dense


def qoq_layer(
    out: int, size: int, *, grouped: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of one QoQ layer in QServe's order, and its weight in float32."""
    codes = numpy.random.randint(0, 16, (out, size))
    n, k = numpy.meshgrid(numpy.arange(out), numpy.arange(size), indexing="ij")
    # A tile of 32 x 32 is 512 bytes: eight rows of lanes, four columns of lanes, 16 bytes each.
    byte = (n // 32 * (size // 32) + k // 32) * 512 + n % 8 * 64 + k % 16 // 4 * 16
    byte += k % 32 // 16 * 8 + n % 16 // 8 * 4 + k % 4
    packed = numpy.zeros(out * size // 2, numpy.uint8)
    numpy.bitwise_or.at(packed, byte, (codes << 4 * (n % 32 // 16)).astype(numpy.uint8))
    scale = (torch.rand(out) + 0.5).mul(size**-0.5 / (60 if grouped else 8)).half()
    found = {
        "qweight": torch.from_numpy(packed.view(numpy.int8).reshape(out, size // 2)),
        "s1_scales": scale,
    }
    if not grouped:
        zero = (scale * torch.randint(5, 11, (out,))).half()
        weight = torch.from_numpy(codes).float() * scale[:, None] - zero.float()[:, None]
        return {**found, "s1_szeros": zero}, weight
    step = numpy.random.randint(1, 9, (out, size // 128))
    zero = numpy.random.randint(0, 8 * step)
    levels = codes * step[n, k // 128] - zero[n, k // 128]
    assert levels.min() >= -127 and levels.max() <= 127
    order = numpy.array([32 * (i // 32) + i % 32 // 4 + i % 4 * 8 for i in range(out)])
    assert list(order[:6]) == [0, 8, 16, 24, 1, 9]
    found["s2_scales"] = torch.from_numpy(step.T[:, order].astype(numpy.int8, order="C"))
    found["s2_zeros"] = torch.from_numpy((-zero.T[:, order]).astype(numpy.int8, order="C"))
    return found, torch.from_numpy(levels).float() * scale.float()[:, None]


def make_qoq(
    folder: Path, name: str = "llama", *, grouped: bool, pickled: bool = False
) -> dict[str, torch.Tensor]:
    """Write a QoQ checkpoint of a tiny model; its weights, decoded, by name.

    Args:
        pickled: as QServe's converter writes it: no safetensors, nothing in config.json.
    """
    config, tensors = published_names(name)
    dense = dict(tensors)
    for layer in linear_names(tensors):
        out, size = tensors.pop(f"{layer}.weight").shape
        coded, dense[f"{layer}.weight"] = qoq_layer(out, size, grouped=grouped)
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in coded.items()}
    about = {"quant_method": "qoq", "wbits": 4, "group_size": 128 if grouped else -1}
    save_published(folder, config, tensors, about)
    if pickled:
        tensors["model.layers.0.self_attn.kv_scale_quant_orig"] = torch.ones(2)
        torch.save(tensors, folder / "quant_model.pt")
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        path = folder / "config.json"
        found = json.loads(path.read_text())
        del found["quantization_config"]
        path.write_text(json.dumps(found))
    return dense


_THREE = [0, 3, 6, 9, 12, 1, 4, 7, 10, 13, 2, 5, 8, 11, 14, 15]


def pack_flute(codes: numpy.ndarray, bits: int, tile: int) -> numpy.ndarray:
    """Codes [out, in] as FLUTE's int16 words, word by word and bit by bit."""
    out, size = codes.shape
    places = 16 if bits == 3 else 16 // bits
    words = numpy.zeros((out * bits // 16, size), numpy.uint32)
    for block in range(out // (places * tile)):
        for lane in range(tile):
            rows = [block * places * tile + place * tile + lane for place in range(places)]
            for pair in range(0, size, 2):
                stream = []
                for place in range(places):
                    row = rows[_THREE[place]] if bits == 3 else rows[place]
                    for column in (pair + 1, pair):
                        stream += [codes[row, column] >> bit & 1 for bit in range(bits)]
                if bits != 3:  # the first half of the stream is the word of the first column
                    place = block * tile + lane
                    for half in range(2):
                        part = stream[16 * half : 16 * half + 16]
                        words[place, pair + half] = sum(b << i for i, b in enumerate(part))
                    continue
                first = out // 16
                at = [block * tile + lane]
                at += [first + (2 * block + word) * tile + lane for word in range(2)]
                for word in range(3):
                    low, high = stream[30 * word : 30 * word + 16], stream[30 * word + 16 :][:14]
                    high += stream[90 + 2 * word : 92 + 2 * word]
                    words[at[word], pair] = sum(b << i for i, b in enumerate(low))
                    words[at[word], pair + 1] = sum(b << i for i, b in enumerate(high))
    return words.astype(numpy.uint16).view(numpy.int16)


def higgs_layer(
    out: int, size: int, *, bits: int, group: int, hadamard: int, tile: int, dtype=torch.float16
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of one HIGGS layer (p = 2), and its weight in float64."""
    codes = numpy.random.randint(0, 1 << bits, (out, size))
    grid = torch.randn(1 << bits, 1 << bits, 2).to(dtype)
    scales = ((torch.rand(out, size // group) + 0.5) * size**-0.5).to(dtype)
    tensors = {
        "weight": torch.from_numpy(pack_flute(codes, bits, tile)),
        "scales": scales,
        "tables": torch.arange(1 << bits).to(dtype),
        "tables2": grid.view(torch.float16) if dtype == torch.bfloat16 else grid,
    }
    pairs = grid.float().numpy()[codes[:, 0::2], codes[:, 1::2]].reshape(out, size)
    pairs = pairs * numpy.repeat(scales.float().numpy(), group, axis=1)
    matrix = numpy.ones((1, 1))
    while len(matrix) < hadamard:
        matrix = numpy.block([[matrix, matrix], [matrix, -matrix]])
    blocks = pairs.astype(numpy.float64).reshape(out, -1, hadamard) @ matrix / hadamard**0.5
    return tensors, torch.from_numpy(blocks.reshape(out, size))


def make_higgs(
    folder: Path, *, bits: int, template: int, tile: int, dtype=torch.float16
) -> dict[str, torch.Tensor]:
    """Write a HIGGS checkpoint of a small Llama; its weights, decoded, by name."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    config = LlamaConfig(**{**MIXTRAL, **sizes, **heads})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    dense, metadata = dict(tensors), {}
    for layer in linear_names(tensors):
        out, size = tensors[f"{layer}.weight"].shape
        coded, weight = higgs_layer(
            out, size, bits=bits, group=64, hadamard=128, tile=tile, dtype=dtype
        )
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in coded.items()}
        dense[f"{layer}.weight"] = weight
        metadata[layer] = {"template_id": template, "num_sms": 108, "num_bits": bits, "N": out}
    quantization = {
        "quant_method": "higgs", "bits": bits, "p": 2, "group_size": 64, "hadamard_size": 128,
        "modules_to_not_convert": ["lm_head"], "tune_metadata": metadata,
    }  # fmt: skip
    save_published(folder, config, tensors, quantization)
    return dense
