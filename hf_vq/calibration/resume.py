"""Resume folder of a calibration: after an interruption it continues with the next block.

    text.safetensors        token ids, and the identity: model, scheme, text, options
    largest.safetensors     largest inputs of layers, if transforms need them
    costs.safetensors       cost of each layer's candidate schemes, if there are candidates
    block-3.safetensors     codes of block 3
    hidden-4.safetensors    hidden states of the text between blocks 3 and 4, written before block-3
                            (hidden-4-1.safetensors: those of the second of several processes)
    finetune.safetensors    state of a fine-tuning of the whole model, after its last epoch
    saved                   digest of the config.json of the finished model

Every file is written atomically, and tensors are stored exactly: the result equals that of an
uninterrupted run bit by bit. A running process locks the file `lock`.
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
from .distributed import ProcessGroup

VERSION = 1
ALGORITHM = 2  # part of the identity: raise it where the same options make other codes
_KEY = "hf_vq_calibration"
_SAVED = "saved"


@dataclass
class CodedBlock:
    """Codes of the layers of one block.

    Args:
        fitted: codes of each dense tensor, by name.
        fallbacks: deviations from the requested calibration, by name.
        tuned: norms and biases that fine-tuning changed, by name.
        loss: loss of this block's fine-tuning, before and after.
        divergence: KL divergence of the whole model before and after its fine-tuning; only set in
            the last block.
    """

    fitted: dict[str, FittedWeight] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    tuned: dict[str, Tensor] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)

    def on(self, device: torch.device | str) -> CodedBlock:
        """Copy with the codes on `device`."""
        fitted = {
            name: replace(one, tensors={key: t.to(device) for key, t in one.tensors.items()})
            for name, one in self.fitted.items()
        }
        return replace(self, fitted=fitted)


@contextmanager
def open_resume_folder(
    folder: str | None, identity: dict[str, Any], processes: ProcessGroup | None = None
) -> Iterator[ResumeFolder]:
    """Open and lock the resume folder of one calibration.

    Args:
        folder: path, created if it does not exist; None = save nothing.
        identity: JSON that must be equal to that of the interrupted run.
        processes: processes that calibrate together. The first saves text, costs and blocks; each
            saves its hidden states.

    Raises:
        VQCalibrationError: the folder holds another calibration, is used by another process, or
            cannot be written.
        VQFormatError: a file in it is damaged.
    """
    processes = processes or ProcessGroup()
    if folder is None:
        yield ResumeFolder(None, identity, processes)
        return
    identity = {**identity, "algorithm": ALGORITHM}
    if processes.size > 1:
        identity = {**identity, "processes": processes.size}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock_file = (Path(folder) / "lock").open("ab")
    except OSError as error:
        raise VQCalibrationError(f"cannot write to {folder}: {error.strerror}.") from None
    with lock_file:
        if processes.rank == 0 and lock(lock_file) is False:
            raise VQCalibrationError(
                f"another process calibrates in {folder}. Wait for it, or give another folder."
            )
        yield ResumeFolder(folder, identity, processes)


def mark_saved(folder: Path, model: Path) -> None:
    """Record that the folder `model` holds the calibrated model; called just before its rename."""
    with hidden_file(folder / _SAVED) as path:
        path.write_text(_digest(model), encoding="ascii")


def discard_if_saved(folder: Path, model: Path) -> None:
    """Remove a resume folder whose result is in the folder `model`, and leftovers of removals.

    The folder is renamed first: half of it could not be resumed.
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


