"""`VQConfig(activations=...)`: quantize with what a few thousand tokens say about the inputs.

    for every block:   its inputs -> H = mean of x x^T in wide blocks of inputs -> codes
                       its outputs with these codes -> the inputs of the next block

It is calibration's way (`layerwise`) in seconds instead of minutes: few tokens of the model's own
(`text.own_words`), whose H is believed by less than half (`fit/block_ldlq.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.accelerate import infer_auto_device_map
from transformers.utils import logging

from ..errors import VQCalibrationError, VQConfigError, VQFormatError
from ..fit import FittedWeight, fixed_tensors
from ..fit.block_ldlq import BlockFeedback, width_of
from ..fit.input_scale import input_scale
from ..formats.catalog import LinearScheme
from ..formats.scheme import VQScheme
from ..formats.stored_weight import rotation_of
from ..hf.calibration_options import (
    AUTO,
    OWN_WORDS,
    RANDOM,
    TOKEN_IDS,
    leave_out_activations,
    reads_activations,
)
from ..hf.checkpoint.headers import absent_dense
from ..hf.checkpoint.new_parts import is_new, is_outside
from ..hf.config import VQConfig
from ..nn.experts import holds_experts
from ..progress import Progress
from .blocks import Blocks, WholeModel, dtypes_of_blocks, find_blocks
from .distributed import ProcessGroup, launched_processes
from .hessians import Listener, Site
from .offload import is_offloaded, shortage, too_little
from .targets import Target, decoded, fit_target, replace_layers, targets_of
from .text import (
    context_of,
    find_text,
    halved_batches,
    own_words,
    sequences_of,
    tokenizer_of,
)

logger = logging.get_logger("hf_vq")

TOKENS, MOST_TOKENS = 2048, 4096  # between them, as many as the widest layer has inputs
_CONTEXT = 64  # of own words and random tokens: first tokens are special
_CONTEXT_OF_TEXT = 256
_ROOM = 1.15  # for activations and codes, in units of the dense model
_CHARACTERS = 12  # of a data set for every token
_AT_ONCE = 512  # tokens of a batch


@dataclass
class _Encoded:
    """Codes of the tensors of one block, by name.

    Args:
        codes: of all of them.
        fallbacks: why some were encoded without data.
    """

    codes: dict[str, FittedWeight] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)

    def sendable(self) -> _Encoded:
        """The same with tensors of the CPU: a pickled tensor names the sender's device."""
        codes = {
            name: replace(one, tensors={key: t.cpu() for key, t in one.tensors.items()})
            for name, one in self.codes.items()
        }
        return _Encoded(codes, self.fallbacks)


