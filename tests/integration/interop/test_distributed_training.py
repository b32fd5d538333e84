"""Two processes that train a model of codes find what one process finds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.fixtures import PROCESSES, ROOT

pytest.importorskip("peft")
SCRIPT = PROCESSES / "training.py"
SCHEMES = ("vq-4", "turboquant-4+4", "vq-2", "quip-sharp-2")
DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)


def losses(how: str, *schemes: str) -> dict[tuple[str, str], list[float]]:
    """Of each scheme and of what is trained, step by step."""
    command = [sys.executable]
    if how != "one":
        command += ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [*command, str(SCRIPT), how, *schemes],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(schemes)]
    return {(scheme, what): [*map(float, rest)] for scheme, what, *rest in lines}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], list[float]]:
    found = losses("one", *SCHEMES)
    assert len(found) == 2 * len(SCHEMES)
    assert all(first - last > 0.01 for first, *_, last in found.values()), "nothing was learned"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(how: str, alone: dict[tuple[str, str], list[float]]) -> None:
    """Adapters on codes, and scales; a step that did not share its gradients would part them."""
    found = losses(how, *SCHEMES)
    assert found.keys() == alone.keys()
    for key, expected in alone.items():
        assert found[key] == pytest.approx(expected, rel=1e-5), key


@pytest.mark.slow
@DEEPSPEED
def test_deepspeed_trains(alone: dict[tuple[str, str], list[float]]) -> None:
    """With ZeRO-2 as with ZeRO-3. On a CPU it scales gradients otherwise, of dense models, too."""
    two, three = (losses(how, *SCHEMES) for how in ("zero2", "zero3"))
    assert two.keys() == three.keys() == alone.keys()
    for key, (first, *_) in alone.items():
        assert two[key][0] == pytest.approx(first, rel=1e-5), key
        assert two[key] == pytest.approx(three[key], rel=1e-5), key
        assert two[key][0] - two[key][-1] > 0.01, key
