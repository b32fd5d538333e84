"""The config of a checkpoint for vLLM: which layers hold codes, and the method of each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import linear as layers
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.transformers_utils.config import get_safetensors_params_metadata

from ..errors import VQConfigError, VQFormatError
from ..hf.checkpoint.headers import CURE
from ..hf.config import QUANT_METHODS, VQConfig
from . import kv_cache
from .embedding import VQEmbeddingMethod
from .linear import VQLinearMethod

_SHARED = ("vq_codebook.", "vq_rotation.")
"""Top-level tensors that layers share. They do not depend on the model: the package has them."""
_OF_KV_CACHE = re.compile(r"^layers\.\d+\.(key|value|key_mean|key_rotary_mean)$")
"""Tensors of kv_codebooks.safetensors, which vLLM takes for weights."""


class VQQuantizationConfig(QuantizationConfig):
    """The `quantization_config` of a checkpoint, for vLLM.

    Args:
        config: as in config.json.

    Attributes:
        coded: names of the layers with codes, by vLLM's name of the layer.
    """

    packed_modules_mapping: dict[str, list[str]]

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.coded: dict[str, str] = {}
        self.tied = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> VQQuantizationConfig:
        """See `QuantizationConfig`.

        Raises:
            VQConfigError: an option that this version does not know.
        """
        return cls(VQConfig.from_dict(config))

    def get_name(self) -> str:
        """The name in config.json."""
        return str(self.config.quant_method)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability of NVIDIA GPUs, times ten."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: config.json says all."""
        return []

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Leave out the tensors that layers share, and those of a KV cache."""
        return WeightsMapper(
            orig_to_new_regex={_OF_KV_CACHE: None}, orig_to_new_prefix=dict.fromkeys(_SHARED)
        )

    get_cache_scale_mapper = get_checkpoint_weight_mapper  # what vLLM asked for before

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the headers of the files for the names of the layers with codes.

        Raises:
            VQFormatError: there are none.
        """
        headers = get_safetensors_params_metadata(model_name, revision=revision)
        self.coded = {name: name for name in layers_with_codes(headers)}
        self.tied = bool(getattr(hf_config, "tie_word_embeddings", False))
        if not self.coded:
            raise VQFormatError(
                f"{model_name}: no safetensors file with codes was found, and its config.json says "
                f"that there are some. {CURE}"
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Rename layers as vLLM's model calls them."""
        self.coded = hf_to_vllm_mapper.apply_dict(self.coded)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that loads and runs a layer; None for layers that vLLM need not ask about.

        Raises:
            VQConfigError: it holds codes, and this plugin cannot run it.
        """
        if isinstance(layer, VocabParallelEmbedding):
            # A tied head has no tensor in the files; some models name no embedding.
            head = isinstance(layer, ParallelLMHead)
            coded = prefix in self.coded or (self.tied if head else not prefix)
            kind = self.config.embeddings
            return VQEmbeddingMethod(kind, prefix) if coded and kind is not None else None
        if isinstance(layer, RoutedExperts):
            if any(name.startswith(f"{prefix}.") for name in self.coded):
                raise VQConfigError(
                    f"{prefix}: experts with codes cannot be served by vLLM yet. Serve the model "
                    "with Transformers, or quantize it again with "
                    'VQConfig(modules_to_not_convert=["experts"]).'
                )
            return None
        if not isinstance(layer, layers.LinearBase):
            return None
        names = self._unfused(prefix)
        if not any(name in self.coded for name in names):
            return layers.UnquantizedLinearMethod()
        stored = {self.coded.get(name, name): name in self.coded for name in names}
        return VQLinearMethod(self.config, stored)

    def _unfused(self, prefix: str) -> list[str]:
        """Names of the matrices that vLLM stacks in one layer; the layer's own name where the
        checkpoint stacks them too."""
        start, dot, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last, [])
        return [prefix] if prefix in self.coded or not parts else [start + dot + p for p in parts]


def layers_with_codes(headers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the layers and embeddings whose weights are integers.

    Args:
        headers: dtype of each tensor in the files, by name, as safetensors writes it.
    """
    integers = [name for name, entry in headers.items() if entry.get("dtype") in ("U8", "I8")]
    return sorted({name.rpartition(".")[0] for name in integers if not name.startswith(_SHARED)})


def register() -> None:
    """Make `quant_method: "hf_vq"`, and a KV cache that is asked for, known to vLLM; may be called
    again."""
    kv_cache.register()
    for name in QUANT_METHODS:
        if name not in QUANTIZATION_METHODS:
            register_quantization_config(name)(VQQuantizationConfig)
