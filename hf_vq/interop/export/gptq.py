"""Checkpoints in GPTQ's format, as GPTQModel and vLLM read them, and Transformers where no linear
layer of a block stays dense: 4 bits, symmetric.

    w[o, i] ~ scales[i // group, o] * (code[o, i] - 8)       code 0 .. 15
    qweight int32 [in / 8, out]          code of input 8 r + k in bits 4 k .. 4 k + 3 of row r
    qzeros  int32 [in / group, out / 8]  8 - 1 in each 4 bits: readers add the 1
    scales  fp16  [in / group, out]
    g_idx   int32 [in]                   i // group

With Hessians of the layers' inputs, codes make up for the errors of those before them (GPTQ, arXiv
2210.17323, in the form of `fit.ldlq`); without, each is the nearest. Scales are searched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import VQConfigError, VQFormatError
from ...fit.ldlq import Feedback, ldlq_rows
from ...formats.packing import unpack_bits
from ...formats.scheme import VQScheme
from ...nn.experts import VQExperts, holds_experts
from ...ops.codes import encode_weight
from ...ops.reference.encode_weight import SCALAR_FACTORS
from ...progress import Progress
from . import GROUPS

_PER_WORD = 8  # codes of an int32
_ZERO = 8
_STEP = 0.335  # between two values, in standard deviations: the best for Gaussian weights
_CODEBOOK = _STEP * torch.arange(-_ZERO, _ZERO, dtype=torch.float32)[None, :, None]
_CHUNK = 1 << 22  # weights that are encoded at once


def group_of(layers: Iterable[nn.Module]) -> int:
    """The largest group that divides the rows of all layers which one of `GROUPS` divides.

    Raises:
        VQConfigError: there is no such layer.
    """
    widths = [layer.weight.shape[1] for layer in layers if type(layer) is nn.Linear]
    widths = [width for width in widths if width % GROUPS[-1] == 0]
    if not widths:
        raise VQConfigError(
            f"no linear layer (nn.Linear) has rows of a multiple of {GROUPS[-1]} weights. Use "
            "--to dense."
        )
    return next(group for group in GROUPS if all(width % group == 0 for width in widths))


def check_experts(model: nn.Module) -> None:
    """Raise if a model, dense or of codes, has fused experts."""
    if any(isinstance(m, VQExperts) or holds_experts(m) for m in model.modules()):
        raise VQConfigError(
            f"--to gptq does not write fused experts, as {type(model).__name__} has: readers would "
            "take them for codes, too. Use --to dense."
        )


@torch.no_grad()
def write_gptq(
    model: Any,
    names: Iterable[str],
    folder: Path,
    group: int | None = None,
    hessians: Iterable[Mapping[str, Tensor]] = (),
) -> tuple[int, int]:
    """Save a dense model with some layers in GPTQ's format.

    Layers whose size the format does not take stay dense; the config lists them.

    Args:
        model: of Transformers. Weights of the layers become those that the files hold, rounded to
            their dtype.
        names: of the layers.
        folder: to save into.
        group: inputs that share a scale; None is `group_of` the layers.
        hessians: the mean of x x^T [in, in] over the inputs of layers, by name; those of one block
            are asked for after the blocks before it were encoded.

    Returns:
        The group, and the number of layers that were encoded.

    Raises:
        VQConfigError: none of the layers can be encoded.
        VQFormatError: a weight is beyond fp16.
    """
    layers = {name: model.get_submodule(name) for name in names}
    check_experts(model)
    group = group_of(layers.values()) if group is None else group
    head = getattr(model, "get_output_embeddings", lambda: None)()  # stays dense there
    coded = {n: layer for n, layer in layers.items() if _fits(layer, group) and layer is not head}
    if not coded:
        raise VQConfigError(
            f"GPTQ's format takes linear layers with rows of a multiple of {group} weights and "
            f"a number of outputs that {_PER_WORD} divides, and {type(model).__name__} has none "
            "that holds codes. Use --to dense."
        )
    advice = "Without --calibration, weights are rounded to the nearest at once."
    progress = Progress("GPTQ", sum(layer.weight.numel() for layer in coded.values()), advice)
    packed: dict[str, dict[str, Tensor]] = {}
    for found in chain(hessians, [dict.fromkeys(coded)]):  # at last, those that no block has
        for name in [name for name in found if name in coded and name not in packed]:
            weight = coded[name].weight
            progress.start(name, weight.numel())
            packed[name] = encode(weight, group, name, found[name])
            weight.copy_(decode(packed[name]))
            progress.done()
    progress.close()
    state = model.state_dict()
    for name, tensors in packed.items():
        del state[f"{name}.weight"]
        state |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
    config = _config(model, coded, group)
    model.config.quantization_config = config
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        del model.config.quantization_config
    text = json.dumps(config, indent=2)
    (folder / "quantize_config.json").write_text(text, encoding="utf-8")
    return group, len(coded)


def encode(
    weight: Tensor, group: int, where: str = "the layer", hessian: Tensor | None = None
) -> dict[str, Tensor]:
    """Tensors of GPTQ's format of a matrix [out, in].

    Args:
        hessian: the mean of x x^T [in, in] over the layer's inputs; None: of inputs that are
            independent.

    Raises:
        VQFormatError: a weight is not finite, or beyond fp16.
        VQCalibrationError: the Hessian is not finite, or has no Cholesky factor.
    """
    rows, width = weight.shape
    scheme = VQScheme.parse(f"vq1x4r1-universal-g{group}-none")
    feedback = None if hessian is None else Feedback(hessian.cpu(), scheme, where=where)
    found = [
        _encoded(chunk.float(), scheme, feedback)
        for chunk in weight.cpu().split(max(1, _CHUNK // width))
    ]
    codes, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
    if not bool(scales.isfinite().all()):
        raise VQFormatError(f"{where} holds weights that are not finite, or beyond fp16.")
    zeros = codes.new_full((rows, width // group), _ZERO - 1)
    return {
        "qweight": _packed(codes.T),
        "qzeros": _packed(zeros).T.contiguous(),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(width, dtype=torch.int32) // group,
    }


def decode(packed: dict[str, Tensor]) -> Tensor:
    """The matrix float32 [out, in] that GPTQ's readers see."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = (packed["qweight"][:, None] >> shifts[:, None]).flatten(0, 1) & 15  # [in, out]
    zeros = ((packed["qzeros"][..., None] >> shifts) & 15).flatten(1) + 1  # [groups, out]
    groups = packed["g_idx"].long()
    return (packed["scales"].float()[groups] * (codes - zeros[groups])).T.contiguous()


