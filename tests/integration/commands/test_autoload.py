"""hf_vq_autoload: a process that never imports hf_vq knows the quantization method "vq"."""

import copy
import importlib.util
import pickle
import sys
import types
from importlib import metadata

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_vq_autoload
from hf_vq import VQConfig, VQConfigError
from tests.fixtures.tiny_models import save_tiny

LOOK = """
import sys
def hooks():
    ours = [f for f in sys.meta_path if type(f).__module__ == "hf_vq_autoload"]
    return [f.target for f in ours]  # diffusers' waits until diffusers is imported
assert "hf_vq" not in sys.modules, "imported too early"
from transformers.quantizers import auto
import transformers.quantizers.quantizer_aqlm, json.tool  # something is imported after the tables
print(type(auto.AUTO_QUANTIZATION_CONFIG_MAPPING) is type(auto.AUTO_QUANTIZER_MAPPING) is dict)
print("awq" in auto.AUTO_QUANTIZER_MAPPING, "nope" in auto.AUTO_QUANTIZER_MAPPING, *hooks())
print(auto.AutoHfQuantizer.supports_quant_method({"quant_method": "vq"}), "hf_vq" in sys.modules)
print(type(auto.AutoQuantizationConfig.from_dict({"quant_method": "vq"})).__name__)
print(auto.AUTO_QUANTIZATION_CONFIG_MAPPING["vq"].__name__)
print(auto.AUTO_QUANTIZER_MAPPING["vq"].__name__)
"""
WAITS = ["diffusers.quantizers.auto"] if importlib.util.find_spec("diffusers") else []
SEEN = ["True", " ".join(["True False", *WAITS]), "True False"]
SEEN += ["VQConfig", "VQConfig", "VQHfQuantizer"]


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
@pytest.mark.parametrize(
    ("value", "found"),
    [("0", []), ("1", [hf_vq_autoload.ACCELERATE, *WAITS, hf_vq_autoload.TARGET])],
)
def test_it_can_be_turned_off(run_python, value, found):
    code = (
        "import torch, sys\n"
        "ours = [f for f in sys.meta_path if type(f).__module__ == 'hf_vq_autoload']\n"
        "print(*sorted({f.target for f in ours}))"
    )
    assert run_python(code, HF_VQ_AUTOLOAD=value).split() == found


@pytest.mark.usefixtures("installed")
def test_the_quantizer_alone_imports_hf_vq(run_python):
    """As code does that looks up the class without a config."""
    code = (
        "import torch, sys\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as table\n"
        "lazy = table['vq']\n"
        "print('hf_vq' in sys.modules, lazy.requires_calibration, table['vq'] is lazy)"
    )
    assert run_python(code).split() == ["False", "False", "False"]


@pytest.fixture
def plugin(monkeypatch):
    """An hf_vq that registers itself in a table of Transformers, as `fill` leaves it."""
    module = types.SimpleNamespace(
        AUTO_QUANTIZATION_CONFIG_MAPPING={"awq": 1}, AUTO_QUANTIZER_MAPPING={"awq": 2}
    )
    imports = []

    class Config(dict):
        @classmethod
        def from_dict(cls, of):
            return cls(of)

    class Plugin:
        registers = True

        def find_spec(self, name, path=None, target=None):
            return importlib.util.spec_from_loader(name, self) if name == "hf_vq" else None

        def create_module(self, spec):
            return None

        def exec_module(self, imported):
            imports.append(imported.__name__)
            if self.registers:
                module.AUTO_QUANTIZATION_CONFIG_MAPPING["vq"] = Config

    plugin = Plugin()
    plugin.module, plugin.imports = module, imports
    monkeypatch.setitem(sys.modules, hf_vq_autoload.TARGET, module)
    monkeypatch.delitem(sys.modules, "hf_vq", raising=False)
    monkeypatch.setattr(sys, "meta_path", [plugin, *sys.meta_path])
    yield plugin
    sys.modules.pop("hf_vq", None)


def test_an_entry_imports_when_it_is_used(plugin):
    finder = hf_vq_autoload._Finder()
    sys.meta_path.insert(0, finder)
    finder.fill(plugin.module)
    assert finder not in sys.meta_path and plugin in sys.meta_path
    table = plugin.module.AUTO_QUANTIZATION_CONFIG_MAPPING
    lazy = table["vq"]
    assert table["awq"] == 1 and "nope" not in table and not plugin.imports
    assert lazy.from_dict({"a": 1}) == {"a": 1} and lazy({"b": 2}) == {"b": 2}
    assert plugin.imports == ["hf_vq"] and table["vq"] is not lazy
    finder.fill(plugin.module)  # what hf_vq registered stays
    assert table["vq"] is not lazy and type(table["vq"]) is type


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda table: pickle.loads(pickle.dumps(table))]
)
def test_tables_are_copied_without_an_import(plugin, copied):
    hf_vq_autoload._Finder().fill(plugin.module)
    table = copied(plugin.module.AUTO_QUANTIZATION_CONFIG_MAPPING)
    lazy = table["vq"]
    assert table["awq"] == 1 and not hasattr(lazy, "__name__") and not plugin.imports
    assert lazy.from_dict({"a": 1}) == {"a": 1} == lazy({"a": 1}) and plugin.imports == ["hf_vq"]


