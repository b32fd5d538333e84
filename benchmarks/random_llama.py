"""Llamas with random weights, dense or as codes, and caches full of random tokens.

How fast a model generates depends on its shapes and not on its numbers, so nothing is trained,
downloaded or fitted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache

from hf_vq.formats.catalog import LinearScheme, linear_scheme
from hf_vq.hf.fused_activations import fuse_inputs
from hf_vq.nn import VQLinear
from hf_vq.nn.quantized_module import share
from hf_vq.nn.replace import replace_modules
from tests.fixtures.random_weights import random_tensors

LAYERS, HIDDEN, HEAD_DIM, FFN, VOCABULARY = 16, 2048, 128, 8192, 32000
TOKENS = 1024  # appended to a cache per call


def llama_config(
    kv_heads: int, context: int, layers: int = LAYERS, hidden: int = HIDDEN, ffn: int = FFN
) -> LlamaConfig:
    """Query heads of 128; the output layer is not tied."""
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        intermediate_size=ffn,
        vocab_size=VOCABULARY,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def random_llama(
    config: LlamaConfig,
    dtype: torch.dtype,
    scheme: str | None,
    device: str = "cpu",
    overrides: Mapping[str, str | None] | None = None,
) -> LlamaForCausalLM:
    """The model with random weights; linear layers as codes of `scheme`, or dense (None).

    Args:
        overrides: the schemes of single layers, by name.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    schemes = overrides or {}

    def stored(name: str) -> LinearScheme | None:
        spec = schemes.get(name, scheme)
        return None if spec is None else linear_scheme(spec)

    codes = replace_modules(model, stored)
    model.to_empty(device=device)
    model.to(dtype)
    sizes: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    for module in codes.values():
        assert isinstance(module, VQLinear)
        _fill_codes(module, sizes, device)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not name.rpartition(".")[2].startswith("vq_"):
            norm = parameter.ndim == 1
            nn.init.ones_(parameter) if norm else nn.init.normal_(parameter, std=0.02)
    fuse_inputs(model)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)
    return model.eval()


def _fill_codes(
    layer: VQLinear, sizes: dict[tuple[Any, ...], dict[str, Tensor]], device: str
) -> None:
    """Random tensors, the same numbers in layers of one size: only where they lie matters."""
    size = layer.scheme, layer.out_features, layer.in_features
    if size not in sizes:
        found = random_tensors(*size)
        sizes[size] = {key: tensor.to(device) for key, tensor in found.items()}
    for key, tensor in sizes[size].items():
        attribute = layer.attributes[key]
        if attribute in layer._buffers:
            layer._buffers[attribute] = share(tensor)
        else:
            layer._parameters[attribute] = nn.Parameter(
                tensor.clone().reshape(getattr(layer, attribute).shape), requires_grad=False
            )


@torch.no_grad()  # a static cache could not be written to if it were made in inference_mode
def fill_cache(
    cache: Cache,
    config: LlamaConfig,
    tokens: int,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    device: str = "cpu",
) -> None:
    """Append `tokens` random tokens, the same to every layer of an empty cache."""
    shape = (2, batch, config.num_key_value_heads, tokens, config.head_dim)
    keys, values = torch.randn(shape, dtype=dtype, device=device).unbind()
    for index in range(config.num_hidden_layers):
        cache.update(keys, values, index)


class TokenClock:
    """Seconds between the tokens that `generate` hands to its streamer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called by generate with the prompt, then with every token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called by generate at its end."""

    @property
    def seconds(self) -> list[float]:
        """One number per token after the first."""
        tokens = self.times[1:]
        return [after - before for before, after in itertools.pairwise(tokens)]
