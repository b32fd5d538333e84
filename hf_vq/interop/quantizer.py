"""Published checkpoints (AQLM and others) through `from_pretrained`: `hf_vq.adopt`.

hf_vq's quantizers replace those of Transformers for these methods. The layers become `VQLinear`,
the model's config a `VQConfig`, and `save_pretrained` writes hf_vq's format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import patches
from ..errors import VQConfigError, VQFormatError
from ..formats.published import LAYOUTS
from ..hf.checkpoint import headers as stored_files
from ..hf.checkpoint.provenance import origin
from ..hf.config import VQConfig
from ..hf.quantize_op import Deferred
from ..hf.quantizer import VQHfQuantizer
from ..hf.tensor_parallel import ranks
from ..nn.linear import VQLinear
from ..nn.published import PublishedLinear
from ..nn.replace import linear_class, vq_modules
from .plan import Plan, PublishedLayer, build, make_plan, neither

_SOURCE = "published tensor of hf_vq"  # no tensor is called so
_CONFIGS = "transformers.quantizers.auto:AUTO_QUANTIZATION_CONFIG_MAPPING"
_QUANTIZERS = "transformers.quantizers.auto:AUTO_QUANTIZER_MAPPING"


def adopt(*methods: str) -> None:
    """Load checkpoints of other methods with hf_vq: `hf_vq.adopt("aqlm")`, then `from_pretrained`.

    Transformers' quantizers of these methods are replaced in this process, until `release`.

    Args:
        methods: any of `hf_vq.formats.published.LAYOUTS` that a config.json names; none means all.

    Raises:
        VQConfigError: an unknown method.
    """
    for method in _known(methods):
        patches.replace_entry(_CONFIGS, method, PublishedConfig)
        patches.replace_entry(_QUANTIZERS, method, PublishedQuantizer)


def release(*methods: str) -> None:
    """Give methods back to the quantizers that `adopt` replaced; none means all.

    Raises:
        VQConfigError: an unknown method.
    """
    for method in _known(methods):
        patches.restore_entry(_CONFIGS, method)
        patches.restore_entry(_QUANTIZERS, method)


def _known(methods: tuple[str, ...]) -> tuple[str, ...]:
    known = tuple(name for name, layout in LAYOUTS.items() if layout.in_config)
    for method in methods:
        if method not in known:
            cure = " Run `hf-vq convert`." if method in LAYOUTS else ""
            raise VQConfigError(
                f"{method!r} is not a method that from_pretrained can know: {', '.join(known)}."
                f"{cure}"
            )
    return methods or known


class PublishedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a published checkpoint, with its fields unchanged."""

    def __init__(self, **fields: Any) -> None:
        self.quant_method = fields["quant_method"]
        self.__dict__.update(fields)


