"""hf_vq_autoload: a process that never imports hf_vq knows the quantization method "vq"."""

import importlib.util
import sys
import types
from importlib import metadata

import pytest

import hf_vq_autoload

LOOK = """
import sys
assert "hf_vq" not in sys.modules, "imported too early"
from transformers.quantizers import auto
print(type(auto.AUTO_QUANTIZATION_CONFIG_MAPPING).__module__)
print("awq" in auto.AUTO_QUANTIZER_MAPPING, "nope" in auto.AUTO_QUANTIZER_MAPPING)
print("hf_vq" in sys.modules)
print(auto.AutoHfQuantizer.supports_quant_method({"quant_method": "vq"}))
print(auto.AUTO_QUANTIZATION_CONFIG_MAPPING["vq"].__module__.split(".")[0])
print(auto.AUTO_QUANTIZER_MAPPING["vq"].__module__.split(".")[0])
"""
SEEN = ["hf_vq_autoload", "True False", "False", "True", "hf_vq", "hf_vq"]


@pytest.fixture
def installed() -> None:
    try:
        metadata.distribution("hf-vq")
    except metadata.PackageNotFoundError:
        pytest.skip("hf_vq is not installed: torch runs no entry point")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "first",
    [
        "import torch",
        "from transformers import AutoModelForCausalLM",
        # Here torch is imported by a Transformers module that is itself half imported.
        "import transformers.quantizers.auto; from transformers import LlamaForCausalLM",
    ],
)
def test_every_order_of_imports(run_python, first):
    assert run_python(f"{first}\n{LOOK}").splitlines() == SEEN


@pytest.mark.usefixtures("installed")
def test_importing_hf_vq_oneself_still_works(run_python):
    code = (
        "import hf_vq\nfrom transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as table\n"
    )
    assert run_python(code + "print('vq' in table)").split() == ["True"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("value", "found"), [("0", "0"), ("1", "1")])
def test_it_can_be_turned_off(run_python, value, found):
    code = (
        "import torch, sys\n"
        "print(sum(type(f).__module__ == 'hf_vq_autoload' for f in sys.meta_path))"
    )
    assert run_python(code, HF_VQ_AUTOLOAD=value).split() == [found]


@pytest.fixture
def table(monkeypatch):
    """A table of Transformers as autoload leaves it, and an hf_vq that registers itself in it."""
    mapping = hf_vq_autoload._Mapping(awq="AwqQuantizer")
    imports = []

    class Plugin:
        def find_spec(self, name, path=None, target=None):
            return importlib.util.spec_from_loader(name, self) if name == "hf_vq" else None

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            imports.append(module.__name__)
            # As Transformers' register_quantizer does: this look-up must not import again.
            assert "vq" not in mapping
            mapping["vq"] = "VQQuantizer"

    monkeypatch.delitem(sys.modules, "hf_vq", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Plugin(), *sys.meta_path])
    yield mapping
    assert len(imports) == 1


LOOKS = {
    "in": lambda table: "VQQuantizer" if "vq" in table else None,
    "brackets": lambda table: table["vq"],
    "get": lambda table: table.get("vq"),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_every_way_to_look_up(table, look):
    assert table["awq"] == table.get("awq") == "AwqQuantizer"
    assert "nope" not in table
    assert table.get("nope", 7) == 7
    with pytest.raises(KeyError, match="nope"):
        table["nope"]
    assert "hf_vq" not in sys.modules
    assert look(table) == look(table) == "VQQuantizer"


@pytest.mark.parametrize("holds", [{}, {"AUTO_QUANTIZATION_CONFIG_MAPPING": 3}], ids=str)
def test_a_transformers_with_other_tables_is_left_alone(monkeypatch, holds):
    """Whatever Transformers holds there one day, or not yet, importing goes on."""
    module = types.SimpleNamespace(**holds)
    monkeypatch.setitem(sys.modules, hf_vq_autoload.TARGET, module)
    assert hf_vq_autoload._Finder().find_spec("anything") is None
    assert vars(module) == holds


def test_tables_are_replaced_once(monkeypatch):
    tables = {"AUTO_QUANTIZATION_CONFIG_MAPPING": {"a": 1}, "AUTO_QUANTIZER_MAPPING": {"b": 2}}
    module = types.SimpleNamespace(**tables)
    monkeypatch.setitem(sys.modules, hf_vq_autoload.TARGET, module)
    for _ in range(2):
        hf_vq_autoload._Finder().find_spec("anything")
        assert vars(module) == tables
        replaced = dict(vars(module))
    hf_vq_autoload._Finder().find_spec("anything")
    assert all(vars(module)[name] is table for name, table in replaced.items())
    assert {type(table) for table in replaced.values()} == {hf_vq_autoload._Mapping}


@pytest.mark.parametrize("method", [["vq"], {"vq": 1}, 7, None])
def test_a_method_that_is_no_name_is_unknown(method):
    """As a config.json may have it: a dict of Python would raise TypeError for a list."""
    table = hf_vq_autoload._Mapping({"awq": 1, 7: 2})
    assert method not in table and "awq" in table
