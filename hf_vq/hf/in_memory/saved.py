"""Files of quantized modules that are no models of Transformers.

    FOLDER/model.safetensors   the state dict, each tensor that layers share once, with digests
    FOLDER/config.json         {"quantization_config": the module's VQConfig}

The code of the module is not stored: `load_quantized` fills a module that the caller has built.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ... import env
from ...errors import VQConfigError
from ...formats import digests
from ...formats.catalog import LinearScheme
from ...nn.replace import candidates, left_out, replace_modules, shared_names, vq_modules
from ..checkpoint import by_layer
from ..checkpoint import headers as stored_files
from ..checkpoint.atomic_dir import check_whole, replacing
from ..checkpoint.integrity import check, record, take_record
from ..config import QUANT_METHODS, VQConfig, quantization_of
from .encode import share
from .quantize import is_of_diffusers, prepare

Module = TypeVar("Module", bound=nn.Module)

_EXTRA = "_extra_state"  # of a module that has get_extra_state


def save_quantized(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Save a module that `quantize_model` quantized, all files or none.

    Args:
        model: of neither Transformers nor diffusers; those have `save_pretrained`.
        folder: its other files stay.

    Raises:
        VQConfigError: the module is not quantized, is offloaded, or has its own way to be saved.
    """
    if _has_its_own_files(model):
        raise VQConfigError(f"{type(model).__name__} is saved by model.save_pretrained(folder).")
    if not vq_modules(model):
        raise VQConfigError(f"{type(model).__name__} is not quantized: quantize_model comes first.")
    state = _state(model)
    quantization = quantization_of(model)
    with replacing(Path(folder)) as work:
        config = {"quantization_config": quantization.to_dict()}
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (work / CONFIG_NAME).write_text(text, encoding="utf-8")
        save_file(state, work / SAFE_WEIGHTS_NAME, metadata=digests.room(state))
        record(work, provenance=quantization.provenance or {})


def load_quantized(model: Module, folder: str | os.PathLike[str]) -> Module:
    """Load what `save_quantized` wrote into a module of the same code, in place.

    Args:
        model: as it was before it was quantized; its weights do not matter, and may be on the meta
            device. Tensors go to the device where the module has them, to the CPU from there.

    Returns:
        The module itself, in evaluation mode.

    Raises:
        VQConfigError: `folder` holds no such module, `model` is quantized already, or is not the
            module that was saved.
        VQFormatError: a file is damaged.
    """
    source = Path(folder)
    check_whole(source)
    config = _read_config(source)
    if _has_its_own_files(model):
        raise VQConfigError(f"{type(model).__name__} is loaded by from_pretrained(folder).")
    if vq_modules(model):
        raise VQConfigError(f"{type(model).__name__} is quantized already: build it anew.")
    recorded = take_record(config)
    config.provenance = by_layer.joined(config.provenance or {}, source / by_layer.FILE)
    file = str(source / SAFE_WEIGHTS_NAME)
    checkpoint = stored_files.Checkpoint([file])
    running = check(config, [file]) if env.VERIFY.get() else None
    schemes = _schemes(model, checkpoint, config)
    state = model.state_dict(keep_vars=True)
    _compare(model, state, schemes, checkpoint, config.seed)
    with _dense_after_an_error(model, schemes):
        replace_modules(model, schemes.get, seed=config.seed)
        stored_files.verify(model, checkpoint, lambda name: name)
        shared = checkpoint.shared(stored_files.shared_specs(model), config.provenance or {})
        if running is not None:
            running.finish(recorded is not None, recorded)
        _fill(model, state, checkpoint)
    share(model, shared)
    prepare(model, config)
    return model.eval()


def _has_its_own_files(model: nn.Module) -> bool:
    """True if `save_pretrained` of a model stores codes."""
    return isinstance(model, PreTrainedModel) or is_of_diffusers(model)


