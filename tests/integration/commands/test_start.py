"""How `hf-vq` starts: quickly, with help for beginners; and `hf-vq chat`."""

import io
import json
import shutil
import sys
from importlib import metadata

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_vq.cli import main
from tests.fixtures import ROOT

START = f"""
import os, sys
os.chdir({str(ROOT)!r})  # of the script, where it is not installed
import hf_vq_cli
sys.argv[0] = "hf-vq"
try: status = hf_vq_cli.main()
except SystemExit as error: status = error.code
heavy = sorted({{"torch", "transformers", "numpy"}} & set(sys.modules))
print("status", status, "heavy", heavy)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, "hf-vq "),
        (["--help"], 0, "chat"),
        (["quantize", "--help"], 0, "--scheme"),
        (["chat"], 2, ""),
        (["nonsense"], 2, ""),
    ],
    ids=["version", "help", "help of a verb", "no model", "no verb"],
)
def test_help_needs_neither_torch_nor_transformers(run_python, arguments, status, said):
    found = run_python(f"import sys; sys.argv[1:] = {arguments!r}\n{START}")
    assert found.splitlines()[-1] == f"status {status} heavy []" and said in found


def test_a_verb_imports_the_package(run_python, tinybooks):
    found = run_python(f"import sys; sys.argv[1:] = ['info', {str(tinybooks)!r}]\n{START}")
    assert "status 0" in found and "model type        llama" in found
    code = f"import runpy, sys; sys.argv = ['hf_vq', 'info', {str(tinybooks)!r}]\n"
    code += (
        "try: runpy.run_module('hf_vq', run_name='__main__')\nexcept SystemExit as e: print(e.code)"
    )
    assert run_python(code).splitlines()[-1] == "0"


def test_the_version_is_that_of_the_package(capsys):
    import hf_vq

    try:
        installed = metadata.version("hf-vq")
    except metadata.PackageNotFoundError:
        installed = hf_vq.__version__
    assert installed == hf_vq.__version__
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"hf-vq {hf_vq.__version__}\n"


@pytest.fixture
def talker(tinybooks, tmp_path):
    """tinybooks-5m with a chat template."""
    shutil.copytree(tinybooks, tmp_path / "talker")
    path = tmp_path / "talker" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    path.write_text(json.dumps(config))
    return tmp_path / "talker"


def chat(monkeypatch, *arguments: str, said: str = "hello there\nand then?\n") -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    return main(["chat", *arguments, "--greedy", "--max-new-tokens", "8"])


@pytest.mark.parametrize("kv", ["u4", "none"])
def test_chat(talker, capsys, monkeypatch, kv):
    assert chat(monkeypatch, str(talker), "--kv", kv, "--system", "Be brief.") == 0
    tokenizer = AutoTokenizer.from_pretrained(talker)
    model = AutoModelForCausalLM.from_pretrained(talker)
    text, answers = "system: Be brief.\n", []
    for words in ("hello there", "and then?"):
        text += f"user: {words}\nassistant:"
        prompt = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        answers.append(tokenizer.decode(out[0, prompt.input_ids.shape[1] :], True))
        text += f" {answers[-1]}\n"
    shown = capsys.readouterr().out
    assert shown.split() == " ".join(answers).split()  # all tokens are in the window of u4


def test_a_dense_model_is_quantized_for_a_chat(talker, capsys, monkeypatch):
    assert chat(monkeypatch, str(talker), "--scheme", "vq-4") == 0
    assert len(capsys.readouterr().out) > 10


def test_a_model_without_a_chat_template(tinybooks, capsys, monkeypatch):
    assert chat(monkeypatch, str(tinybooks)) == 2
    assert "has no chat template" in capsys.readouterr().err
