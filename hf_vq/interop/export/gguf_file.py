"""GGUF files of llama.cpp, through its package `gguf`: metadata, tensors one by one, tokenizer.

    model.layers.0.self_attn.q_proj.weight --permute rows, gguf.quants--> blk.0.attn_q.weight
                            weight in the model <--dequantize, rows back--'

What each architecture needs is taken from llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import VQConfigError, VQFormatError
from ...formats.hidden import hidden_folder
from ...progress import bar
from . import TYPES
from .gguf_tokenizer import add_tokenizer

_SMALL = ("q5_1", "q5_0", "q4_1", "q4_0")  # whose embeddings and heads are q8_0
_CURE = "Use --to dense, and llama.cpp's convert_hf_to_gguf.py on OUT."


@dataclass(frozen=True)
class Architecture:
    """The form in which llama.cpp expects one class of Transformers.

    Args:
        name: in GGUF.
        neighbours: RoPE turns channels 2i and 2i + 1, where Transformers turns i and i + d / 2.
        frequencies: a tensor may change the frequencies of RoPE.
    """

    name: str
    neighbours: bool = False
    frequencies: bool = False


_LLAMA = Architecture("llama", neighbours=True, frequencies=True)
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3"),
}


@dataclass(frozen=True)
class _Stored:
    """A tensor of the file."""

    name: str
    source: Tensor  # of the model, which shares its memory
    kind: Any  # gguf.GGMLQuantizationType
    order: Tensor | None  # of the rows: stored row i is source row order[i]


def library() -> ModuleType:
    """The package `gguf`.

    Raises:
        VQConfigError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise VQConfigError(
            "GGUF files are written with llama.cpp's package gguf: pip install gguf."
        ) from None
    module: ModuleType = gguf
    return module


def architecture(model: Any) -> Architecture:
    """Find what llama.cpp expects of the model's class.

    Raises:
        VQConfigError: this class, or an option of its config, is not written here.
    """
    kind, config = type(model).__name__, model.config
    found = ARCHITECTURES.get(kind)
    if found is None:
        raise VQConfigError(f"--to gguf writes {', '.join(ARCHITECTURES)}, not {kind}. {_CURE}")
    rope = getattr(config, "rope_parameters", None) or {}
    types = ("default", "linear", "llama3") if found.frequencies else ("default",)
    refused = {
        "sliding windows": "sliding_attention" in (getattr(config, "layer_types", None) or ())
        or (kind == "MistralForCausalLM" and config.sliding_window is not None),
        f"hidden_act={config.hidden_act!r}": config.hidden_act != "silu",
        f"rope_type={rope.get('rope_type')!r}": rope.get("rope_type") not in types,
        "RoPE on a part of the channels": rope.get("partial_rotary_factor") not in (None, 1.0),
        "biases of attention": kind == "Qwen3ForCausalLM" and config.attention_bias,
        "heads that do not make up hidden_size": kind == "Qwen2ForCausalLM"
        and config.num_attention_heads * _head_dim(config) != config.hidden_size,
    }
    for what, given in refused.items():
        if given:
            raise VQConfigError(f"--to gguf does not write {kind} with {what}. {_CURE}")
    return found


