"""Calibration of weights: a model on text, block by block (GPTQ's order, with block-LDLQ inside).

    for every block:   its inputs on the text -> H = mean of x x^T for every layer -> codes
                       its outputs with these codes -> the inputs of the next block

So every block compensates the errors of the codes before it. The memory holds the Hessians of one
block, and the hidden states of the text between two blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..errors import VQCalibrationError
from ..fit import FittedWeight
from ..fit.qoq_calibrated import CLIPS
from ..formats.catalog import LinearScheme, linear_scheme
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from ..hf.calibration_options import CPU_TOKENS, TOKENS, choices
from ..hf.config import VQConfig
from ..progress import Progress
from .blocks import Blocks, find_blocks
from .distributed import ProcessGroup
from .equivalent_transforms.qoq import BY_BLOCK, Trial, transform_model
from .finetune import ENTRY_STEP, TunedBlock, tune_block, tune_model
from .hessians import Listener, Site
from .ldlq_groups import LdlqGroups
from .offload import place_of, weight_of
from .resume import CodedBlock, ResumeFolder, open_resume_folder
from .targets import Target, decode_target, fit_target, replace_layers, targets_of
from .text import context_of, find_text, sequences_of, tokenizer_of, usual_context
from .weight_allocation import allocation, measure_costs

logger = logging.get_logger("hf_vq")
_CHARACTERS = 12  # of a data set for every token: more than tokenizers put into one
# The options that the result depends on.
_DECIDING = ("tokens", "context", "damping", "finetune", "move_codes", "transforms")
_SAMPLE = 1 << 14  # numbers of a weight that its digest covers


class WeightCalibration:
    """Encodes the layers in the blocks of a model, calibrated on text.

    Args:
        model: a decoder; its weights need not be loaded yet.
        schemes: schemes of the layers to encode, by name.
        config: gives seed, search and `calibration`.
        files: files of the weights; the tokenizer is in the same folder.

    Attributes:
        kind: name of its facts in config.json.
        names: layers of `schemes` that are in a block; this calibration encodes only them.

    Raises:
        VQCalibrationError: the model has no blocks; or the text or device does not exist.
        VQSchemeError: a layer's size does not fit the scheme; the message names the layer.
        VQConfigError: experts in an unknown layout.
    """

    kind = "calibration"

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
            self.options["text"], (self.options["tokens"] or TOKENS) * _CHARACTERS
        )
        _check_device(self.options.get("device"))
        self.prefix = find_blocks(model, schemes)
        inside = {n: scheme for n, scheme in schemes.items() if n.startswith(f"{self.prefix}.")}
        self.names, self.schemes = set(inside), inside
        if not any(isinstance(scheme, QoQScheme) for scheme in inside.values()):
            self.options.pop("transforms", None)  # they help only layers with QoQ's schemes
        self.targets: dict[str, Target] = {}
        for name, layer in model.named_modules():
            for target in targets_of(name, layer) if name in self.names else []:
                self.targets[target.name] = target
                possible: list[LinearScheme] = [*choices(config, name)] or [inside[name]]
                for scheme in possible:
                    target.specs(scheme)

    @torch.no_grad()
    def run(self, model: Any, errors: dict[str, float]) -> dict[str, Any]:
        """Replace the layers by VQ modules.

        Args:
            model: a model with its weights in memory or offloaded by accelerate.
            errors: receives the relative error of each layer's weights, by name.

        Returns:
            Facts about the calibration for config.json.

        Raises:
            VQCalibrationError: the text is too short, a layer's inputs are not finite, or `resume`
                holds another calibration.
            VQConfigError: no choice of the candidate schemes reaches `target_bits`.
        """
        facts: dict[str, Any] = {"output_error": {}, "fallbacks": {}}
        if self.options["tokens"] is None:
            where = self._device or place_of(model)
            self.options["tokens"] = CPU_TOKENS if where.type == "cpu" else TOKENS
        resume, self.processes = self.options.get("resume"), ProcessGroup()
        if self.processes.size > 1 and self.options.get("finetune"):
            raise VQCalibrationError(
                f"{self.processes.size} processes cannot fine-tune one model together. Start one, "
                'or leave "finetune" out.'
            )
        if self.options.get("finetune") and any(p.is_meta for p in model.parameters()):
            raise VQCalibrationError(
                "weights of the model are offloaded, and fine-tuning changes them in memory. Load "
                'the model on the CPU and give calibration a "device", or leave "finetune" out.'
            )
        with open_resume_folder(resume, self._identity(model), self.processes) as work:
            sequences = self.processes.shard(work.tokens(lambda: self._sequences(model)))
            if transforms := self.options.get("transforms"):
                transform_model(model, self.prefix, transforms, self.schemes, sequences, work)
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
        self, model: Any, blocks: Blocks, sequences: Tensor, work: ResumeFolder
    ) -> dict[str, Any]:
        """Choose the scheme of every layer; returns the facts for config.json."""

        def measure() -> dict[str, dict[str, float]]:
            targets = list(self.targets.values())
            with _enough_memory("the cost of the schemes"):
                return measure_costs(blocks, sequences, targets, self.config, self._device)

        costs = work.costs(measure)
        table = allocation(model, list(self.targets.values()), costs, self.config)
        self.config.use({**(self.config.layers or {}), **table})
        self.schemes = {layer: linear_scheme(spec) for layer, spec in table.items()}
        kld = sum(cost[table[layer]] for layer, cost in costs.items())
        return {"predicted_kld": _rounded(kld)}

    def _blocks(
        self, model: Any, blocks: Blocks, sequences: Tensor, work: ResumeFolder
    ) -> Iterator[CodedBlock]:
        """Yield the codes of each block; all at the end if the whole model is fine-tuned."""
        tune = self.options.get("finetune")
        text, coded = list(blocks.hidden), list[CodedBlock]()
        original = list(blocks.hidden) if tune else []  # hidden states of the original model
        what = self.config.target_bits or self.config.scheme_name
        progress = Progress(f"Calibrating {what}", len(self.targets))
        resumed = False  # the block before was loaded from the resume folder
        try:
            for index in range(len(blocks)):
                done = work.load_block(index)
                if done is not None:
                    progress.skip(len(done.fitted))
                elif resumed:
                    _resume(blocks, original, work, index)
                resumed = done is not None
                if done is None:
                    with _enough_memory(f"{self.prefix}.{index}"):
                        done = self._code(model, blocks, original, index, progress)
                    work.save_block(index, done, [*blocks.hidden, *original])
                if tune == "model":
                    coded.append(done)
                else:
                    yield done
        finally:
            progress.close()
        if coded:
            if resumed:
                blocks.hidden = []
                _resume(blocks, original, work, len(blocks))
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
        """Encode one block.

        Replaces `blocks.hidden` by the outputs of the encoded block, if another block reads them,
        and `original` by those of the original block.
        """
        targets = blocks.targets(index, self.targets.values())
        layers = {target.layer: model.get_submodule(target.layer) for target in targets}
        done = CodedBlock()
        with blocks.on(index, self._device) as device:
            listener = Listener(hold_out=True)
            for hidden in blocks.hidden:
                with listener.listening(layers):
                    blocks.run(index, hidden, device)
            original[:] = [blocks.run(index, hidden, device) for hidden in original]
            sites = self.processes.all_reduce(listener.sites, device)
            clips = (self.options.get("transforms") or {}).get("clip", False)
            trial = Trial(blocks, index, device) if clips else None
            for number, site in enumerate(sites):
                if number % self.processes.size == self.processes.rank:
                    self._fit_site(site, layers, done, trial, progress)
                site.release()
            # A pickled tensor names the sender's device: send tensors of the CPU.
            mine = done if self.processes.size == 1 else done.on("cpu")
            for other in self.processes.all_gather(mine):
                done.fitted.update(other.fitted)
                done.fallbacks.update(other.fallbacks)
            for target in targets:
                module = layers[target.layer]
                if target.name not in done.fitted:
                    done.fitted[target.name] = self._fit(target, module, None)
                    done.fallbacks[target.name] = (
                        "was not reached by the text: quantized without calibration"
                    )
                self._decode(target, module, done.fitted[target.name])
            tensors, tune = None, self.options.get("finetune")
            if tune:
                tuned = self._tuned(blocks, index, done, device)
                done.loss = tune_block(blocks, index, tuned, original, device)
                # With the rounding of the stored dtypes: the next block compensates it, too.
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
        """Encode all layers that read the same tensor; adds the codes to `done`."""
        ldlq_groups = LdlqGroups(site, self.schemes, self.config.seed, self.options.get("damping"))
        for name in site.layers:
            progress.start(name)
            target = self.targets[name]
            layer, qoq = layers[target.layer], isinstance(self.schemes[target.layer], QoQScheme)
            if trial is not None and qoq and target.layer.endswith(BY_BLOCK):
                fit = partial(self._fit, target, layer, ldlq_groups)
                done.fitted[name] = trial.best(layer, fit, partial(self._decode, target, layer))
            else:
                done.fitted[name] = self._fit(target, layer, ldlq_groups)
            done.fallbacks.update(ldlq_groups.fallbacks(target))
            progress.done()

    def _tuned(
        self, blocks: Blocks, index: int, done: CodedBlock, device: torch.device
    ) -> TunedBlock:
        targets, start = blocks.targets(index, self.targets.values()), f"{self.prefix}.{index}."
        seed, block = self.config.seed, blocks.blocks[index]
        step = ENTRY_STEP if self.options.get("move_codes", True) else None
        schemes = {n: one for n, one in self.schemes.items() if isinstance(one, VQScheme)}
        return TunedBlock(block, start, done, targets, schemes, seed, device, step)

    def _tune_model(
        self,
        blocks: Blocks,
        coded: list[CodedBlock],
        sequences: Tensor,
        original: list[Tensor],
        work: ResumeFolder,
    ) -> None:
        with ExitStack() as stack:
            devices = [stack.enter_context(blocks.on(i, self._device)) for i in range(len(coded))]
            tuned = [
                self._tuned(blocks, index, done, devices[index]) for index, done in enumerate(coded)
            ]
            coded[-1].divergence = tune_model(blocks, tuned, sequences, original, work)

    def _fit(
        self,
        target: Target,
        module: nn.Module,
        ldlq_groups: LdlqGroups | None,
        clips: tuple[float, ...] = CLIPS,
    ) -> FittedWeight:
        """Encode one dense tensor; codes of experts are stacked."""
        transforms = self.options.get("transforms") or {}
        return fit_target(
            target,
            module,
            self.schemes[target.layer],
            self.config,
            lambda matrix, index: {
                "feedback": ldlq_groups and ldlq_groups.of(target, matrix, index)
            },
            clips=clips if transforms.get("clip", True) else CLIPS[:1],
            in_turn=transforms.get("feedback", True),
        )

    def _decode(self, target: Target, module: nn.Module, fitted: FittedWeight) -> None:
        decode_target(target, module, fitted, self.schemes[target.layer], self.config.seed)

    def _replace(self, model: Any, done: CodedBlock) -> None:
        """Replace the layers of a block by VQ modules."""
        targets = [self.targets[name] for name in done.fitted]
        replace_layers(model, targets, done.fitted, self.schemes, self.config.seed)

    @property
    def _device(self) -> torch.device | None:
        """Device that computes the blocks; None = the device of each block."""
        name = self.options.get("device")
        return None if name is None else torch.device(name)

    def _sequences(self, model: Any) -> Tensor:
        tokens, given = self.options["tokens"], self.options["context"]
        context = context_of(model, given)
        if given is None:
            context = min(context, usual_context(tokens))
        tokenizer = None if self.text is None else tokenizer_of(model, self.files)
        context, seed = min(context, tokens), self.config.seed
        return sequences_of(model, self.text, tokenizer, tokens, context, seed, progress=True)

    def _identity(self, model: Any) -> dict[str, Any]:
        """Everything that decides the result, as JSON; of each weight a digest of some numbers."""
        digest = hashlib.sha256()
        for target in self.targets.values():
            weight = weight_of(model.get_submodule(target.layer), target.weight)
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


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


@contextmanager
def _enough_memory(where: str) -> Iterator[None]:
    """Replace an out-of-memory error by a VQCalibrationError that names the cure."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        out = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not out and "allocate memory" not in str(error):
            raise
        raise VQCalibrationError(
            f"memory ran out while {where} was calibrated. Give calibration a shorter context, "
            'another "device" or fewer tokens, and to "finetune" with less memory "move_codes": '
            'False. With "resume", the finished blocks are not lost.'
        ) from error


def _resume(blocks: Blocks, original: list[Tensor], work: ResumeFolder, index: int) -> None:
    """Load the hidden states before block `index`, the first block that is not finished."""
    kept, count = work.load_hidden(index, [*blocks.hidden, *original]), len(blocks.hidden)
    blocks.hidden, original[:] = kept[:count], kept[count:]


def _check_device(name: str | None) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        what = next(iter(str(error).splitlines()), type(error).__name__)
        raise VQCalibrationError(f"there is no device {name!r} for calibration: {what}.") from None
