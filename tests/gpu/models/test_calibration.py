"""Calibration of a model whose blocks are moved to a GPU."""

import pytest


@pytest.mark.gpu
def test_blocks_travel_to_a_gpu(calibrate):
    """Memory holds the model, the GPU a block at a time; near ties may differ from a CPU's."""
    model, there = calibrate(), calibrate(device="cuda")
    assert next(there.parameters()).device.type == "cpu"
    a, b = model.state_dict(), there.state_dict()
    assert a.keys() == b.keys() and all(a[key].shape == b[key].shape for key in a)
    errors = (m.config.quantization_config.provenance["calibration"]["output_error"]
              for m in (model, there))  # fmt: skip
    for one, other in zip(*(found.values() for found in errors), strict=True):
        assert one == pytest.approx(other, rel=0.05)
