"""Fine-tuning after calibration: it trains scales, codebooks, norms, biases and codes.

    block    min | block_q(x_q) - block(x) |^2         as soon as a block has its codes
    model    the same, and at the end, in all blocks at once, min KL( model(text) || model_q(text) )

x are the hidden states of the original model, x_q those after the quantized blocks before, so a
block also compensates their errors. AQLM (arXiv 2401.06118, section 3.4) tunes blocks on x_q only;
"model" is knowledge distillation. Universal codebooks are shared by all layers and stay fixed, as
do integers.

A scale s moves as s (1 + d), any other tensor t as t + rms(t) d: one learning rate serves all.
Codes of universal codebooks follow gradients of their entries (`straight_through.py`).
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
from ..ops.reference import codes as reference
from ..progress import Progress
from .blocks import Blocks
from .resume import CodedBlock, ResumeFolder
from .straight_through import MovingCodes, movable
from .targets import Target

LEARNING_RATE = 3e-3  # falls to zero in a straight line
EPOCHS = 2
ENTRY_STEP = 3.3
"""Step size of an entry of a codebook, in units of the relative step of a scale."""
_BETAS = (0.9, 0.95)


class TunedBlock:
    """One block of a model as a function of its trained tensors.

    Args:
        block: the module, with its original norms and biases.
        start: name of the block in the model, with a dot at its end.
        done: codes of its tensors; `update` writes the trained tensors there.
        targets: dense tensors of the block.
        schemes: schemes of the model's layers, by name.
        seed: seed of the rotations.
        device: device of the computation.
        entry_step: step size of entries, see `ENTRY_STEP`; None keeps the codes.
    """

    def __init__(
        self,
        block: nn.Module,
        start: str,
        done: CodedBlock,
        targets: Iterable[Target],
        schemes: Mapping[str, VQScheme],
        seed: int,
        device: torch.device,
        entry_step: float | None,
    ) -> None:
        self.start, self.done, self.device = start, done, device
        self.targets, self.schemes = list(targets), schemes
        self.fixed: dict[str, dict[str, Tensor]] = {}
        self.origin: dict[str, dict[str, Tensor]] = {}  # by layer, then by key
        for target in self.targets:
            stored = {k: t.to(device) for k, t in done.fitted[target.name].tensors.items()}
            self.fixed[target.name] = stored
            self.origin[target.name] = {
                key: tensor.float() for key, tensor in stored.items() if tensor.is_floating_point()
            }
        self.shared = {
            target.name: fixed_tensors(schemes[target.layer], target.shape[1], seed, device)
            for target in self.targets
        }
        self.moving = {
            target.name: MovingCodes(
                self.fixed[target.name]["codes"], self.shared[target.name]["codebook"],
                schemes[target.layer], target.shape[1], entry_step,
            )
            for target in self.targets
            if entry_step is not None and movable(schemes[target.layer])
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
        """Parameters of the optimizer, in a fixed order."""
        found = [delta for deltas in self.deltas.values() for delta in deltas.values()]
        return [*found, *(codes.delta for codes in self.moving.values())]

    def follow(self) -> None:
        """Update the codes to the entries nearest to the trained vectors."""
        for codes in self.moving.values():
            codes.follow()

    def tensors(self) -> dict[str, Tensor]:
        """Weights, norms and biases by their names in the block, differentiable."""
        found = self._moved("")
        for target in self.targets:
            stored = {**self.fixed[target.name], **self._moved(target.name)}
            if target.name in self.moving:
                stored |= self.moving[target.name].stored()
            if not target.fused:
                weight = self._decoded(target, stored)
            else:
                each = [{key: t[i] for key, t in stored.items()} for i in range(target.count)]
                weight = torch.stack([self._decoded(target, one) for one in each])
            found[f"{target.layer}.{target.weight}"] = weight
        return {
            name.removeprefix(self.start): tensor.to(self.dtypes[name])
            for name, tensor in found.items()
        }

    def _decoded(self, target: Target, stored: dict[str, Tensor]) -> Tensor:
        """Decode one matrix, in the layer's orientation; all operations are differentiable."""
        scheme, tensors = self.schemes[target.layer], {**self.shared[target.name], **stored}
        weight = reference.decode(StoredWeight.of(tensors, scheme, target.shape[1]))
        if "pull" in stored:
            scale = stored["scale"].detach()[..., None]
            rows = (stored["pull"].unflatten(-1, (scale.shape[-2], -1)) * scale).flatten(-2)
            weight = weight + reference.rotate(rows, rotation_of(tensors), scheme, True)
        return weight.T if target.transposed else weight

    def update(self) -> None:
        """Write the trained tensors to `done`, in their stored dtypes.

        Raises:
            VQCalibrationError: a tensor is not finite.
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
    blocks: Blocks, index: int, tuned: TunedBlock, original: list[Tensor], device: torch.device
) -> list[float]:
    """Train one block towards `original`, its outputs in the original model for each sequence.

    Returns:
        Mean squared error over the mean square of `original`, before and after.
    """
    size = torch.stack([output.float().square().mean() for output in original]).mean()

    def loss(row: int) -> Tensor:
        found = blocks.run(index, blocks.hidden[row], device, tuned.tensors())
        return (found.float() - original[row].float()).square().mean() / size

    descent = _Descent([tuned], loss, len(original))
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
    work: ResumeFolder,
) -> list[float]:
    """Train all blocks towards the original model's predictions on `sequences` [n, tokens].

    Args:
        original: outputs of the original model's last block for each sequence.
        work: saves the state after every epoch.

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
    kept = work.load_tuning()
    before = descent.restore(*kept) if kept else descent.mean()
    for epoch in descent.epochs():
        work.save_tuning(descent.state(), epoch=epoch, before=before)
    after = descent.settle(before)
    for one in tuned:
        one.update()
    return [before, after]


class _Descent:
    """Adam with one sequence per step; the order of sequences depends only on the epoch."""

    def __init__(
        self, tuned: Sequence[TunedBlock], loss: Callable[[int], Tensor], rows: int
    ) -> None:
        self.tuned, self.loss, self.rows = tuned, loss, rows
        self.parameters = [delta for one in tuned for delta in one.parameters()]
        self.adam = torch.optim.Adam(self.parameters, lr=LEARNING_RATE, betas=_BETAS)
        self.epoch = 0

    def epochs(self) -> Iterable[int]:
        """Run the remaining epochs; yields the number of finished epochs after each."""
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
        for block in self.tuned:
            block.follow()

    @torch.no_grad()
    def mean(self) -> float:
        """Mean loss over all sequences."""
        return float(torch.stack([self.loss(row).double() for row in range(self.rows)]).mean())

    def settle(self, before: float) -> float:
        """Loss after training; undoes the training if the loss is not below `before`."""
        after = self.mean()
        if after < before:
            return after
        for parameter in self.parameters:
            parameter.detach().zero_()
        self._follow()
        return before

    def state(self) -> dict[str, Tensor]:
        """Changes of the parameters, and the moments of Adam."""
        found = {f"{i}.delta": p.detach() for i, p in enumerate(self.parameters)}
        for i, moments in self.adam.state_dict()["state"].items():
            found |= {f"{i}.{key}": tensor for key, tensor in moments.items()}
        return found

    def restore(self, about: dict[str, Any], tensors: dict[str, Tensor]) -> float:
        """Continue from `state`; returns the loss before the first step."""
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
