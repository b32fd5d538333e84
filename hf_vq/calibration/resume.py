"""A calibration on disk while it runs: killed at any point, it goes on after its last whole block.

    text.safetensors        token ids, and what is calibrated: model, scheme, text, options
    largest.safetensors     the largest inputs of layers, if transforms are chosen by them
    costs.safetensors       what each layer's schemes cost, if they are to be chosen
    block-3.safetensors     codes of block 3
    hidden-4.safetensors    hidden states of the text between blocks 3 and 4, written before it
                            (hidden-4-1.safetensors: those of the second of several processes)
    finetune.safetensors    what moved in a fine-tuning of the whole model, after its last epoch
    saved                   digest of the config.json of the model that is about to take its place

Every file is written whole or not at all. What is read is what was written, so the result is that
of a run that was not killed, bit by bit. The file `lock` is locked while a process is at work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache.safetensors_file import read, write
from ..errors import VQCalibrationError
from ..fit import FittedWeight
from ..formats.hidden import hidden_file, hidden_folder, lock, remove_leftovers
from .distributed import Team

VERSION = 1
_KEY = "hf_vq_calibration"
_SAVED = "saved"


@dataclass
class CodedBlock:
    """What became of the layers of one block.

    Args:
        fitted: by name.
        fallbacks: what was done otherwise than asked, by name.
        tuned: norms and biases that fine-tuning moved, by name.
        loss: of the fine-tuning of this block, before and after.
        divergence: of the whole model, of the last block after that of all blocks at once.
    """

    fitted: dict[str, FittedWeight] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    tuned: dict[str, Tensor] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)

    def on(self, device: torch.device | str) -> CodedBlock:
        """The same with the codes on a device."""
        fitted = {
            name: replace(one, tensors={key: t.to(device) for key, t in one.tensors.items()})
            for name, one in self.fitted.items()
        }
        return replace(self, fitted=fitted)


@contextmanager
def unfinished(
    folder: str | None, identity: dict[str, Any], team: Team | None = None
) -> Iterator[Unfinished]:
    """The folder of one calibration, for one process at a time, or for one team of them.

    Args:
        folder: created if it is not there; None keeps nothing.
        identity: JSON that must be equal for work to be taken up again.
        team: the first process keeps text, costs and blocks, each one its hidden states.

    Raises:
        VQCalibrationError: the folder holds the calibration of something else, is used by another
            process, or cannot be written.
        VQFormatError: a file in it is damaged.
    """
    team = team or Team()
    if folder is None:
        yield Unfinished(None, identity, team)
        return
    if team.size > 1:
        identity = {**identity, "processes": team.size}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        held = (Path(folder) / "lock").open("ab")
    except OSError as error:
        raise VQCalibrationError(f"cannot write to {folder}: {error.strerror}.") from None
    with held:
        if team.rank == 0 and lock(held) is False:
            raise VQCalibrationError(
                f"another process calibrates in {folder}. Wait for it, or give another folder."
            )
        yield Unfinished(folder, identity, team)


def mark_saved(folder: Path, model: Path) -> None:
    """Note that the calibration is in a model's folder, which takes its place just after this."""
    with hidden_file(folder / _SAVED) as path:
        path.write_text(_digest(model), encoding="ascii")


def discard_if_saved(folder: Path, model: Path) -> None:
    """Remove a calibration whose result is in a model's folder, and what is left of such removals.

    It must go as a whole: half of one could not be taken up.
    """
    remove_leftovers(folder.parent, folder.name)
    try:
        saved = (folder / _SAVED).read_text(encoding="ascii") == _digest(model)
    except OSError:
        return
    if saved:
        with hidden_folder(folder.parent, folder.name) as hidden:
            folder.rename(hidden / folder.name)


def _digest(model: Path) -> str:
    return hashlib.sha256((model / "config.json").read_bytes()).hexdigest()


