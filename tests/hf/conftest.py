"""Tiny models, saved once per run: dense, and quantized."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent, HERE / "calibration", HERE / "published"):
    sys.path.append(str(folder))

from hub_server import HubServer  # noqa: E402
from tiny import save_tiny  # noqa: E402

from hf_vq.hf import VQConfig, register  # noqa: E402

register()

Find = Callable[..., Path]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """`dense("llama")`: the folder of a tiny random model in float32."""
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            with torch.random.fork_rng():
                torch.manual_seed(1)
                folders[name] = save_tiny(name, tmp_path_factory.mktemp(name))
        return folders[name]

    return find


@pytest.fixture(scope="session")
def quantized(dense: Find, tmp_path_factory: pytest.TempPathFactory) -> Find:
    """`quantized("llama", "vq-4")`: the folder of the same model, quantized and saved."""
    folders: dict[tuple[str, str], Path] = {}

    def find(name: str = "llama", scheme: str = "vq-4") -> Path:
        if (name, scheme) not in folders:
            model = AutoModelForCausalLM.from_pretrained(
                dense(name), quantization_config=VQConfig(scheme)
            )
            folder = tmp_path_factory.mktemp(f"{name}-{scheme}") / "model"
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
