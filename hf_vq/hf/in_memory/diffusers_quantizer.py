"""The quantizer that diffusers calls while it loads a model with `quant_method: "hf_vq"`.

Imported when `diffusers.quantizers.auto` has been (`quantizer.register`), so it imports no more of
diffusers. diffusers hands each tensor of a file to its model: a dense weight becomes codes at that
moment, on the device where it goes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from ... import patches
from ...errors import VQConfigError, VQFormatError
from ...formats.catalog import LinearScheme
from ...nn.quantized_module import QuantizedModule
from ...nn.replace import (
    candidates,
    convertible,
    replace_modules,
    restore_modules,
    set_activations_bits,
)
from ...progress import Progress
from ..checkpoint import headers as stored_files
from ..checkpoint.provenance import record
from ..config import QUANT_METHOD, QUANT_METHODS, VQConfig
from ..explain import warn_of_kernels
from ..fused_activations import fuse_inputs, separate_inputs
from ..left_dense import choose_layers, weights_read
from ..quantize_op import advice
from .encode import (
    check_weights,
    dense_dtype,
    encode_layer,
    leave_fast_path,
    leave_out_automatic,
    nothing_to_quantize,
    restore_fast_path,
    share,
)


class Method(str):
    """`quant_method`, of which diffusers reads the `value` of an enum."""

    @property
    def value(self) -> str:
        """The method itself."""
        return str(self)


class VQDiffusersQuantizer(DiffusersQuantizer):
    """Encode the linear layers of a diffusers model while it is loaded, or load their codes."""

    use_keep_in_fp32_modules = True
    requires_calibration = False
    required_packages = None
    dense_dtype: torch.dtype | None = None  # that `hf_vq.dequantize` asks for

    def __init__(self, quantization_config: VQConfig, **kwargs: Any) -> None:
        patches.apply(patches.BACKEND)
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        config: VQConfig = self.quantization_config
        config.quant_method, config.one_file = Method(QUANT_METHOD), True
        self.errors: dict[str, float] = {}
        self.progress = Progress("", 0)
        self._wanted: Mapping[str, LinearScheme] = {}  # to encode
        self._shared: dict[str, Tensor] = {}  # tensors that encoded layers share
        self._dtype = torch.float32  # of dense weights
        self._checkpoint: stored_files.Checkpoint | None = None
        self._model: Any = None
        if self.pre_quantized:
            return
        config.provenance = None
        leave_out_automatic(config, "a model of diffusers does not read token ids")
        refused = ("calibration", "activations", "target_bits", "embeddings", "pass2", "trainable")
        for option in refused:
            if getattr(config, option) is not None:
                raise VQConfigError(f"{option} is not for models of diffusers: leave it out.")

    @property
    def supports_parallel_loading(self) -> bool:
        """False: threads that read files would share a bar, and encode the same layer."""
        return False

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise if weights would be offloaded before they are codes, or could not be saved."""
        if not hasattr(DiffusersQuantizer, "get_state_dict_and_metadata"):
            raise VQConfigError(
                "this version of diffusers does not let a quantizer say what is saved: update it; "
                "0.42.1 does."
            )
        places = set(device_map.values()) if isinstance(device_map, dict) else set()
        if "disk" in places and not self.pre_quantized:
            raise VQConfigError(
                "a model of diffusers cannot be quantized while it is offloaded to disk: quantize "
                "and save it first, then load the result."
            )

    def maybe_update_loaded_keys(self, loaded_keys: list[str], files: list[str]) -> list[str]:
        """The names that diffusers looks for; tensors that layers share are read here."""
        if not self.pre_quantized:
            return loaded_keys
        named = [str(file) for file in files]
        if not all(file.endswith(".safetensors") for file in named):
            raise VQFormatError(f"hf_vq reads codes from safetensors files; got {named[0]}.")
        self._checkpoint = stored_files.Checkpoint(named)
        return [name for name in loaded_keys if not name.startswith("vq_")]

    def _process_model_before_weight_loading(
        self, model: Any, keep_in_fp32_modules: list[str] | None = None, **kwargs: Any
    ) -> Any:
        config, self._model = self.quantization_config, model
        if self._checkpoint is None:
            exact = weights_read(model)
            exact += [name for name, layer in candidates(model) if not convertible(layer)]
            self._wanted = choose_layers(model, config, keep_in_fp32_modules or [], exact)
            if not self._wanted:
                raise nothing_to_quantize(model, config)
            total = sum(model.get_submodule(name).weight.numel() for name in self._wanted)
            label, slow = f"Quantizing to {config.scheme_name}", advice(self._wanted.values())
            self.progress = Progress(label, total, slow)
            return model
        owners = stored_files.coded_layers(model, self._checkpoint)
        schemes = {name: config.stored_scheme(name) for name, _ in candidates(model)}
        wanted = {name: scheme for name, scheme in schemes.items() if name in owners}
        replace_modules(model, wanted.get, seed=config.seed)
        stored_files.verify(model, self._checkpoint, lambda name: name)
        return model

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        """True for a tensor that `create_quantized_param` takes."""
        prefix, _, attribute = param_name.rpartition(".")
        if self.pre_quantized:
            module = model.get_submodule(prefix)
            return isinstance(module, QuantizedModule) and attribute in module.specs
        return attribute == "weight" and prefix in self._wanted

    def create_quantized_param(
        self,
        model: Any,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        state_dict: Mapping[str, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Encode a dense weight, or put a stored tensor in place, in its stored dtype."""
        prefix, _, attribute = param_name.rpartition(".")
        layer = model.get_submodule(prefix)
        if self.pre_quantized:
            stored = param_value if state_dict is None else state_dict[param_name]
            stored = stored.to(layer.specs[attribute].dtype)  # diffusers casts all floats
            layer._parameters[attribute] = nn.Parameter(
                stored.to(target_device), requires_grad=False
            )
            return
        self.progress.start(prefix, param_value.numel())
        self._dtype = param_value.dtype
        layer.weight = nn.Parameter(param_value.to(target_device), requires_grad=False)
        try:
            scheme = self._wanted[prefix]
            config = self.quantization_config
            encode_layer(model, prefix, scheme, config, self.errors, self._shared)
        except BaseException:
            self.progress.close()
            raise
        self.progress.done()

    def quantize(self, model: Any) -> None:
        """Quantize a model whose weights are in memory, in place: `hf_vq.quantize_model`."""
        kept = model._keep_in_fp32_modules or []
        self.preprocess_model(model, keep_in_fp32_modules=[kept] if type(kept) is str else kept)
        check_weights(model, self._wanted)
        for name in self._wanted:
            weight = model.get_submodule(name).weight
            self.create_quantized_param(model, weight.data, f"{name}.weight", weight.device)
        self.postprocess_model(model)
        model.hf_quantizer = self

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.progress.close()
        config = self.quantization_config
        left = [name for name in self._wanted if convertible(model.get_submodule(name))]
        if left:
            raise VQFormatError(
                f"the checkpoint lacks {left[0]}.weight, or it was offloaded before it could be "
                "encoded: load the model without offloading, or add the layer to "
                "VQConfig(modules_to_not_convert=[...])."
            )
        if self._checkpoint is not None:
            specs = stored_files.shared_specs(model)
            shared = self._checkpoint.shared(specs, config.provenance or {})
        else:
            shared = self._shared
        share(model, shared)
        if self._checkpoint is None:
            stored_files.check_values(model)
            dtype = str(self._dtype).removeprefix("torch.")
            config.provenance = record(model, self.errors, shared, {"dtype": dtype})
        self._checkpoint, self._wanted, self._shared = None, {}, {}
        leave_fast_path(model)
        set_activations_bits(model, config.activations_bits)
        fuse_inputs(model)
        warn_of_kernels(model)
        model.register_to_config(quantization_config=config)
        if hasattr(model, "fuse_qkv_projections"):
            patches.override(model, "fuse_qkv_projections", _refuse_to_fuse)
        return model

    def get_state_dict_and_metadata(
        self, state_dict: Mapping[str, Tensor], **kwargs: Any
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors to save, each that layers share once, and metadata of the file."""
        return stored_files.stored_state(self._model, state_dict), {}

    def _dequantize(self, model: Any) -> Any:
        separate_inputs(model)
        patches.restore(model, "fuse_qkv_projections")
        restore_modules(model, self.dense_dtype or dense_dtype(model))
        restore_fast_path(model)
        config = {key: value for key, value in model.config.items() if key != "quantization_config"}
        model._internal_dict = type(model.config)(config)  # it is frozen
        return model

    @property
    def is_serializable(self) -> bool:
        """True: a quantized model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters can be trained on a quantized model."""
        return True


def _refuse_to_fuse() -> None:
    raise VQConfigError(
        "codes of projections cannot be fused into those of one: call fuse_qkv_projections before "
        "hf_vq.quantize_model, or leave it out."
    )


def register() -> None:
    """Tell diffusers about `quant_method: "hf_vq"`."""
    from diffusers.quantizers import auto

    for method in QUANT_METHODS:
        auto.AUTO_QUANTIZER_MAPPING[method] = VQDiffusersQuantizer
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = VQConfig
