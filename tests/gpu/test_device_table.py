"""The table of devices says what the driver says."""

import pytest

from hf_vq.codegen.jit.device import ARCHES, device_arch


@pytest.mark.gpu
def test_the_driver_agrees_with_the_table():
    import torch

    found = device_arch(torch.cuda.current_device())
    if found.name not in ARCHES:
        pytest.skip(f"{found.name} is not in the table")
    named = ARCHES[found.name]
    for field in ("shared_per_block", "shared_per_sm", "threads_per_sm", "registers_per_sm"):
        assert getattr(found, field) == getattr(named, field)
    assert 0 < found.dram_bytes_per_clock < 100
