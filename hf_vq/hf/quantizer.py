"""The quantizer that Transformers calls while it loads a model with `quant_method: "hf_vq"`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils import logging

from .. import env, patches
from ..dispatch.entry import load
from ..errors import VQConfigError
from ..formats import digests
from ..formats.catalog import LinearScheme
from ..nn.experts import VQExperts
from ..nn.linear import VQLinear
from ..nn.published import PublishedLinear
from ..nn.quantized_module import QuantizedModule
from ..nn.replace import (
    candidates,
    check_in_memory,
    convertible,
    linear_class,
    replace_modules,
    restore_modules,
    set_activations_bits,
    vq_modules,
)
from ..nn.trained import train
from ..progress import Progress
from . import embeddings
from .calibration_options import AUTO, choices, leave_out_activations
from .checkpoint import by_layer
from .checkpoint import headers as stored_files
from .checkpoint.atomic_dir import check_whole
from .checkpoint.conversions import conversions_of, dense_conversions, renamer
from .checkpoint.expert_names import list_stored_experts
from .checkpoint.integrity import check, is_variant, take_record
from .checkpoint.new_parts import is_new, is_outside
from .checkpoint.provenance import record
from .checkpoint.sizes import check_layers
from .config import QUANT_METHODS, VQConfig
from .explain import warn_of_kernels
from .fused_activations import fuse_inputs, separate_inputs
from .in_memory.encode import check_weights, encode_layers, nothing_to_quantize
from .left_dense import choose_layers, dense_in_any_case
from .module_patterns import check_pass2, matches
from .quantize_op import Quantize, advice, bytes_per_weight, settle
from .residual import leave_out_pass2, place_pass2
from .tensor_parallel import CAN_SPLIT, ranks, split_plan

logger = logging.get_logger("hf_vq")

_CALIBRATION = "calibration.layerwise:WeightCalibration"
_ACTIVATIONS = "calibration.activations:ActivationPass"
"""Named by strings and imported only when a model is quantized: they are a layer above."""
_DIFFUSERS = "hf.in_memory.diffusers_quantizer:register"


class VQHfQuantizer(HfQuantizer):
    """Replace layers by VQ modules before the weights are loaded, then load their tensors.

    On-the-fly quantization encodes every dense tensor as soon as it is read. The tensors of a VQ
    checkpoint are the modules' parameters, so nothing is converted.

    The hooks accept extra arguments: their signatures differ between releases of Transformers.
    """

    requires_calibration = False
    quantization_config: VQConfig

    def __init__(self, quantization_config: VQConfig, **kwargs: Any) -> None:
        patches.apply(patches.BACKEND)  # the model's generation config may request a VQ cache
        # Quantizing writes to the copy, never to the user's object.
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        if not self.pre_quantized:
            self.quantization_config.provenance = None
        self.errors: dict[str, float] = {}
        self.progress = Progress("", 0)
        self._checkpoint: stored_files.Checkpoint | None = None
        self._model: Any = None
        self._calibration: Any = None
        self._cut: list[str] = []  # layers whose second pass is left out
        self._heads: dict[str, Any] = {}  # dense layers that may turn out to be new
        self._recorded = take_record(self.quantization_config)
        self._check: digests.Check | None = None

    def update_attn_implementation(self, config: Any) -> Any:
        """The config, once it is known that its model can be made."""
        check_layers(config, "config.json")
        return config

    update_tp_plan = update_attn_implementation  # what Transformers before 5.23 calls there

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        config = self.quantization_config
        if not self.pre_quantized:
            self._check_dense(model)
        if ranks(model) > 1 and not CAN_SPLIT:
            raise VQConfigError("tensor parallelism needs a newer Transformers: 5.23 or later.")
        for folder in {Path(file).parent for file in checkpoint_files or []}:
            check_whole(folder)
            if config.provenance and by_layer.DIGEST in config.provenance:
                path = by_layer.find(folder, model.config)
                config.provenance = by_layer.joined(config.provenance, path)
        files = [file for file in checkpoint_files or [] if file.endswith(".safetensors")]
        if self.pre_quantized and files:
            self._checkpoint = stored_files.Checkpoint(files)
            if env.VERIFY.get():
                self._check = check(config, files, loaded=True)
                if any(map(is_variant, files)):
                    self._recorded = None
            integers = [n for n, e in self._checkpoint.entries.items() if not e.is_float]
            list_stored_experts(model, integers, self._expert)
        if self.pre_quantized:
            wanted = self._wanted_stored(model)
            self._place_published(model, wanted)
            if config.embeddings is not None:
                embeddings.replace_embedding(model, config.embeddings, config.seed)
        else:
            wanted = self._wanted_dense(model, checkpoint_files or [], kwargs.get("device_map"))
            maybe = {n for n in wanted if is_new(model, n) or is_outside(model, n)}
            self._heads = {n: m for n, m in candidates(model) if n in maybe and convertible(m)}
        self._put_empty_modules(model, wanted)
        if self._calibration is None and not vq_modules(model):
            raise nothing_to_quantize(model, config)
        # hf_vq, not Transformers, reads the tensors that layers share.
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        ignored.add(r"(^|\.)vq_(codebook|rotation)\.[^.]+$")
        if config.leaves_out_second_passes():
            ignored.add(r"(^|[._])vq_\w+_2$")
        model._keys_to_ignore_on_load_unexpected = ignored
        self._watch_missing(model)
        self._model = model
        return model

    def _put_empty_modules(self, model: Any, wanted: Mapping[str, LinearScheme]) -> None:
        """Replace layers by modules that are filled while files are read."""
        config = self.quantization_config
        with torch.device("meta"):
            replace_modules(model, wanted.get, seed=config.seed, keep_dense=not self.pre_quantized)
        modules = vq_modules(model)
        for name, module in modules.items():
            # Their tensors come from a file or from quantization, never from a random generator.
            module._is_hf_initialized = True  # type: ignore[assignment]
            if isinstance(module, VQExperts):  # some models initialize experts from outside
                model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
        if not self.pre_quantized:
            streamed = self._calibration is None  # else a layer or two outside of the blocks
            total = sum(module.weight_count() for module in modules.values()) if streamed else 0
            label = f"Quantizing to {config.scheme_name}"
            self.progress = Progress(label, total, advice(wanted.values()))
            if streamed:
                self.progress.replace_loaders_bar()

    def _check_dense(self, model: Any) -> None:
        """Raise if a dense model cannot be quantized with these options."""
        if self.quantization_config.leaves_out_second_passes():
            raise VQConfigError(
                'pass2="absent" is for a model that was saved with two passes. To quantize with '
                "one pass, use the scheme turboquant-4."
            )
        if ranks(model) > 1:
            raise VQConfigError(
                "a model cannot be quantized while it is split over devices: quantize and save it "
                "on one device first, then load the result with tensor parallelism."
            )

    def _wanted_dense(
        self, model: Any, files: list[str], device_map: Any
    ) -> dict[str, LinearScheme]:
        """Schemes of the layers to encode without data, by name; prepares the calibration, or the
        pass over tokens, that encodes the others."""
        config, exact = self.quantization_config, dense_in_any_case(model)
        wanted = choose_layers(model, config, self._patterns_left(model), exact)
        if not wanted:
            return wanted
        self._check_what_comes_last(model, wanted)
        if config.calibration is not None:
            self._calibration = load(_CALIBRATION)(model, wanted, config, files)
        elif config.activations is not None:
            read = {name: s for name, s in wanted.items() if not files or not is_new(model, name)}
            self._calibration = self._activation_pass(model, read, files, device_map)
        names = () if self._calibration is None else self._calibration.names
        return {name: scheme for name, scheme in wanted.items() if name not in names}

    def _activation_pass(
        self, model: Any, wanted: Mapping[str, LinearScheme], files: list[str], device_map: Any
    ) -> Any:
        """The pass over tokens before layers are encoded; None where the model cannot run."""
        config, kind = self.quantization_config, load(_ACTIVATIONS)
        is_automatic = config.activations == AUTO
        why = kind.obstacle(model, wanted, device_map, is_automatic=is_automatic)
        found = kind(model, wanted, config, files) if why is None else None
        if found is not None and found.names:
            return found
        leave_out_activations(config, why)
        return None

    def _read_without_activations(self, why: str | None) -> None:
        """Encode the layers of the pass while they are read, after all, if there is a reason."""
        if why is not None:
            schemes, self._calibration = self._calibration.schemes, None
            leave_out_activations(self.quantization_config, why)
            self._put_empty_modules(self._model, schemes)

    def _has_pass(self) -> bool:
        return getattr(self._calibration, "kind", "") == "activations"

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Judge whether the dense model fits into what `device_map` and `max_memory` leave, before
        Transformers makes a map of places from it."""
        if self._model is not None and self._has_pass():
            why = self._calibration.too_large(self._model, max_memory)
            self._read_without_activations(why)
        return max_memory

    def quantize(self, model: Any) -> None:
        """Quantize a model whose weights are in memory, in place: `hf_vq.quantize_model`."""
        self._check_dense(model)
        wanted = self._wanted_dense(model, [], getattr(model, "hf_device_map", None))
        if not wanted and self._calibration is None:
            raise nothing_to_quantize(model, self.quantization_config)
        check_weights(model, [*wanted, *(self._calibration.names if self._calibration else ())])
        encode_layers(model, wanted, self.quantization_config, self.progress, self.errors)
        model.is_quantized, model.hf_quantizer = True, self
        model.quantization_method = self.quantization_config.quant_method
        for plan in (model.tp_plan, model.ep_plan) if CAN_SPLIT else ():
            self.update_parallel_plan(model, plan)
        self.postprocess_model(model)

    def _check_what_comes_last(self, model: Any, wanted: Mapping[str, LinearScheme]) -> None:
        """Raise now if a step that follows the encoding of all layers cannot be done."""
        config = self.quantization_config
        if config.embeddings is not None:
            embeddings.check_embedding(model, config.embeddings)
        if config.pass2 is not None:
            two = [
                name
                for name, scheme in wanted.items()
                if any(s.two_passes for s in tuple(choices(config, name)) or (scheme,))
            ]
            check_pass2(config.pass2, two, model, config.scheme_name)

    def _expert(self, name: str, out_features: int, in_features: int) -> VQLinear:
        """Make the module of one expert's matrix that the checkpoint stores separately."""
        config = self.quantization_config
        layout = config.published_layouts.get(name)
        if layout is not None:
            return PublishedLinear(layout, (out_features, in_features), False, where=name)
        scheme = config.stored_scheme(name)
        return linear_class(scheme)(in_features, out_features, False, scheme, where=name)

    def _place_published(self, model: Any, wanted: Mapping[str, Any]) -> None:
        """Replace layers that the checkpoint stores in another project's layout."""
        prefix = f"{model.base_model_prefix}."
        for given, layout in self.quantization_config.published_layouts.items():
            for name in {given, given.removeprefix(prefix), prefix + given} & set(wanted):
                source: Any = model.get_submodule(name)
                rows, columns = source.weight.shape
                size = (rows, columns) if isinstance(source, torch.nn.Linear) else (columns, rows)
                about = {"dtype": source.weight.dtype, "where": name, "source": type(source)}
                with torch.device("meta"):
                    new = PublishedLinear(layout, size, source.bias is not None, **about)
                model.set_submodule(name, new.train(source.training))

    def _leave_dense(self, model: Any, name: str) -> bool:
        """Put the dense layer of a head back: the checkpoint lacks its weight, or has another size.
        False if the layer is none."""
        dense = self._heads.pop(name, None)
        if dense is None:
            return False
        layer, config = model.get_submodule(name), self.quantization_config
        dense._parameters.update({key: layer._parameters[key] for key in dense._parameters})
        model.set_submodule(name, dense.train(layer.training))
        config.modules_to_not_convert = sorted({*(config.modules_to_not_convert or ()), name})
        if name in (config.layers or {}):
            config.use({n: s for n, s in (config.layers or {}).items() if n != name})
        return True

    def _wanted_stored(self, model: Any) -> dict[str, LinearScheme]:
        """Schemes of the layers whose codes the checkpoint holds, or should hold, by name."""
        config, prefix = self.quantization_config, f"{model.base_model_prefix}."
        skipped = set(config.modules_to_not_convert or ())
        recorded = set((config.provenance or {}).get("relative_error", {}))
        recorded |= {name.rpartition(".")[0] for name in recorded}  # experts: one for each tensor
        defaults = self._default_skips(model)
        wanted = {}
        for name, _ in candidates(model):
            # The file may have been written by the model with a head, or by the one without.
            names = {name, name.removeprefix(prefix), prefix + name}
            if names & skipped:
                continue
            optional = any(matches(name, entry) for entry in defaults)
            # A head without tensors in the file is new: Transformers initializes it.
            known = names & recorded or not (
                optional or is_outside(model, name) or is_new(model, name)
            )
            if known or self._in_file(name, prefix, codes=optional):
                scheme = config.stored_scheme(*names)
                if scheme.two_passes and config.pass2_of(name) == "absent":
                    scheme = scheme.first_pass()
                    self._cut.append(name)
                wanted[name] = scheme
        return wanted

    def _in_file(self, name: str, prefix: str, codes: bool) -> bool:
        if self._checkpoint is None:
            return not codes
        starts = tuple(f"{start}{name}.{'vq_' if codes else ''}" for start in ("", prefix))
        return any(entry.startswith(starts) for entry in self._checkpoint.entries)

    def _patterns_left(self, model: Any) -> list[str]:
        kept = list(model._keep_in_fp32_modules or ())
        skips: list[str] = self.get_modules_to_not_convert(model, None, kept)
        return skips

    def _default_skips(self, model: Any) -> list[str]:
        return [*self._patterns_left(model), *dense_in_any_case(model)]

    def _watch_missing(self, model: Any) -> None:
        """Check for missing tensors just before Transformers fills them with random numbers."""
        original = model.mark_tied_weights_as_initialized

        def checked(loading_info: Any) -> Any:
            unloaded = loading_info.missing_and_mismatched()
            if self._has_pass():
                self._calibration.check_missing(model, unloaded)
            for name in [n for n in self._heads if f"{n}.weight" in unloaded and is_new(model, n)]:
                codes = {f"{name}.{attribute}" for attribute in model.get_submodule(name).specs}
                self._leave_dense(model, name)
                loading_info.missing_keys -= codes - {f"{name}.weight"}
            self._unloaded(model, loading_info.missing_and_mismatched())
            if self.pre_quantized:
                files = self._checkpoint.files if self._checkpoint else ["the checkpoint"]
                stored_files.check_dense(model, loading_info.missing_keys, ", ".join(files))
            return original(loading_info)

        patches.override(model, "mark_tied_weights_as_initialized", checked)

    def _check_values(self, model: Any) -> None:
        """Raise if a stored float is wrong or not finite."""
        stored_files.check_values(model)

    def _unloaded(self, model: Any, unloaded: set[str]) -> None:
        """Raise if the checkpoint has no tensor for what is codes or becomes codes."""
        targets = () if self._calibration is None else self._calibration.targets.values()
        dense = [f"{target.layer}.{target.weight}" for target in targets]
        stored_files.check_loaded(model, unloaded, self.pre_quantized, dense)

    def update_weight_conversions(self, weight_conversions: Any, *args: Any) -> Any:
        """Exempt codes from Transformers' conversions, and verify the checkpoint's headers."""
        model, files = self._model, self._checkpoint
        if model is None or not self.pre_quantized:
            return weight_conversions
        conversions = dense_conversions(weight_conversions, model)
        if files is not None:
            stored_files.verify(model, files, renamer(conversions, model), self._is_left_out)
        return conversions

    def _is_left_out(self, name: str) -> bool:
        """True for a stored tensor of a second pass with `pass2="absent"`."""
        prefix, _, attribute = name.rpartition(".")
        return attribute.endswith("_2") and self.quantization_config.pass2_of(prefix) == "absent"

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """True if `param_name` is a dense tensor that becomes codes."""
        if self.pre_quantized:
            return False
        module, name = get_module_from_name(model, param_name)
        return isinstance(module, QuantizedModule) and name in module.weights()

    def get_quantize_ops(self) -> Quantize:
        """The operation of one dense tensor."""
        return Quantize(
            self.quantization_config,
            self.param_needs_quantization,
            self._leave_dense,
            self.progress,
            self.errors,
        )

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes per element once loaded: `device_map="auto"` plans with it."""
        if self.param_needs_quantization(model, param_name):
            module: VQLinear | VQExperts = get_module_from_name(model, param_name)[0]
            return bytes_per_weight(module)
        return float(param.element_size())

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Say how stored tensors are split."""
        split_plan(model, plan)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.progress.close()
        patches.restore(model, "mark_tied_weights_as_initialized")
        if not self.pre_quantized:
            settle(model)
        config = self.quantization_config
        if self._checkpoint is not None:
            specs = stored_files.shared_specs(model)
            has_digests = self._check is not None and self._check.has_digests
            provenance = {} if has_digests else config.provenance or {}
            shared = self._checkpoint.shared(specs, provenance)
        else:
            shared = stored_files.packaged(vq_modules(model).values(), config.seed)
            if self.pre_quantized:
                stored_files.check_recorded(shared, config.provenance or {})
        # Only now: loading replaces every non-persistent buffer by an empty one.
        for module in vq_modules(model).values():
            module.set_shared(shared)
        if self._check is not None:  # last: missing tensors have their own message
            known = self._recorded is not None
            self._check.finish(known, self._recorded, self._is_left_out)
            self._check = None
        calibrated = None
        if self._calibration is not None:
            calibrated = {self._calibration.kind: self._calibration.run(model, self.errors)}
            shared = stored_files.packaged(vq_modules(model).values(), config.seed)
            self._calibration = None
        if self._checkpoint is None:
            self._check_values(model)
        if not self.pre_quantized and config.embeddings is not None:
            embeddings.replace_embedding(model, config.embeddings, config.seed)
        if not self.pre_quantized:
            config.provenance = record(model, self.errors, shared, calibrated)
        if config.leaves_out_second_passes():
            leave_out_pass2(model, self._cut)
        if config.pass2 is not None:
            place_pass2(model, config.pass2)
        model._weight_conversions = dense_conversions(conversions_of(model), model, reverse=True)
        self._checkpoint, self._model, self._heads = None, None, {}
        train(vq_modules(model) | embeddings.embeddings_of(model), config.trainable or ())
        set_activations_bits(model, config.activations_bits)
        fuse_inputs(model)
        embeddings.speed_up_head(model)
        warn_of_kernels(model)
        patches.begin_codes(model)
        # By this name PEFT's prepare_model_for_kbit_training turns checkpointing on, and leaves
        # the dtype of scales alone. Nobody else reads it.
        model.hqq_quantized = True
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, Any]:
        """The state dict to save, with each tensor that layers share once, and its metadata."""
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}
        state = stored_files.stored_state(model, model.state_dict())
        return state, digests.room(state)  # for what `save_pretrained` writes there

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        check_in_memory(vq_modules(model) | embeddings.embeddings_of(model))
        kind = (getattr(torch, dtype) if isinstance(dtype, str) else dtype) or model.dtype
        separate_inputs(model)
        restore_modules(model, kind)
        embeddings.restore_embedding(model, kind)
        patches.end_codes(model)
        for name in ("hqq_quantized", "_weight_conversions"):
            vars(model).pop(name, None)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """True: a quantized model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters can be trained on a quantized model."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True if what is stored trains, so that `Trainer` needs no adapter."""
        return self.quantization_config.trainable is not None

    @property
    def is_compileable(self) -> bool:
        """True if `generate` may compile the model: not while second passes are offloaded."""
        return self.quantization_config.pass2 in (None, "resident")


def register() -> None:
    """Tell Transformers and diffusers about `quant_method: "hf_vq"`, also again after a reload."""
    for table, add, kind in (
        (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.register_quantization_config, VQConfig),
        (auto.AUTO_QUANTIZER_MAPPING, auto.register_quantizer, VQHfQuantizer),
    ):
        for method in QUANT_METHODS:
            table.pop(method, None)  # of hf_vq_autoload, or of an earlier call
            add(method)(kind)
    patches.when_imported("diffusers.quantizers.auto", lambda: load(_DIFFUSERS)())
