"""Tests of the plugin of vLLM, in an environment that has vLLM: `make vllm`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Read when vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

collect_ignore_glob = []
try:
    import vllm  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]
else:
    pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of processes, of this one alone."""
    from tests.vllm.layers import ranks

    with ranks(0, 1, str(tmp_path_factory.mktemp("group") / "store")):
        yield
