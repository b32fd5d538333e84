"""What kernels are told of a rotary mean is checked on the host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_vq import VQFormatError
from hf_vq.backends.cuda.kv.rotary_mean import FARTHEST, rotary_mean


def view(**fields: Any) -> Any:
    """What is read of a `KVCacheView`: two rows, three heads of 8 channels, 6 of which turn."""
    given = {
        "key": SimpleNamespace(recent=torch.zeros(2, 3, 0, 8)),
        "key_rotary_mean": torch.zeros(2, 3, 1, 8),
        "rotary_inv_freq": torch.ones(3),
        "rotary_interleaved": False,
        "rotary_start": 0,
        "page_table": None,
    }
    return SimpleNamespace(**given | fields)


@pytest.mark.parametrize("start", [-FARTHEST, 0, FARTHEST])
def test_members(start):
    given = view(rotary_start=start)
    addresses = given.key_rotary_mean.data_ptr(), given.rotary_inv_freq.data_ptr()
    assert rotary_mean(given) == (*addresses, 24, 8, 3, False, start)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rotary_start": FARTHEST + 1}, "have positions within"),
        ({"rotary_start": -FARTHEST - 1}, "have positions within"),
        ({"rotary_inv_freq": torch.ones(5)}, "a rotary mean is float32"),
        ({"rotary_inv_freq": None}, "a rotary mean is float32"),
        ({"key_rotary_mean": torch.zeros(2, 3, 1, 8).half()}, "a rotary mean is float32"),
    ],
)
def test_errors(fields, said):
    with pytest.raises(VQFormatError, match=said):
        rotary_mean(view(**fields))
