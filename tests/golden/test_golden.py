"""Files, numbers and names are those that were recorded: no redesign changes one unseen.

The data is the same on every x86 and Arm processor, for any number of threads: see `stored_weights`
and `stored_caches` (nothing that is recorded was fitted), `exact_results` (nothing is rounded), and
`interface`. It was compared under every instruction set of the kernels, PyTorch and MKL that an
x86 processor has:

    HF_VQ_CPU_ISA=scalar ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 \\
        pytest tests/golden
"""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_vq import VQConfig, VQError
from tests.golden import exact_results, interface, recorded, stored_caches, stored_weights
from tests.golden.recorded import OLDER, check

pytestmark = pytest.mark.filterwarnings("ignore:.* loses much quality without calibration data")

PARTS = {
    "weights": stored_weights.ALL,
    "caches": stored_caches.ALL,
    "results": exact_results.ALL,
    "interface": list(interface.PARTS),
}


@pytest.fixture(autouse=True)
def _quiet_and_alone():
    """No warnings of files without digests, which many of these are; one thread, since the tensors
    are so small that others only wait."""
    logging.disable(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("dense")


@pytest.mark.parametrize("part", PARTS)
def test_every_scheme_is_recorded(part):
    names = recorded.recorded(part)
    check(f"tests/golden/data/{part}.json", sorted(names), sorted(PARTS[part]))


@pytest.mark.parametrize("name", stored_weights.ALL)
def test_models_are_saved_as_they_were(name, dense, tmp_path):
    found = stored_weights.facts(name, dense, tmp_path)
    check(f"a saved model, {name}", recorded.recorded("weights").get(name), found)


@pytest.mark.parametrize("name", stored_caches.ALL)
def test_caches_are_saved_as_they_were(name, tmp_path):
    found = stored_caches.facts(name, tmp_path)
    check(f"a saved VQCache or KVCodebooks, {name}", recorded.recorded("caches").get(name), found)


@pytest.mark.parametrize("name", exact_results.ALL)
def test_results_are_the_same_bits(name, tmp_path):
    found = exact_results.facts(name, tmp_path)
    check(f"a result, {name}", recorded.recorded("results").get(name), found)


@pytest.mark.parametrize("name", [name for name in exact_results.ALL if not name.startswith("fit")])
def test_results_of_the_reference_are_the_same_bits(name, tmp_path, reference_kernels):
    found = exact_results.facts(name, tmp_path)
    check(f"a result of the reference, {name}", recorded.recorded("results").get(name), found)


@pytest.mark.parametrize("name", interface.PARTS)
def test_names_are_what_they_were(name):
    found = interface.PARTS[name]()
    check(f"the interface, {name}", recorded.recorded("interface").get(name), found)


@pytest.mark.parametrize("name", stored_weights.OLDER_MODELS)
def test_models_of_every_format_version_are_read(name, tmp_path):
    """What an earlier version wrote is loaded, and saved with the same bytes of every tensor."""
    version = json.loads((OLDER / name / "config.json").read_text())["quantization_config"]
    assert version["format_version"] == int(name[0])
    saved = stored_weights.saved_older(name, tmp_path)
    check_tensors(OLDER / name / "model.safetensors", saved / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("cache-1-k4v2", stored_caches.saved_older_cache),
        ("codebooks-1-nomad-4", stored_caches.saved_older_codebooks),
    ],
)
def test_caches_of_every_format_version_are_read(name, save, tmp_path):
    check_tensors(OLDER / f"{name}.safetensors", save(tmp_path))


def check_tensors(before: Path, after: Path) -> None:
    old, new = load_file(before), load_file(after)
    assert set(old) == set(new), f"{before}: other tensors are saved: {set(old) ^ set(new)}"
    for key, tensor in old.items():
        same = new[key].dtype == tensor.dtype and torch.equal(new[key], tensor)
        assert same, f"{before}: {key} is not saved as it was read"


def test_every_format_version_has_an_older_file():
    """A newer version needs a file of its own before the next one is begun."""
    versions = {int(name[0]) for name in stored_weights.OLDER_MODELS}
    newest = max(versions)
    assert versions == set(range(1, newest + 1))
    with pytest.raises(VQError, match=f"format_version {newest + 1} is newer"):
        VQConfig(format_version=newest + 1)


def test_a_change_is_named():
    old = {"vq-4": {"weight": "uint8 [2] aa", "gone": 1, "flags": [1, 2], "same": 0}}
    new = {"vq-4": {"weight": "uint8 [2] bb", "flags": [1, 3], "same": 0, "more": True}}
    with pytest.raises(AssertionError) as failure:
        check("the file", old, new)
    for line in (
        'vq-4 / weight: "uint8 [2] aa" -> "uint8 [2] bb"',
        "vq-4 / gone: 1 -> (gone)",
        "vq-4 / flags / 1: 2 -> 3",
        "vq-4 / more: (none) -> true",
        recorded.COMMAND,
    ):
        assert line in str(failure.value)
    assert recorded.changes(["a", "b"], ["b", "c", "d"], "names") == [
        'names: "a" -> (gone)',
        'names: (none) -> "c"',
        'names: (none) -> "d"',
    ]
    assert recorded.changes(["a"], ["a", "a"], "names") == ["names: 1 items -> 2 items"]
    assert recorded.changes(old, old) == []


def test_the_data_stays_small():
    files = [path for path in recorded.DATA.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 256 * 1024
