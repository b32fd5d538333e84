"""SIGKILL at every file event of every call that writes: the old or new state, and no leftovers.

    worker    a copy of the old state
      child   the call, killed at its n-th file event
    worker    check: the old state or the new one
      child   the call again: the new state, bit for bit, and no other file

Events are Python's audit events for files below the copy. safetensors writes without audit events,
so its files are also truncated to half.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from campaign import Finding, Try
from kill_scenarios import Scenario, contents, scenarios

EVENTS = {
    "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod",
    "os.truncate", "os.utime", "fcntl.flock", "exchange", "half", "open",
}  # fmt: skip
LIMITS = {"limit": 60}  # seconds of a try: two calls, some of them whole calibrations


def prepare(folder: Path) -> Try:
    """Run every scenario once, whole."""
    known = scenarios(folder)
    after, tries = {}, []
    for one in known:
        work = fresh(one, folder / "whole")
        status, events, said = forked(one.call, work, None)
        if status:
            raise RuntimeError(f"{one.name} fails without a kill: {said}")
        after[one.name] = contents(work)
        tries += [(one, event) for event in range(events)]
    random.Random(0).shuffle(tries)  # a short run meets all scenarios
    print(f"kills: {len(tries)} file events of {len(known)} calls", flush=True)

    def attempt(rng: random.Random, number: int) -> str:
        one, event = tries[number % len(tries)]
        work = fresh(one, folder / f"try-{os.getpid()}")
        before, new = contents(work), after[one.name]
        where = f"{one.name}, event {event}"
        status, _, said = forked(one.call, work, event)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            if status:
                raise Finding("fails before it is killed", f"{where}: {said}")
            return "came to its end"
        state = one.state(work, before, new, where, rng.random() < 0.5)
        status, _, said = forked(one.again if state == "new" else one.call, work, None)
        if status:
            raise Finding("cannot be repeated", f"{where}, {state}: {said}")
        found = contents(work)
        if set(found) - set(new):
            left = {name: len(found[name]) for name in sorted(set(found) - set(new))}
            raise Finding("left behind", f"{where}, {state}: {left}")
        if wrong := [name for name in new if found.get(name) != new[name]]:
            raise Finding("another result", f"{where}, {state}: {wrong}")
        return state

    return attempt


def fresh(one: Scenario, work: Path) -> Path:
    """The old state of a scenario in an empty folder."""
    shutil.rmtree(work, ignore_errors=True)
    if one.before is None:
        work.mkdir()
    else:
        shutil.copytree(one.before, work)
    return work


def forked(call: Callable[[Path], None], work: Path, event: int | None) -> tuple[int, int, str]:
    """Run a call in a child that is killed at an event.

    Returns:
        Its status, how many events there were, and what it said.
    """
    events = work.with_name(f"{work.name}-events")
    said = work.with_name(f"{work.name}-said")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with said.open("w") as errors:
                for number in (1, 2):
                    os.dup2(errors.fileno(), number)
            count = watch(work, event)
            call(work)
            events.write_text(str(count()))
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            sys.stdout.flush()
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    return status, int(events.read_text()) if status == 0 else 0, said.read_text()[-500:]


def watch(work: Path, event: int | None) -> Callable[[], int]:
    """Die at an event below `work`; returns what tells how many there were."""
    seen, place = [0], str(work)

    def happened() -> None:
        if seen[0] == event:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name not in EVENTS:
            return
        if name == "open" and not (isinstance(arguments[2], int) and arguments[2] & 3):
            return
        if name != "fcntl.flock" and not any(_below(one, place) for one in arguments):
            return
        happened()

    sys.addaudithook(hook)
    write = safetensors.torch.serialize_file

    def serialize(tensors: Any, filename: Any, metadata: Any = None) -> None:
        half = Path(filename).with_name(".tmpHALFWAY")  # as safetensors names its own
        half.write_bytes(b"half")
        happened()
        half.unlink()
        write(tensors, filename, metadata)
        happened()

    safetensors.torch.serialize_file = serialize
    return lambda: seen[0]


def _below(path: Any, place: str) -> bool:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    try:
        return os.path.abspath(os.fsdecode(path)).startswith(place + os.sep)
    except (OSError, ValueError):
        return False
