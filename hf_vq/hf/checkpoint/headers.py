"""Reading a saved model before Transformers does: headers, shared tensors, and what is missing.

Transformers fills a parameter that a file lacks with random numbers and a warning. Codes that are
missing or of a wrong shape must stop the load instead, so every file's header is read first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...errors import VQFormatError
from ...fit.weight import fixed_tensors
from ...formats.coded_rows import tensors_of
from ...formats.spec import TensorSpec, validate_tensor
from ...nn.embedding import VQEmbedding
from ...nn.experts import VQExperts
from ...nn.linear import VQLinear, attribute_of
from ...nn.published import PublishedLinear
from ...nn.quantized_module import QuantizedModule, digest
from ...nn.replace import vq_modules
from ...nn.trained import moved
from .new_parts import is_new

CURE = "Download or copy the checkpoint again, or quantize the model again."
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor in a header: its name, dtype as safetensors writes it, shape, and file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * DTYPES.get(self.dtype, torch.uint8).itemsize

    @property
    def is_float(self) -> bool:
        """True for floating-point dtypes."""
        return self.dtype.startswith(("F", "BF"))

    def placeholder(self) -> Tensor:
        """A tensor of this shape and dtype without data.

        Raises:
            VQFormatError: a dtype that hf_vq does not know.
        """
        if self.dtype not in DTYPES:
            raise VQFormatError(f"{self.file}: {self.name} has the unknown dtype {self.dtype}.")
        return torch.empty(self.shape, dtype=DTYPES[self.dtype], device="meta")


def read_header(file: str) -> list[Entry]:
    """The tensors of a safetensors file.

    Raises:
        VQFormatError: it is missing, truncated or not a safetensors file.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            found = [
                Entry(name, part.get_dtype(), tuple(part.get_shape()), file)
                for name, part in parts.items()
            ]
    except (SafetensorError, OSError) as error:
        raise VQFormatError(f"{file} is truncated or corrupted ({error}). {CURE}") from error
    for entry in found:  # an empty tensor may have sizes that no tensor of torch can have
        if math.prod(max(size, 1) for size in entry.shape) >= 1 << 63:
            raise VQFormatError(f"{file}: {entry.name} has the shape {entry.shape}. {CURE}")
    return found


class Checkpoint:
    """The tensors of a list of safetensors files, by name.

    Raises:
        VQFormatError: a file is missing, truncated or not a safetensors file.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self.files = list(files)
        self.entries = {entry.name: entry for file in self.files for entry in read_header(file)}

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        with safe_open(self.entries[name].file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def find(self, suffix: str) -> str | None:
        """The name that is `suffix`, or ends with it after a dot (a prefix may have been added)."""
        return next(
            (name for name in self.entries if name == suffix or name.endswith(f".{suffix}")), None
        )

    def shared(
        self, needed: Mapping[str, TensorSpec], provenance: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """The tensors that layers share, by name.

        Raises:
            VQFormatError: one is missing, wrong, or not the one that config.json records.
        """
        found = {}
        for name, spec in needed.items():
            stored = self.find(name)
            if stored is None:
                where = ", ".join(self.files)
                raise VQFormatError(f"{where} lacks {name}, which every layer needs. {CURE}")
            where = self.entries[stored].file
            found[name] = self.read(stored)
            validate_tensor(name, found[name], spec, where)
            check_recorded({name: found[name]}, provenance, where)
        return found


def check_recorded(
    shared: Mapping[str, Tensor], provenance: Mapping[str, Any], where: str = "hf_vq"
) -> None:
    """Compare shared tensors with the hashes in config.json.

    Raises:
        VQFormatError: one differs.
    """
    recorded = provenance.get("codebooks", {})
    for name, tensor in shared.items():
        if name in recorded and digest(tensor) != recorded[name]:
            raise VQFormatError(
                f"{where}: {name} is not the one that config.json records "
                f"({recorded[name]}). {CURE}"
            )


def shared_specs(model: nn.Module) -> dict[str, TensorSpec]:
    """Name and spec of the tensors that the VQ modules of a model share."""
    return {
        spec.shared_name: spec
        for module in vq_modules(model).values()
        for spec in module.specs.values()
        if spec.shared_name is not None
    }


def coded_layers(model: nn.Module, checkpoint: Checkpoint) -> set[str]:
    """Names of the modules of a dense model whose codes a checkpoint holds."""
    own = set(model.state_dict(keep_vars=True))  # may begin with vq_, too
    return {
        name.rpartition(".")[0]
        for name in checkpoint.entries
        if name.rpartition(".")[2].startswith("vq_") and name not in own
    }


def stored_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors to write for a model with this state dict: stored dtypes, and each tensor that
    layers share once."""
    found = dict(state)
    for prefix, module in vq_modules(model).items():
        for attribute, spec in module.specs.items():
            if spec.shared_name is None:
                name = f"{prefix}.{attribute}"
                change = found.pop(f"{prefix}.{module.deltas.get(attribute)}", None)
                if change is not None:
                    found[name] = moved(found[name], change, attribute).detach()
                found[name] = found[name].to(spec.dtype)
            else:
                found[spec.shared_name] = module.stored(attribute).cpu()
    return found


