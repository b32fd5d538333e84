"""The entry `cutile.linear`: its kernel compiles without a GPU; on one it is the product.

With hf-vq[cuda-tile]; its continuous integration installs it.
"""

import contextlib
import re

import pytest
import torch

from hf_vq import dispatch
from hf_vq.backends.cutile import supports
from hf_vq.errors import VQFormatError
from hf_vq.formats import VQScheme, weight_scheme
from hf_vq.ops.codes import stored_arguments
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import random_tensors


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(("dtype", "nested"), [("float16", True), ("bfloat16", False)])
def test_it_compiles(arch, dtype, nested):
    pytest.importorskip("cuda.tile", reason="cuTile is not installed: hf-vq[cuda-tile]")
    from hf_vq.backends.cutile import linear as cutile_linear

    assert cutile_linear.cubin(arch, dtype, nested).startswith(b"\x7fELF")


@pytest.mark.parametrize("name", ["turboquant-4", "turboquant-4+4"])
def test_what_the_kernel_is_given(name, monkeypatch):
    """The launch, with a kernel in PyTorch; everything else as HF_VQ_BACKEND=cutile runs it."""
    pytest.importorskip("cuda.tile", reason="cuTile is not installed: hf-vq[cuda-tile]")
    from hf_vq.backends.cutile import linear as cutile_linear

    def launch(stream, grid, kernel, arguments):
        halves, first, second, table, scale, y, tm, tn, group, nested = arguments
        assert grid[0] * tm >= len(y) and grid[1] * tn >= y.shape[1]
        for half, shift in enumerate((0, 4)):
            code = first.int() >> shift & 15
            code = code << 4 | second.int() >> shift & 15 if nested else code
            factor = scale.float().repeat_interleave(64 * group, 1)
            rows = table.float()[code] * factor[:, : code.shape[1]]
            y += (halves[half].float() @ rows.T).to(y.dtype)

    monkeypatch.setenv("HF_VQ_BACKEND", "cutile")
    monkeypatch.setattr(cutile_linear.ct, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    scheme = weight_scheme(name)
    given = stored_arguments(random_tensors(scheme, 70, 256))
    x, bias = torch.randn(3, 17, 256).bfloat16(), torch.randn(70).bfloat16()
    y = cutile_linear.linear(x, *given, bias, scheme)
    monkeypatch.undo()
    right = reference.linear(x.float(), *given, bias.float(), scheme)
    assert y.shape == right.shape and (y - right).norm() <= 0.02 * right.norm()
    with pytest.raises(VQFormatError, match="scale"):
        cutile_linear.linear(x, *given[:2], given[2][:-1], *given[3:], bias, scheme)


def test_which_schemes_it_has():
    for scheme, reason in (
        (weight_scheme("turboquant-4+2"), "4 \\+ 4 nested"),
        (weight_scheme("vq-4"), "one pass"),
        (VQScheme.parse("vq1x4r1-universal-g64-none"), "multiples"),
    ):
        assert re.search(reason, supports.runnable(scheme, 1024))
    assert supports.runnable(weight_scheme("turboquant-4+4"), 1024) is None


def test_nobody_gets_it_unasked(monkeypatch):
    spec = weight_scheme("turboquant-4").spec()
    asked = dispatch.LinearProblem("cuda", "float16", spec, 1, 64, 128)

    def reason(problem):
        return {v.entry.name: v.reason for v in dispatch.explain(problem)}["cutile.linear"]

    assert reason(asked) == "it runs only with HF_VQ_BACKEND=cutile"
    for forced in ("cutile", "cutile.linear"):
        monkeypatch.setenv("HF_VQ_BACKEND", forced)
        assert reason(asked._replace(device="cpu")) == "tensor is on cpu"
        if not torch.cuda.is_available():
            assert reason(asked) == "there is no NVIDIA GPU"
