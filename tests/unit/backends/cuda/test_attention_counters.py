"""Counters of attention on a GPU, handed to threads that meet: no GPU is needed."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_vq.backends.cuda.kv import attention as cuda_attention


@pytest.fixture
def counters(monkeypatch):
    """Counters whose memory takes its time to come."""

    def slowly(nbytes: int, ordinal: int) -> int:
        time.sleep(0.05)
        return 1 << 30

    monkeypatch.setattr(cuda_attention, "zeros", slowly)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return cuda_attention._Counters(0)


def test_streams_that_start_together_share_no_counter(counters):
    with ThreadPoolExecutor(8) as pool:
        addresses = list(pool.map(lambda stream: counters.take(7, stream), range(8)))
    assert min(addresses) >= 1 << 30
    size = 4 * counters.OF_STREAM
    assert sorted(addresses) == list(range(min(addresses), min(addresses) + 8 * size, size))
    assert [counters.take(7, stream) for stream in range(8)] == addresses


def test_launches_that_are_captured_share_no_counter(counters, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first, second = counters.take(5, 1), counters.take(5, 1)
    assert second == first + 4 * 5
