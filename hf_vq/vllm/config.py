"""The config of a checkpoint for vLLM: which layers hold codes, and the method of each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
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

from .. import env
from ..errors import VQConfigError, VQFormatError
from ..hf.checkpoint import integrity
from ..hf.checkpoint.headers import CURE
from ..hf.config import QUANT_METHODS, VQConfig
from . import kv_cache, on_the_fly
from .embedding import VQEmbeddingMethod
from .experts import VQExpertsMethod
from .linear import VQLinearMethod

_SHARED = re.compile(r"^(?:transformer\.)?vq_(?:codebook|rotation)\.")
"""Top-level tensors that layers share. They do not depend on the model: the package has them.
vLLM's GPT-2 puts its prefix before all names."""
_EXPERTS = re.compile(r"\.experts\.(vq_\w+)$")
_OF_KV_CACHE = re.compile(r"^layers\.\d+\.(key|value|key_mean|key_rotary_mean|key_smoothing)$")
"""Tensors of kv_codebooks.safetensors, which vLLM takes for weights."""


class VQQuantizationConfig(QuantizationConfig):
    """The `quantization_config` of a checkpoint, for vLLM; or of a model to quantize.

    Args:
        config: as in config.json; without it, the layers of a dense model become codes.

    Attributes:
        coded: names of the layers with codes, by vLLM's name of the layer.
        is_dense: whether the files hold no codes, and layers are to be quantized.
    """

    packed_modules_mapping: dict[str, list[str]]

    def __init__(self, config: VQConfig | None = None) -> None:
        super().__init__()
        self.is_dense = config is None
        self.config = on_the_fly.requested({}) if config is None else config
        self.coded: dict[str, str] = {}
        self.tied = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> VQQuantizationConfig:
        """See `QuantizationConfig`. Options that no checkpoint recorded are the user's, of
        `--hf-overrides`.

        Raises:
            VQConfigError: an option that this version does not know.
        """
        if "format_version" in config:
            return cls(VQConfig.from_dict(config))
        found = cls(on_the_fly.requested(config))
        found.is_dense = True
        return found

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
    def get_cache_scale_mapper() -> WeightsMapper:
        """See `QuantizationConfig`. Leave out the tensors that layers share, too, and those of a KV
        cache, and name experts' codes as vLLM's parameters. Only newer vLLM than 0.26 has an
        interface for that alone."""
        own = {_SHARED: None, _OF_KV_CACHE: None, _EXPERTS: r".experts.routed_experts.\1"}
        return QuantizationConfig.get_cache_scale_mapper() | WeightsMapper(orig_to_new_regex=own)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the headers of the files for the names of the layers with codes.

        Raises:
            VQFormatError: there are none, where config.json says otherwise; or the files of a
                folder changed since they were written.
        """
        if self.is_dense:
            on_the_fly.announce(self.config)
            return
        self._check_digests(Path(model_name))
        headers = get_safetensors_params_metadata(model_name, revision=revision)
        self.coded = {name: name for name in layers_with_codes(headers)}
        self.tied = bool(getattr(hf_config, "tie_word_embeddings", False))
        if not self.coded:
            raise VQFormatError(
                f"{model_name}: no safetensors file with codes was found, and its config.json says "
                f"that there are some. {CURE}"
            )

    def _check_digests(self, folder: Path) -> None:
        """Compare files with their digests. vLLM downloads others later, and tells nobody."""
        recorded = integrity.take_record(self.config)
        if folder.is_dir() and env.VERIFY.get():
            files = integrity.checkpoints(folder).get("", [])
            integrity.check(self.config, files).finish(recorded is not None, recorded)

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
            if head and not self.tied and prefix in self.coded:
                raise VQConfigError(
                    f"{prefix}: vLLM cannot serve an output head that is stored as codes. Quantize "
                    "without an entry of `layers` for it, or serve the model with Transformers."
                )
            coded = prefix in self.coded or (self.tied if head else not prefix)
            kind = self.config.embeddings
            return VQEmbeddingMethod(kind, prefix) if coded and kind is not None else None
        if isinstance(layer, RoutedExperts):
            if any(name.startswith(f"{prefix}.") for name in self.coded):
                raise VQConfigError(
                    f"{prefix}: vLLM cannot serve experts that a checkpoint stores one by one. "
                    "Serve the model with Transformers."
                )
            if self.is_dense:
                return on_the_fly.experts_method(self.config, layer, prefix)
            stored = self.coded.get(prefix)
            return None if stored is None else VQExpertsMethod(layer, self.config, stored)
        if not isinstance(layer, layers.LinearBase):
            return None
        names = self._unfused(prefix)
        if self.is_dense:
            return on_the_fly.linear_method(self.config, names)
        if not any(name in self.coded for name in names):
            return layers.UnquantizedLinearMethod()
        matrices = {self.coded.get(name, name): name in self.coded for name in names}
        return VQLinearMethod(self.config, matrices)

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
    return sorted({name.rpartition(".")[0] for name in integers if not _SHARED.search(name)})


def register() -> None:
    """Make `quant_method: "hf_vq"`, and a KV cache that is asked for, known to vLLM; may be called
    again."""
    kv_cache.register()
    for name in QUANT_METHODS:
        if name not in QUANTIZATION_METHODS:
            register_quantization_config(name)(VQQuantizationConfig)