class ActivationPass:
    """Encodes the layers of a model with statistics of their inputs.

    Args:
        model: its weights need not be loaded yet.
        schemes: schemes of the layers to encode, by name.
        config: gives seed, search and `activations`.
        files: files of the weights; the tokenizer is in the same folder.

    Attributes:
        kind: name of its facts in config.json.
        schemes: of the layers that this pass encodes, by name.
        names: of these layers.
        tokens: that are read, if none are given and the text has so many.
        is_automatic: nobody asked for it, so whatever fails must leave data-free codes.
        failed: why layers are encoded without data from here on; "" while they are not.
        can_write: False if the weights of the model's head were not in the checkpoint.

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
        self.is_automatic = config.activations == AUTO
        self.files, self.config = files, config
        self.given = OWN_WORDS if self.is_automatic else config.activations
        usable = {name: scheme for name, scheme in schemes.items() if reads_activations(scheme)}
        try:
            self.prefix = find_blocks(model, usable)
        except VQCalibrationError:
            self.prefix = ""  # the model is run as a whole
        start = f"{self.prefix}." if self.prefix else ""
        self.schemes: dict[str, LinearScheme] = {}
        self.failed, self.can_write = "", True
        self.targets: dict[str, Target] = {}
        for name in usable:
            if name.startswith(start):
                try:
                    found = targets_of(name, model.get_submodule(name))
                except VQConfigError:  # experts of another kind, as Llama 4's: encoded while read
                    continue
                self.schemes[name] = usable[name]
                self.targets |= {target.name: target for target in found}
        self.names = set(self.schemes)
        widest = max((target.shape[1] for target in self.targets.values()), default=0)
        self.tokens = min(max(TOKENS, widest - widest % (2 * _AT_ONCE)), MOST_TOKENS)  # of halves
        self.text, self.facts = None, {"text": RANDOM if self.given == RANDOM else TOKEN_IDS}
        if isinstance(self.given, str) and self.given != RANDOM:
            self.text, self.facts = find_text(self.given, self.tokens * _CHARACTERS)

    @staticmethod
    def obstacle(
        model: Any,
        schemes: Mapping[str, LinearScheme],
        device_map: Any = None,
        *,
        is_automatic: bool = False,
    ) -> str | None:
        """Why `model` cannot have this pass; None if it can, "" if no scheme could use it.

        Args:
            device_map: as given to `from_pretrained`; of names such as "auto", `too_large` judges.
            is_automatic: nobody asked for the pass.
        """
        if not any(map(reads_activations, schemes.values())):
            return ""
        if getattr(model, "main_input_name", "") != "input_ids":
            return f"{type(model).__name__} does not read token ids"
        if is_automatic and launched_processes() > 1:
            return (
                "several processes load the model, and must find the same codes; quantize it once "
                f"in one process and save it, or give activations={OWN_WORDS!r} after "
                "torch.distributed has started in all of them"
            )
        if is_automatic and is_offloaded(device_map):
            return (
                "weights are offloaded, and the dense model would be read twice; quantize it once "
                f"without offloading and save it, or give activations={RANDOM!r}"
            )
        return shortage(model, device_map, _ROOM)

    def too_large(self, model: Any, max_memory: Mapping[Any, int]) -> str | None:
        """Why a dense model does not fit into the memory of places, or only in part; None if it
        does.

        Args:
            max_memory: bytes by place, as Transformers makes a map of places from.
        """
        far = {place: size for place, size in max_memory.items() if place not in ("cpu", "disk")}
        have = int(sum(far.values()) if far else max_memory.get("cpu", 0))
        need = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        if _ROOM * need > have:
            return too_little(need, have)
        if not self.is_automatic:
            return None
        classes = model._no_split_modules
        places = infer_auto_device_map(model, dict(max_memory), classes)  # of the dense model
        return self.obstacle(model, self.schemes, places, is_automatic=True)

    def check_missing(self, model: Any, missing: Iterable[str]) -> None:
        """Keep the pass from reading numbers that are in no file.

        Args:
            missing: names of the parameters that were not found, or have another shape.

        Raises:
            VQFormatError: somebody asked for the pass, and it would read them.
        """
        absent = absent_dense(model, missing)
        head = model.get_output_embeddings()
        heads = {name for name, module in model.named_modules() if module is head}
        self.can_write = not any(name.rpartition(".")[0] in heads for name in absent)
        coded = {f"{target.layer}.{target.weight}" for target in self.targets.values()}
        read = [n for n in absent if not (n in coded or is_outside(model, n) or is_new(model, n))]
        if read and not self.is_automatic:
            raise VQFormatError(
                f"the checkpoint lacks {read[0]}, or has it in another shape, so activations would "
                "be of random numbers: VQConfig(activations=None) quantizes without them."
            )
        if read:
            self.failed = f"the checkpoint lacks {read[0]}"

    @torch.no_grad()
    def run(self, model: Any, errors: dict[str, float]) -> dict[str, Any]:
        """Replace the layers by VQ modules.

        An interruption leaves every layer whole, as codes or dense. Several processes of a group
        get the codes of the first.

        Args:
            model: a model with its weights in memory or offloaded by accelerate.
            errors: receives the relative error of each layer's weights, by name.

        Returns:
            Facts about the pass for config.json: `layers` is the number of tensors whose codes know
            their inputs, `fallbacks` says why others do not, `failed` why none do from there on.

        Raises:
            VQCalibrationError: the text is too short.
        """
        group = ProcessGroup()
        sequences = torch.empty(0, 0)
        if group.rank == 0 and not self.failed:
            sequences = self._sequences_or_none(model)
        blocks = self._blocks(model, sequences)
        progress = Progress(f"Quantizing to {self.config.scheme_name}", len(self.targets))
        fallbacks: dict[str, str] = {}
        try:
            for index in range(group.broadcast(lambda: len(blocks))):
                done = group.broadcast(partial(self._sent, group, blocks, index, progress))
                targets = [self.targets[name] for name in done.codes]
                replace_layers(model, targets, done.codes, self.schemes, self.config.seed)
                fallbacks |= done.fallbacks
                for name, one in done.codes.items():
                    errors[name] = float(f"{one.relative_error:.4g}")
        finally:
            progress.close()
        self.failed, self.facts, count = group.broadcast(
            lambda: (self.failed, self.facts, sequences.numel())
        )
        return self._facts_of(fallbacks, count)

    def _facts_of(self, fallbacks: dict[str, str], tokens: int) -> dict[str, Any]:
        """Log in one line what fell back, and return facts about the pass."""
        heard, why = len(self.targets) - len(fallbacks), self.failed
        others = {name: reason for name, reason in fallbacks.items() if reason != why}
        if others and not why:
            why = f"{next(iter(others))} {next(iter(others.values()))}"
        if fallbacks:
            logger.warning(
                "hf_vq: %d of %d tensors are quantized without activations: %s.",
                len(fallbacks), len(self.targets), why.rstrip("."),
            )  # fmt: skip
        if not heard:
            leave_out_activations(self.config)
        self.config.activations = None  # from here on, the provenance says it
        found: dict[str, Any] = {"layers": heard, "fallbacks": others}
        found |= {"failed": self.failed} if self.failed else {}
        read = {**self.facts, "tokens": tokens, "seed": self.config.seed}
        return {**read, **found} if heard else found

    def _blocks(self, model: Any, sequences: Tensor) -> Blocks | WholeModel:
        batches = halved_batches(sequences, _AT_ONCE)
        for dtype in dtypes_of_blocks(model):
            try:
                if self.prefix and batches:
                    return Blocks(model, self.prefix, batches, dtype)
            except Exception as error:  # of its forward, too: what cannot run at all, says so below
                logger.info("hf_vq: %s The model is run in another way instead.", error)
        return WholeModel(model, batches)

    def _sent(
        self, group: ProcessGroup, blocks: Blocks | WholeModel, index: int, progress: Progress
    ) -> _Encoded:
        done = self._block(blocks, index, progress)
        return done if group.size == 1 else done.sendable()

    def _block(self, blocks: Blocks | WholeModel, index: int, progress: Progress) -> _Encoded:
        """Encode one block, and run it with these codes for the next."""
        targets = blocks.targets(index, self.targets.values())
        layers = {target.layer: blocks.model.get_submodule(target.layer) for target in targets}
        done = _Encoded()
        with blocks.on(index, None) as device:
            for site in self._heard(blocks, index, layers, device, done.fallbacks):
                self._site(site, layers, done, progress)
                site.release()
            for target in targets:
                if target.name not in done.codes:
                    why = self.failed or "got no token"
                    done.fallbacks.setdefault(target.name, why)
                    progress.start(target.name)
                    done.codes[target.name] = self._fit(target, layers[target.layer], None)
                    progress.done()
            if index + 1 < len(blocks) and not self.failed:
                self._pass_on(blocks, index, layers, done, device)
        return done

    def _pass_on(
        self,
        blocks: Blocks | WholeModel,
        index: int,
        layers: Mapping[str, nn.Module],
        done: _Encoded,
        device: torch.device,
    ) -> None:
        """Replace the inputs of a block by its outputs with codes; the layers stay unchanged, so
        that an interruption leaves a whole model."""
        assert isinstance(blocks, Blocks)
        start, seed = f"{blocks.prefix}.{index}.", self.config.seed
        tensors = {}
        for name, one in done.codes.items():
            target = self.targets[name]
            weight = f"{target.layer}.{target.weight}".removeprefix(start)
            scheme = self.schemes[target.layer]
            layer = layers[target.layer]
            tensors[weight] = decoded(target, layer, one, scheme, seed, blocks.dtype)
        try:
            for row, hidden in enumerate(blocks.hidden):
                blocks.hidden[row] = blocks.run(index, hidden, device, tensors)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """From here on, layers are encoded without data: a pass must not forbid what works without
        it."""
        self.failed = f"the model cannot run ({_shown(error)})"

    def _heard(
        self,
        blocks: Blocks | WholeModel,
        index: int,
        layers: Mapping[str, nn.Module],
        device: torch.device,
        fallbacks: dict[str, str],
    ) -> list[Site]:
        """Inputs of the layers of one block; nothing where the model cannot run.

        Args:
            fallbacks: receives tensors of experts that are called in an unknown way.
        """
        plain = {name: layer for name, layer in layers.items() if not holds_experts(layer)}
        for heard in (layers, plain) if len(plain) < len(layers) else (layers,):
            listener = Listener(block=partial(self._width, isinstance(blocks, Blocks)))
            try:
                for hidden in blocks.hidden if not self.failed else ():
                    with listener.listening(heard):
                        blocks.run(index, hidden, device)
            except Exception as error:
                problem = error
                continue
            for name, target in self.targets.items():
                if target.layer in layers and target.layer not in heard:
                    fallbacks[name] = f"cannot be listened to ({_shown(problem)})"
            return listener.sites
        self._fail(problem)
        return []

    def _site(
        self,
        site: Site,
        layers: Mapping[str, nn.Module],
        done: _Encoded,
        progress: Progress,
    ) -> None:
        """Encode the layers that read the same tensor."""
        known = _Known(site, [self.targets[name] for name in site.layers], layers, self)
        for name in site.layers:
            progress.start(name)
            target = self.targets[name]
            try:
                done.codes[name] = self._fit(target, layers[target.layer], known)
            except Exception as error:  # of the statistics: without them, it may work
                done.fallbacks[name] = f"has inputs that do not help ({error})"
                done.codes[name] = self._fit(target, layers[target.layer], None)
            progress.done()

    def _fit(self, target: Target, module: nn.Module, known: _Known | None) -> FittedWeight:
        """Encode one dense tensor."""

        scheme = self.schemes[target.layer]
        nothing = {"input_scale": torch.ones(target.shape[1])} if scheme.is_scaled else {}

        def known_of(matrix: Tensor, index: int) -> Mapping[str, Any]:
            return nothing if known is None else known.of(target, index)

        return fit_target(target, module, scheme, self.config, known_of)

    def _width(self, one_by_one: bool, in_features: int, fused: bool) -> int:
        """Inputs of a block of H: many, unless experts share few tokens, or the moments of all
        layers are in memory at once."""
        schemes = {s for s in self.schemes.values() if isinstance(s, VQScheme)}
        block = max(scheme.block(in_features) for scheme in schemes)
        return width_of(in_features, block) if one_by_one and not fused else block

    def _sequences_or_none(self, model: Any) -> Tensor:
        """Token ids [sequences, tokens]; none where a model that was given no text has no tokens
        either."""
        if not isinstance(self.given, str) or self.text is not None:
            return self._sequences(model)
        try:
            return self._sequences(model)
        except Exception as error:
            self._fail(error)
            return torch.empty(0, 0)

    def _sequences(self, model: Any) -> Tensor:
        """Token ids [sequences, tokens], two sequences at least: one half judges the other."""
        if not isinstance(self.given, str):
            ids = torch.atleast_2d(torch.as_tensor(self.given))
            return ids if len(ids) > 1 else ids[:, : ids.shape[1] // 2 * 2].reshape(2, -1)
        seed, longest = self.config.seed, context_of(model, None)
        drawn = self.given in (OWN_WORDS, RANDOM)
        context = min(_CONTEXT if drawn else _CONTEXT_OF_TEXT, longest)
        if self.given == OWN_WORDS:
            why = self._writes_nothing(model)
            try:
                if why is None:
                    count = self.tokens // context
                    return own_words(model, count, context, seed=seed, files=self.files)
            except Exception as error:
                why = _shown(error)
            logger.warning("hf_vq: random tokens are read, not the model's own words: %s", why)
            self.facts = {"text": RANDOM}
        if self.facts["text"] == RANDOM:
            size = model.get_input_embeddings().num_embeddings
            generator = torch.Generator().manual_seed(seed)
            return torch.randint(size, (self.tokens // context, context), generator=generator)
        tokenizer = tokenizer_of(model, self.files)
        of = model, self.text, tokenizer
        try:
            return sequences_of(*of, self.tokens, context, seed, progress=True)
        except VQCalibrationError:  # a short text will do
            return sequences_of(*of, TOKENS, context, seed, progress=True)

    def _writes_nothing(self, model: Any) -> str | None:
        """Why a model cannot write its own words; None if it may."""
        if any(parameter.is_meta for parameter in model.parameters()):
            return "its weights are offloaded, and each token would load them all."
        if not model.can_generate() or model.config.is_encoder_decoder:
            return f"{type(model).__name__} writes no text."
        return None if self.can_write else "its output head is not in the checkpoint."


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
                found["input_scale"] = self._input_scale(hessian.sum(0), index, target.shape[1])
            seed, device = self.owner.config.seed, hessian.device
            fixed = fixed_tensors(scheme, target.shape[1], seed, device, **found)
            rotation = rotation_of(fixed)
            found["feedback"] = BlockFeedback(
                hessian, scheme, rotation, in_features=target.shape[1], where=target.name
            )
            self._made[key] = found
        return self._made[key]

    def _input_scale(self, hessian: Tensor, index: int, in_features: int) -> Tensor:
        """One for all layers of the site, so that kernels rotate their input once."""
        matrices = [one.matrices(self.layers[one.layer])[index] for one in self.targets]
        power = hessian.diagonal(dim1=-2, dim2=-1).flatten()[:in_features]
        return input_scale(power, matrices)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
