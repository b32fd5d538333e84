"""What calibration on few tokens hears of them: sequences with a first token, and wide blocks."""

import pytest
import torch

from hf_vq.calibration.hessians import Listener
from hf_vq.calibration.text import usual_context


@pytest.mark.parametrize(
    ("tokens", "context"), [(1 << 20, 2048), (1 << 17, 2048), (1 << 14, 256), (1000, 64)]
)
def test_few_tokens_are_many_short_sequences(tokens, context):
    assert usual_context(tokens) == context


def test_blocks_of_moments_may_end_behind_the_inputs():
    layer, heard = torch.nn.Linear(12, 4), []
    listener = Listener(block=lambda size, fused: 8)
    for _ in range(2):
        heard.append(torch.randn(5, 12))
        with listener.listening({"layer": layer}):
            layer(heard[-1])
    halves = listener.sites[0].hessian()
    assert halves.shape == (2, 2, 8, 8)
    for half, x in zip(halves, heard, strict=True):
        moments = x.T @ x / 10
        torch.testing.assert_close(half[0], moments[:8, :8])
        torch.testing.assert_close(half[1, :4, :4], moments[8:, 8:])
        assert not half[1, 4:].any() and not half[1, :, 4:].any()