def test_an_hf_vq_that_does_not_register_is_an_error_and_no_loop(plugin):
    plugin.registers = False
    hf_vq_autoload._Finder().fill(plugin.module)
    with pytest.raises(AttributeError, match="no from_dict"):
        plugin.module.AUTO_QUANTIZATION_CONFIG_MAPPING["vq"].from_dict({})
    with pytest.raises(AttributeError, match="no __call__"):
        plugin.module.AUTO_QUANTIZATION_CONFIG_MAPPING["vq"]({})


@pytest.mark.parametrize("holds", [{}, {"AUTO_QUANTIZATION_CONFIG_MAPPING": 3}], ids=str)
@pytest.mark.parametrize("half", [True, False])
def test_a_transformers_with_other_tables_is_left_alone(monkeypatch, holds, half):
    """Whatever Transformers holds there one day, or not yet, importing goes on."""
    spec = types.SimpleNamespace(_initializing=half)
    module = types.SimpleNamespace(__spec__=spec, **holds)
    finder = hf_vq_autoload._Finder()
    monkeypatch.setitem(sys.modules, hf_vq_autoload.TARGET, module)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert finder.find_spec("anything") is None
    assert vars(module) == {"__spec__": spec, **holds}
    assert (finder in sys.meta_path) == half  # it waits for what is still being imported


def test_removal_skips_no_other_finder(monkeypatch):
    """importlib walks the list that it was given: an element less would hide the next one."""
    tables = {name: {} for name in hf_vq_autoload.TABLES}
    spec = types.SimpleNamespace(_initializing=False)
    module = types.SimpleNamespace(__spec__=spec, **tables)
    asked = []

    class Next:
        def find_spec(self, name, path=None, target=None):
            asked.append(name)

    monkeypatch.setitem(sys.modules, hf_vq_autoload.TARGET, module)
    monkeypatch.setattr(sys, "meta_path", [hf_vq_autoload._Finder(), Next(), *sys.meta_path])
    assert importlib.util.find_spec("a_module_that_is_not_there") is None
    assert asked == ["a_module_that_is_not_there"]
    assert type(sys.meta_path[0]) is Next


DISPATCH = """
import sys
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoConfig, AutoModelForCausalLM
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({folder!r}))
assert "hf_vq" not in sys.modules
on_cpu = ("model.embed_tokens", "model.rotary_emb", "model.layers.1", "model.norm", "lm_head")
places = {{"model.layers.0": "disk", **dict.fromkeys(on_cpu, "cpu")}}
for file, at in (("/model.safetensors", None), ("", places)):
    model = load_checkpoint_and_dispatch(
        model, {folder!r} + file, device_map=at, offload_folder={folder!r} + "-offloaded"
    )
    print(model.quantization_method, getattr(model, "hf_device_map", None) == at)
print(*map(float, model(model.dummy_inputs["input_ids"] % 96).logits.flatten()[:9]))
"""


@pytest.mark.usefixtures("installed")
def test_load_checkpoint_and_dispatch_of_accelerate(run_python, tmp_path):
    """Break 17 of a survey: `from_config` makes dense layers, which codes do not fit."""
    model = AutoModelForCausalLM.from_pretrained(
        save_tiny("llama", tmp_path / "dense"), quantization_config=VQConfig()
    )
    model.save_pretrained(tmp_path / "vq")
    loaded, again, logits = run_python(DISPATCH.format(folder=str(tmp_path / "vq"))).splitlines()
    assert loaded == again == "hf_vq True"
    with torch.no_grad():
        wanted = model(model.dummy_inputs["input_ids"] % 96).logits.flatten()[:9]
    assert list(map(float, logits.split())) == wanted.tolist()


def test_a_dense_model_goes_to_accelerate_itself():
    asked = []

    def load(model, checkpoint, **options):
        asked.append((model, checkpoint, options))
        return "loaded"

    module = types.SimpleNamespace(load_checkpoint_and_dispatch=load)
    hf_vq_autoload._Finder(hf_vq_autoload.ACCELERATE).fill(module)
    other = types.SimpleNamespace(config=types.SimpleNamespace(quantization_config=object()))
    for model in (torch.nn.Linear(2, 2), other):
        assert module.load_checkpoint_and_dispatch(model, "here", device_map="auto") == "loaded"
        assert asked.pop() == (model, "here", {"device_map": "auto"})


def test_a_model_without_from_pretrained_names_the_cure():
    module = torch.nn.Linear(2, 2)
    module.config = types.SimpleNamespace(quantization_config={"quant_method": "hf_vq"})
    wrapped = hf_vq_autoload._for_codes(lambda *given: None)
    with pytest.raises(VQConfigError, match=r"hf_vq\.load_quantized"):
        wrapped(module, "here")


WITHOUT_A_HUB = """
import socket, sys
def refused(*args, **kwargs):
    raise SystemExit(f"asked {args[0]}")  # no retry catches it
socket.getaddrinfo = socket.create_connection = refused
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_vq import VQCache, VQConfig, explain
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=VQConfig("vq-4"))
model.save_pretrained("saved")
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained("saved")
again = AutoModelForCausalLM.from_pretrained("saved")
explain(again, cache=VQCache.from_pretrained(again))
print("loaded", type(again).__name__)
"""


def test_local_folders_ask_nothing_of_the_hub(run_python, tinybooks):
    code = f"import sys; sys.argv = ['', {str(tinybooks)!r}]\n{WITHOUT_A_HUB}"
    assert "loaded LlamaForCausalLM" in run_python(code, HF_HUB_OFFLINE="0")