class Unfinished:
    """What a calibration keeps in its folder: see `unfinished`."""

    def __init__(self, folder: str | None, identity: dict[str, Any], team: Team) -> None:
        self.folder = None if folder is None else Path(folder)
        self.identity, self.team = identity, team
        if self.folder is None or team.rank > 0:
            return
        remove_leftovers(self.folder, None)
        self._text = self.folder / "text.safetensors"
        if self._text.exists():
            old = _read(self._text)[0]["identity"]
            changed = [key for key in {**old, **identity} if old.get(key) != identity.get(key)]
            if changed:
                raise VQCalibrationError(
                    f"{folder} holds an unfinished calibration of something else "
                    f"({', '.join(changed)} differ). Delete it, or give another folder."
                )

    def tokens(self, make: Callable[[], Tensor]) -> Tensor:
        """The token ids that were kept, else what `make` returns; in every process the first's."""
        return self.team.first(lambda: self._tokens(make))

    def _tokens(self, make: Callable[[], Tensor]) -> Tensor:
        if self.folder is None:
            return make()
        if not self._text.exists():
            ids = make()
            # Of a folder that was not removed as a whole:
            for what in ("largest", "costs", "block-*", "hidden-*", "finetune"):
                for left in self.folder.glob(f"{what}.safetensors"):
                    left.unlink()
            _write(self._text, {"ids": ids}, identity=self.identity)
        return _read(self._text)[1]["ids"]

    def largest(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The maxima that were kept, else those over what `make` returns in every process."""
        path = None if self.folder is None else self.folder / "largest.safetensors"

        def kept() -> dict[str, Tensor] | None:
            return _read(path)[1] if path is not None and path.exists() else None

        found = self.team.first(kept)
        if found is not None:
            return found
        found = {}
        for one in self.team.everyones(make()):
            for name, maxima in one.items():
                found[name] = torch.maximum(maxima, found.get(name, maxima))
        if path is not None and self.team.rank == 0:
            _write(path, found)
        return found

    def costs(self, make: Callable[[], dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
        """The costs that were kept, else the mean of what `make` returns in every process."""
        path = None if self.folder is None else self.folder / "costs.safetensors"

        def kept() -> dict[str, dict[str, float]] | None:
            return _read(path)[0]["costs"] if path is not None and path.exists() else None

        found = self.team.first(kept)
        if found is not None:
            return found
        all_of_them = self.team.everyones(make())
        found = {}
        for one in all_of_them:  # a layer may be heard in some of them only
            for layer, costs in one.items():
                whole = found.setdefault(layer, {})
                for spec, cost in costs.items():
                    whole[spec] = whole.get(spec, 0.0) + cost / len(all_of_them)
        if path is not None and self.team.rank == 0:
            _write(path, {}, costs=found)
        return found

    def block(self, index: int) -> CodedBlock | None:
        """What was kept of a block; None if it is still to be done."""
        done = self.team.first(lambda: self._block(index))
        before = self._path("hidden", index)
        if done is not None and before is not None:
            before.unlink(missing_ok=True)  # if the process was killed just before that
        return done

    def _block(self, index: int) -> CodedBlock | None:
        path = self._path("block", index)
        if path is None or not path.exists():
            return None
        about, tensors = _read(path)
        done = CodedBlock(fallbacks=about["fallbacks"], loss=about["loss"])
        done.tuned = {name: tensors[f"{name}:tuned"] for name in about["tuned"]}
        for name, (relative, output) in about["errors"].items():
            keys = {key: f"{name}:{key}" for key in about["keys"][name]}
            own = {key: tensors[stored] for key, stored in keys.items()}
            done.fitted[name] = FittedWeight(own, relative, output)
        return done

    def hidden(self, index: int, current: list[Tensor]) -> list[Tensor]:
        """Hidden states that were kept after the block before `index`, where `current` are."""
        path = self._path("hidden", index)
        assert path is not None, "without a folder no block is taken up"
        if not path.exists():
            raise VQCalibrationError(
                f"{path} is missing, so block {index} cannot be calibrated. Delete the folder."
            )
        kept = _read(path)[1]
        return [kept[str(row)].to(hidden.device) for row, hidden in enumerate(current)]

    def keep(self, index: int, done: CodedBlock, hidden: list[Tensor]) -> None:
        """Keep a block that is done, and the hidden states after it; none after the last."""
        block, before = self._path("block", index), self._path("hidden", index)
        after = self._path("hidden", index + 1)
        if block is None or before is None or after is None:
            return
        if hidden:
            _write(after, {str(row): part for row, part in enumerate(hidden)})
        self.team.wait()  # a block that is kept has hidden states in every process
        if self.team.rank == 0:
            self._keep(block, done)
        self.team.wait()
        before.unlink(missing_ok=True)

    @staticmethod
    def _keep(path: Path, done: CodedBlock) -> None:
        tensors = {
            f"{name}:{key}": tensor
            for name, fitted in done.fitted.items()
            for key, tensor in fitted.tensors.items()
        }
        tensors |= {f"{name}:tuned": tensor for name, tensor in done.tuned.items()}
        _write(
            path,
            tensors,
            fallbacks=done.fallbacks,
            tuned=list(done.tuned),
            loss=done.loss,
            keys={name: list(fitted.tensors) for name, fitted in done.fitted.items()},
            errors={n: [f.relative_error, f.output_error] for n, f in done.fitted.items()},
        )

    def tuning(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """What `keep_tuning` kept; None if that is nothing."""
        path = None if self.folder is None else self.folder / "finetune.safetensors"
        return _read(path) if path is not None and path.exists() else None

    def keep_tuning(self, tensors: dict[str, Tensor], **about: Any) -> None:
        """Keep the state of a fine-tuning of the whole model."""
        if self.folder is not None:
            _write(self.folder / "finetune.safetensors", tensors, **about)

    def _path(self, what: str, index: int) -> Path | None:
        own = f"-{self.team.rank}" if what == "hidden" and self.team.size > 1 else ""
        return None if self.folder is None else self.folder / f"{what}-{index}{own}.safetensors"


def _write(path: Path, tensors: dict[str, Tensor], **about: Any) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write(path, whole, _KEY, {"format_version": VERSION, **about})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return read(path, _KEY, VERSION, "part of a calibration", "a calibration of hf_vq")