@torch.no_grad()
def write_gguf(model: Any, tokenizer: Any, path: Path, kind: str = "q8_0") -> None:
    """Write a dense model and its tokenizer as a GGUF file.

    Matrices become `kind`; where rows do not fill blocks of it, f16. Embeddings and heads of a file
    below 8 bits are q8_0. Vectors are f32.

    Args:
        model: of a class in `ARCHITECTURES`. Its weights become those that the file holds, rounded
            to their dtype.
        tokenizer: of `AutoTokenizer`, or None.
        path: of the file, which is replaced in one step.
        kind: of `export.TYPES`.

    Raises:
        VQConfigError: llama.cpp would read another model or tokenizer.
        VQFormatError: a weight is not finite, or beyond fp16.
    """
    gguf = library()
    built = architecture(model)
    if tokenizer is None:
        raise VQConfigError("a GGUF file holds a tokenizer, and the model has none.")
    stored = list(_tensors(gguf, model, built, kind))
    with hidden_folder(path.parent, path.name) as work:
        with closing(gguf.GGUFWriter(work / "file", built.name)) as writer:
            _add_facts(gguf, writer, model, kind)
            add_tokenizer(gguf, writer, tokenizer, model.config, work)
            for each in stored:
                block, size = gguf.GGML_QUANT_SIZES[each.kind]
                count, shape = each.source.numel() // block * size, tuple(each.source.shape)
                writer.add_tensor_info(each.name, shape, np.dtype(np.float32), count, each.kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for each in bar(stored, "GGUF", True):
                _write(gguf, writer, each)
        os.replace(work / "file", path)


def _write(gguf: ModuleType, writer: Any, each: _Stored) -> None:
    """Encode one tensor, write it, and put what a reader decodes into the model."""
    values = each.source.detach().float().cpu()
    if each.order is not None:
        values = values[each.order]
    with np.errstate(over="ignore", invalid="ignore"):  # what they leave is found below
        data = gguf.quants.quantize(values.numpy(), each.kind)
        decoded = torch.from_numpy(gguf.quants.dequantize(data, each.kind).copy())
    if not bool(decoded.isfinite().all()):
        raise VQFormatError(f"{each.name} holds weights that are not finite, or beyond fp16.")
    writer.write_tensor_data(data)
    if each.order is not None:
        decoded = torch.empty_like(decoded).index_copy_(0, each.order, decoded)
    each.source.copy_(decoded)


def _add_facts(gguf: ModuleType, writer: Any, model: Any, kind: str) -> None:
    """Add the metadata that llama.cpp asks for besides the tokenizer."""
    config = model.config
    head_dim = _head_dim(config)
    writer.add_type("model")
    writer.add_name(Path(config._name_or_path or type(model).__name__).name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    name = f"ALL_{kind.upper()}" if kind == "f32" else f"MOSTLY_{kind.upper()}"
    writer.add_file_type(gguf.LlamaFileType[name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _tensors(gguf: ModuleType, model: Any, built: Architecture, kind: str) -> Iterator[_Stored]:
    config = model.config
    kinds = {name: gguf.GGMLQuantizationType[name.upper()] for name in TYPES}
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == built.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    orders = {
        "q_proj": _neighbours(config.num_attention_heads, _head_dim(config)),
        "k_proj": _neighbours(config.num_key_value_heads, _head_dim(config)),
    }
    for name, tensor in dict(model.named_parameters()).items():  # a tied head once
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise VQConfigError(f"llama.cpp's {built.name} has no tensor for {name}. {_CURE}")
        wanted = (
            "q8_0" if kind in _SMALL and new in ("token_embd.weight", "output.weight") else kind
        )
        if tensor.ndim < 2:
            wanted = "f32"
        elif tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kinds[wanted]][0]:
            wanted = "f16"
        order = orders.get(name.split(".")[-2]) if built.neighbours else None
        yield _Stored(new, tensor, kinds[wanted], order)
    if (factors := _frequency_factors(model, config)) is not None:
        yield _Stored("rope_freqs.weight", factors, kinds["f32"], None)


def _neighbours(heads: int, head_dim: int) -> Tensor:
    """Order of rows in which channels i and i + d / 2 of each head become neighbours."""
    rows = torch.arange(heads * head_dim).reshape(heads, 2, head_dim // 2)
    return rows.swapaxes(1, 2).flatten()


def _frequency_factors(model: Any, config: Any) -> Tensor | None:
    """Plain frequencies of RoPE over the model's, float32 [head_dim / 2]; None if all are 1."""
    channels = torch.arange(0, _head_dim(config), 2, dtype=torch.float32) / _head_dim(config)
    plain = 1.0 / (config.rope_parameters["rope_theta"] ** channels)
    factors = plain / model.get_decoder().rotary_emb.inv_freq.detach().float().cpu()
    if config.rope_parameters["rope_type"] == "default":
        return None
    return factors


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
