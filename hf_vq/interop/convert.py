"""`hf-vq convert`: convert a published checkpoint to hf_vq's format, file by file.

    IN/model-00002-of-00003.safetensors  -->  OUT.unfinished/model-00002-of-00003.safetensors
    config.json, tokenizer, ...          -->  config.json last; then OUT.unfinished becomes OUT

A file of the output holds the layers whose codes are in the input file of the same number. After an
interruption, the same command continues with the next file. The verification reads every written
file and decodes it: every weight must equal that of the published formula, bit for bit.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from .. import ops
from ..errors import VQConfigError, VQFormatError
from ..fit import fit_weight
from ..fit.weight import fixed_tensors
from ..formats import digests
from ..formats.hidden import hidden_file, lock, remove_leftovers
from ..formats.published import LAYOUTS, TurboquantLayout
from ..formats.published.layout import CURE
from ..formats.qoq import QoQScheme
from ..formats.spec import is_finite
from ..formats.tensors import tensor_specs
from ..hf.calibration_options import AUTO, leave_out_activations
from ..hf.checkpoint.atomic_dir import replacing
from ..hf.checkpoint.headers import Checkpoint
from ..hf.checkpoint.integrity import record
from ..hf.checkpoint.sizes import check_layers
from ..hf.config import VQConfig
from ..nn.experts import holds_experts
from ..nn.linear import attribute_of
from ..nn.replace import convertible
from ..ops.reference import codes as reference
from ..progress import Progress
from ..transforms import rotate
from . import turboquant
from .pickled import PickledCheckpoint, pickled_files, published_config
from .plan import Plan, PublishedLayer, make_plan, neither
from .quantizer import config_of
from .source import INDEX, copy_others, read_json, source_folder, weight_files

_STATE = "convert.json"
_CONFIGS = ("config.json", turboquant.CONFIG)


def convert(source: str, out: str, *, requantize: VQConfig | None = None) -> dict[str, Any]:
    """Convert a published checkpoint, and verify the result.

    Args:
        source: folder of the checkpoint, or its name on the Hub. Files are safetensors, or
            written by QServe's converter with `torch.save`.
        out: folder to write; must not exist.
        requantize: config to quantize the decoded weights with, instead of keeping their codes;
            only its scheme, `seed` and `search` may be set.

    Returns:
        Numbers of converted `layers` and compared `weights`, and `bits_per_weight`.

    Raises:
        VQConfigError: hf_vq does not read the checkpoint's method, `out` is in use, a file of
            `source` is a link out of the folder, or `requantize` sets other options.
        VQFormatError: a tensor is missing or wrong, or a written weight differs from the source.
    """
    if requantize is not None:
        _check_requantize(requantize)
    folder = source_folder(source)
    config = read_json(folder / "config.json")
    if "quip_params" in config:
        raise _unread(source, "QuIP#, which hf_vq does not read")
    pickled = pickled_files(folder)
    checkpoint = PickledCheckpoint(pickled) if pickled else Checkpoint(weight_files(folder))
    if (folder / turboquant.CONFIG).is_file():
        published = {
            "quant_method": TurboquantLayout.method,
            **read_json(folder / turboquant.CONFIG),
        }
    else:
        published = published_config(config, checkpoint)
    method = published.get("quant_method")
    if not isinstance(method, str) or method not in LAYOUTS:
        if method is None:
            raise VQConfigError(
                f"{source} is not quantized, so there is nothing to convert: hf-vq quantize."
            )
        raise _unread(source, repr(method))
    model = _empty(folder)
    if method == TurboquantLayout.method:
        published = turboquant.described(published, model)
        checkpoint = turboquant.TurboquantFolder(folder, published, model)
    plan = make_plan(model, checkpoint, published)
    _check_dense(model, plan, checkpoint, method)
    ours = config_of(plan, published, model)
    if requantize is not None:
        ours = VQConfig(
            requantize.vq_scheme,
            modules_to_not_convert=plan.dense,
            seed=requantize.seed,
            search=requantize.search,
            provenance={**(ours.provenance or {}), "relative_error": {}},
        )
    work = Path(f"{os.path.abspath(out)}.unfinished")
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("ab") as lock_file:
        if lock(lock_file) is False:
            raise VQConfigError(f"another process converts to {work}. Wait for it.")
        _check_state(work, folder, checkpoint, ours)
        remove_leftovers(work, None)
        result = _Conversion(plan, checkpoint, ours, requantize, folder, work).run(config)
    with replacing(Path(out)) as new:
        (work / "lock").unlink()
        (work / _STATE).unlink()
        for file in work.iterdir():
            file.rename(new / file.name)
        # Before OUT exists: after a kill from here on, nothing is left to resume.
        shutil.rmtree(work, ignore_errors=True)
    return result


def _unread(source: str, method: str) -> VQConfigError:
    return VQConfigError(
        f"{source}: its quantization is {method}. hf-vq convert reads {', '.join(LAYOUTS)}."
    )


def _check_requantize(config: VQConfig) -> None:
    """Raise if a config sets more than a scheme, `seed` and `search`."""
    plain = VQConfig(config.vq_scheme, seed=config.seed, search=config.search, provenance={})
    options = set(vars(config)) - {"format_version", "provenance"}  # written, not requested
    if config.activations == AUTO:  # weights are read one by one, without data
        options.discard("activations")
        leave_out_activations(copy.deepcopy(config))
    if more := sorted(name for name in options if getattr(config, name) != getattr(plain, name)):
        raise VQConfigError(
            f"requantize takes a scheme, seed and search; got {', '.join(more)} too. Leave that "
            "out; or load the published model, dequantize and save it, and quantize what is saved."
        )


class _Conversion:
    """One conversion: see `convert`."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        ours: VQConfig,
        requantize: VQConfig | None,
        folder: Path,
        work: Path,
    ) -> None:
        self.plan, self.checkpoint, self.ours = plan, checkpoint, ours
        self.requantize, self.folder, self.work = requantize, folder, work
        self.of_codes = {layer.sources[layer.layout.codes]: layer for layer in plan.layers.values()}
        self.coded = {source for one in plan.layers.values() for source in one.sources.values()}
        self.errors: dict[str, float] = {}
        self.shared: dict[str, Tensor] = {}

    def run(self, config: dict[str, Any]) -> dict[str, Any]:
        """Write and verify every file, then the rest."""
        progress = Progress("Converting", len(self.plan.layers))
        index: dict[str, str] = {}
        bits = weights = 0
        for number, file in enumerate(self.checkpoint.files):
            name = _file_name(number, len(self.checkpoint.files))
            target = self.work / name
            done = target.with_suffix(".json")  # of a file that was written whole and verified
            if not done.exists():
                facts = self._one(file, target, progress, last=file == self.checkpoint.files[-1])
                _write(done, facts)
            facts = json.loads(done.read_text(encoding="utf-8"))
            self.errors |= facts["errors"]
            bits, weights = bits + facts["bits"], weights + facts["weights"]
            index |= dict.fromkeys(facts["names"], name)
        progress.close()
        provenance = self.ours.provenance
        assert provenance is not None
        provenance["bits_per_weight"] = round(bits / weights, 4)
        if self.requantize is not None:
            provenance["relative_error"] = self.errors
        count = len(self.checkpoint.files)
        for number in range(count):
            (self.work / _file_name(number, count)).with_suffix(".json").unlink()
        self._write_rest(config, index)
        return {
            "layers": len(self.plan.layers),
            "weights": weights,
            "bits_per_weight": bits / weights,
            "relative_error": dict(self.errors),
        }

    def _one(self, file: str, target: Path, progress: Progress, last: bool) -> dict[str, Any]:
        """Write one file of the output, read it again and compare."""
        tensors: dict[str, Tensor] = {}
        layers: dict[str, PublishedLayer] = {}
        bits = weights = 0
        for name, entry in self.checkpoint.entries.items():
            if entry.file != file:
                continue
            if name in self.of_codes:
                layer = self.of_codes[name]
                progress.start(layer.name)
                made = self._layer(layer)
                layers[layer.name] = layer
                bits += sum(8 * tensor.nbytes for tensor in made.values())
                weights += layer.size[0] * layer.size[1]
                tensors |= made
                progress.done()
            elif name not in self.coded:
                tensors[self._kept(name)] = kept = self.checkpoint.read(name)
                if not is_finite(kept):
                    raise VQFormatError(f"{file}: {name} holds NaN or infinity. {CURE}")
        if last and self.requantize is not None:
            tensors |= self._fixed()
        names = list(tensors)
        with hidden_file(target) as partial:
            save_file(tensors, partial, {"format": "pt", **digests.room(tensors)})
            del tensors
            written = Checkpoint([str(partial)])
            for layer in layers.values():
                self._verify(layer, written)
        return {"names": names, "bits": bits, "weights": weights, "errors": dict(self.errors)}

    def _kept(self, name: str) -> str:
        """The name of a tensor that is copied: a bias of a coded layer follows that layer."""
        renamed = self.plan.rename(name)
        owner = renamed.rpartition(".")[0]
        return renamed if owner in self.plan.layers else name

    def _layer(self, layer: PublishedLayer) -> dict[str, Tensor]:
        if self.requantize is None:
            return {
                target: make(self.checkpoint.read(source))
                for source, (target, make) in layer.moves().items()
            }
        for source, (_, make) in layer.moves().items():
            make(self.checkpoint.read(source))  # raises where a tensor is damaged
        dense, rotated = self._decoded(layer), layer.layout.rotation()
        if rotated is not None:
            dense = rotate(dense, rotated, inverse=True)
        fitted = fit_weight(
            dense, self.requantize.vq_scheme, seed=self.requantize.seed, where=layer.name,
            search=self.requantize.search,
        )  # fmt: skip
        self.errors[layer.name] = float(f"{fitted.relative_error:.4g}")
        specs = tensor_specs(self.requantize.vq_scheme, *layer.size, seed=self.requantize.seed)
        made = {}
        for key, tensor in fitted.tensors.items():
            lead = key == "codes" and tensor.shape == layer.size
            if specs[key].shared_name is None:
                stored = tensor[None] if lead else tensor
                made[f"{layer.name}.{attribute_of(key)}"] = stored.contiguous()
        return made

    def _fixed(self) -> dict[str, Tensor]:
        """The tensors that all layers of the new scheme share."""
        assert self.requantize is not None
        scheme, seed = self.requantize.vq_scheme, self.requantize.seed
        found: dict[str, Tensor] = {}
        for layer in self.plan.layers.values():
            specs = tensor_specs(scheme, *layer.size, seed=seed)
            names = {key: spec.shared_name for key, spec in specs.items() if spec.shared_name}
            if set(names.values()) - set(found):
                fixed = fixed_tensors(scheme, layer.size[1], seed)
                found |= {name: fixed[key] for key, name in names.items()}
        return found

    def _decoded(self, layer: PublishedLayer) -> Tensor:
        """The published formula on the tensors of the input, in the space of the rotation."""
        tensors = {suffix: self.checkpoint.read(name) for suffix, name in layer.sources.items()}
        return layer.layout.decode(tensors, *layer.size)

    def _verify(self, layer: PublishedLayer, written: Checkpoint) -> None:
        """Raise if what was written does not decode to the published weight."""
        if self.requantize is not None:
            return  # its error is in the provenance
        tensors = {
            layer.key(suffix): written.read(f"{layer.name}.{attribute_of(layer.key(suffix))}")
            for suffix in layer.kept
        }
        scheme = layer.layout.stored_as
        if scheme is None:
            published = {suffix: tensors[layer.key(suffix)] for suffix in layer.kept}
            found = layer.layout.decode(published, *layer.size)
        elif isinstance(scheme, QoQScheme) or scheme.rotation == "none":
            found = ops.decode_weight(tensors, scheme, layer.size[1], torch.float32)
        else:
            found = reference.decode_rotated(
                tensors["codes"], tensors["codebook"], tensors["scale"], scheme, layer.size[1]
            )
        if not torch.equal(found, self._decoded(layer)):
            raise VQFormatError(
                f"{layer.name}: what was written does not decode to the weight that was read. "
                "Check the disk, delete the unfinished folder and convert again; if it happens "
                "again, report it."
            )

    def _write_rest(self, config: dict[str, Any], index: Mapping[str, str]) -> None:
        """Tokenizer and other files, the index, and config.json."""
        copy_others(self.folder, self.work, but=_CONFIGS)
        if len(self.checkpoint.files) > 1:
            size = sum((self.work / name).stat().st_size for name in set(index.values()))
            found = {"metadata": {"total_size": size}, "weight_map": dict(index)}
            path = self.work / INDEX
            path.write_text(json.dumps(found, indent=2, sort_keys=True), encoding="utf-8")
        whole = {**config, "quantization_config": self.ours.to_dict()}
        (self.work / "config.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")
        record(self.work, provenance=self.ours.provenance or {})


