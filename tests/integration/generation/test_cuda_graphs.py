"""`hf_vq.capture`: the tokens of `generate`, from CUDA graphs of our own."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch

import hf_vq
from hf_vq import patches
from hf_vq.errors import VQBackendError
from hf_vq.hf import cuda_graphs
from tests.fixtures.generation import build


def test_the_method_of_one_model() -> None:
    """It is that of the model alone: not of its class, nor of a copy."""
    model = build("gqa")
    plain = type(model).get_compiled_call
    model.__dict__[cuda_graphs._ATTRIBUTE] = cuda_graphs._Captured.__new__(cuda_graphs._Captured)
    patches.override(model, "get_compiled_call", partial(cuda_graphs._get_compiled_call, model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.get_compiled_call.args[0] is other is not model
        assert not isinstance(other.get_compiled_call(None), cuda_graphs._Decoding)
    assert isinstance(model.get_compiled_call(None), cuda_graphs._Decoding)
    assert type(model).get_compiled_call is plain
    hf_vq.capture(model, enabled=False)
    assert not isinstance(model.get_compiled_call(None), cuda_graphs._Decoding)
    assert not {cuda_graphs._ATTRIBUTE, "get_compiled_call"} & model.__dict__.keys()


def test_a_model_on_a_cpu() -> None:
    with pytest.raises(VQBackendError, match=r"one GPU.*cpu.*device_map"):
        hf_vq.capture(build("gqa"))


def test_a_wrapped_model() -> None:
    with pytest.raises(VQBackendError, match=r"Linear; in a PeftModel"):
        hf_vq.capture(torch.nn.Linear(3, 3))  # type: ignore[arg-type]
