"""Calibration of weights: a model on text, block by block (GPTQ's order, with block-LDLQ inside).

    for every block:   its inputs on the text -> H = mean of x x^T for every layer -> codes
                       its outputs with these codes -> the inputs of the next block

So every block makes up for what the codes before it did. At any time there are second moments of
one block only, and the hidden states of the text between two blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..errors import VQCalibrationError
from ..fit import FittedWeight, fit_weight, fixed_tensors
from ..fit.ldlq import Feedback
from ..formats.scheme import VQScheme
from ..ops import decode_weight
from ..ops.codes import rotation_of
from .allocation import allocation, choices, measure_costs
from .blocks import Blocks, find_blocks
from .config import VQConfig
from .finetune import TunedBlock, tune_block, tune_model
from .moments import Listener, Site
from .operation import Progress
from .parts import Part, parts_of, replace
from .text import OWN_WORDS, context_of, find_text, sequences_of
from .unfinished import CodedBlock, Unfinished, unfinished

logger = logging.get_logger("hf_vq")
_CHARACTERS = 12  # of a data set for every token: more than tokenizers put into one
_DECIDING = ("tokens", "context", "damping", "finetune")  # options that the result depends on
_SAMPLE = 1 << 14  # numbers of a weight that tell it from others


class WeightCalibration:
    """Makes codes of the layers in the blocks of a model, from text.

    Args:
        model: a decoder, whose weights may still be to come.
        schemes: of its layers that are to become codes, by name.
        config: seed, search and `calibration`.

    Attributes:
        names: those that are in a block, so that this calibration makes their codes.

    Raises:
        VQCalibrationError: the model has no blocks; there is no such text or device.
        VQSchemeError: a layer's size does not fit the scheme; the message names the layer.
        VQConfigError: experts in an unknown layout.
    """

    def __init__(self, model: Any, schemes: Mapping[str, VQScheme], config: VQConfig) -> None:
        assert config.calibration is not None
        self.config, self.options = config, config.calibration
        self.text, self.facts = find_text(
            self.options["text"], self.options["tokens"] * _CHARACTERS
        )
        _check_device(self.options.get("device"))
        self.prefix = find_blocks(model, schemes)
        inside = {n: scheme for n, scheme in schemes.items() if n.startswith(f"{self.prefix}.")}
        self.names, self.schemes = set(inside), inside
        self.parts: dict[str, Part] = {}
        for name, layer in model.named_modules():
            for part in parts_of(name, layer) if name in self.names else []:
                self.parts[part.name] = part
                for scheme in choices(config, name) or [inside[name]]:
                    part.specs(scheme)

    @torch.no_grad()
    def run(self, model: Any, errors: dict[str, float]) -> dict[str, Any]:
        """Replace the layers; what config.json records of the calibration.

        Args:
            model: with its weights in memory.
            errors: gets the relative error of each layer's weights, by name.

        Raises:
            VQCalibrationError: the text is too short, a layer's inputs are not finite, weights are
                offloaded, or `resume` holds the calibration of something else.
            VQConfigError: the schemes to choose from do not reach `target_bits`.
        """
        self._check_in_memory(model)
        facts: dict[str, Any] = {"output_error": {}, "fallbacks": {}}
        with unfinished(self.options.get("resume"), self._identity(model)) as work:
            sequences = work.tokens(lambda: self._sequences(model))
            blocks = Blocks(model, self.prefix, sequences)
            if self.config.target_bits is not None:
                facts.update(self._allocate(model, blocks, sequences, work))
            for done in self._blocks(model, blocks, sequences, work):
                if done.loss:
                    facts.setdefault("finetune_loss", []).append([*map(_rounded, done.loss)])
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
            return measure_costs(blocks, sequences, parts, self.config, self._device)

        costs = work.costs(measure)
        table = allocation(model, list(self.parts.values()), costs, self.config)
        self.config.use(table)
        self.schemes = {layer: VQScheme.parse(spec) for layer, spec in table.items()}
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
            for site in listener.sites:
                feedbacks = Feedbacks(site, self.schemes, self.config.seed, self.options["damping"])
                for name in site.layers:
                    progress.start(name)
                    part = self.parts[name]
                    done.fitted[name] = self._fit(part, layers[part.layer], feedbacks)
                    done.fallbacks.update(feedbacks.fallbacks(part))
                    progress.done()
                site.release()
            for part in parts:
                if part.name not in done.fitted:
                    done.fitted[part.name] = self._fit(part, layers[part.layer], None)
                    done.fallbacks[part.name] = (
                        "was not reached by the text: quantized without calibration"
                    )
            tensors, by_block = None, self.options.get("finetune") == "block"
            if by_block:
                tuned = self._tuned(blocks, index, done, device)
                done.loss = tune_block(blocks, index, tuned, original, device)
                tensors = tuned.tensors()
            if index + 1 == len(blocks):
                blocks.hidden = []
                original[:] = [] if by_block else original
            for row, hidden in enumerate(blocks.hidden):
                blocks.hidden[row] = blocks.run(index, hidden, device, tensors)
        return done

    def _tuned(
        self, blocks: Blocks, index: int, done: CodedBlock, device: torch.device
    ) -> TunedBlock:
        parts, start = blocks.parts(index, self.parts.values()), f"{self.prefix}.{index}."
        seed, block = self.config.seed, blocks.blocks[index]
        return TunedBlock(block, start, done, parts, self.schemes, seed, device)

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
            coded[-1].loss = tune_model(blocks, tuned, sequences, original, work)

    def _fit(self, part: Part, module: nn.Module, feedbacks: Feedbacks | None) -> FittedWeight:
        """Codes of one part, whose matrices are changed to what they decode to."""
        config, scheme = self.config, self.schemes[part.layer]
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
            )
            norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float32)) ** 2
            energy = 0.0 if feedback is None else feedback.energy(matrix)
            found.append((fitted, norm, energy))
            fixed = fixed_tensors(scheme, matrix.shape[1], config.seed, matrix.device)
            decoded = decode_weight({**fixed, **fitted.tensors}, scheme, matrix.shape[1])
            matrix.copy_(decoded)
        return found[0][0] if part.count == 1 else _stacked(found)

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

    @staticmethod
    def _tokenizer(model: Any) -> Any:
        from transformers import AutoTokenizer  # imports much

        source = model.config.name_or_path
        try:
            return AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            what = next(iter(str(error).splitlines()), type(error).__name__)
            raise VQCalibrationError(
                f"calibration needs the tokenizer of {source}: {what}. Save one beside the model, "
                f"or calibrate on what the model writes by itself: text={OWN_WORDS!r}."
            ) from error

    def _check_in_memory(self, model: Any) -> None:
        for name, part in self.parts.items():
            if model.get_submodule(part.layer).get_parameter(part.weight).is_meta:
                raise VQCalibrationError(
                    f"{name} is offloaded, and calibration changes weights in memory. Load the "
                    'model on the CPU and give calibration a "device": one block at a time is '
                    "moved there."
                )

    def _identity(self, model: Any) -> dict[str, Any]:
        """What decides the result, without what is large: of weights some numbers."""
        digest = hashlib.sha256()
        for part in self.parts.values():
            weight = model.get_submodule(part.layer).get_parameter(part.weight)
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


class Feedbacks:
    """What the inputs of the layers of a site say about their weights, for every rotation and
    expert."""

    def __init__(
        self, site: Site, schemes: Mapping[str, VQScheme], seed: int, damping: float
    ) -> None:
        self.site, self.schemes, self.seed, self.damping = site, schemes, seed, damping
        self.most = 0.0  # damping that was needed
        self._found: dict[tuple[str, int, int], Feedback] = {}

    def of(self, part: Part, expert: int = 0) -> Feedback:
        """The feedback of one matrix."""
        scheme = self.schemes[part.layer]
        key = (scheme.rotation, scheme.rotation_block, expert)
        if key not in self._found:
            if len(self.site.tokens) > 1:
                self._found.clear()  # the experts' second moments would be in memory twice
            moments = self.site.moments(expert)
            fixed = fixed_tensors(scheme, len(moments), self.seed, moments.device)
            where = part.name if part.count == 1 else f"{part.name}[{expert}]"
            self._found[key] = Feedback(
                moments, scheme, rotation_of(fixed), damping=self.damping, where=where
            )
            self.most = max(self.most, self._found[key].damping)
        return self._found[key]

    def fallbacks(self, part: Part) -> dict[str, str]:
        """What was done otherwise than asked for one part, by name."""
        reasons = []
        none = [str(expert) for expert, tokens in enumerate(self.site.tokens) if not tokens]
        if none:
            reasons.append(
                f"has experts that no token was sent to ({', '.join(none)}): calibrated on what "
                "the other experts read"
            )
        if self.most > self.damping:
            reasons.append(f"was calibrated with a damping of {self.most:g}")
        return {part.name: "; it ".join(reasons)} if reasons else {}


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


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


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
