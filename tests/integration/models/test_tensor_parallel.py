"""Tensor parallelism: which layers can be split, and two processes that share a model."""

import os
import subprocess
import sys

import pytest
import torch

from hf_vq.errors import VQConfigError
from hf_vq.formats import QoQScheme, VQScheme
from hf_vq.formats.catalog import weight_scheme
from hf_vq.hf.tensor_parallel import CAN_SPLIT, check_split, whole_everywhere
from hf_vq.nn.replace import linear_class
from tests.fixtures import PROCESSES, ROOT

SCRIPT = PROCESSES / "tensor_parallel.py"


def layer(scheme, inputs=512, outputs=256):
    with torch.device("meta"):
        return linear_class(scheme)(inputs, outputs, False, scheme)


@pytest.mark.parametrize(
    ("scheme", "inputs", "style", "problem"),
    [
        (weight_scheme("vq-4"), 512, "colwise", None),
        (weight_scheme("vq-4"), 512, "rowwise", None),
        (weight_scheme("vq-3"), 512, "rowwise", None),
        (weight_scheme("turboquant-4+4"), 512, "rowwise", None),
        (weight_scheme("vq-4-scaled"), 512, "colwise", None),
        (weight_scheme("vq-4-scaled"), 512, "rowwise", None),
        (weight_scheme("vq-4-scaled"), 384, "rowwise", "scale groups of 128"),
        (VQScheme(2, 8, scale_group=16).scaled(), 128, "rowwise", "rotation blocks of 128"),
        (weight_scheme("vq-4"), 384, "rowwise", "scale groups of 128"),
        (VQScheme(2, 8, rotation_block=16), 528, "colwise", None),
        (weight_scheme("quip-sharp-4"), 512, "colwise", None),
        (weight_scheme("quip-sharp-4"), 512, "rowwise", "residual stages"),
        (weight_scheme("gptvq-2"), 512, "colwise", "tiles"),
        (weight_scheme("vq-4"), 512, "packed_colwise", "not supported"),
        (VQScheme(2, 8, scale_group=16), 256, "rowwise", None),
        (VQScheme(2, 8, scale_group=16), 128, "rowwise", "rotation blocks of 128"),
        (VQScheme(1, 3, scale_group=16, rotation="none"), 48 * 2, "rowwise", None),
        (VQScheme(1, 5, scale_group=0, rotation="none"), 20, "rowwise", "whole bytes"),
        (VQScheme(1, 5, scale_group=0, rotation="none"), 21, "rowwise", "does not divide"),
        (QoQScheme(128), 512, "colwise", None),
        (QoQScheme(128), 512, "rowwise", None),
        (QoQScheme(128), 384, "rowwise", "whole groups of 128"),
        (QoQScheme(), 384, "rowwise", None),
        (QoQScheme(), 202, "rowwise", "whole bytes"),
        (QoQScheme(), 201, "rowwise", "does not divide"),
    ],
)
def test_which_layers_can_be_split(scheme, inputs, style, problem):
    module = layer(scheme, inputs)
    if problem is None:
        check_split(module, "q_proj", style, 2)
        return
    with pytest.raises(VQConfigError, match=f"q_proj cannot be split over 2.*{problem}"):
        check_split(module, "q_proj", style, 2)


def test_what_is_whole_everywhere():
    module = layer(VQScheme(2, 8, codebook="tensor"))
    names = module._parameters
    assert [n for n in names if whole_everywhere(module, n, "colwise")] == [
        "vq_codebook",
        "vq_signs",
    ]
    assert [n for n in names if whole_everywhere(module, n, "rowwise")] == ["vq_codebook"]
    # Diagonals as signs: a device that has some inputs has their numbers.
    module = layer(VQScheme(1, 4, residuals=2, stages="rerotated").scaled())
    names = module._parameters
    diagonals = ["vq_diagonal", "vq_diagonal_2"]
    assert [n for n in names if whole_everywhere(module, n, "colwise")] == diagonals
    assert not [n for n in names if whole_everywhere(module, n, "rowwise")]
    for scheme, whole in ((QoQScheme(128), ["vq_scale"]), (QoQScheme(), ["vq_scale", "vq_zero"])):
        module = layer(scheme)
        names = module._parameters
        assert not [n for n in names if whole_everywhere(module, n, "colwise")]
        assert [n for n in names if whole_everywhere(module, n, "rowwise")] == whole
    module = layer(VQScheme(2, 8, scale_group=0))
    assert [n for n in module._parameters if whole_everywhere(module, n, "rowwise")] == ["vq_scale"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
@pytest.mark.skipif(not CAN_SPLIT, reason="needs Transformers 5.23")
def test_two_processes(quantized, dense, tmp_path):
    scheme = VQScheme(2, 8, scale_group=16, rotation_block=16).scaled()
    arguments = [
        quantized("llama", scheme),
        quantized("llama", VQScheme(2, 4, residuals=2, scale_group=16, rotation_block=16)),
        quantized("qwen3-moe", scheme),
        dense("llama"),
        tmp_path / "saved",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
    ]
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [*command, str(SCRIPT), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is fine") == 2
