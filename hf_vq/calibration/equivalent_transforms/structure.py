"""Structure of a decoder, which the transforms need: which layers feed which.

    embedding -> ( norm -> q, k, v -> attention -> o  +  norm -> gate, up -> act * -> down ) x n
              -> norm -> head

Llama, Mistral, Qwen 2 and 3 and models like them have it. A model with any other module that has
parameters is refused, with the module's name. Norms and MLPs are compared with their formulas on
random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import VQCalibrationError

_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = tuple(f"self_attn.{side}_proj" for side in "qkvo")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_ALLOWED = {"self_attn.q_norm", "self_attn.k_norm"}  # norms of heads: nothing is folded past them
_ROWS = 4096  # of a weight that are in float64 at once


@dataclass(frozen=True)
class Block:
    """One block of a decoder; `head_dim` is that of its values."""

    name: str
    attention_norm: Any
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    mlp_norm: Any
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    head_dim: int

    @property
    def values(self) -> tuple[int, int, int]:
        """Heads of values, query heads that read each, and channels of a head."""
        heads = self.v.out_features // self.head_dim
        return heads, self.o.in_features // self.v.out_features, self.head_dim


@dataclass(frozen=True)
class Structure:
    """A decoder, from its embedding to its head."""

    embedding: nn.Embedding
    blocks: list[Block]
    norm: Any
    head: nn.Linear


def structure_of(model: Any, prefix: str) -> Structure:
    """Find the layers of a model.

    Args:
        prefix: name of the list of its blocks.

    Raises:
        VQCalibrationError: the model has another structure, is quantized or offloaded; the message
            names the module.
    """
    if any(p.is_meta or not p.is_floating_point() for p in model.parameters()):
        raise VQCalibrationError(
            "transforms of QoQ are folded into float weights in memory, and some of this model's "
            "are offloaded or quantized. Load it whole, or turn them off: "
            f"{_off()}."
        )
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise VQCalibrationError(f"{name} holds NaN or infinity. Download the model again.")
    owners = {name: one for name, one in model.named_modules() if one._parameters}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    outside = {
        name: one
        for name, one in owners.items()
        if not name.startswith(f"{prefix}.") and one is not embedding and one is not head
    }
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        raise _unknown(model, "has no embedding and output head of the usual kind")
    if len(outside) != 1:
        found = f"{len(outside)} modules with weights" + "".join(f", {n}" for n in [*outside][:3])
        raise _unknown(model, f"has {found} outside its blocks, where one norm is expected")
    (norm_name, norm), count = outside.popitem(), len(model.get_submodule(prefix))
    _check_norm(model, norm_name, norm)
    blocks = [_block(model, f"{prefix}.{index}", owners) for index in range(count)]
    return Structure(embedding, blocks, norm, head)


def _block(model: Any, name: str, owners: dict[str, nn.Module]) -> Block:
    start = f"{name}."
    own: dict[str, Any] = {
        key.removeprefix(start): one for key, one in owners.items() if key.startswith(start)
    }
    wanted = (*_NORMS, *_ATTENTION, *_MLP)
    if missing := [key for key in wanted if key not in own]:
        raise _unknown(model, f"has no {start}{missing[0]}")
    if more := sorted(set(own) - set(wanted) - _ALLOWED):
        raise _unknown(model, f"has an unknown module {start}{more[0]}")
    for key in (*_ATTENTION, *_MLP):
        if type(own[key]) is not nn.Linear:
            raise _unknown(model, f"has a {type(own[key]).__name__} at {start}{key}")
    for key in _NORMS:
        _check_norm(model, start + key, own[key])
    q, k, v, o = (own[key] for key in _ATTENTION)
    gate, up, down = (own[key] for key in _MLP)
    attention: Any = model.get_submodule(f"{name}.self_attn")
    size = getattr(attention, "head_dim", None)
    if not isinstance(size, int) or v.out_features % size or o.in_features % v.out_features:
        raise _unknown(model, f"has values at {name}.self_attn that are not heads of one size")
    _check_mlp(model, f"{name}.mlp", gate, up, down)
    norms = [own[key] for key in _NORMS]
    return Block(name, norms[0], q, k, v, o, norms[1], gate, up, down, size)


def _check_norm(model: Any, name: str, norm: Any) -> None:
    """Raise unless a norm is x / rms(x) * weight: no mean subtracted, nothing added to weight."""
    weight = norm._parameters.get("weight")
    if len(norm._parameters) != 1 or weight is None or weight.ndim != 1:
        raise _unknown(model, f"has a {type(norm).__name__} at {name}, where a norm is expected")
    x = _numbers(weight, 4) * 16  # so large that its epsilon does not count
    expected = x.double() * x.double().square().mean(-1, keepdim=True).rsqrt() * weight.double()
    if not _close(norm(x), expected):
        raise _unknown(model, f"has a {type(norm).__name__} at {name} that is not x / rms(x) * w")


def _check_mlp(model: Any, name: str, gate: Any, up: Any, down: Any) -> None:
    mlp: Any = model.get_submodule(name)
    activation: Callable[[Tensor], Tensor] | None = getattr(mlp, "act_fn", None)
    x = _numbers(gate.weight[0], 4)
    if activation is None or not _close(mlp(x), down(activation(gate(x)) * up(x)).double()):
        raise _unknown(model, f"has a {type(mlp).__name__} at {name} that is not gated as Llama's")


def _numbers(like: Tensor, rows: int) -> Tensor:
    """Random rows of the size, dtype and device of `like`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, len(like), generator=generator).to(like)


def _close(found: Tensor, expected: Tensor) -> bool:
    eps = max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps)  # norms use float32
    return bool((found.double() - expected).norm() <= 4 * eps * expected.norm())


def change(rows: Tensor, map_rows: Callable[[Tensor], Tensor]) -> None:
    """Map rows [n, m] in place, in float64 and in chunks; pass `weight.T` to map columns."""
    for part in rows.split(_ROWS):
        part.copy_(map_rows(part.double()))


def _off() -> str:
    off = {"rotate": False, "smooth_outputs": False, "reorder": False}
    return f'VQConfig(calibration={{..., "transforms": {off}}})'


def _unknown(model: Any, what: str) -> VQCalibrationError:
    return VQCalibrationError(
        f"{type(model).__name__} {what}: QoQ's transforms are for models that are built as Llama. "
        f"Turn them off: {_off()}."
    )