class PublishedQuantizer(VQHfQuantizer):
    """Loads a published checkpoint into the modules of hf_vq."""

    def __init__(self, quantization_config: PublishedConfig, **kwargs: Any) -> None:
        self.published = quantization_config.to_dict()
        method = self.published["quant_method"]
        if not kwargs.get("pre_quantized", True):
            raise VQConfigError(
                f"hf_vq reads {method} checkpoints, and does not make them. To quantize a model, "
                'pass quantization_config=VQConfig("vq-4").'
            )
        super().__init__(VQConfig(provenance={}), **kwargs)
        self._plan: Plan | None = None

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        method = self.published["quant_method"]
        if ranks(model) > 1:
            raise VQConfigError(
                f"a checkpoint of {method} cannot be split over devices: run `hf-vq convert` "
                "first, and load the result."
            )
        files = [file for file in checkpoint_files or [] if file.endswith(".safetensors")]
        if not files:
            raise VQFormatError(
                f"hf_vq reads {method} from safetensors files, and there is none: run `hf-vq "
                "convert` first, which reads QServe's files too, or save it as safetensors."
            )
        plan = make_plan(model, stored_files.Checkpoint(files), self.published)
        self.quantization_config = config_of(plan, self.published, model)
        build(model, plan, module_of)
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        ignored |= {rf"\.{re.escape(suffix)}$" for suffix in LAYOUTS[method].suffixes}
        model._keys_to_ignore_on_load_unexpected = ignored  # what a scheme has no use for
        for name in plan.layers:
            model.get_submodule(name)._is_hf_initialized = True
        self._plan = plan
        self._watch_missing(model)
        self._model = model
        return model

    def _unloaded(self, model: Any, unloaded: set[str]) -> None:
        super()._unloaded(model, unloaded)
        assert self._plan is not None
        kept = {f"{name}.weight" for name in self._plan.dense}
        new = {f"{name}.weight" for name in self._default_skips(model)}
        for name in sorted(unloaded & kept - new):
            raise neither(name.rpartition(".")[0], self.published["quant_method"])

    def _check_values(self, model: Any) -> None:
        """Check codes against the tensors that decide their range; each tensor by itself was
        checked when it was made, under its published name."""
        for name, module in vq_modules(model).items():
            module.check_codes(partial(getattr, module), name)

    def update_weight_conversions(self, weight_conversions: Any, *args: Any) -> Any:
        """Put the conversion of published tensors before the model's conversions."""
        if self._plan is None:
            return weight_conversions
        return [Translation(self._plan), *weight_conversions]

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Published tensors are read in their own dtype."""
        if isinstance(converter, Translation):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        plan, self._plan = self._plan, None
        assert plan is not None
        loaded = super()._process_model_after_weight_loading(model, **kwargs)
        bits, weights = stored_files.storage(model)
        provenance = self.quantization_config.provenance
        assert provenance is not None
        provenance["bits_per_weight"] = round(bits / weights, 4)
        return loaded


def config_of(plan: Plan, published: dict[str, Any], model: Any) -> VQConfig:
    """Make the `VQConfig` of a published checkpoint."""
    schemes = {name: layer.layout.stored_as for name, layer in plan.layers.items()}
    counts = Counter(scheme for scheme in schemes.values() if scheme is not None)
    usual = counts.most_common(1)[0][0] if counts else None
    others = {n: s.spec() for n, s in schemes.items() if s is not None and s != usual}
    layouts = {
        name: layer.layout.to_dict()
        for name, layer in plan.layers.items()
        if layer.layout.stored_as is None
    }
    return VQConfig(
        usual,
        layers=others or None,
        modules_to_not_convert=plan.dense,
        layouts=layouts,
        provenance=origin(model, published),
    )


def module_of(layer: PublishedLayer, source: Any) -> VQLinear:
    """The empty module of a published layer that replaces `source`."""
    scheme, bias, dtype = layer.layout.stored_as, source.bias is not None, source.weight.dtype
    about: dict[str, Any] = {"dtype": dtype, "where": layer.name, "source": type(source)}
    if scheme is None:
        return PublishedLinear(layer.layout, layer.size, bias, **about)
    out_features, in_features = layer.size
    return linear_class(scheme)(in_features, out_features, bias, scheme, **about)


class Translation(WeightConverter):
    """Conversion of each published tensor to hf_vq's format while it is loaded."""

    __slots__ = ("moves",)

    def __init__(self, plan: Plan) -> None:
        # The loader adds the prefix of a base model, or takes it away, only afterwards.
        self.moves = {
            name: move
            for layer in plan.layers.values()
            for source, move in layer.moves().items()
            for name in plan.spellings(source)
        }
        super().__init__([_SOURCE], [_SOURCE], [Translate(dict(self.moves.values()))])

    def __deepcopy__(self, memo: Any) -> Translation:
        # The loader copies a conversion for every tensor.
        copied = object.__new__(Translation)
        for slot in ("moves", "operations"):
            setattr(copied, slot, getattr(self, slot))
        WeightConverter.__init__(copied, [_SOURCE], [_SOURCE], self.operations)
        return copied

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The name in the model of a published tensor."""
        if source_key not in self.moves:
            return source_key, None
        self._was_used = True  # type: ignore[misc]
        return self.moves[source_key][0], _SOURCE


class Translate(ConversionOps):
    """The operation of a `Translation`.

    Args:
        makers: function that makes the tensor, by name in the model.
    """

    def __init__(self, makers: dict[str, Any]) -> None:
        self.makers = makers

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", **unused: Any
    ) -> dict[str, Tensor]:
        """Make the tensor called `full_layer_name`."""

        def make() -> Iterator[tuple[str, Tensor]]:
            (value,) = input_dict.values()
            input_dict.clear()
            tensor = value[0] if isinstance(value, list) else value
            del value
            made = self.makers[full_layer_name](tensor)
            yield full_layer_name, nn.Parameter(made, requires_grad=False)

        return Deferred(make)
