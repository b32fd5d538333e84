"""The campaign of `make fuzz` sees what it looks for, and finds nothing in a short run."""

import importlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from hf_vq.errors import VQFormatError
from tests.fixtures import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
FOLDERS = [str(ROOT / "scripts" / "fuzz")]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, *FOLDERS])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def module(name):
    return importlib.import_module(name)


def test_crashes_hangs_and_findings_are_counted_and_the_run_goes_on():
    campaign = module("campaign")

    def attempt(rng, number):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 5:
            time.sleep(60)
        if number == 7:
            raise campaign.Finding("silent", "details")
        if number == 8:
            raise KeyError("a defect of the campaign")
        return campaign.Tried("fine", 10) if number == 9 else "fine"

    report = campaign.run("test", attempt, 1, 60, 12, 2, limit=5)
    row = report.row()
    assert (row["tried"], row["crashes"], row["hangs"], row["findings"]) == (21, 1, 1, 2)
    assert row["outcomes"]["fine"] == 17
    assert [number for number, _ in report.findings["hang"]] == [5]


def test_a_try_that_waits_for_a_processor_is_no_hang(monkeypatch):
    campaign = module("campaign")

    def attempt(rng, number):
        time.sleep(3)
        return "fine"

    for starved in (True, False):
        monkeypatch.setattr(campaign, "waited", lambda pid, s=starved: s * time.monotonic())
        report = campaign.run("test", attempt, 1, 60, 1, 1, limit=1)
        assert dict(report.outcomes) == ({"fine": 1} if starved else {"hang": 1})


def test_a_try_is_decided_by_its_seed_and_number():
    campaign = module("campaign")
    drawn = [campaign.made(lambda rng, number: str(rng.random()), 1, "x", n)[0] for n in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_only_our_own_errors_are_refusals():
    campaign = module("campaign")

    def outcome(call):
        try:
            call()
        except Exception as error:
            return campaign.outcome_of_error(error)

    from hf_vq.formats.hidden import hidden_file
    from hf_vq.interop.source import read_json

    assert outcome(lambda: read_json(Path("absent"))) == "refused"
    assert outcome(lambda: int("x")) == "refused by others"
    with pytest.raises(campaign.Finding, match=r"FileNotFoundError at hidden\.py"):
        outcome(lambda: hidden_file(Path("absent/file")).__enter__())
    assert issubclass(VQFormatError, ValueError)


def sequences(tmp_path, tries):
    """The details of findings, as they come."""
    attempt = module("sequences").prepare(tmp_path)
    for number in range(tries):
        _, details, _ = module("campaign").made(attempt, 1, "sequences", number)
        if details:
            yield details


def test_random_caches_find_nothing(tmp_path):
    assert not list(sequences(tmp_path, 15))


@pytest.mark.parametrize("defect", ["rows stay", "codes of the token before", "short tail"])
def test_random_caches_find_a_defect(tmp_path, monkeypatch, defect):
    from hf_vq.cache import layer
    from hf_vq.cache.layer import VQCacheLayer

    append = layer.kv_append
    if defect == "rows stay":
        monkeypatch.setattr(VQCacheLayer, "reorder_cache", lambda self, beam_idx: None)
    elif defect == "codes of the token before":
        monkeypatch.setattr(
            layer, "kv_append", lambda k, v, *given: append(k.roll(1, 2), v.roll(1, 2), *given)
        )
    else:
        tail_length = property(lambda self: self.window // 2, lambda self, value: None)
        monkeypatch.setattr(VQCacheLayer, "tail_length", tail_length, raising=False)
    assert next(sequences(tmp_path, 200), None)


def test_kills_of_single_files_leave_nothing(tmp_path, monkeypatch):
    kills, scenarios = module("kills"), module("kill_scenarios")
    torch.manual_seed(0)
    monkeypatch.setattr(kills, "scenarios", scenarios.files)
    attempt = kills.prepare(tmp_path)
    found = [attempt(random.Random(number), number) for number in range(40)]
    assert {"old", "new"} <= set(found)


def test_kills_see_what_is_left(tmp_path, monkeypatch):
    from hf_vq.formats import hidden

    kills, scenarios = module("kills"), module("kill_scenarios")
    monkeypatch.setattr(kills, "scenarios", scenarios.files)
    attempt = kills.prepare(tmp_path)
    monkeypatch.setattr(hidden, "remove_leftovers", lambda parent, name="": None)
    made = [module("campaign").made(attempt, 1, "kills", number)[0] for number in range(40)]
    assert "left behind" in made


def test_every_mutation_changes_the_file():
    from safetensors.torch import save

    mutations = module("mutations")
    data = save({"a": torch.arange(8), "b": torch.arange(8)}, {"d": '{"x": 1, "y": [1, 2]}'})
    rng = random.Random(1)
    made = [mutations.change_safetensors(data, rng, description="d") for _ in range(300)]
    kinds = {what.split(" ")[0].rstrip(":") for _, what in made}
    assert {"data", "header", "names", "cut", "size", "a", "description"} <= kinds
    assert sum(changed != data for changed, _ in made) > 280
