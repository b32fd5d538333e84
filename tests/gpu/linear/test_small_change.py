"""A small change of codes on a GPU: what merging an adapter there stores."""

import pytest
import torch

from hf_vq import fit
from hf_vq.formats import QoQScheme
from hf_vq.formats.catalog import linear_scheme
from hf_vq.interop.small_change import decoded, fit_small_change, part_left

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = ["vq-4", "turboquant-2", "turboquant-4+4", "quip-sharp-2", "aqlm-2", "gptvq-2", "qoq-w4a8"]


@pytest.mark.parametrize("name", NAMES)
def test_it_stays_and_is_the_same_twice(name):
    scheme, width = linear_scheme(name), 512
    weight = torch.randn(256, width, device="cuda")
    fixed = {}
    if not isinstance(scheme, QoQScheme):
        fixed = fit.fixed_tensors(scheme, width, 0, device=weight.device)
    tensors = {**fixed, **fit.fit_weight(weight, scheme).tensors}
    before = decoded(tensors, scheme, width)
    change = torch.randn(256, 1, device="cuda") @ torch.randn(1, width, device="cuda")
    wanted = before + 0.01 * change
    found, again = (fit_small_change(wanted, tensors, scheme) for _ in range(2))
    assert all(torch.equal(again[key], tensor) and tensor.is_cuda for key, tensor in found.items())
    after = decoded({**tensors, **found}, scheme, width)
    assert part_left(after, before, wanted) == pytest.approx(1, abs=0.25)
