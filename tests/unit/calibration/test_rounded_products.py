"""Products in bfloat16: where a CPU has tiles for them, and for no longer than they are wanted."""

import pytest
import torch

from hf_vq.calibration import blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_products_are_rounded_inside_of_the_block_only(monkeypatch, dtype):
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    monkeypatch.setattr(blocks, "multiplied_by_tiles", lambda: dtype)
    with pytest.raises(KeyError), blocks.rounded_products():
        assert setting.fp32_precision == ("bf16" if dtype else before)
        raise KeyError
    assert setting.fp32_precision == before != "bf16"


def test_rounded_products_are_near():
    x = torch.randn(64, 128)
    with blocks.rounded_products():
        found = x.T @ x
    torch.testing.assert_close(found, x.T @ x, rtol=0.02, atol=0.3)