@contextmanager
def _dense_after_an_error(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Put layers back as they are now, if what is done meanwhile fails."""
    layers = {name: model.get_submodule(name) for name in names}
    parameters = {name: dict(layer._parameters) for name, layer in layers.items()}
    try:
        yield
    except BaseException:
        for name, layer in layers.items():
            layer._parameters.update(parameters[name])  # experts give theirs up
            model.set_submodule(name, layer)
        raise


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors to write by name: of several that are one, the first; shared ones once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise VQConfigError(f"{name} is no tensor, and safetensors holds nothing else.")
        if value.is_meta:
            raise VQConfigError(f"{name} is not in memory: load the module whole, and save it.")
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value.detach().cpu().contiguous()
    found = stored_files.stored_state(model, found)
    storages: set[int] = set()
    for name, tensor in found.items():  # views of one buffer: safetensors writes no overlaps
        if tensor.untyped_storage().data_ptr() in storages:
            found[name] = tensor.clone()
        storages.add(found[name].untyped_storage().data_ptr())
    return found


def _read_config(folder: Path) -> VQConfig:
    try:
        found = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        quantization = found["quantization_config"]
        if quantization["quant_method"] not in QUANT_METHODS:
            raise KeyError("quant_method")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise VQConfigError(
            f"{folder} holds nothing that hf_vq.save_quantized wrote: its {CONFIG_NAME} has no "
            "quantization_config of hf_vq."
        ) from None
    config: VQConfig = VQConfig.from_dict(quantization)
    return config


def _schemes(
    model: nn.Module, checkpoint: stored_files.Checkpoint, config: VQConfig
) -> dict[str, LinearScheme]:
    """Schemes of the layers whose codes are in the file, by name."""
    owners = stored_files.coded_layers(model, checkpoint)
    layers = {name: layer for name, layer in candidates(model) if name in owners}
    for name, layer in layers.items():
        if (what := left_out(layer)) is not None:
            raise VQConfigError(f"{name} has {what}, which codes in its place would lose.")
    return {name: config.stored_scheme(name) for name in layers}


def _compare(
    model: nn.Module,
    state: dict[str, Any],
    schemes: dict[str, LinearScheme],
    checkpoint: stored_files.Checkpoint,
    seed: int,
) -> None:
    """Raise if the file's dense tensors are not those of the module, or it cannot be filled."""
    shared = shared_names(model, schemes, seed)

    def coded(name: str) -> bool:
        return name.rpartition(".")[0] in schemes or name in shared

    entries = {name for name in checkpoint.entries if not coded(name)}
    here = {name: id(tensor) for name, tensor in state.items() if not coded(name)}
    stored = {here[name] for name in entries & set(here)}
    lost = sorted(name for name, tensor in here.items() if tensor not in stored)
    both, entry_of = sorted(entries & set(here)), checkpoint.entries
    other = [
        name
        for name in both
        if not name.endswith(_EXTRA) and entry_of[name].shape != state[name].shape
    ]
    strange = sorted(entries - set(here))
    found = {"has no": strange, "has, and the file lacks,": lost, "has another size of": other}
    for what, names in found.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise VQConfigError(
                f"{checkpoint.files[0]} is not of this {type(model).__name__}: the module {what} "
                f"{names[0]}{more}. Build it as it was before it was quantized."
            )
    for name, module in model.named_modules():
        kept = module._non_persistent_buffers_set
        meta = [key for key in kept if (b := module._buffers[key]) is not None and b.is_meta]
        if meta:
            buffer = f"{name}.{meta[0]}".lstrip(".")
            raise VQConfigError(
                f"the buffer {buffer} is not stored, and is on the meta device: build the module "
                "on a real one."
            )


def _fill(model: nn.Module, before: dict[str, Any], checkpoint: stored_files.Checkpoint) -> None:
    """Put the file's tensors into the module; one that stands for several goes to all of them."""
    homes: dict[str, torch.device] = {}
    for name, tensor in before.items():
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            homes[name] = tensor.device
            homes.setdefault(name.rpartition(".")[0], tensor.device)  # of stored tensors
    usual = next(iter(homes.values()), torch.device("cpu"))
    groups: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    for names in groups.values():
        stored = next((name for name in names if name in checkpoint.entries), None)
        if stored is None:
            raise stored_files.missing(names[0], checkpoint.files[0])
        home = homes.get(names[0], homes.get(names[0].rpartition(".")[0], usual))
        tensor = checkpoint.read(stored).to(home)
        old = state[names[0]]
        if isinstance(old, nn.Parameter):
            given = before.get(names[0], old)  # a bias may have been frozen
            needs = old.requires_grad and given.requires_grad
            tensor = nn.Parameter(tensor, requires_grad=needs)
        for name in names:
            prefix, _, attribute = name.rpartition(".")
            owner = model.get_submodule(prefix)
            if attribute == _EXTRA:
                owner.set_extra_state(tensor)
                continue
            (owner._parameters if attribute in owner._parameters else owner._buffers)[attribute] = (
                tensor
            )