def _encoded(rows: Tensor, scheme: VQScheme, feedback: Feedback | None) -> tuple[Tensor, Tensor]:
    """Codes [n, in] and scales fp16 [n, groups] of rows [n, in] float32."""
    if feedback is None:
        packed, scales = encode_weight(rows, _CODEBOOK, scheme, SCALAR_FACTORS, True)
        codes = unpack_bits(packed, 4, rows.shape[1])
    else:
        found, scales = ldlq_rows(rows, _CODEBOOK, scheme, feedback)
        codes = found[..., 0]
    return codes.long(), (scales.float() * _STEP).half()


def _packed(codes: Tensor) -> Tensor:
    """Each 8 numbers below 16 of a column of [8 r, n] as one int32 of [r, n], the first lowest."""
    words = codes.unflatten(0, (-1, _PER_WORD))
    shifts = torch.arange(0, 32, 4)[None, :, None]
    return (words << shifts).sum(1).to(torch.int32)


def _fits(layer: nn.Module, group: int) -> bool:
    if type(layer) is not nn.Linear:
        return False
    rows, width = layer.weight.shape
    return rows % _PER_WORD == 0 and width % group == 0


def _config(model: nn.Module, coded: dict[str, nn.Module], group: int) -> dict[str, Any]:
    """The quantization config; linear layers besides the head that are not coded are excepted."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    dense = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in coded and module is not head
    ]
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
    }
    if dense:
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in dense}
    return config
