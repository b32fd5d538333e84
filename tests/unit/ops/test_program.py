"""Operands of a decoding step: dimensions that can be one, and rows."""

import re

import pytest
import torch

from hf_vq import paths
from hf_vq.ops.program import OPS, Operand, flat, merged


def test_ops_are_numbered_as_in_the_header():
    text = (paths.kernel_sources() / "cpu" / "api.h").read_text(encoding="utf-8")
    body = re.search(r"enum hf_vq_op \{(.*?)\}", text, re.DOTALL)[1]
    names = [name.strip().removeprefix("HF_VQ_").lower() for name in body.split(",")]
    assert tuple(names) == (*OPS, "num_ops")


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 4, 1, 16), (3, 4, 5), (2, 1, 3, 1, 4)])
def test_merged_dimensions_read_the_same_numbers(shape):
    x = torch.arange(2 * torch.Size(shape).numel())[::2].view(shape)
    views = [x, x.transpose(0, -1).contiguous().transpose(0, -1), x.narrow(1, 0, 1).expand(shape)]
    sizes, strides = merged(shape, tuple(view.stride() for view in views))
    for view, stride in zip(views, strides, strict=True):
        found = view.as_strided(sizes, stride)
        assert torch.equal(found.flatten(), view.flatten())


def test_merged_has_as_few_dimensions_as_possible():
    assert merged((2, 3, 4), ((12, 4, 1), (12, 4, 1))) == ((24,), ((1,), (1,)))
    assert merged((2, 3, 4), ((12, 4, 1), (0, 0, 1))) == ((6, 4), ((4, 1), (0, 1)))


def test_flat():
    assert flat(Operand((1, 3, 4), (99, 4, 1), 5)) == (12, 1, 5)
    assert flat(Operand((3,), (2,))) == (3, 2, 0)
    assert flat(Operand((3, 4), (5, 1))) is None
