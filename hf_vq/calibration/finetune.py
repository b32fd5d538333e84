"""Fine-tuning after calibration: scales, codebooks, norms and biases move, and codes.

    block    min | block_q(x_q) - block(x) |^2         as soon as a block has its codes
    model    the same, and at the end, in all blocks at once, min KL( model(text) || model_q(text) )

x are the hidden states of the original model, x_q those that the codes of the blocks before have
left, so that a block makes up for their errors too. AQLM (arXiv 2401.06118, section 3.4) tunes
blocks on x_q alone; "model" is knowledge distillation. A universal codebook is shared: it stays,
and so do integers.

A scale s moves as s (1 + d), any other tensor t as t + rms(t) d: one learning rate serves all.
Codes of universal codebooks follow gradients of their entries (`moving_codes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import VQCalibrationError
from ..fit import fixed_tensors
from ..formats.scheme import VQScheme
from ..formats.stored_weight import StoredWeight, rotation_of
from ..hf.quantize_op import Progress
from ..ops.reference import codes as reference
from .blocks import Blocks
from .resume import CodedBlock, Unfinished
from .straight_through import MovingCodes, movable
from .targets import Part

LEARNING_RATE = 3e-3  # falls to zero in a straight line
EPOCHS = 2
ENTRY_STEP = 3.3
"""A step of an entry that moves, in units of the relative step of a scale."""
_BETAS = (0.9, 0.95)


class TunedBlock:
    """One block of a model as a function of what moves in it.

    Args:
        block: of the model; its norms and biases are the original ones.
        start: name of the block in the model, with a dot at its end.
        done: the codes of its parts; `update` writes what moved there.
        parts: dense tensors of the block.
        schemes: of the layers of the model, by name.
        seed: of the rotations.
        device: where it is computed.
        entry_step: as `ENTRY_STEP`: codes move, too, where they can; None leaves them.
    """

    def __init__(
        self,
        block: nn.Module,
        start: str,
        done: CodedBlock,
        parts: Iterable[Part],
        schemes: Mapping[str, VQScheme],
        seed: int,
        device: torch.device,
        entry_step: float | None,
    ) -> None:
        self.start, self.done, self.device = start, done, device
        self.parts, self.schemes = list(parts), schemes
        self.fixed: dict[str, dict[str, Tensor]] = {}
        self.origin: dict[str, dict[str, Tensor]] = {}  # by layer, then by key
        for part in self.parts:
            stored = {k: t.to(device) for k, t in done.fitted[part.name].tensors.items()}
            self.fixed[part.name] = stored
            self.origin[part.name] = {
                key: tensor.float() for key, tensor in stored.items() if tensor.is_floating_point()
            }
        self.shared = {
            part.name: fixed_tensors(schemes[part.layer], part.shape[1], seed, device)
            for part in self.parts
        }
        self.moving = {
            part.name: MovingCodes(
                self.fixed[part.name]["codes"], self.shared[part.name]["codebook"],
                schemes[part.layer], part.shape[1], entry_step,
            )
            for part in self.parts
            if entry_step is not None and movable(schemes[part.layer])
        }  # fmt: skip
        small = {start + name: p for name, p in block.named_parameters() if p.ndim == 1}
        self.dtypes = {start + name: p.dtype for name, p in block.named_parameters()}
        self.origin[""] = {
            name: done.tuned.get(name, parameter.detach()).to(device).float()
            for name, parameter in small.items()
        }
        self.deltas = {
            name: {key: torch.zeros_like(t).requires_grad_() for key, t in tensors.items()}
            for name, tensors in self.origin.items()
        }

    def parameters(self) -> list[Tensor]:
        """What a step moves, in a fixed order."""
        found = [delta for deltas in self.deltas.values() for delta in deltas.values()]
        return [*found, *(codes.delta for codes in self.moving.values())]

    def follow(self) -> None:
        """Take the codes that parameters have moved to."""
        for codes in self.moving.values():
            codes.follow()

    def tensors(self) -> dict[str, Tensor]:
        """Weights, norms and biases by their names in the block, differentiable."""
        found = self._moved("")
        for part in self.parts:
            stored = {**self.fixed[part.name], **self._moved(part.name)}
            if part.name in self.moving:
                stored |= self.moving[part.name].stored()
            if not part.fused:
                weight = self._decoded(part, stored)
            else:
                each = [{key: t[i] for key, t in stored.items()} for i in range(part.count)]
                weight = torch.stack([self._decoded(part, one) for one in each])
            found[f"{part.layer}.{part.weight}"] = weight
        return {
            name.removeprefix(self.start): tensor.to(self.dtypes[name])
            for name, tensor in found.items()
        }

    def _decoded(self, part: Part, stored: dict[str, Tensor]) -> Tensor:
        """One matrix as the layer keeps it. The reference is made of differentiable operations."""
        scheme, tensors = self.schemes[part.layer], {**self.shared[part.name], **stored}
        weight = reference.decode(StoredWeight.of(tensors, scheme, part.shape[1]))
        if "pull" in stored:
            scale = stored["scale"].detach()[..., None]
            rows = (stored["pull"].unflatten(-1, (scale.shape[-2], -1)) * scale).flatten(-2)
            weight = weight + reference.rotate(rows, rotation_of(tensors), scheme, True)
        return weight.T if part.transposed else weight

    def update(self) -> None:
        """Write what moved to `done`, as it is stored.

        Raises:
            VQCalibrationError: it is not finite.
        """
        for name, fitted in list(self.done.fitted.items()):
            moved = {key: tensor.detach().half() for key, tensor in self._moved(name).items()}
            if not all(bool(tensor.isfinite().all()) for tensor in moved.values()):
                raise VQCalibrationError(
                    f"fine-tuning of {name} gave NaN or infinity. Use a longer text, or leave "
                    '"finetune" out.'
                )
            if name in self.moving:
                moved["codes"] = self.moving[name].packed
            tensors = {key: moved.get(key, t).to(t.device) for key, t in fitted.tensors.items()}
            self.done.fitted[name] = replace(fitted, tensors=tensors)
        for name, tensor in self._moved("").items():
            self.done.tuned[name] = tensor.detach().to(self.dtypes[name])

    def _moved(self, name: str) -> dict[str, Tensor]:
        found = {}
        for key, origin in self.origin[name].items():
            size = origin if key.startswith("scale") else origin.square().mean().sqrt()
            found[key] = origin + size * self.deltas[name][key]
        return found


def tune_block(
    blocks: Blocks, index: int, tuned: TunedBlock, targets: list[Tensor], device: torch.device
) -> list[float]:
    """Move one block towards `targets`, what the original makes of the same texts.

    Returns:
        mean squared error over the mean square of the targets, before and after.
    """
    size = torch.stack([target.float().square().mean() for target in targets]).mean()

    def loss(row: int) -> Tensor:
        found = blocks.run(index, blocks.hidden[row], device, tuned.tensors())
        return (found.float() - targets[row].float()).square().mean() / size

    descent = _Descent([tuned], loss, len(targets))
    before = descent.mean()
    for _ in descent.epochs():
        pass
    after = descent.settle(before)
    tuned.update()
    return [before, after]


def tune_model(
    blocks: Blocks,
    tuned: list[TunedBlock],
    sequences: Tensor,
    original: list[Tensor],
    work: Unfinished,
) -> list[float]:
    """Move all blocks towards the original's predictions on `sequences` [n, tokens].

    Args:
        original: what its last block returned for each of them.
        work: keeps what moved after every epoch.

    Returns:
        KL divergence of a prediction in nats, before and after.
    """

    def block(index: int, hidden: Tensor) -> Tensor:
        return blocks.run(index, hidden, tuned[index].device, tuned[index].tensors())

    def loss(row: int) -> Tensor:
        hidden, ids = blocks.hidden[row], sequences[row : row + 1].to(blocks.model.device)
        for index in range(len(tuned)):
            hidden = checkpoint(block, index, hidden, use_reentrant=False)
        with torch.no_grad():
            expected = blocks.logits(ids, original[row]).float().log_softmax(-1)
        found = blocks.logits(ids, hidden).float().log_softmax(-1)
        return (expected.exp() * (expected - found)).sum(-1).mean()

    descent = _Descent(tuned, loss, len(sequences))
    kept = work.tuning()
    before = descent.restore(*kept) if kept else descent.mean()
    for epoch in descent.epochs():
        work.keep_tuning(descent.state(), epoch=epoch, before=before)
    after = descent.settle(before)
    for part in tuned:
        part.update()
    return [before, after]


class _Descent:
    """Adam, one sequence a step, in an order that only the epoch decides."""

    def __init__(
        self, tuned: Sequence[TunedBlock], loss: Callable[[int], Tensor], rows: int
    ) -> None:
        self.tuned, self.loss, self.rows = tuned, loss, rows
        self.parameters = [delta for part in tuned for delta in part.parameters()]
        self.adam = torch.optim.Adam(self.parameters, lr=LEARNING_RATE, betas=_BETAS)
        self.epoch = 0

    def epochs(self) -> Iterable[int]:
        """Run what is left to do; yields the number of epochs done after each."""
        progress = Progress("Fine-tuning", EPOCHS * self.rows)
        progress.skip(self.epoch * self.rows)
        try:
            while self.epoch < EPOCHS:
                order = torch.randperm(
                    self.rows, generator=torch.Generator().manual_seed(self.epoch)
                )
                for step, row in enumerate(order.tolist(), self.epoch * self.rows):
                    progress.start(f"epoch {self.epoch + 1}")
                    rate = LEARNING_RATE * (1 - step / (EPOCHS * self.rows))
                    self.adam.param_groups[0]["lr"] = rate
                    self._step(row)
                    progress.done()
                self.epoch += 1
                yield self.epoch
        finally:
            progress.close()

    def _step(self, row: int) -> None:
        with torch.enable_grad():
            found = torch.autograd.grad(self.loss(row), self.parameters, allow_unused=True)
        for parameter, gradient in zip(self.parameters, found, strict=True):
            parameter.grad = gradient
        self.adam.step()
        self._follow()

    def _follow(self) -> None:
        for part in self.tuned:
            part.follow()

    @torch.no_grad()
    def mean(self) -> float:
        """The loss over all sequences."""
        return float(torch.stack([self.loss(row).double() for row in range(self.rows)]).mean())

    def settle(self, before: float) -> float:
        """The loss at the end; nothing has moved where that would be no less than `before`."""
        after = self.mean()
        if after < before:
            return after
        for parameter in self.parameters:
            parameter.detach().zero_()
        self._follow()
        return before

    def state(self) -> dict[str, Tensor]:
        """What moved, and the optimizer's moments."""
        found = {f"{i}.delta": p.detach() for i, p in enumerate(self.parameters)}
        for i, moments in self.adam.state_dict()["state"].items():
            found |= {f"{i}.{key}": tensor for key, tensor in moments.items()}
        return found

    def restore(self, about: dict[str, Any], tensors: dict[str, Tensor]) -> float:
        """Go on from `state`; the loss before the first step."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            parameter = self.parameters[int(index)]
            if key == "delta":
                parameter.detach().copy_(tensor)
            else:
                state.setdefault(int(index), {})[key] = tensor
        groups = self.adam.state_dict()["param_groups"]
        self.adam.load_state_dict({"state": state, "param_groups": groups})
        self._follow()
        self.epoch = about["epoch"]
        before: float = about["before"]
        return before