class ResumeFolder:
    """Files of an interrupted or running calibration; made by `open_resume_folder`."""

    def __init__(
        self, folder: str | None, identity: dict[str, Any], processes: ProcessGroup
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.identity, self.processes = identity, processes
        if self.folder is None or processes.rank > 0:
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
        """Saved token ids, else those of `make`; all processes get those of the first."""
        return self.processes.broadcast(lambda: self._tokens(make))

    def _tokens(self, make: Callable[[], Tensor]) -> Tensor:
        if self.folder is None:
            return make()
        if not self._text.exists():
            ids = make()
            # Files of a folder that was removed only partly:
            for what in ("largest", "costs", "block-*", "hidden-*", "finetune"):
                for left in self.folder.glob(f"{what}.safetensors"):
                    left.unlink()
            _write(self._text, {"ids": ids}, identity=self.identity)
        return _read(self._text)[1]["ids"]

    def largest(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Saved maxima, else the maxima over the results of `make` in all processes."""
        path = None if self.folder is None else self.folder / "largest.safetensors"

        def kept() -> dict[str, Tensor] | None:
            return _read(path)[1] if path is not None and path.exists() else None

        found = self.processes.broadcast(kept)
        if found is not None:
            return found
        found = {}
        for one in self.processes.all_gather(make()):
            for name, maxima in one.items():
                found[name] = torch.maximum(maxima, found.get(name, maxima))
        if path is not None and self.processes.rank == 0:
            _write(path, found)
        return found

    def costs(self, make: Callable[[], dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
        """Saved costs, else the mean over the results of `make` in all processes."""
        path = None if self.folder is None else self.folder / "costs.safetensors"

        def kept() -> dict[str, dict[str, float]] | None:
            return _read(path)[0]["costs"] if path is not None and path.exists() else None

        found = self.processes.broadcast(kept)
        if found is not None:
            return found
        all_of_them = self.processes.all_gather(make())
        found = {}
        for one in all_of_them:  # some processes may have no token for a layer
            for layer, costs in one.items():
                whole = found.setdefault(layer, {})
                for spec, cost in costs.items():
                    whole[spec] = whole.get(spec, 0.0) + cost / len(all_of_them)
        if path is not None and self.processes.rank == 0:
            _write(path, {}, costs=found)
        return found

    def load_block(self, index: int) -> CodedBlock | None:
        """Saved codes of a block; None if it is not finished."""
        done = self.processes.broadcast(lambda: self._block(index))
        before = self._path("hidden", index)
        if done is not None and before is not None:
            before.unlink(missing_ok=True)  # left if the process was killed in `save_block`
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

    def load_hidden(self, index: int, current: list[Tensor]) -> list[Tensor]:
        """Saved inputs of block `index`, on the devices of `current`.

        Raises:
            VQCalibrationError: the file is missing.
        """
        path = self._path("hidden", index)
        assert path is not None, "without a folder no block is resumed"
        if not path.exists():
            raise VQCalibrationError(
                f"{path} is missing, so block {index} cannot be calibrated. Delete the folder."
            )
        kept = _read(path)[1]
        return [kept[str(row)].to(hidden.device) for row, hidden in enumerate(current)]

    def save_block(self, index: int, done: CodedBlock, hidden: list[Tensor]) -> None:
        """Save a finished block, and the hidden states after it (none after the last block)."""
        block, before = self._path("block", index), self._path("hidden", index)
        after = self._path("hidden", index + 1)
        if block is None or before is None or after is None:
            return
        if hidden:
            _write(after, {str(row): part for row, part in enumerate(hidden)})
        self.processes.barrier()  # every process saves its hidden states before the block
        if self.processes.rank == 0:
            self._write_block(block, done)
        self.processes.barrier()
        before.unlink(missing_ok=True)

    @staticmethod
    def _write_block(path: Path, done: CodedBlock) -> None:
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

    def load_tuning(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """State saved by `save_tuning`; None if there is none."""
        path = None if self.folder is None else self.folder / "finetune.safetensors"
        return _read(path) if path is not None and path.exists() else None

    def save_tuning(self, tensors: dict[str, Tensor], **about: Any) -> None:
        """Save the state of a fine-tuning of the whole model."""
        if self.folder is not None:
            _write(self.folder / "finetune.safetensors", tensors, **about)

    def _path(self, what: str, index: int) -> Path | None:
        own = f"-{self.processes.rank}" if what == "hidden" and self.processes.size > 1 else ""
        return None if self.folder is None else self.folder / f"{what}-{index}{own}.safetensors"


def _write(path: Path, tensors: dict[str, Tensor], **about: Any) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write(path, whole, _KEY, {"format_version": VERSION, **about})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return read(path, _KEY, VERSION, "part of a calibration", "a calibration of hf_vq")
