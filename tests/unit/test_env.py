"""Every knob is in hf_vq.env, and reads what its line in the table says."""

import re

import pytest

from hf_vq import env
from tests.fixtures import ROOT


def test_a_flag_reads_words_and_refuses_the_rest(monkeypatch):
    for text, value in [("1", True), ("0", False), ("off", False), (" True ", True), ("", True)]:
        monkeypatch.setenv("HF_VQ_AUTOLOAD", text)
        assert env.AUTOLOAD.get() is value
    monkeypatch.setenv("HF_VQ_AUTOLOAD", "maybe")
    with pytest.raises(ValueError, match=r"HF_VQ_AUTOLOAD='maybe': expected 0 or 1"):
        env.AUTOLOAD.get()


def test_unset_is_the_default(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
        assert variable.get() == variable.default


def test_no_variable_is_read_that_the_table_lacks():
    known = {variable.name for variable in env.VARIABLES}
    assert len(known) == len(env.VARIABLES)
    used: set[str] = set()
    for path in [ROOT / "hf_vq_autoload.py", *(ROOT / "hf_vq").rglob("*.py")]:
        used |= set(re.findall(r"[\"'](HF_VQ_[A-Z_]+)[\"']", path.read_text(encoding="utf-8")))
    assert used == known
    for name in known:
        assert f"| `{name}` |" in env.table()


def test_only_env_and_autoload_read_the_environment():
    readers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "hf_vq").rglob("*.py")
        if re.search(r"environ\b.*HF_VQ_|getenv\(.HF_VQ_", path.read_text(encoding="utf-8"))
    }
    assert readers <= {"hf_vq/env.py"}
