"""Saving a quantized model: all files or none (`folder`), with our model card."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import hf_api

from ... import patches
from ...errors import VQError
from ...formats.hidden import hidden_file
from ...nn.embedding import VQEmbedding
from ...nn.replace import vq_modules
from ..config import QUANT_METHODS
from .atomic_dir import replacing
from .card import CARD, is_ours, model_card
from .integrity import record


def saving_codes(before: Any) -> Any:
    """`PreTrainedModel.save_pretrained` that knows models of codes."""
    return patches.of_codes(_save_pretrained, before)


def pushing_codes(before: Any) -> Any:
    """`PreTrainedModel.push_to_hub` that knows models of codes."""
    return patches.of_codes(_push_to_hub, before)


def counting_weights(before: Any) -> Any:
    """`PreTrainedModel.num_parameters` that knows models of codes."""
    return patches.of_codes(_num_parameters, before)


def _num_parameters(
    before: Any, self: Any, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Count the parameters of the dense model: bytes of codes and their scales are none."""
    count: int = before(self, only_trainable, exclude_embeddings)
    if only_trainable:  # codes do not train
        return count
    for module in vq_modules(self).values():
        names = (*module.specs, *module.deltas.values())
        stored = (module._parameters[name] for name in names if name in module._parameters)
        count += module.weight_count() - sum(t.numel() for t in stored if t is not None)
    for module in self.modules():
        if isinstance(module, VQEmbedding):  # whose `weight` alone Transformers can leave out
            count -= sum(getattr(module, key).numel() for key in module.keys)
            if not exclude_embeddings:
                count += module.num_embeddings * module.embedding_dim - module.weight.numel()
    return count


def _save_pretrained(
    before: Any,
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Save the model as `before` does (same arguments), all or nothing.

    Other files in `save_directory` stay. `README.md` is written anew unless a person wrote it.
    """
    arguments = {"is_main_process": is_main_process, "state_dict": state_dict}
    adapters = getattr(self, "_hf_peft_config_loaded", False)
    if adapters or kwargs.get("distributed_checkpoint") or os.path.isfile(save_directory):
        before(self, save_directory, push_to_hub=push_to_hub, **arguments, **kwargs)
        return
    target = Path(save_directory)
    hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
    writes = self.should_save_on_this_rank(is_main_process)
    stamps = self._get_files_timestamps(target) if target.is_dir() else {}
    with replacing(target, kwargs.get("variant"), writes) as folder:
        if "token" in hub:
            kwargs["token"] = hub["token"]
        before(self, folder, **arguments, **kwargs)
        if writes:
            quantization = self.config.quantization_config
            record(folder, kwargs.get("variant"), quantization.provenance or {})
            _write_card(self, folder, target)
    if push_to_hub and writes:
        repo = hub.pop("repo_id", None) or target.resolve().name
        _upload(self, str(target), repo, stamps, tags=None, **hub)


def save_evaluation(model: Any, folder: str | os.PathLike[str], found: dict[str, Any]) -> None:
    """Keep what was measured of a saved model: in its config.json, and in its card.

    Later saves of the model keep it too.

    Args:
        model: loaded from `folder`.
        folder: where it is saved; of its files, `README.md` and `config.json` change.
        found: of `evaluation.evaluate.Evaluation.facts`.

    Raises:
        VQError: see `check_card`.
    """
    check_card(folder)
    path = Path(folder) / CONFIG_NAME
    config = json.loads(path.read_text(encoding="utf-8"))
    model.config.quantization_config.provenance = {
        **(model.config.quantization_config.provenance or {}),
        "evaluation": found,
    }
    config["quantization_config"].setdefault("provenance", {})["evaluation"] = found
    _replace(path, json.dumps(config, indent=2, sort_keys=True) + "\n")
    _replace(Path(folder) / CARD, model_card(model, Path(folder)))


def check_card(folder: str | os.PathLike[str]) -> None:
    """Check that `save_evaluation` can write to a folder.

    Raises:
        VQError: it holds no model of hf_vq, or a card that a person wrote.
    """
    try:
        config = json.loads((Path(folder) / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if (config.get("quantization_config") or {}).get("quant_method") not in QUANT_METHODS:
        raise VQError(f"{folder} is not the folder of a model that hf_vq quantized.")
    card = Path(folder) / CARD
    if card.is_file() and not is_ours(card.read_text(encoding="utf-8", errors="replace")):
        raise VQError(
            f"{card} was written by a person, and is not replaced: rename it to get a new one."
        )


def _replace(path: Path, text: str) -> None:
    with hidden_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


_HUB = (
    "repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr",
)  # fmt: skip


def _push_to_hub(
    before: Any,
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
    except (RemoteEntryNotFoundError, RepositoryNotFoundError):
        return False
    except RevisionNotFoundError:  # a new branch begins as a copy of the main one
        return revision is not None and _remote_card_is_foreign(repo_id, token, None)
    except (HfHubHTTPError, OSError):  # it may be there: an unreadable card is not replaced
        return True
    return not is_ours(Path(path).read_text(encoding="utf-8", errors="replace"))


def _write_card(model: Any, folder: Path, target: Path) -> None:
    old = target / CARD
    if not old.exists() or is_ours(old.read_text(encoding="utf-8", errors="replace")):
        (folder / CARD).write_text(model_card(model, target), encoding="utf-8")
