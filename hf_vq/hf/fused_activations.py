"""Fuse 8-bit quantization of activations into the norms and activations before `W4A8Linear`.

    input_layernorm           -> self_attn.q_proj, k_proj, v_proj
    post_attention_layernorm  -> mlp.gate_proj, up_proj
    mlp.act_fn, times up      -> mlp.down_proj

Blocks of Llama, Mistral, Qwen 2 and 3 and models like them have these names. Norms and activations
are compared with their formulas on random numbers. Their output is a `LazyActivation`
(nn/lazy_activation.py), which decodes itself for any other consumer: files, hooks and adapters do
not change.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .. import env, ops
from ..nn.lazy_activation import LazyActivation, Norm, Silu
from ..nn.w4a8_linear import W4A8Linear
from ..ops.fused_inputs import fused_inputs, rms_norm

_NORMS = {
    "input_layernorm": tuple(f"self_attn.{side}_proj" for side in "qkv"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_ACTIVATION, _DOWN = "mlp.act_fn", "mlp.down_proj"


def fuse_inputs(model: nn.Module) -> None:
    """Let the norms and activations of a model round for the layers that read them, where all of
    these are `W4A8Linear`. A second call does nothing."""
    for block in model.modules():
        for name, readers in _NORMS.items():
            norm, layers = _child(block, name), [_child(block, reader) for reader in readers]
            if all(type(layer) is W4A8Linear for layer in layers) and _is_rms_norm(norm.__class__):
                _replace(norm, functools.partial(_norm, norm, *_problem(layers[0])))
        activation, down = _child(block, _ACTIVATION), _child(block, _DOWN)
        if type(down) is W4A8Linear and _is_silu(activation.__class__):
            _replace(activation, functools.partial(_silu, activation, *_problem(down)))


def separate_inputs(model: nn.Module) -> None:
    """Undo `fuse_inputs`."""
    for module in model.modules():
        slot = _slot(module)
        if not _is_ours(vars(module).get(slot)):
            continue
        if slot == "forward":
            del module.__dict__[slot]
        else:
            module.__dict__[slot] = MethodType(type(module).forward, module)


def _replace(module: nn.Module, forward: functools.partial[Tensor]) -> None:
    """Unless somebody else replaced it."""
    slot, plain = _slot(module), type(module).forward
    now = vars(module).get(slot)
    if now is None or _is_ours(now) or getattr(now, "__func__", None) is plain:
        module.__dict__[slot] = forward


def _slot(module: nn.Module) -> str:
    """The attribute that holds a module's forward: accelerate puts its hooks in front of it."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and forward.func in (_norm, _silu)


def _child(module: nn.Module, path: str) -> Any:
    found: nn.Module | None = module
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found


def _problem(layer: W4A8Linear) -> tuple[str, int]:
    """Spec and out_features of a layer, the key of its problem in the dispatch table."""
    return layer.spec, layer.out_features


def _norm(norm: Any, spec: str, rows: int, hidden_states: Tensor) -> Tensor:
    x, weight = hidden_states, norm.weight
    alike = weight.dtype == x.dtype and weight.device == x.device
    if alike and weight.shape == x.shape[-1:] and _is_taken(norm, spec, rows, x, weight):
        return LazyActivation(Norm(x, weight, norm.variance_epsilon))
    plain: Tensor = type(norm).forward(norm, x)
    return plain


def _silu(activation: Any, spec: str, rows: int, input: Tensor) -> Tensor:
    if _is_taken(activation, spec, rows, input):
        return LazyActivation(Silu(input))
    plain: Tensor = type(activation).forward(activation, input)
    return plain


def _is_taken(module: nn.Module, spec: str, rows: int, x: Tensor, *others: Tensor) -> bool:
    """True if only the layers behind `module` read its output, and their kernel takes inputs that
    are already quantized."""
    if module._forward_hooks or not ops.is_plain_eager(x, *others) or not x.numel():
        return False
    return env.FUSED_INPUTS.get() and fused_inputs(x, spec, rows) is not None


@functools.cache
def _is_rms_norm(kind: Any) -> bool:
    """True if modules of a class equal `rms_norm` bit by bit."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    with torch.device("cpu"), torch.no_grad():
        try:
            norm: Any = kind(96, eps=1e-3)
        except TypeError:
            return False
        names = [name for name, _ in norm.named_parameters()]
        if names != ["weight"] or getattr(norm, "variance_epsilon", None) != 1e-3:
            return False
        x = _numbers()
        norm.weight.copy_(_numbers()[0] + 1)
        return all(
            torch.equal(norm.to(dtype)(x.to(dtype)), rms_norm(x.to(dtype), norm.weight, 1e-3))
            for dtype in (torch.float32, torch.bfloat16)
        )


@functools.cache
def _is_silu(kind: Any) -> bool:
    """True if modules of a class equal SiLU bit by bit."""
    if "SiLU" not in kind.__name__:
        return False
    with torch.device("cpu"), torch.no_grad():
        try:
            activation: Any = kind()
        except TypeError:
            return False
        x = _numbers()
        return torch.equal(activation(x), nn.functional.silu(x))


def _numbers() -> Tensor:
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
