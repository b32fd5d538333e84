"""Which launches may read weights before those before them have ended."""

import copy
import io
import weakref

import pytest
import torch

from hf_vq.backends.cuda.bound_weight import ATTRIBUTE, BoundWeight, bind_weight, bound_weight


@pytest.fixture
def capturing(monkeypatch):
    """Whether a graph is captured."""
    now = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    return now


@pytest.mark.usefixtures("capturing")
def test_what_nobody_wrote_since_the_last_launch():
    tensors = [torch.zeros(4), torch.zeros(2)]
    launches = BoundWeight(tensors[0])
    assert not launches.settled(tensors, 1)  # who knows what wrote them
    assert launches.settled(tensors, 1)
    tensors[1].add_(1)
    assert not launches.settled(tensors, 1) and launches.settled(tensors, 1)
    tensors[0].data = torch.ones(4)  # the same tensor with other memory
    assert not launches.settled(tensors, 1) and launches.settled(tensors, 1)
    assert not launches.settled([tensors[0], torch.zeros(2)], 1)
    assert not launches.settled(tensors[:1], 1)


def test_another_stream_may_have_written(capturing):
    tensors = [torch.zeros(4)]
    launches = BoundWeight(tensors[0])
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
    launches = BoundWeight(tensors[0])
    assert not launches.settled(tensors, 1) and not launches.settled(tensors, 1)


@pytest.mark.usefixtures("capturing")
def test_it_lives_as_long_as_its_codes():
    codes, scale = torch.zeros(4), torch.zeros(2)
    bound = bind_weight(codes)
    assert bound_weight(scale) is None and bind_weight(codes) is bound is bound_weight(codes)
    bound.settled([codes, scale], 1)
    alive = [weakref.ref(tensor) for tensor in (bound, codes, scale)]
    del bound, codes, scale
    assert [ref() for ref in alive] == [None] * 3


def test_copies_of_codes_are_not_bound():
    codes = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    plain = torch.zeros(4)
    for tensor in (codes, plain):
        bind_weight(tensor)
        assert bound_weight(copy.deepcopy(tensor)) is None
        assert bound_weight(tensor.clone()) is None
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        assert bound_weight(torch.load(file, weights_only=True)) is None
    other = torch.zeros(4)
    setattr(other, ATTRIBUTE, bound_weight(plain))  # as a tool that copies attributes does
    assert bound_weight(other) is None and bind_weight(other) is not bound_weight(plain)
