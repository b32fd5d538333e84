"""Every bucket of every chooser on a GPU: the problems of `tests.buckets`, each twice on the
same inputs in memory full of NaN, the same bits, and as near to float64 as rounding allows.

tests/unit/codegen/test_buckets.py compares, without a GPU, what these problems launch with what the
choosers can choose. Most of the time goes into compiling: with 15 processes minutes.
"""

import functools
import os
import pickle
import time

import pytest
import torch

from hf_vq.codegen.attention_plan import Mask
from hf_vq.codegen.jit.device import device_arch, named_arch
from hf_vq.errors import VQError
from tests.buckets.attention import SCHEMES, AttentionCase, has_kernel
from tests.buckets.case import run_twice
from tests.buckets.every import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Slow, not wrong.
    pytest.mark.filterwarnings("ignore:.* spills .* bytes per thread:RuntimeWarning"),
]

PARTS = {"attention": 120, "linear-turboquant-1": 30, "linear-turboquant-1+1": 30, "append": 15,
         "store": 10, "rows": 15, "w4a8": 20}  # fmt: skip
SEVERAL = [(kernel, part) for kernel in CASES for part in range(PARTS.get(kernel, 6))]
HOPPER = named_arch("sm_90a")  # has kernels for all that any GPU has


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The problems of a kernel, which takes seconds: one process finds them for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def read(kernel):
        path = folder / f"buckets-{kernel}"
        if not path.exists():
            unfinished = path.with_name(f"{path.name}-{os.getpid()}")
            unfinished.write_bytes(pickle.dumps(CASES[kernel](device_arch(0))))
            unfinished.replace(path)
        return pickle.loads(path.read_bytes())

    return functools.cache(read)


@pytest.mark.parametrize(("kernel", "part"), SEVERAL)
def test_problems_of_every_bucket(kernel, part, found):
    """Some of a kernel's; all that fail are told."""
    some = found(kernel)[part :: PARTS.get(kernel, 6)]
    failed = []
    for number, case in enumerate(some):
        start = time.monotonic()
        seed = 1000 * part + number
        torch.manual_seed(seed)
        try:
            run_twice(case, torch.device("cuda", 0))
        except (AssertionError, VQError) as error:
            plans = case.plans(device_arch(0))
            failed.append(f"{case.name}, seed {seed}: {error}\n  problem {case}\n  plan {plans[0]}")
        print(f"{time.monotonic() - start:6.2f} s {case.name}")
    assert not failed, f"{len(failed)} of {len(some)}:\n" + "\n".join(failed)


def every_scheme():
    """Names of all that have kernels, also those that share them."""
    return [name for name, scheme in SCHEMES.items() if has_kernel(scheme, (128, 128), HOPPER)]


def of_heads(name, rows, heads, share, page=0):
    """A decoding step over 1,024 tokens and some."""
    if not has_kernel(SCHEMES[name], (128, 128), device_arch(0)):
        pytest.skip("has no kernel on this GPU")
    tokens = 4096 if page else 1024
    return AttentionCase(
        name, (128, 128), rows, heads, share, 1, tokens, False, page, "bfloat16", Mask.NONE, False
    )


@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("name", every_scheme())
def test_many_heads_again_and_again(name, page):
    """Blocks that meet in the memory of others' barriers were wrong in some of many calls."""
    if page and not (SCHEMES[name].key.has_scale and SCHEMES[name].value.has_scale):
        pytest.skip("has no pages")
    for share in (4, 8):
        run_twice(of_heads(name, 32, 8, share, page), torch.device("cuda", 0), 30)


@pytest.mark.parametrize(("rows", "heads"), [(1, 32), (3, 8), (32, 8)])
@pytest.mark.parametrize("name", every_scheme())
def test_one_query_head_again_and_again(name, rows, heads):
    """Columns that no query has took part in a maximum."""
    run_twice(of_heads(name, rows, heads, 1), torch.device("cuda", 0), 100)
