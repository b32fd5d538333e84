"""Block-input rotation (QServe, section 4.3.1): one Hadamard matrix Q rotates the hidden states
between blocks, so that no channel of a block's input is much larger than the others.

    h' = h Q        x / rms(x) does not see a rotation, so

    embedding   E' = E Q                            writes h
    q, k, v, gate, up, head     W' = W diag(g) Q    reads it; g of the norm before it becomes 1
    o, down     W' = Q^T W,  b' = b Q               adds to it

Values are rotated too, each head by a Hadamard matrix R of its size: v returns x R, o undoes it. So
the inputs of all layers but `down` are rotated, and inference needs no extra operation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from ...errors import VQCalibrationError, VQSchemeError
from ...transforms import hadamard
from ...transforms.hadamard import odd_factor
from .structure import Block, Structure, change

logger = logging.get_logger("hf_vq")


def rotate(model: Any, structure: Structure) -> None:
    """Rotate a model's hidden states and values, in place; its outputs stay the same.

    An output head that is tied to the embedding gets a separate weight, because the last norm is
    folded into it. The model grows by the size of this weight.

    Raises:
        VQCalibrationError: there is no Hadamard matrix of its size.
    """
    sizes = {structure.embedding.embedding_dim} | {block.head_dim for block in structure.blocks}
    for size in sorted(sizes):
        try:
            odd_factor(size)
        except VQSchemeError as error:
            raise VQCalibrationError(
                f"{type(model).__name__} cannot be rotated: {error} Turn it off: "
                'VQConfig(calibration={..., "transforms": {"rotate": False}}).'
            ) from None
    _untie(model, structure)
    change(structure.embedding.weight, hadamard)
    for block in structure.blocks:
        _read(block.attention_norm, block.q, block.k, block.v)
        _read(block.mlp_norm, block.gate, block.up)
        for layer in (block.o, block.down):
            _write(layer)
        _rotate_values(block)
    _read(structure.norm, structure.head)


def _untie(model: Any, structure: Structure) -> None:
    head, embedding = structure.head, structure.embedding
    if head.weight is not embedding.weight:
        return
    size = head.weight.numel() * head.weight.element_size()
    logger.warning(
        "hf_vq: rotation gives the output head a separate weight (%.1f MB): the last norm is "
        "folded into it, so it cannot stay tied to the embedding.",
        size / 1e6,
    )
    head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    for module in model.modules():  # what Transformers found tied when the model was made
        if getattr(module, "all_tied_weights_keys", None):
            module.all_tied_weights_keys = {}


def _read(norm: Any, *layers: nn.Linear) -> None:
    """Fold a norm's weight and Q into the layers that read the norm's output."""
    gain = norm.weight.detach().double()
    for layer in layers:
        change(layer.weight, lambda rows: hadamard(rows * gain.to(rows.device)))
    norm.weight.fill_(1.0)


def _write(layer: nn.Linear) -> None:
    """Fold Q into a layer whose output is added to the hidden states."""
    change(layer.weight.T, hadamard)
    if layer.bias is not None:
        change(layer.bias[None], hadamard)


def _rotate_values(block: Block) -> None:
    heads, repeats, size = block.values

    def rotated(rows: Tensor) -> Tensor:
        return hadamard(rows.unflatten(-1, (-1, size))).flatten(-2)

    change(block.v.weight.T, rotated)
    if block.v.bias is not None:
        change(block.v.bias[None], rotated)
    assert block.o.in_features == heads * repeats * size
    change(block.o.weight, rotated)  # o x = (o R^T^T) (x R), and R is orthonormal
