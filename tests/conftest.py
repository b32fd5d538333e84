"""What every test shares: a seed of its own, no network, few threads, the embedded model."""

import gc
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# Read by the libraries when they are first imported, so set before that.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # share the GPUs of a machine, as the cores
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    gpus = list(map(str, range(len(there)))) if visible is None else visible.split(",")
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]

import numpy
import pytest
import torch

from tests.fixtures import ROOT
from tests.fixtures.hub_server import HubServer


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores between the workers, and with the processes that tests start.

    With more threads than cores, every parallel loop waits for a thread that has no core. Workers
    inherit what was set for the process that started them, so they set it anew.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Notebooks first (a stable sort): few tests that take long, which one worker would run alone
    at the end. CPU kernels on another instruction set than the best of this machine are slow tests:
    the same again."""
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")
    from hf_vq.backends.cpu import library

    others = set(library.isas()[1:])
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if given.get("isa") in others:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections.

    Libraries and tests collect garbage hundreds of times, each time a second, if all of it is
    looked at.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let them go: nanobind calls what is left at the end a leak."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed every generator from the test's own id: any test alone repeats what it did in a run."""
    value = zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every op by its reference: for tests that hold float32 results to each other."""
    monkeypatch.setenv("HF_VQ_BACKEND", "reference")


@pytest.fixture
def restored_patches() -> Iterator[None]:
    """For tests that undo the patches of other libraries: make again those that were made."""
    from hf_vq import patches

    happened = tuple(patches._happened)
    yield
    for event in happened:
        patches.apply(event)


@pytest.fixture(scope="session", autouse=True)
def _quiet_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tinybooks() -> Path:
    """The embedded model: a 5 M parameter Llama with its tokenizer."""
    return ROOT / "tests" / "models" / "tinybooks-5m"


@pytest.fixture(scope="session")
def eval_text(tinybooks: Path) -> Path:
    """The demo's evaluation text."""
    return tinybooks.with_name("tinybooks-5m-eval.txt")


@pytest.fixture(scope="session")
def massive_twin(tmp_path_factory: pytest.TempPathFactory, tinybooks: Path) -> Path:
    """The embedded model with massive channels before its linear layers: the same function."""
    from tests.fixtures.models import outlier_twins

    return outlier_twins.massive_twin(tinybooks, tmp_path_factory.mktemp("massive"))


@pytest.fixture(scope="session")
def key_bias_twin(tmp_path_factory: pytest.TempPathFactory, tinybooks: Path) -> Path:
    """The embedded model as a Qwen2 with a large key bias."""
    from tests.fixtures.models import outlier_twins

    return outlier_twins.key_bias_twin(tinybooks, tmp_path_factory.mktemp("key_bias"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tinybooks: Path) -> Path:
    """A random two-layer Llama with the embedded model's tokenizer: suites run on it in seconds."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=2,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tinybooks).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`dense("llama")`: the folder of a tiny random model in float32."""
    from tests.fixtures.tiny_models import save_tiny

    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            with torch.random.fork_rng():
                torch.manual_seed(1)
                folders[name] = save_tiny(name, tmp_path_factory.mktemp(name))
        return folders[name]

    return find


@pytest.fixture(scope="session")
def quantized(
    dense: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`quantized("llama", "vq-4")`: the folder of the same model, quantized and saved.

    Whichever test asks first, the backend is that of the session: the reference, which
    `reference_kernels` asks for, rounds some scales to the other float16.
    """
    from transformers import AutoModelForCausalLM

    from hf_vq import VQConfig
    from tests.fixtures.random_weights import scaled_models

    folders: dict[tuple[str, str], Path] = {}
    backend = os.environ.get("HF_VQ_BACKEND", "")

    def find(name: str = "llama", scheme: str = "vq-4") -> Path:
        if (name, scheme) not in folders:
            with scaled_models(), pytest.MonkeyPatch.context() as patch:
                patch.setenv("HF_VQ_BACKEND", backend)
                model = AutoModelForCausalLM.from_pretrained(
                    dense(name), quantization_config=VQConfig(scheme, activations=None)
                )
            label = scheme if isinstance(scheme, str) else scheme.spec()
            folder = tmp_path_factory.mktemp(f"{name}-{label}") / "model"
            model.save_pretrained(folder)
            folders[name, scheme] = folder
        return folders[name, scheme]

    return find


@pytest.fixture
def hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HubServer]:
    """A Hub on this machine: what is pushed lies in `hub.files`."""
    with HubServer() as server:
        server.use(monkeypatch, tmp_path_factory.mktemp("hub"))
        yield server


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Run Python code in a fresh process and an empty folder; its stdout, or a failure.

    It keeps its bytecode, as an installed package does, even where pytest's process may not.
    """

    def run(code: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **env},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
