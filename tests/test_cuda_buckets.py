"""Every bucket of every chooser on a GPU: the problems of `hf_vq.bench.buckets`, each twice on the
same inputs in memory full of NaN, the same bits, and as near to float64 as rounding allows.

tests/codegen/test_buckets.py compares, without a GPU, what these problems launch with what the
choosers can choose. With 15 processes the file takes an H200 about a minute, most of it compiling.
"""

import time

import pytest
import torch

from hf_vq.bench.buckets.case import run_twice
from hf_vq.bench.buckets.every import CASES
from hf_vq.codegen.device import device_arch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PARTS = {"attention": 45, "linear-turboquant-1": 20, "linear-turboquant-1+1": 15, "w4a8": 10}
SEVERAL = [(kernel, part) for kernel in CASES for part in range(PARTS.get(kernel, 6))]
REPEATED = 30


@pytest.mark.parametrize(("kernel", "part"), SEVERAL)
def test_problems(kernel, part):
    """Some of a kernel's; all that fail are told."""
    some = CASES[kernel](device_arch(0))[part :: PARTS.get(kernel, 6)]
    failed = []
    for case in some:
        start = time.monotonic()
        try:
            run_twice(case, torch.device("cuda", 0))
        except AssertionError as error:
            failed.append(f"{case.name}: {error}")
        print(f"{time.monotonic() - start:6.2f} s {case.name}")
    assert not failed, f"{len(failed)} of {len(some)}:\n" + "\n".join(failed)
