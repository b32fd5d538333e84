"""Which launches may read weights before those before them have ended."""

import gc

import pytest
import torch

from hf_vq.backends.cuda.launch_order import Launches


@pytest.fixture
def capturing(monkeypatch):
    """Whether a graph is captured."""
    now = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    return now


@pytest.mark.usefixtures("capturing")
def test_what_nobody_wrote_since_the_last_launch():
    launches, tensors = Launches(), [torch.zeros(4), torch.zeros(2)]
    assert not launches.settled(tensors, 1)  # who knows what wrote them
    assert launches.settled(tensors, 1)
    tensors[1].add_(1)
    assert not launches.settled(tensors, 1) and launches.settled(tensors, 1)
    tensors[0].data = torch.ones(4)  # the same tensor with other memory
    assert not launches.settled(tensors, 1) and launches.settled(tensors, 1)
    assert not launches.settled([tensors[0], torch.zeros(2)], 1)
    assert not launches.settled(tensors[:1], 1)


def test_another_stream_may_have_written(capturing):
    launches, tensors = Launches(), [torch.zeros(4)]
    launches.settled(tensors, 1)
    assert not launches.settled(tensors, 2) and launches.settled(tensors, 2)
    capturing[0] = True
    assert launches.settled(tensors, 3)  # a node of the graph would have written
    tensors[0].add_(1)
    assert not launches.settled(tensors, 3)


@pytest.mark.usefixtures("capturing")
def test_writes_that_nobody_counts():
    with torch.inference_mode():
        tensors = [torch.zeros(4)]
    launches = Launches()
    assert not launches.settled(tensors, 1) and not launches.settled(tensors, 1)


@pytest.mark.usefixtures("capturing")
def test_nothing_is_kept_of_tensors_that_are_gone():
    launches, tensors = Launches(), [torch.zeros(4)]
    launches.settled(tensors, 1)
    tensors.clear()
    gc.collect()
    assert not launches._last
