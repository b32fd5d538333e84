"""Calibration of weights: a model on text, block by block (GPTQ's order, with block-LDLQ inside).

    for every block:   its inputs on the text -> H = mean of x x^T for every layer -> codes
                       its outputs with these codes -> the inputs of the next block

So every block makes up for what the codes before it did. At any time there are second moments of
one block only, and the hidden states of the text between two blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..errors import VQCalibrationError
from ..fit import FittedWeight, fit_weight, fixed_tensors
from ..fit.qoq_calibrated import CLIPS
from ..formats.catalog import LinearScheme, linear_scheme
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from ..hf.calibration_options import OWN_WORDS, choices
from ..hf.config import VQConfig
from ..hf.quantize_op import Progress
from ..ops import decode_weight
from .blocks import Blocks, find_blocks
from .distributed import Team
from .finetune import ENTRY_STEP, TunedBlock, tune_block, tune_model
from .hessians import Listener, Site
from .ldlq_groups import Feedbacks
from .offload import weight_of
from .qoq import BY_BLOCK, Trial, fold_model
from .resume import CodedBlock, Unfinished, unfinished
from .targets import Part, parts_of, replace
from .text import context_of, find_text, sequences_of
from .weight_allocation import allocation, measure_costs

logger = logging.get_logger("hf_vq")
_CHARACTERS = 12  # of a data set for every token: more than tokenizers put into one
# The options that the result depends on.
_DECIDING = ("tokens", "context", "damping", "finetune", "move_codes", "transforms")
_SAMPLE = 1 << 14  # numbers of a weight that tell it from others


class WeightCalibration:
    """Makes codes of the layers in the blocks of a model, from text.

    Args:
        model: a decoder, whose weights may still be to come.
        schemes: of its layers that are to become codes, by name.
        config: seed, search and `calibration`.
        files: that the weights are in; the tokenizer is looked for beside them.

    Attributes:
        names: those that are in a block, so that this calibration makes their codes.

    Raises:
        VQCalibrationError: the model has no blocks; there is no such text or device.
        VQSchemeError: a layer's size does not fit the scheme; the message names the layer.
        VQConfigError: experts in an unknown layout.
    """

    def __init__(
        self,
        model: Any,
        schemes: Mapping[str, LinearScheme],
        config: VQConfig,
        files: Sequence[str] = (),
    ) -> None:
        assert config.calibration is not None
        self.files = files
        self.config, self.options = config, config.calibration
        self.text, self.facts = find_text(
            self.options["text"], self.options["tokens"] * _CHARACTERS
        )
        _check_device(self.options.get("device"))
        self.prefix = find_blocks(model, schemes)
        inside = {n: scheme for n, scheme in schemes.items() if n.startswith(f"{self.prefix}.")}
        self.names, self.schemes = set(inside), inside
        if not any(isinstance(scheme, QoQScheme) for scheme in inside.values()):
            self.options.pop("transforms", None)  # they would change other layers for nothing
        self.parts: dict[str, Part] = {}
        for name, layer in model.named_modules():
            for part in parts_of(name, layer) if name in self.names else []:
                self.parts[part.name] = part
                possible: list[LinearScheme] = [*choices(config, name)] or [inside[name]]
                for scheme in possible:
                    part.specs(scheme)

    @torch.no_grad()
    def run(self, model: Any, errors: dict[str, float]) -> dict[str, Any]:
        """Replace the layers; what config.json records of the calibration.

        Args:
            model: with its weights in memory or offloaded by accelerate.
            errors: gets the relative error of each layer's weights, by name.

        Raises:
            VQCalibrationError: the text is too short, a layer's inputs are not finite, or `resume`
                holds the calibration of something else.
            VQConfigError: the schemes to choose from do not reach `target_bits`.
        """
        facts: dict[str, Any] = {"output_error": {}, "fallbacks": {}}
        resume, self.team = self.options.get("resume"), Team()
        if self.team.size > 1 and self.options.get("finetune"):
            raise VQCalibrationError(
                f"{self.team.size} processes cannot fine-tune one model together. Start one, or "
                'leave "finetune" out.'
            )
        if self.options.get("finetune") and any(p.is_meta for p in model.parameters()):
            raise VQCalibrationError(
                "weights of the model are offloaded, and fine-tuning changes them in memory. Load "
                'the model on the CPU and give calibration a "device", or leave "finetune" out.'
            )
        with unfinished(resume, self._identity(model), self.team) as work:
            sequences = self.team.share(work.tokens(lambda: self._sequences(model)))
            if transforms := self.options.get("transforms"):
                fold_model(model, self.prefix, transforms, self.schemes, sequences, work)
            blocks = Blocks(model, self.prefix, sequences)
            if self.config.target_bits is not None:
                facts.update(self._allocate(model, blocks, sequences, work))
            for done in self._blocks(model, blocks, sequences, work):
                if done.loss:
                    facts.setdefault("finetune_loss", []).append([*map(_rounded, done.loss)])
                if done.divergence:
                    facts["finetune_divergence"] = [*map(_rounded, done.divergence)]
                for name, tensor in done.tuned.items():
                    parameter = model.get_parameter(name)
                    parameter.data = tensor.to(parameter.device)
                self._replace(model, done)
                for name, fitted in done.fitted.items():
                    errors[name] = _rounded(fitted.relative_error)
                    if not math.isnan(fitted.output_error):
                        facts["output_error"][name] = _rounded(fitted.output_error)
                facts["fallbacks"].update(done.fallbacks)
        for name, reason in facts["fallbacks"].items():
            logger.warning("hf_vq: %s %s", name, reason)
        known = dict(self.facts)
        self.options.update(text=known.pop("text"), context=sequences.shape[1])
        for private in ("device", "resume"):
            self.options.pop(private, None)
        return {**known, **facts}

    def _allocate(
        self, model: Any, blocks: Blocks, sequences: Tensor, work: Unfinished
    ) -> dict[str, Any]:
        """Choose the scheme of every layer; what config.json records of that."""

        def measure() -> dict[str, dict[str, float]]:
            parts = list(self.parts.values())
            with _enough_memory("what the layers cost"):
                return measure_costs(blocks, sequences, parts, self.config, self._device)

        costs = work.costs(measure)
        table = allocation(model, list(self.parts.values()), costs, self.config)
        self.config.use({**(self.config.layers or {}), **table})
        self.schemes = {layer: linear_scheme(spec) for layer, spec in table.items()}
        kld = sum(cost[table[layer]] for layer, cost in costs.items())
        return {"predicted_kld": _rounded(kld)}

    def _blocks(
        self, model: Any, blocks: Blocks, sequences: Tensor, work: Unfinished
    ) -> Iterator[CodedBlock]:
        """The codes of one block after the other; at the end, where the model is tuned as one."""
        tune = self.options.get("finetune")
        text, coded = list(blocks.hidden), list[CodedBlock]()
        original = list(blocks.hidden) if tune else []  # what the original makes of the text
        what = self.config.target_bits or self.config.scheme_name
        progress = Progress(f"Calibrating {what}", len(self.parts))
        taken_up = False  # the block before this one was
        try:
            for index in range(len(blocks)):
                done = work.block(index)
                if done is not None:
                    progress.skip(len(done.fitted))
                elif taken_up:
                    _take_up(blocks, original, work, index)
                taken_up = done is not None
                if done is None:
                    with _enough_memory(f"{self.prefix}.{index}"):
                        done = self._code(model, blocks, original, index, progress)
                    work.keep(index, done, [*blocks.hidden, *original])
                if tune == "model":
                    coded.append(done)
                else:
                    yield done
        finally:
            progress.close()
        if coded:
            if taken_up:
                blocks.hidden = []
                _take_up(blocks, original, work, len(blocks))
            blocks.hidden = text
            with _enough_memory("the whole model"):
                self._tune_model(blocks, coded, sequences, original, work)
            yield from coded

    def _code(
        self,
        model: Any,
        blocks: Blocks,
        original: list[Tensor],
        index: int,
        progress: Progress,
    ) -> CodedBlock:
        """Codes of one block; `blocks.hidden` becomes what it returns with them, if another block
        reads it, and `original` what it returned without."""
        parts = blocks.parts(index, self.parts.values())
        layers = {part.layer: model.get_submodule(part.layer) for part in parts}
        done = CodedBlock()
        with blocks.on(index, self._device) as device:
            listener = Listener()
            for hidden in blocks.hidden:
                with listener.listening(layers):
                    blocks.run(index, hidden, device)
            original[:] = [blocks.run(index, hidden, device) for hidden in original]
            sites = self.team.heard(listener.sites, device)
            clips = (self.options.get("transforms") or {}).get("clip", False)
            trial = Trial(blocks, index, device) if clips else None
            for number, site in enumerate(sites):
                if number % self.team.size == self.team.rank:
                    self._fit_site(site, layers, done, trial, progress)
                site.release()
            # What is sent names its device, which is of the sender: so from memory to memory.
            mine = done if self.team.size == 1 else done.on("cpu")
            for other in self.team.everyones(mine):
                done.fitted.update(other.fitted)
                done.fallbacks.update(other.fallbacks)
            for part in parts:
                module = layers[part.layer]
                if part.name not in done.fitted:
                    done.fitted[part.name] = self._fit(part, module, None)
                    done.fallbacks[part.name] = (
                        "was not reached by the text: quantized without calibration"
                    )
                self._decode(part, module, done.fitted[part.name])
            tensors, tune = None, self.options.get("finetune")
            if tune:
                tuned = self._tuned(blocks, index, done, device)
                done.loss = tune_block(blocks, index, tuned, original, device)
                # As they are stored: the next block makes up for that rounding too.
                tensors = self._tuned(blocks, index, done, device).tensors()
            if index + 1 == len(blocks):
                blocks.hidden = []
                if tune != "model":
                    original.clear()
            for row, hidden in enumerate(blocks.hidden):
                blocks.hidden[row] = blocks.run(index, hidden, device, tensors)
        return done

    def _fit_site(
        self,
        site: Site,
        layers: Mapping[str, Any],
        done: CodedBlock,
        trial: Trial | None,
        progress: Progress,
    ) -> None:
        """Add the codes of all layers that read the same."""
        feedbacks = Feedbacks(site, self.schemes, self.config.seed, self.options["damping"])
        for name in site.layers:
            progress.start(name)
            part = self.parts[name]
            layer, qoq = layers[part.layer], isinstance(self.schemes[part.layer], QoQScheme)
            if trial is not None and qoq and part.layer.endswith(BY_BLOCK):
                fit = partial(self._fit, part, layer, feedbacks)
                done.fitted[name] = trial.best(layer, fit, partial(self._decode, part, layer))
            else:
                done.fitted[name] = self._fit(part, layer, feedbacks)
            done.fallbacks.update(feedbacks.fallbacks(part))
            progress.done()

    def _tuned(
        self, blocks: Blocks, index: int, done: CodedBlock, device: torch.device
    ) -> TunedBlock:
        parts, start = blocks.parts(index, self.parts.values()), f"{self.prefix}.{index}."
        seed, block = self.config.seed, blocks.blocks[index]
        step = ENTRY_STEP if self.options.get("move_codes", True) else None
        schemes = {n: one for n, one in self.schemes.items() if isinstance(one, VQScheme)}
        return TunedBlock(block, start, done, parts, schemes, seed, device, step)

    def _tune_model(
        self,
        blocks: Blocks,
        coded: list[CodedBlock],
        sequences: Tensor,
        original: list[Tensor],
        work: Unfinished,
    ) -> None:
        with ExitStack() as stack:
            devices = [stack.enter_context(blocks.on(i, self._device)) for i in range(len(coded))]
            tuned = [
                self._tuned(blocks, index, done, devices[index]) for index, done in enumerate(coded)
            ]
            coded[-1].divergence = tune_model(blocks, tuned, sequences, original, work)

    def _fit(
        self,
        part: Part,
        module: nn.Module,
        feedbacks: Feedbacks | None,
        clips: tuple[float, ...] = CLIPS,
    ) -> FittedWeight:
        """Codes of one part; of experts, stacked."""
        config, scheme = self.config, self.schemes[part.layer]
        transforms = self.options.get("transforms") or {}
        clips = clips if transforms.get("clip", True) else CLIPS[:1]
        found = []
        for index, matrix in enumerate(part.matrices(module)):
            feedback = None if feedbacks is None else feedbacks.of(part, index)
            fitted = fit_weight(
                matrix,
                scheme,
                seed=config.seed,
                where=part.name,
                search=config.search,
                feedback=feedback,
                clips=clips,
                in_turn=transforms.get("feedback", True),
            )
            norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float32)) ** 2
            energy = 0.0 if feedback is None else feedback.energy(matrix)
            found.append((fitted, norm, energy))
        return found[0][0] if not part.fused else _stacked(found)

    def _decode(self, part: Part, module: nn.Module, fitted: FittedWeight) -> None:
        """Change the matrices of a part to what their codes decode to."""
        scheme, size = self.schemes[part.layer], part.shape[1]
        for index, matrix in enumerate(part.matrices(module)):
            fixed = fixed_tensors(scheme, size, self.config.seed, matrix.device)
            own = _taken(fitted.tensors, index) if part.fused else fitted.tensors
            here = {key: tensor.to(matrix.device) for key, tensor in own.items()}
            matrix.copy_(decode_weight({**fixed, **here}, scheme, size))

    def _replace(self, model: Any, done: CodedBlock) -> None:
        """Put VQ modules where the layers of a block were."""
        layers: dict[str, list[Part]] = {}
        for name in done.fitted:
            layers.setdefault(self.parts[name].layer, []).append(self.parts[name])
        tensors = {name: fitted.tensors for name, fitted in done.fitted.items()}
        for layer, parts in layers.items():
            replace(model, parts, tensors, self.schemes[layer], self.config.seed)

    @property
    def _device(self) -> torch.device | None:
        """Where blocks are computed, if not where they are."""
        name = self.options.get("device")
        return None if name is None else torch.device(name)

    def _sequences(self, model: Any) -> Tensor:
        tokens, context = self.options["tokens"], context_of(model, self.options["context"])
        tokenizer = None if self.text is None else self._tokenizer(model)
        context, seed = min(context, tokens), self.config.seed
        return sequences_of(model, self.text, tokenizer, tokens, context, seed, progress=True)

    def _tokenizer(self, model: Any) -> Any:
        """That of the revision and folder that the weights come from, or of the folder above."""
        from transformers import AutoTokenizer  # imports much

        source = model.config.name_or_path
        commit = getattr(model.config, "_commit_hash", None)
        options = {} if commit is None else {"revision": commit}
        inner = subfolder(source, self.files)
        for folder in dict.fromkeys([inner, ""]):
            try:
                return AutoTokenizer.from_pretrained(source, subfolder=folder, **options)
            except (OSError, ValueError) as error:
                problem = error
        what = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise VQCalibrationError(
            f"calibration needs the tokenizer of {source}: {what}. Save one beside the model, "
            f"or calibrate on what the model writes by itself: text={OWN_WORDS!r}."
        ) from problem

    def _identity(self, model: Any) -> dict[str, Any]:
        """What decides the result, without what is large: of weights some numbers."""
        digest = hashlib.sha256()
        for part in self.parts.values():
            weight = weight_of(model.get_submodule(part.layer), part.weight)
            some = weight.detach().flatten()[:_SAMPLE]
            digest.update(some.cpu().float().numpy().tobytes())
        options = {key: self.options.get(key) for key in _DECIDING}
        config = self.config
        recipe = {"scheme": config.vq_scheme.spec(), "seed": config.seed, "search": config.search}
        for name in ("layers", "target_bits", "candidates"):
            if getattr(config, name) is not None:
                recipe["schemes" if name == "layers" else name] = getattr(config, name)
        layers = {"layers": sorted(self.names), "dtype": str(model.dtype)}
        return {**recipe, **options, **self.facts, **layers, "weights": digest.hexdigest()}


def _stacked(found: list[tuple[FittedWeight, float, float]]) -> FittedWeight:
    """The experts of one part together, with the squared norm of each and of its outputs."""
    fitted, norms, energies = zip(*found, strict=True)
    tensors = {key: torch.stack([f.tensors[key] for f in fitted]) for key in fitted[0].tensors}
    relative = sum(f.relative_error * norm for f, norm in zip(fitted, norms, strict=True))
    output = sum(f.output_error * energy for f, energy in zip(fitted, energies, strict=True))
    whole, heard = sum(norms), sum(energies)
    return FittedWeight(
        tensors, relative / whole if whole else 0.0, output / heard if heard else math.nan
    )


def _taken(tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    return {key: tensor[index] for key, tensor in tensors.items()}


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def subfolder(source: str, files: Sequence[str]) -> str:
    """The folder inside of a model's directory or repository that its weights lie in."""
    if not files:
        return ""
    folder, parts = Path(files[0]).parent, Path(files[0]).parent.parts
    if Path(source).is_dir():
        inside = folder.relative_to(source).parts if folder.is_relative_to(source) else ()
        return "/".join(inside)
    cached = "snapshots" in parts  # of the Hub's cache: snapshots/REVISION/FOLDER
    return "/".join(parts[parts.index("snapshots") + 2 :]) if cached else ""


@contextmanager
def _enough_memory(where: str) -> Iterator[None]:
    """Say what to do when memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        out = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not out and "allocate memory" not in str(error):
            raise
        raise VQCalibrationError(
            f"memory ran out while {where} was calibrated. Give calibration a shorter context, "
            'another "device" or fewer tokens, and to "finetune" with less memory "move_codes": '
            'False; with "resume", the blocks before it are kept.'
        ) from error


def _take_up(blocks: Blocks, original: list[Tensor], work: Unfinished, index: int) -> None:
    """Take hidden states as they were before block `index`, where work on it was stopped."""
    kept, count = work.hidden(index, [*blocks.hidden, *original]), len(blocks.hidden)
    blocks.hidden, original[:] = kept[:count], kept[count:]


def _check_device(name: str | None) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        what = next(iter(str(error).splitlines()), type(error).__name__)
        raise VQCalibrationError(f"there is no device {name!r} for calibration: {what}.") from None