def _file_name(number: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _empty(folder: Path) -> Any:
    """The model of a checkpoint, without weights."""
    try:
        config = AutoConfig.from_pretrained(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        check_layers(config, str(folder / "config.json"))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except VQFormatError:
        raise
    except Exception as error:  # a config.json of nonsense may raise anything there
        raise VQConfigError(
            f"{folder / 'config.json'} is not of a model that Transformers can make "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')}). hf_vq runs no "
            "code of a checkpoint; is Transformers new enough?"
        ) from error
    model.config.name_or_path = str(folder)
    return model


def _check_dense(model: Any, plan: Plan, checkpoint: Checkpoint, method: str) -> None:
    """Raise if a parameter without codes is in no file or has another shape; tied weights are
    another tensor's, and dense experts are put together by Transformers."""
    stored = {
        name: entry for key, entry in checkpoint.entries.items() for name in plan.spellings(key)
    }
    head = model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        module = model.get_submodule(owner)
        coded = name == f"{owner}.weight" and owner in plan.layers
        tied = module is head and model.config.get_text_config().tie_word_embeddings
        if coded or tied or holds_experts(module):
            continue
        if name not in stored:
            if owner in plan.dense and convertible(module):
                raise neither(owner, method)
            raise VQFormatError(f"the checkpoint lacks {name}: it would be random. {CURE}")
        entry = stored[name]
        if entry.shape != tuple(parameter.shape):
            raise VQFormatError(
                f"{entry.file}: {entry.name} has the shape {entry.shape}, where the model needs "
                f"{tuple(parameter.shape)}. {CURE}"
            )


def _check_state(work: Path, folder: Path, checkpoint: Checkpoint, ours: VQConfig) -> None:
    """Raise if a folder holds the unfinished conversion of something else."""
    facts = {Path(file).name: os.stat(file) for file in checkpoint.files}
    files = {name: [fact.st_size, fact.st_mtime_ns] for name, fact in facts.items()}
    state = {"source": str(folder.resolve()), "files": files, "config": ours.to_dict()}
    state = json.loads(json.dumps(state))
    path = work / _STATE
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != state:
            raise VQConfigError(
                f"{work} holds an unfinished conversion of something else. Delete it, or give "
                "another OUT."
            )
        return
    _write(path, state)


def _write(path: Path, found: Any) -> None:
    """Write JSON, whole or not at all."""
    with hidden_file(path) as partial:
        partial.write_text(json.dumps(found), encoding="utf-8")
