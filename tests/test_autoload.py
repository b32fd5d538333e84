"""hf_vq_autoload: a process that never imports hf_vq knows the quantization method "vq"."""

import subprocess
import sys
from importlib import metadata

import pytest

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


@pytest.fixture(autouse=True)
def _installed() -> None:
    try:
        metadata.distribution("hf-vq")
    except metadata.PackageNotFoundError:
        pytest.skip("hf_vq is not installed: torch runs no entry point")


@pytest.mark.parametrize(
    "first",
    [
        "import torch",
        "import transformers, torch",
        "from transformers import AutoModelForCausalLM",
        # Here torch is imported by a Transformers module that is itself half imported.
        "import transformers.quantizers.auto; from transformers import LlamaForCausalLM",
    ],
)
def test_every_order_of_imports(run_python, first):
    assert run_python(f"{first}\n{LOOK}").splitlines() == SEEN


@pytest.mark.parametrize(
    "look", ["table['vq']", "table.get('vq')", "'vq' in table and table['vq']"]
)
def test_every_way_to_look_up(run_python, look):
    code = (
        "import torch\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as table\n"
        "assert table.get('nope', 7) == 7\n"
        "try:\n    table['nope']\nexcept KeyError as error:\n    assert error.args == ('nope',)\n"
        f"print(({look}).__module__.split('.')[0])"
    )
    assert run_python(code).split() == ["hf_vq"]


@pytest.mark.parametrize("first", ["import hf_vq", "import torch, hf_vq", "import hf_vq, torch"])
def test_importing_hf_vq_oneself_still_works(run_python, first):
    code = f"{first}\nfrom transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as table\n"
    code += "print('vq' in table)"
    assert run_python(code).split() == ["True"]


def test_it_can_be_turned_off(run_python):
    code = (
        "import torch, sys\n"
        "from transformers.quantizers import auto\n"
        "print(type(auto.AUTO_QUANTIZER_MAPPING).__name__, 'vq' in auto.AUTO_QUANTIZER_MAPPING)\n"
        "print('hf_vq' in sys.modules)"
    )
    assert run_python(code, HF_VQ_AUTOLOAD="0").split() == ["dict", "False", "False"]


def test_a_transformers_without_the_tables_still_imports(run_python):
    """Whatever a future Transformers does there, `import torch` and that import go on."""
    code = (
        "import sys, types, torch\n"
        "module = types.ModuleType('transformers.quantizers.auto')\n"
        "sys.modules[module.__name__] = module\n"
        "import this_is_not_there\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert "ModuleNotFoundError: No module named 'this_is_not_there'" in done.stderr
