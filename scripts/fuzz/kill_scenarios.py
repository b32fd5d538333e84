"""Scenarios for kills: every call of hf_vq that writes files, with the state before it."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import torch
from caches import dense_model, learned
from campaign import Finding
from torch import nn

from hf_vq import VQCache, VQConfig, quantize_model, save_quantized
from hf_vq.cli import main
from hf_vq.codegen.jit.kernel_store import Store
from hf_vq.errors import VQFormatError
from hf_vq.evaluation.score import Score
from hf_vq.hf.checkpoint import atomic_dir as saving
from hf_vq.hf.checkpoint.save import save_evaluation
from tests.fixtures import published_models

Call = Callable[[Path], None]
Contents = dict[str, bytes]
FOLDER = b"a folder"
MEASURED = {
    "model": "dense", "text": "a text", "text_sha256": "0" * 16, "tokens": 8, "context": 8,
    "hf_vq": "0.1.0", "date": "2026-01-01",
    **Score(2.0, 1.0, 0.1, 0.01, 0.001, 0.1, 99.0, 0.5, 1.0).to_dict(),
}  # fmt: skip


@dataclass
class Scenario:
    """One call.

    Args:
        call: given a folder that holds the old state.
        again: the same where the new state is there; a verb may need --force then.
        before: folder of the old state; None = empty.
        inside: the files of a folder are moved one by one: whoever loads it finishes that.
        resumes: prefix of files next to the unfinished result, from which a call resumes.
        several: made of files that are old or new each.
        two_steps: between two renames neither is there.
    """

    name: str
    call: Call
    again: Call
    before: Path | None = None
    inside: bool = False
    resumes: str = ""
    several: bool = False
    two_steps: bool = False

    def state(self, work: Path, old: Contents, new: Contents, where: str, load: bool) -> str:
        """Tell if a folder has the old state or the new one.

        Raises:
            Finding: it has neither.
        """
        if self.two_steps and not (work / "out").exists():
            saving.recover(work / "out")  # as every verb begins: it puts the old one back
        if self.inside and load:
            load_again(work / "out", where)
        now = {
            name: data for name, data in contents(work).items()
            if ".hf_vq-" not in name and not (self.resumes and name.startswith(self.resumes))
        }  # fmt: skip
        old, new, now = (
            {name: data for name, data in each.items() if data != FOLDER}
            for each in (old, new, now)
        )
        if now == new:
            return "new"
        if now == old or not (old or now):
            return "old"
        if self.inside and not load and any((work / "out").glob(".hf_vq-*/commit")):
            return "being finished"
        names = {**old, **new, **now}
        if self.several and all(now.get(n) in (old.get(n), new.get(n)) for n in names):
            return "some new"
        changed = [name for name in {**old, **now} if now.get(name) != old.get(name)]
        raise Finding("half a state", f"{where}: {changed}")


def load_again(out: Path, where: str) -> None:
    """Load a folder where a save was killed; a second time, if the first says so."""
    if not (out / "config.json").exists():
        return
    try:
        models.load(out)
    except VQFormatError as error:
        if "Load it again" not in str(error):
            raise Finding("cannot be loaded", f"{where}: {error}") from error
        models.load(out)


def contents(work: Path) -> Contents:
    """Every file and folder below `work`; safetensors with their headers in order."""
    found = {}
    for path in sorted(work.rglob("*")):
        name = str(path.relative_to(work))
        found[name] = FOLDER if path.is_dir() else ordered(path.read_bytes(), name)
    return found


def ordered(data: bytes, name: str) -> bytes:
    """A file; of safetensors, with the names in the header in order: they are in none."""
    if not name.endswith(".safetensors") or len(data) < 8:
        return data
    size = struct.unpack("<Q", data[:8])[0]
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        return data
    return json.dumps(header, sort_keys=True).encode() + data[8 + size :]


def verb(*arguments: str) -> Call:
    """A verb of `hf-vq`; OUT stands for the folder that it writes."""

    def call(work: Path) -> None:
        given = [str(work / "out") if each == "OUT" else each for each in arguments]
        if status := main(given):
            raise SystemExit(status)

    return call


def scenarios(folder: Path) -> list[Scenario]:
    """All of them; what they need is made once."""
    made = models.checkpoints(folder.parent / "models")
    dense = folder.parent / "models" / "dense"
    deep = models.save_dense(
        folder / "deep", num_hidden_layers=2, hidden_size=64, intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    old, new = models.load(made["vq-4"]), models.load(made["vq-3"])
    before = folder / "before"
    old.save_pretrained(before / "out")
    (before / "out" / "notes.txt").write_text("mine")
    aqlm = folder / "aqlm"
    torch.manual_seed(0)
    published_models.make_aqlm(aqlm, shards=3)
    found = [
        Scenario(f"save_pretrained, {what}", call, call, there, inside=inside)
        for what, call, there, inside in (
            ("new", saves(new), None, False),
            ("over another", saves(new), before, False),
            ("sharded", saves(new, max_shard_size="20KB"), before, False),
            ("variant", saves(new, variant="b"), before, False),
            ("working directory", inside_of(saves(new)), before, True),
            (
                "working directory, sharded",
                inside_of(saves(new, max_shard_size="20KB")),
                before,
                True,
            ),
            ("mount point", busy(saves(new)), before, True),
            ("without exchange", unexchanged(saves(new)), before, False),
        )
    ]
    found[-1].two_steps = True
    quantize = ["quantize", str(dense), "OUT", "--scheme", "vq-3"]
    short = ["--tokens", "128", "--context", "32"]
    calibrate = ["calibrate", str(deep), "OUT", "--scheme", "vq-3", *short]
    calibrate += ["--skip", "mlp", "q_proj", "k_proj", "v_proj"]
    convert = ["convert", str(aqlm), "OUT"]
    of_cache = ["calibrate", str(dense), "OUT", "--kv", "u4", *short]
    for name, arguments in (("quantize", quantize), ("calibrate", calibrate), ("convert", convert)):
        forced = verb(*arguments, "--force")
        resumes = "" if name == "quantize" else "out.unfinished"
        found += [
            Scenario(name, verb(*arguments), forced, resumes=resumes),
            Scenario(f"{name} --force", forced, forced, before, resumes=resumes),
        ]
        here, name = inside_of(forced), f"{name} into the working directory"
        found.append(Scenario(name, here, here, before, inside=True, resumes=resumes))
    forced = verb(*of_cache, "--force")
    found.append(Scenario("calibrate --kv", verb(*of_cache), forced))
    found.append(Scenario("calibrate --kv --force", forced, forced, before))
    return found + in_memory(folder, before) + exports(made["vq-4"], before) + files(folder)


def in_memory(folder: Path, before: Path) -> list[Scenario]:
    """Scenarios of modules that are no models of Transformers, and of what was measured."""
    module = quantize_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), VQConfig("vq-3"))
    there = folder / "module"
    (there / "out").mkdir(parents=True)
    (there / "out" / "notes.txt").write_text("mine")

    def saved(work: Path) -> None:
        save_quantized(module, work / "out")

    def measured(work: Path) -> None:
        save_evaluation(models.load(work / "out"), work / "out", MEASURED)

    return [
        Scenario("save_quantized", saved, saved),
        Scenario("save_quantized over files", saved, saved, there),
        Scenario("save_evaluation", measured, measured, before, several=True),
    ]


def exports(model: Path, before: Path) -> list[Scenario]:
    """Scenarios of `hf-vq export`."""
    found = []
    for kind in ("dense", "gptq"):
        export = ["export", str(model), "OUT", "--to", kind, "--no-kld"]
        forced = verb(*export, "--force")
        found.append(Scenario(f"export --to {kind}", verb(*export), forced))
        found.append(Scenario(f"export --to {kind} --force", forced, forced, before))
    return found


def files(folder: Path) -> list[Scenario]:
    """Scenarios that write single files."""
    model = dense_model()
    cache = VQCache(model.config, window=4)
    with torch.no_grad():
        model(torch.randint(3, 48, (1, 30)), past_key_values=cache)
    books = learned(model, "cq-2")
    there = folder / "files"
    there.mkdir()
    VQCache(model.config).save(there / "cache.safetensors")
    learned(model, "u4").save(there / "books.safetensors")
    found = []
    for name, call in (
        ("VQCache.save", lambda work: cache.save(work / "cache.safetensors")),
        ("KVCodebooks.save", lambda work: books.save(work / "books.safetensors")),
    ):
        found += [Scenario(name, call, call), Scenario(f"{name} over another", call, call, there)]
    entries = folder / "entries"
    for number in range(3):
        Store(entries / "store").fetch(f"old{number}", lambda: b"old" * 1000)
        os.utime(Store(entries / "store").path(f"old{number}"), (number, number))
    found.append(Scenario("kernel store", stores, stores, several=True))
    found.append(Scenario("kernel store, full", stores, stores, entries, several=True))
    return found


def saves(model: Any, **options: Any) -> Call:
    """Save a model."""
    return lambda work: model.save_pretrained(work / "out", **options)


def stores(work: Path) -> None:
    """Keep kernels, where the oldest have to go."""
    for number in range(3):
        store = Store(work / "store", limit=9500)
        store.fetch(f"new{number}", lambda: b"new" * 1000)
        os.utime(store.path(f"new{number}"), (10 + number, 10 + number))


def inside_of(call: Call) -> Call:
    """Run a call inside the folder that it writes, so that the folder cannot be replaced."""

    def run(work: Path) -> None:
        os.chdir(work / "out")
        call(work)

    return run


def busy(call: Call) -> Call:
    """Run a call as if its folder were a mount point."""

    def run(work: Path) -> None:
        rename = Path.rename

        def refuse(self: Path, to: Path) -> Path:
            if self == work / "out":
                raise OSError(errno.EBUSY, "busy")
            return rename(self, to)

        Path.rename = refuse  # type: ignore[method-assign]
        unexchanged(call)(work)

    return run


def unexchanged(call: Call) -> Call:
    """Run a call as on a file system without atomic exchange of folders."""

    def run(work: Path) -> None:
        saving.exchange = lambda *paths: False
        call(work)

    return run
