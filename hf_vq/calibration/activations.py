"""`VQConfig(activations=...)`: quantize with what a thousand tokens say about the inputs.

    for every block:   its inputs -> H = mean of x x^T in each block of a rotation -> codes
                       its outputs with these codes -> the inputs of the next block

It is calibration's way (`layerwise`) in seconds instead of minutes: H of 128 inputs needs few
tokens, and the blocks of a matrix are rounded at once (`fit/block_ldlq.py`). The tokens are ones
that the model writes itself, so that no text is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..errors import VQCalibrationError
from ..fit import FittedWeight, fixed_tensors
from ..fit.block_ldlq import BlockFeedback
from ..fit.input_scale import input_scale
from ..formats.catalog import LinearScheme
from ..formats.scheme import VQScheme
from ..formats.stored_weight import rotation_of
from ..hf.calibration_options import OWN_WORDS, RANDOM, TOKEN_IDS
from ..hf.config import VQConfig
from ..hf.quantize_op import Progress
from .blocks import Blocks, WholeModel, find_blocks
from .hessians import Listener, Site
from .offload import free_memory
from .targets import Target, decode_target, fit_target, replace_layers, targets_of
from .text import context_of, find_text, sample_text, sequences_of, tokenizer_of

logger = logging.get_logger("hf_vq")

TOKENS = 1024
_CONTEXT = 64  # of own words and random tokens: first tokens are special
_CONTEXT_OF_TEXT = 256
_ROOM = 1.15  # for activations and codes, in units of the dense model
_CHARACTERS = 12  # of a data set for every token


class ActivationPass:
    """Encodes the layers of a model with statistics of their inputs.

    Args:
        model: its weights need not be loaded yet.
        schemes: schemes of the layers to encode, by name.
        config: gives seed, search and `activations`.
        files: files of the weights; the tokenizer is in the same folder.

    Attributes:
        kind: name of its facts in config.json.
        names: layers of `schemes` that this pass encodes.

    Raises:
        VQError: the text does not exist.
    """

    kind = "activations"

    def __init__(
        self,
        model: Any,
        schemes: Mapping[str, LinearScheme],
        config: VQConfig,
        files: Sequence[str] = (),
    ) -> None:
        assert config.activations is not None
        self.files, self.config, self.given = files, config, config.activations
        usable = {name: scheme for name, scheme in schemes.items() if _usable(scheme)}
        self.text: str | None = None
        self.facts: dict[str, Any] = {"text": TOKEN_IDS}
        if self.given == RANDOM:
            self.facts = {"text": RANDOM}
        elif isinstance(self.given, str):
            self.text, self.facts = find_text(self.given, TOKENS * _CHARACTERS)
        try:
            self.prefix = find_blocks(model, usable)
        except VQCalibrationError:
            self.prefix = ""  # the model is run as a whole
        start = f"{self.prefix}." if self.prefix else ""
        self.schemes = {name: usable[name] for name in usable if name.startswith(start)}
        self.names = set(self.schemes)
        self._failed = ""  # why the model cannot run
        self.targets: dict[str, Target] = {}
        for name, layer in model.named_modules():
            for target in targets_of(name, layer) if name in self.names else []:
                self.targets[target.name] = target
                target.specs(self.schemes[name])

    @staticmethod
    def obstacle(
        model: Any, schemes: Mapping[str, LinearScheme], device_map: Any = None
    ) -> str | None:
        """Why `model` cannot have this pass; None if it can, "" if no scheme could use it."""
        if not any(map(_usable, schemes.values())):
            return ""
        if getattr(model, "main_input_name", "") != "input_ids":
            return f"{type(model).__name__} does not read token ids"
        need = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        loaded = not any(tensor.is_meta for tensor in model.parameters())
        have = free_memory(device_map)
        if have is not None and need * (_ROOM - loaded) > have:
            return (
                f"the dense model takes {need / 1e9:.1f} GB, and {have / 1e9:.1f} GB are free; "
                "quantize it once on a machine with more, and save it"
            )
        return None

    @torch.no_grad()
    def run(self, model: Any, errors: dict[str, float]) -> dict[str, Any]:
        """Replace the layers by VQ modules.

        Args:
            model: a model with its weights in memory or offloaded by accelerate.
            errors: receives the relative error of each layer's weights, by name.

        Returns:
            Facts about the pass for config.json.

        Raises:
            VQCalibrationError: the text is too short.
        """
        sequences = self._sequences(model)
        fallbacks: dict[str, str] = {}
        blocks = self._blocks(model, sequences)
        progress = Progress(f"Quantizing to {self.config.scheme_name}", len(self.targets))
        try:
            for index in range(len(blocks)):
                fitted = self._block(model, blocks, index, progress, fallbacks)
                targets = [self.targets[name] for name in fitted]
                replace_layers(model, targets, fitted, self.schemes, self.config.seed)
                for name, one in fitted.items():
                    errors[name] = float(f"{one.relative_error:.4g}")
        finally:
            progress.close()
        for name, reason in fallbacks.items():
            logger.warning("hf_vq: %s %s", name, reason)
        self.config.activations = None  # from here on, the provenance says it
        return {**self.facts, "tokens": sequences.numel(), "seed": self.config.seed,
                "fallbacks": fallbacks}  # fmt: skip

    def _blocks(self, model: Any, sequences: Tensor) -> Blocks | WholeModel:
        if self.prefix:
            try:
                return Blocks(model, self.prefix, sequences)
            except Exception as error:  # of its forward, too: what cannot run at all, says so below
                logger.info("hf_vq: %s The model is run at once instead.", error)
        return WholeModel(model, sequences)

    def _block(
        self,
        model: Any,
        blocks: Blocks | WholeModel,
        index: int,
        progress: Progress,
        fallbacks: dict[str, str],
    ) -> dict[str, FittedWeight]:
        """Encode one block, and run it for the next; returns codes by tensor."""
        targets = blocks.targets(index, self.targets.values())
        layers = {target.layer: model.get_submodule(target.layer) for target in targets}
        fitted: dict[str, FittedWeight] = {}
        with blocks.on(index, None) as device:
            for site in self._heard(blocks, index, layers, device):
                self._site(site, layers, fitted, progress, fallbacks)
                site.release()
            for target in targets:
                if target.name not in fitted:
                    if not self._failed:
                        fallbacks[target.name] = "got no token: quantized without activations"
                    progress.start(target.name)
                    fitted[target.name] = self._fit(target, layers[target.layer], None)
                    progress.done()
                scheme = self.schemes[target.layer]
                one, module = fitted[target.name], layers[target.layer]
                decode_target(target, module, one, scheme, self.config.seed)
            if index + 1 < len(blocks) and not self._failed:
                for row, hidden in enumerate(blocks.hidden):
                    blocks.hidden[row] = blocks.run(index, hidden, device)
        return fitted

    def _heard(
        self,
        blocks: Blocks | WholeModel,
        index: int,
        layers: Mapping[str, nn.Module],
        device: torch.device,
    ) -> list[Site]:
        """Inputs of the layers of one block; nothing where the model cannot run."""
        listener = Listener(block=self._width)
        try:
            for hidden in blocks.hidden if not self._failed else ():
                with listener.listening(layers):
                    blocks.run(index, hidden, device)
        except Exception as error:  # a default must not forbid what works without it
            self._failed = f"{type(error).__name__}: {error}"
            logger.warning(
                "hf_vq: the model cannot run, so its layers are quantized without activations "
                "from %s on: %s", next(iter(layers), "here"), self._failed,
            )  # fmt: skip
            return []
        return listener.sites

    def _site(
        self,
        site: Site,
        layers: Mapping[str, nn.Module],
        fitted: dict[str, FittedWeight],
        progress: Progress,
        fallbacks: dict[str, str],
    ) -> None:
        """Encode the layers that read the same tensor."""
        known = _Known(site, [self.targets[name] for name in site.layers], layers, self)
        for name in site.layers:
            progress.start(name)
            target = self.targets[name]
            try:
                fitted[name] = self._fit(target, layers[target.layer], known)
            except VQCalibrationError as error:
                fallbacks[name] = f"was quantized without activations: {error}"
                fitted[name] = self._fit(target, layers[target.layer], None)
            progress.done()

    def _fit(self, target: Target, module: nn.Module, known: _Known | None) -> FittedWeight:
        """Encode one dense tensor."""

        scheme = self.schemes[target.layer]
        nothing = {"input_scale": torch.ones(target.shape[1])} if scheme.is_scaled else {}

        def known_of(matrix: Tensor, index: int) -> Mapping[str, Any]:
            return nothing if known is None else known.of(target, index)

        return fit_target(target, module, scheme, self.config, known_of)

    def _width(self, in_features: int) -> int:
        """Inputs of a block of H: the largest block of a rotation of rows of this size."""
        schemes = {s for s in self.schemes.values() if isinstance(s, VQScheme)}
        return max(scheme.block(in_features) for scheme in schemes)

    def _sequences(self, model: Any) -> Tensor:
        """Token ids [sequences, tokens], two sequences at least: one half judges the other."""
        if not isinstance(self.given, str):
            ids = torch.atleast_2d(torch.as_tensor(self.given))
            return ids if len(ids) > 1 else ids[:, : ids.shape[1] // 2 * 2].reshape(2, -1)
        seed, longest = self.config.seed, context_of(model, None)
        drawn = self.given in (OWN_WORDS, RANDOM)
        context = min(_CONTEXT if drawn else _CONTEXT_OF_TEXT, longest)
        if self.given == OWN_WORDS:
            offloaded = any(parameter.is_meta for parameter in model.parameters())
            why = "its weights are offloaded, and each token would load them all"
            try:
                if not offloaded:
                    # The first token of a text may have inputs like no other's, and which of
                    # them are large can depend on it: Qwen2.5's differ behind its own first token.
                    count = TOKENS // context
                    return sample_text(
                        model, count, context, seed=seed, progress=True, random_starts=count // 2
                    )
            except Exception as error:  # an encoder, a model without a head, ..
                why = f"{type(error).__name__}: {error}"
            logger.warning("hf_vq: random tokens are read, not the model's own words: %s", why)
            self.facts = {"text": RANDOM}
        if self.facts["text"] == RANDOM:
            size = model.get_input_embeddings().num_embeddings
            generator = torch.Generator().manual_seed(seed)
            return torch.randint(size, (TOKENS // context, context), generator=generator)
        tokenizer = tokenizer_of(model, self.files)
        return sequences_of(model, self.text, tokenizer, TOKENS, context, seed, progress=True)


class _Known:
    """Arguments of `fit_weight` for the layers of a site."""

    def __init__(
        self,
        site: Site,
        targets: Sequence[Target],
        layers: Mapping[str, nn.Module],
        owner: ActivationPass,
    ) -> None:
        self.site, self.targets, self.layers, self.owner = site, targets, layers, owner
        self._made: dict[tuple[str, int], dict[str, Any]] = {}

    def of(self, target: Target, index: int) -> dict[str, Any]:
        """Arguments for one matrix; equal for layers of the site with equal schemes."""
        scheme = self.owner.schemes[target.layer]
        assert isinstance(scheme, VQScheme)
        key = (scheme.spec(), index)
        if key not in self._made:
            self._made.clear()
            hessian = self.site.hessian(index if target.fused else 0)
            found: dict[str, Any] = {}
            if scheme.is_scaled:
                found["input_scale"] = self._input_scale(hessian.sum(0), index)
            seed, device = self.owner.config.seed, hessian.device
            fixed = fixed_tensors(scheme, target.shape[1], seed, device, **found)
            rotation = rotation_of(fixed)
            found["feedback"] = BlockFeedback(hessian, scheme, rotation, where=target.name)
            self._made[key] = found
        return self._made[key]

    def _input_scale(self, hessian: Tensor, index: int) -> Tensor:
        """One for all layers of the site, so that kernels rotate their input once."""
        matrices = [one.matrices(self.layers[one.layer])[index] for one in self.targets]
        return input_scale(hessian.diagonal(dim1=-2, dim2=-1).flatten(), matrices)


def _usable(scheme: LinearScheme) -> bool:
    """True for a scheme that rotates, and whose codebook no weight decides."""
    return (
        isinstance(scheme, VQScheme)
        and scheme.codebook == "universal"
        and scheme.rotation != "none"
    )