def packaged(
    modules: Iterable[VQLinear | VQExperts], seed: int, known: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The shared tensors that modules need, from the package instead of a checkpoint, and those
    that are known."""
    found = dict(known or {})
    for module in modules:
        for part in module.projections.values() if isinstance(module, VQExperts) else [module]:
            names = {key: module.specs[name].shared_name for key, name in part.attributes.items()}
            if new := {key: name for key, name in names.items() if name and name not in found}:
                fixed = fixed_tensors(module.scheme, part.in_features, seed)
                found.update({name: fixed[key] for key, name in new.items()})
    return found


def verify(
    model: nn.Module,
    checkpoint: Checkpoint,
    rename: Callable[[str], str],
    left_out: Callable[[str], bool] = lambda name: False,
) -> None:
    """Check that every stored tensor of every VQ module is in the checkpoint and right, no more.

    Args:
        rename: name in a file -> name in the model, as Transformers will rename it.
        left_out: whether a tensor, by its name in the model, is left in the file on purpose.

    Raises:
        VQFormatError: names the first tensor that is missing, wrong, not finite or not expected.
    """
    available = {rename(name): name for name in checkpoint.entries}
    modules = dict(model.named_modules())
    for name, stored in available.items():
        if name.rpartition(".")[2].startswith("vq_") and not left_out(name):
            _check_expected(model, modules, name, checkpoint.entries[stored])
    for prefix, module in vq_modules(model).items():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}"
            if name not in available:
                raise missing(name, ", ".join(checkpoint.files))
            stored = available[name]
            entry = checkpoint.entries[stored]
            tensor = entry.placeholder()
            # A bias may be of any dtype.
            spec = module.specs.get(attribute) or TensorSpec(tuple(parameter.shape), tensor.dtype)
            validate_tensor(stored, tensor, spec, entry.file)
            if attribute in module.specs and (spec.dtype.is_floating_point or spec.largest):
                validate_tensor(stored, checkpoint.read(stored), spec, entry.file)
            if isinstance(module, PublishedLinear):
                for suffix in module.layout.suffixes:
                    if attribute_of(module.layout.key(suffix)) == attribute:
                        module.layout.inspect(suffix, checkpoint.read(stored), stored)
        here = {a: available[f"{prefix}.{a}"] for a, _ in module.named_parameters(recurse=False)}
        module.check_codes(partial(_read, checkpoint, here), prefix)
    for prefix, module in modules.items():
        if isinstance(module, VQEmbedding):
            _check_rows(checkpoint, module, prefix, available)


def _check_rows(
    checkpoint: Checkpoint, module: VQEmbedding, prefix: str, available: Mapping[str, str]
) -> None:
    """Raise if a tensor of an embedding of codes is wrong or not finite."""
    for key in module.keys:
        if (stored := available.get(f"{prefix}.{key}")) is None:
            continue  # `check_loaded` says so
        entry, bytes_ = checkpoint.entries[stored], getattr(module, key)
        spec = TensorSpec(tuple(bytes_.shape), torch.uint8)
        validate_tensor(stored, entry.placeholder(), spec, entry.file)
        _check_finite({key: checkpoint.read(stored)}, stored, entry.file)


def _check_finite(rows: Mapping[str, Tensor], name: str, where: str) -> None:
    """Raise if tensors of rows of codes, by key, are not finite."""
    for tensor in tensors_of(rows).values():
        if tensor.is_floating_point():
            validate_tensor(name, tensor, TensorSpec(tuple(tensor.shape), tensor.dtype), where)


def _read(checkpoint: Checkpoint, names: Mapping[str, str], attribute: str) -> Tensor:
    return checkpoint.read(names[attribute])


def _check_expected(
    model: nn.Module, modules: Mapping[str, nn.Module], name: str, entry: Entry
) -> None:
    """Raise if a stored tensor belongs to a module that would not read it.

    The codes would then be read in another way than they were written. Tensors of modules that
    this class of model does not have are skipped.
    """
    prefix, _, attribute = name.rpartition(".")
    base = f"{getattr(model, 'base_model_prefix', '')}."
    for owner in (prefix, prefix.removeprefix(base), base + prefix):
        if owner not in modules:
            continue
        module = modules[owner]
        if attribute in module._parameters:
            return
        if attribute in module._buffers and not isinstance(module, QuantizedModule):
            return  # a name of the model's own code
        raise VQFormatError(
            f"{entry.file} holds {entry.name}, which the scheme and the skipped modules of its "
            f"config.json leave no use for: it was edited or belongs to another file. {CURE}"
        )


def missing(name: str, where: str) -> VQFormatError:
    """The error of a stored tensor that is nowhere."""
    return VQFormatError(
        f"{where} lacks {name}: the layer would be filled with random numbers. {CURE}"
    )


def check_loaded(
    model: nn.Module, unloaded: Iterable[str], pre_quantized: bool, dense: Collection[str] = ()
) -> None:
    """Stop when the loader found no tensor for a parameter of a VQ module.

    Args:
        dense: names of weights that become codes when all is loaded.

    Raises:
        VQFormatError: names the parameter.
    """
    modules: dict[str, nn.Module] = dict(vq_modules(model))
    modules |= {n: m for n, m in model.named_modules() if isinstance(m, VQEmbedding)}
    for name in sorted(unloaded):
        prefix, _, attribute = name.rpartition(".")
        module = modules.get(prefix)
        if name not in dense and (module is None or attribute not in module._parameters):
            continue
        if pre_quantized:
            raise missing(name, "the checkpoint")
        raise VQFormatError(
            f"the checkpoint lacks {prefix}, so there is nothing to quantize. To start from random "
            f"weights there, add it to VQConfig(modules_to_not_convert=[{prefix!r}])."
        )


def check_dense(model: Any, absent: Iterable[str], where: str) -> None:
    """Raise if the files lack a dense parameter of a quantized model: embeddings, norms, a head.

    Skipped are those that `absent_dense` skips, and parts that are new (`new_parts.is_new`).

    Args:
        model: the model that Transformers loads.
        absent: names of the parameters that were not found.
        where: the files, for messages.

    Raises:
        VQFormatError: names the parameter.
    """
    for name in absent_dense(model, absent):
        if not is_new(model, name):
            raise missing(name, where)


def absent_dense(model: Any, absent: Iterable[str]) -> list[str]:
    """Names of parameters that are in no file, of those of `absent`: not those that are tied to one
    that was found, nor those that the model's class allows to be missing."""
    absent, parameters = set(absent), dict(model.named_parameters(remove_duplicate=False))
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    ties: dict[str, set[str]] = {}
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        ties.setdefault(source, {source}).add(target)
    tied = {name for group in ties.values() if group - absent for name in group}
    return [
        name
        for name in sorted(absent - tied)
        if name in parameters and not any(pattern.search(name) for pattern in ignored)
    ]


def check_values(model: nn.Module, where: str = "") -> None:
    """Check the stored float tensors of a loaded model that are in memory.

    Args:
        model: or a module of it.
        where: name of the module in its model, for errors.

    Raises:
        VQFormatError: names the first that is wrong or not finite.
    """
    for name, module in vq_modules(model).items():
        prefix = name if not where else f"{where}.{name}" if name else where
        for attribute, spec in module.specs.items():
            tensor: Tensor = getattr(module, attribute)
            validate_tensor(attribute, tensor, spec, prefix)
        module.check_codes(partial(getattr, module), prefix)
    for name, embedding in model.named_modules():
        if isinstance(embedding, VQEmbedding):
            for key in embedding.keys:
                _check_finite({key: getattr(embedding, key).detach()}, f"{name}.{key}", where)


def storage(model: nn.Module) -> tuple[int, int]:
    """Bits stored for the weights of VQ modules, shared tensors counted once, and the weights."""
    modules: list[VQLinear | VQExperts] = list(vq_modules(model).values())
    bits = sum(module.stored_bits() for module in modules) + 8 * shared_bytes(model)
    return bits, sum(module.weight_count() for module in modules)


def shared_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that the VQ modules of a model share."""
    specs = shared_specs(model).values()
    return sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs)
