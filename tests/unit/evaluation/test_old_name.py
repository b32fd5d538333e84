"""The old name of the package works for one release, and says so."""

import importlib
import sys

import pytest

from hf_vq.evaluation.compare import Comparison
from hf_vq.evaluation.evaluate import evaluate


def test_what_was_documented_is_found_and_warns(monkeypatch):
    for name in ("hf_vq.bench", "hf_vq.bench.evaluate", "hf_vq.bench.compare"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(FutureWarning, match="hf_vq.evaluation now"):
        old = importlib.import_module("hf_vq.bench.evaluate")
    assert old.evaluate is evaluate
    assert importlib.import_module("hf_vq.bench.compare").Comparison is Comparison
