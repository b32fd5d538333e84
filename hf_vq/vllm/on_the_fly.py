"""Dense models whose layers become codes while vLLM loads them: `--quantization vq`.

vLLM's own loaders fill dense weights, layer by layer; the last tensor of a layer starts
`process_weights_after_loading`. Ranks encode their own parts, so nothing limits how they split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging
from vllm.model_executor.layers import linear as layers
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from ..errors import VQConfigError, VQFormatError, VQSchemeError
from ..formats.catalog import LinearScheme
from ..hf.config import VQConfig
from ..hf.module_patterns import matches
from ..hf.quantize_op import encode
from ..nn.experts import VQExperts
from ..nn.linear import VQLinear
from ..nn.replace import linear_class
from .experts import DenseExperts, VQExpertsMethod
from .linear import VQLinearMethod, shared_tensors

logger = logging.get_logger("hf_vq")

_ROUTERS = ("gate", "router", "shared_expert_gate")
_SEARCH = "norm"  # of a scale, where the user says nothing: an engine should start soon


def requested(options: Mapping[str, Any]) -> VQConfig:
    """The config of a model that is to be quantized while it is loaded.

    Args:
        options: arguments of `VQConfig`.

    Raises:
        VQConfigError: an option that needs data, or is of embeddings; or a wrong one.
    """
    config = VQConfig(**{"search": _SEARCH, **options})
    scaled = any(scheme.is_scaled for scheme in config.schemes())
    unfit = {
        "calibration": config.calibration, "target_bits": config.target_bits,
        "activations": options.get("activations"), "embeddings": config.embeddings,
        "a scaled scheme": scaled, "activations_bits": config.activations_bits,
    }  # fmt: skip
    for what in (what for what, value in unfit.items() if value):
        raise VQConfigError(
            f"vLLM quantizes while it loads without reading data, and its layers only: {what} is "
            "not possible. Quantize first: hf-vq quantize MODEL OUT."
        )
    return config


def announce(config: VQConfig) -> None:
    """Say once that the weights become codes without data."""
    logger.warning_once(
        f"hf_vq: the layers become {config.scheme_name} while they are loaded, without reading "
        "data. Codes are better, and start faster, after: hf-vq quantize MODEL OUT."
    )


def linear_method(config: VQConfig, names: Iterable[str]) -> QuantizeMethodBase:
    """The method of a linear layer.

    Args:
        config: from `requested`.
        names: of the matrices that vLLM stacks in it.
    """
    schemes = {name: _scheme(config, name) for name in names}
    if not any(schemes.values()):
        return layers.UnquantizedLinearMethod()
    return EncodedLinearMethod(config, schemes)


def experts_method(config: VQConfig, layer: Any, name: str) -> QuantizeMethodBase | None:
    """The method of a layer of experts; None if they stay dense."""
    scheme = _scheme(config, name)
    if scheme is None:
        return None
    try:
        return EncodedExpertsMethod(layer, config, scheme, name)
    except VQSchemeError as error:
        logger.warning_once(f"hf_vq: {name} stays dense: {error}")
        return None


def _scheme(config: VQConfig, name: str) -> LinearScheme | None:
    """Scheme of a layer; None if it stays dense."""
    entries = config.modules_to_not_convert or []
    if name.rpartition(".")[2] in _ROUTERS or any(matches(name, entry) for entry in entries):
        return None
    return config.scheme_of(name)


class EncodedLinearMethod(VQLinearMethod):
    """Loads a dense layer of vLLM, encodes and runs it.

    Args:
        config: from `requested`.
        schemes: of the matrices that vLLM stacks in the layer, by name in order; None where one
            stays dense.
    """

    uses_meta_device = True  # vLLM asks: weights are materialized when all of them have come

    def __init__(self, config: VQConfig, schemes: Mapping[str, LinearScheme | None]) -> None:
        super().__init__(config, {})
        self.schemes = schemes
        self.parts: list[Any] = []

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Add a dense weight without memory, and empty modules; the whole layer stays dense, with a
        warning, where a scheme does not fit the part of a rank."""
        sizes, columns = output_partition_sizes, input_size_per_partition
        schemes = list(self.schemes.items())
        if len(schemes) != len(sizes):  # the checkpoint stacks the matrices as vLLM does
            sizes, schemes = [sum(sizes)], schemes[:1]
        parts = [(name, rows, kind) for (name, kind), rows in zip(schemes, sizes, strict=True)]
        try:
            self.parts = [
                self._encoded([each[:2] for each in group], columns, kind, params_dtype)
                for kind, group in groupby(parts, key=lambda part: part[2])
            ]
        except VQSchemeError as error:
            logger.warning_once(f"hf_vq: {schemes[0][0]} stays dense: {error}")
            layer.quant_method = layers.UnquantizedLinearMethod()
            layer.quant_method.create_weights(
                layer, columns, output_partition_sizes, input_size, output_size, params_dtype,
                **extra_weight_attrs,
            )  # fmt: skip
            return
        empty = torch.empty(sum(sizes), columns, dtype=params_dtype, device="meta")
        loader = extra_weight_attrs.get("weight_loader")
        weight = ModelWeightParameter(data=empty, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def _encoded(
        self, group: list[tuple[str, int]], columns: int, scheme: LinearScheme | None,
        dtype: torch.dtype,
    ) -> nn.Linear:  # fmt: skip
        where, rows = group[0][0], sum(rows for _, rows in group)
        with torch.device("meta"):
            if scheme is None:
                return nn.Linear(columns, rows, bias=False, dtype=dtype)
            kind = linear_class(scheme)
            return kind(columns, rows, False, scheme, seed=self.config.seed, where=where)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Encode the weight and let go of it."""
        if _is_done(layer, hasattr(layer, "vq_parts")):
            return
        _check_loaded(layer, next(iter(self.schemes)), self.dummy)
        first = 0
        for part in self.parts:
            dense = layer.weight.data[first : first + part.out_features]
            first += part.out_features
            if isinstance(part, VQLinear):
                fitted, _ = encode(part, "weight", dense, self.config, part.where)
                part.assign(fitted[0], None)
                part.set_shared(_shared(part, self.config, dense.device))
            else:
                part.weight = nn.Parameter(dense.clone(), requires_grad=False)
        layer.vq_parts = nn.ModuleList(self.parts)
        # vLLM's adapters ask a weight's device.
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


class EncodedExpertsMethod(VQExpertsMethod):
    """Loads the dense experts of a layer of vLLM, encodes and runs them.

    Args:
        layer: of vLLM.
        config: from `requested`.
        scheme: of all experts of the layer.
        name: of the layer.

    Raises:
        VQSchemeError: the scheme does not fit the part of a rank.
        VQConfigError: vLLM asks for what codes cannot do.
    """

    uses_meta_device = True

    def __init__(self, layer: Any, config: VQConfig, scheme: LinearScheme, name: str) -> None:
        super().__init__(layer, config, name)
        own = self.moe.intermediate_size_per_partition
        with torch.device("meta"):
            dense = DenseExperts(self.moe, self.moe.num_local_experts, own, self.moe.in_dtype, name)
            self.module = VQExperts(dense, scheme, seed=config.seed, where=name)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Add vLLM's dense parameters, without memory."""
        loader = {"weight_loader": extra_weight_attrs["weight_loader"]}
        for name, of_vllm in zip(self.module.projections, _NAMES, strict=True):
            part = self.module.projections[name]
            shapes: dict[str, tuple[int, ...]] = {"weight": (part.out_features, part.in_features)}
            if self.module.has_bias:
                shapes["bias"] = (part.out_features,)
            for kind, shape in shapes.items():
                empty = torch.empty(num_experts, *shape, dtype=params_dtype, device="meta")
                parameter = nn.Parameter(empty, requires_grad=False)
                set_weight_attrs(parameter, loader)
                layer.register_parameter(f"{of_vllm}_{kind}", parameter)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Encode the weights and let go of them."""
        if _is_done(layer, hasattr(layer, "vq_experts")):
            return
        _check_loaded(layer, self.name, self.dummy)
        module = self.module
        for name, of_vllm in zip(module.projections, _NAMES, strict=True):
            dense = layer._parameters.pop(f"{of_vllm}_weight").data
            where = f"{self.name}.{name}"
            fitted, _ = encode(module, name, dense, self.config, where)
            module.assign(name, {k: torch.stack([f[k] for f in fitted]) for k in fitted[0]})
            if module.has_bias:
                module._parameters[f"{name}_bias"] = layer._parameters.pop(f"{of_vllm}_bias")
            device = dense.device
            del dense
        module.set_shared(_shared(module, self.config, device))
        self.finish_biases(module)
        layer.vq_experts = module


def _is_done(layer: Any, is_encoded: bool) -> bool:
    """True if the layer is encoded; vLLM calls twice. When it loads weights anew, it takes the mark
    off.

    Raises:
        VQConfigError: it loaded weights anew.
    """
    if getattr(layer, _DONE, False):
        return True
    if is_encoded:
        raise VQConfigError(
            "layers that became codes while they were loaded cannot be loaded anew: start vLLM "
            "again, with the new weights."
        )
    setattr(layer, _DONE, True)
    return False


_DONE = "_already_called_process_weights_after_loading"
"""The mark that vLLM's own online quantization leaves."""
_NAMES = ("w13", "w2")
"""vLLM's names of the two projections."""


def _shared(module: Any, config: VQConfig, device: torch.device) -> dict[str, Tensor]:
    """The tensors that layers share, on a device."""
    return {name: tensor.to(device) for name, tensor in shared_tensors([module], config).items()}


def _check_loaded(layer: Any, name: str, dummy: bool) -> None:
    """Raise if nothing was loaded: some of vLLM's models write to weights past their loaders.

    Raises:
        VQFormatError: nothing was.
    """
    if not (dummy or get_layerwise_info(layer).load_numel):
        raise VQFormatError(
            f"{name}: vLLM loaded no weights to quantize. Quantize first: hf-vq quantize MODEL OUT."
        )
