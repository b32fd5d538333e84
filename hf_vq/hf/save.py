"""Saving a quantized model: all files or none, with our model card.

A save is made in a hidden folder beside the target and then takes its place in one step, so that
a killed save leaves the old folder or the new one.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

from huggingface_hub.errors import HfHubHTTPError
from transformers.utils.hub import hf_api

from .card import CARD, is_ours, model_card

_AT_FDCWD = -100
_EXCHANGE = {"linux": ("renameat2", 2), "darwin": ("renamex_np", 2)}


def install_saving(model: Any) -> None:
    """Give one model our `save_pretrained` and `push_to_hub`."""
    model.save_pretrained = MethodType(save_pretrained, model)
    model.push_to_hub = MethodType(push_to_hub, model)


def remove_saving(model: Any) -> None:
    """Give a model its own methods back."""
    for name in ("save_pretrained", "push_to_hub"):
        model.__dict__.pop(name, None)


def save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Save the model as `PreTrainedModel.save_pretrained` does (same arguments), all or nothing.

    Other files in `save_directory` stay. `README.md` is written anew unless a person wrote it.
    """
    save = type(self).save_pretrained
    arguments = {"is_main_process": is_main_process, "state_dict": state_dict}
    adapters = getattr(self, "_hf_peft_config_loaded", False)
    if adapters or kwargs.get("distributed_checkpoint") or os.path.isfile(save_directory):
        save(self, save_directory, push_to_hub=push_to_hub, **arguments, **kwargs)
        return
    target = Path(save_directory)
    hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
    writes = self.should_save_on_this_rank(is_main_process)
    before = self._get_files_timestamps(target) if target.is_dir() else {}
    with replacing(target, kwargs.get("variant"), writes) as folder:
        if "token" in hub:
            kwargs["token"] = hub["token"]
        save(self, folder, **arguments, **kwargs)
        if writes:
            _write_card(self, folder, target)
    if push_to_hub and writes:
        repo = hub.pop("repo_id", None) or target.resolve().name
        _upload(self, str(target), repo, before, tags=None, **hub)


_HUB = (
    "repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr",
)  # fmt: skip


def push_to_hub(
    self: Any,
    repo_id: str,
    *,
    max_shard_size: int | str | None = "50GB",
    tags: list[str] | str | None = None,
    **hub: Any,
) -> Any:
    """Upload the model as `PreTrainedModel.push_to_hub` does (same arguments), with our card."""
    self.add_model_tags([tags] if isinstance(tags, str) else tags or [])
    with tempfile.TemporaryDirectory() as folder:
        self.save_pretrained(folder, max_shard_size=max_shard_size)
        return _upload(self, folder, repo_id, {}, **hub)


def _upload(
    model: Any,
    folder: str,
    repo_id: str,
    before: dict[str, float],
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    tags: None = None,
    **commit: Any,
) -> Any:
    api = hf_api()
    repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    if _remote_card_is_foreign(repo_id, token, commit.get("revision")):
        path = os.path.join(folder, CARD)
        before = {**before, CARD: os.path.getmtime(path)}  # counts as unchanged
    return model._upload_modified_files(folder, repo_id, before, token=token, **commit)


def _remote_card_is_foreign(repo_id: str, token: Any, revision: str | None) -> bool:
    try:
        path = hf_api().hf_hub_download(repo_id, CARD, token=token, revision=revision)
    except (HfHubHTTPError, FileNotFoundError):
        return False
    return not is_ours(Path(path).read_text(encoding="utf-8"))


def _write_card(model: Any, folder: Path, target: Path) -> None:
    old = target / CARD
    if not old.exists() or is_ours(old.read_text(encoding="utf-8", errors="replace")):
        (folder / CARD).write_text(model_card(model), encoding="utf-8")


@contextmanager
def replacing(target: Path, variant: str | None = None, writes: bool = True) -> Iterator[Path]:
    """A new folder that takes the place of `target` if the block succeeds.

    Files of `target` that were not written anew are kept, except weights of an earlier save.

    Args:
        variant: `save_pretrained`'s; part of the names of the weights.
        writes: False on ranks that only take part in gathering: their folder is thrown away.
    """
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    prefix = f".{target.name}.hf_vq-{os.getpid()}-"
    new = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield new
        if writes:
            _publish(new, target, variant)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _publish(new: Path, target: Path, variant: str | None) -> None:
    # mkdtemp makes a folder that only its owner can read.
    mask = os.umask(0)
    os.umask(mask)
    new.chmod(0o777 & ~mask)
    if not target.exists():
        os.rename(new, target)
        return
    _keep_other_files(target, new, variant)
    shutil.copymode(target, new)
    if not exchange(new, target):
        # Two steps, where the file system cannot exchange: a kill between them leaves both
        # complete folders, the old one under a hidden name.
        old = new.with_name(new.name + "-old")
        os.rename(target, old)
        os.rename(new, target)
        os.rename(old, new)


def exchange(one: Path, other: Path) -> bool:
    """Swap two paths of one file system in a single step; False where that is not possible."""
    name, flag = _EXCHANGE.get(sys.platform, ("", 0))
    call = getattr(ctypes.CDLL(None), name, None) if name else None
    if call is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if name == "renameat2":
        failed = call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], flag)
    else:
        failed = call(*paths, flag)
    return not failed


def _keep_other_files(source: Path, destination: Path, variant: str | None) -> None:
    part = rf"\.{re.escape(variant)}" if variant else ""
    index = rf"model\.safetensors\.index{part}\.json"
    weights = re.compile(rf"{index}|model{part}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    for entry in source.iterdir():
        copy = destination / entry.name
        if os.path.lexists(copy) or weights.fullmatch(entry.name):
            continue
        if entry.is_symlink():
            copy.symlink_to(os.readlink(entry))
        elif entry.is_dir():
            shutil.copytree(entry, copy, symlinks=True, copy_function=_link)
        else:
            _link(entry, copy)


def _link(source: str | Path, destination: str | Path) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, destination)


def _remove_leftovers(target: Path) -> None:
    """Remove the folders of saves to `target` whose process was killed."""
    pattern = re.compile(re.escape(f".{target.name}.hf_vq-") + r"(\d+)-.*")
    for entry in target.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and not _is_running(int(match.group(1))):
            shutil.rmtree(entry, ignore_errors=True)


def _is_running(process: int) -> bool:
    if process == os.getpid() or sys.platform == "win32":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
