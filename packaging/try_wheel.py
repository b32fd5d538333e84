"""Try an installed wheel: its version, its library, and a tiny model from dense to text.

usage: python try_wheel.py MODEL     a folder with a small model, such as tests/models/tinybooks-5m
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import hf_vq
from hf_vq.backends.cpu import library


def run(*words: str) -> str:
    """Output of the installed command hf-vq."""
    done = subprocess.run(
        [sys.executable, "-m", "hf_vq", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"hf-vq {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(model: str) -> None:
    """Raise, or say what ran."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkout = Path(__file__).resolve().parents[1]
    assert checkout not in Path(hf_vq.__file__).resolve().parents, "not the installed package"
    assert hf_vq.__version__ in run("--version")
    assert library.abi_version() == library.ABI_VERSION, library.why_not()
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "codes"))
        run("quantize", model, out, "--scheme", "vq-4", "--activations", "none")
        loaded = AutoModelForCausalLM.from_pretrained(out)
        tokenizer = AutoTokenizer.from_pretrained(out)
        prompt = tokenizer("It was a dark and stormy night", return_tensors="pt")
        cache = hf_vq.VQCache(loaded.config)
        ids = loaded.generate(**prompt, max_new_tokens=20, past_key_values=cache)
        text = tokenizer.decode(ids[0])
        assert ids.shape[1] == prompt["input_ids"].shape[1] + 20, text
        del loaded  # Windows removes no file that is open
    print(f"hf-vq {hf_vq.__version__} with {', '.join(library.isas())}: {text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
