"""Calibration of weights: a model on text, block by block (GPTQ's order, with block-LDLQ inside).

    for every block:   its inputs on the text -> H = mean of x x^T for every layer -> codes
                       its outputs with these codes -> the inputs of the next block

So every block makes up for what the codes before it did. At any time there are second moments of
one block only, and the hidden states of the text between two blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..errors import VQCalibrationError
from ..fit import FittedWeight, fit_weight, fixed_tensors
from ..fit.ldlq import Feedback
from ..nn.experts import holds_experts
from ..nn.linear import VQLinear
from ..ops import decode_weight
from ..ops.codes import rotation_of
from .blocks import Blocks, find_blocks
from .checkpoint import packaged
from .config import VQConfig
from .moments import Listener, Site
from .operation import Progress
from .text import OWN_WORDS, context_of, find_text, sequences_of
from .unfinished import CodedBlock, Unfinished, unfinished

logger = logging.get_logger("hf_vq")
_CHARACTERS = 12  # of a data set for every token: more than tokenizers put into one
_SAMPLE = 1 << 14  # numbers of a weight that tell it from others


class WeightCalibration:
    """Makes codes of the layers in the blocks of a model, from text.

    Args:
        model: a decoder, whose weights may still be to come.
        names: of its layers that are to become codes.
        config: scheme, seed, search and `calibration`.

    Attributes:
        names: those that are in a block, so that this calibration makes their codes.

    Raises:
        VQCalibrationError: the model has no blocks, or holds fused experts; there is no such text
            or device.
        VQSchemeError: a layer's size does not fit the scheme; the message names the layer.
    """

    def __init__(self, model: Any, names: Iterable[str], config: VQConfig) -> None:
        assert config.calibration is not None
        self.config, self.options = config, config.calibration
        self.text, self.facts = find_text(
            self.options["text"], self.options["tokens"] * _CHARACTERS
        )
        _check_device(self.options.get("device"))
        names = list(names)
        self.prefix = find_blocks(model, names)
        self.names = {name for name in names if name.startswith(f"{self.prefix}.")}
        self.empty: dict[str, VQLinear] = {}
        for name, layer in model.named_modules():
            if name not in self.names:
                continue
            if holds_experts(layer):
                raise VQCalibrationError(
                    f"{name} holds fused experts, which cannot be calibrated yet. Leave it dense: "
                    f"VQConfig(modules_to_not_convert=[{name!r}]), or quantize without calibration."
                )
            with torch.device("meta"):
                new = VQLinear.replacing(layer, config.vq_scheme, seed=config.seed, where=name)
            self.empty[name] = new.train(layer.training)

    @torch.no_grad()
    def run(self, model: Any, errors: dict[str, float]) -> dict[str, Any]:
        """Replace the layers; what config.json records of the calibration.

        Args:
            model: with its weights in memory.
            errors: gets the relative error of each layer's weights, by name.

        Raises:
            VQCalibrationError: the text is too short, a layer's inputs are not finite, weights are
                offloaded, or `resume` holds the calibration of something else.
        """
        self._check_in_memory(model)
        output_errors: dict[str, float] = {}
        fallbacks: dict[str, str] = {}
        with unfinished(self.options.get("resume"), self._identity(model)) as work:
            sequences = work.tokens(lambda: self._sequences(model))
            for done in self._blocks(model, sequences, work):
                for name, fitted in done.fitted.items():
                    self._replace(model, name, fitted)
                    errors[name] = float(f"{fitted.relative_error:.4g}")
                    if not math.isnan(fitted.output_error):
                        output_errors[name] = float(f"{fitted.output_error:.4g}")
                fallbacks.update(done.fallbacks)
        for name, reason in fallbacks.items():
            logger.warning("hf_vq: %s %s", name, reason)
        facts = dict(self.facts)
        self.options.update(text=facts.pop("text"), context=sequences.shape[1])
        for private in ("device", "resume"):
            self.options.pop(private, None)
        return {**facts, "output_error": output_errors, "fallbacks": fallbacks}

    def _blocks(self, model: Any, sequences: Tensor, work: Unfinished) -> Iterator[CodedBlock]:
        """The codes of one block after the other."""
        blocks = Blocks(model, self.prefix, sequences)
        progress = Progress(f"Calibrating {self.config.scheme_name}", len(self.names))
        taken_up = False  # the block before this one was
        try:
            for index in range(len(blocks)):
                done = work.block(index)
                if done is not None:
                    progress.skip(len(done.fitted))
                    taken_up = True
                    yield done
                    continue
                if taken_up:
                    blocks.hidden = work.hidden(index, blocks.hidden)
                taken_up = False
                done = self._code(model, blocks, index, progress)
                work.keep(index, done, blocks.hidden)
                yield done
        finally:
            progress.close()

    def _code(self, model: Any, blocks: Blocks, index: int, progress: Progress) -> CodedBlock:
        """Codes of one block; `blocks.hidden` becomes what it returns with them, if another block
        reads it."""
        block = blocks.blocks[index]
        home = next(block.parameters()).device
        device = torch.device(self.options.get("device") or home)
        start = f"{self.prefix}.{index}."
        layers = {n: model.get_submodule(n) for n in self.empty if n.startswith(start)}
        block.to(device)
        listener = Listener()
        for hidden in blocks.hidden:
            with listener.listening(layers):
                blocks.run(index, hidden, device)
        done = CodedBlock()
        for site in listener.sites:
            feedback = self._feedback(site, device)
            for name in site.layers:
                progress.start(name)
                done.fitted[name] = self._fit(name, layers[name], feedback)
                if feedback.damping > self.options["damping"]:
                    done.fallbacks[name] = f"was calibrated with a damping of {feedback.damping:g}"
                progress.done()
            site.total = torch.empty(0)
        for name in [name for name in layers if name not in done.fitted]:
            done.fitted[name] = self._fit(name, layers[name], None)
            done.fallbacks[name] = "was not reached by the text: quantized without calibration"
        if index + 1 == len(blocks):
            blocks.hidden = []
        for row, hidden in enumerate(blocks.hidden):
            blocks.hidden[row] = blocks.run(index, hidden, device)
        block.to(home)
        return done

    def _feedback(self, site: Site, device: torch.device) -> Feedback:
        scheme, name = self.config.vq_scheme, site.layers[0]
        fixed = fixed_tensors(scheme, len(site.total), self.config.seed, device)
        damping = self.options["damping"]
        return Feedback(site.moments, scheme, rotation_of(fixed), damping=damping, where=name)

    def _fit(self, name: str, layer: nn.Module, feedback: Feedback | None) -> FittedWeight:
        """Codes of one layer, whose weight is changed to what they decode to."""
        weight, empty, config = layer.weight, self.empty[name], self.config
        assert isinstance(weight, Tensor)
        [matrix] = empty.matrices("weight", weight)
        fitted = fit_weight(
            matrix,
            config.vq_scheme,
            seed=config.seed,
            where=name,
            search=config.search,
            feedback=feedback,
        )
        fixed = fixed_tensors(config.vq_scheme, matrix.shape[1], config.seed, matrix.device)
        decoded = decode_weight({**fixed, **fitted.tensors}, config.vq_scheme, matrix.shape[1])
        matrix.copy_(decoded)
        return fitted

    def _replace(self, model: Any, name: str, fitted: FittedWeight) -> None:
        layer, new = model.get_submodule(name), self.empty.pop(name)
        new.hold(fitted.tensors, layer.bias)
        new.fill(packaged([new], self.config.seed))
        model.set_submodule(name, new.to(layer.weight.device))

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
        for name in self.empty:
            if model.get_submodule(name).weight.is_meta:
                raise VQCalibrationError(
                    f"{name} is offloaded, and calibration changes weights in memory. Load the "
                    'model on the CPU and give calibration a "device": one block at a time is '
                    "moved there."
                )

    def _identity(self, model: Any) -> dict[str, Any]:
        """What decides the result, without what is large: of weights some numbers."""
        digest = hashlib.sha256()
        for name in self.empty:
            some = model.get_submodule(name).weight.detach().flatten()[:_SAMPLE]
            digest.update(some.cpu().float().numpy().tobytes())
        options = {key: self.options[key] for key in ("tokens", "context", "damping")}
        config = self.config
        recipe = {"scheme": config.vq_scheme.spec(), "seed": config.seed, "search": config.search}
        layers = {"layers": sorted(self.empty), "dtype": str(model.dtype)}
        return {**recipe, **options, **self.facts, **layers, "weights": digest.hexdigest()}


def _check_device(name: str | None) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        what = next(iter(str(error).splitlines()), type(error).__name__)
        raise VQCalibrationError(f"there is no device {name!r} for calibration: {what}.") from None
