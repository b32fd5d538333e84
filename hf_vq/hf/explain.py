"""`hf_vq.explain`: which kernel runs for each layer and its cache, and why not a faster one.

`warn_of_kernels` says once that layers are slower than dense ones, or keep 16-bit inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import dispatch, env
from ..cache import VQCache, VQCacheLayer
from ..dispatch import Problem, Verdict, bucket
from ..formats.catalog import linear_scheme, scheme_name
from ..formats.scheme import VQScheme
from ..nn.experts import VQExperts
from ..nn.linear import VQLinear
from ..nn.replace import vq_modules
from ..ops.kv import GROWING, STATIC
from ..ops.layout import layouts_for
from ..ops.library import append_problem, attention_problem, static_append_problem
from . import embeddings, step

logger = logging.get_logger("hf_vq")

_FAST = (
    "vq-2",
    "vq-3",
    "vq-4",
    "turboquant-4",
    "turboquant-8",
    "turboquant-4+4",
)  # have kernels on most devices

SIZES = {
    "kv_append": ("num_new", "head_dim"),
    "kv_attention": ("length", "head_dim"),
}
"""Fields of problems of a cache that are printed as their size."""

FEATURES = ("out_features", "in_features")
"""The same of a layer."""

_INT8 = "cuda.int8_linear"  # rounds inputs to 8 bits
_MANY_TOKENS = 128  # for which it does


@dataclass(frozen=True)
class Row:
    """One kind of layer: its names, the problem for the dispatch table, and the verdicts.

    Args:
        layers: names of the layers that ask the same.
        problem: what they ask.
        verdicts: every entry of the table, in order; the chosen one has no reason.
    """

    layers: tuple[str, ...]
    problem: Problem
    verdicts: tuple[Verdict, ...]

    @property
    def kernel(self) -> str:
        """Name of the entry that runs, or `none`."""
        return next((v.entry.name for v in self.verdicts if v.chosen), "none")

    @property
    def is_slow(self) -> bool:
        """True if the problem is one token, and a dense layer would take less time."""
        chosen = next((v.entry for v in self.verdicts if v.chosen), None)
        if chosen is None or getattr(self.problem, "tokens", 0) != 1:
            return False
        return chosen.implementation.is_slow(self.problem)

    def __str__(self) -> str:
        """One sentence: what runs the layers, and why nothing does that is faster and for a device
        of this machine. A CPU kernel that is fast needs no reasons."""
        said: list[str] = []
        for verdict in self.verdicts:
            name = verdict.entry.name
            if verdict.chosen:
                note = verdict.entry.implementation.note(self.problem)
                if name.startswith("cpu.") and not self.is_slow:
                    said = []
                said += filter(None, [note])
                break
            if _is_here(verdict.entry.devices, self.problem.device):
                said.append(f"{name} does not: {verdict.reason}")
        first, count, op = self.layers[0], len(self.layers), self.problem.op
        shown = first if count == 1 else f"{first} and {count - 1} more"
        size = " x ".join(str(getattr(self.problem, name)) for name in SIZES.get(op, FEATURES))
        kind = [op, _name(self)] if op.endswith("linear") else [op]
        sentence = "; ".join([f"{self.kernel} runs {shown} ({', '.join([*kind, size])})", *said])
        return f"{sentence}."


def _is_here(devices: tuple[str, ...], device: str) -> bool:
    """True if this machine has one of `devices` besides its CPU, or tensors are on one of them."""
    return not devices or any(
        each == device or (each != "cpu" and getattr(torch, each).is_available())
        for each in devices
    )


class Explanation(list[Row]):
    """The rows of `explain`; printing it shows a sentence for each.

    Attributes:
        step: how a decoding step over the cache runs on a CPU; empty elsewhere.
        head: what a dense output head costs, if that is much.
    """

    step = head = ""

    @property
    def summary(self) -> str:
        """One sentence on the layers."""
        layers = [row for row in self if row.problem.op.endswith("linear")]
        total = sum(len(row.layers) for row in layers)
        slow = [row for row in layers if row.is_slow]
        if not slow:
            return f"All {total} layers run on their codes." if total else "No layer holds codes."
        count, device = sum(len(row.layers) for row in slow), slow[0].problem.device
        names = ", ".join(dict.fromkeys(map(_name, slow)))
        cures = [cure for row in slow if (cure := _faster(row.problem))]
        cure = f" {' and '.join(dict.fromkeys(cures))} would not." if cures else ""
        return f"{count} of {total} layers take longer than dense ones on {device}: {names}.{cure}"

    def __str__(self) -> str:
        return "\n".join(filter(None, (self._sentences(), self.step, self.head)))

    def _sentences(self) -> str:
        return "\n".join([self.summary, "", *map(str, self)]) if self else "no VQ layer here"

    __repr__ = __str__


def explain(
    model: nn.Module,
    *,
    tokens: int = 1,
    dtype: torch.dtype | None = None,
    cache: VQCache | None = None,
) -> Explanation:
    """Explain which kernel runs for every VQ layer of `model`, and why not another.

    Args:
        model: a model, a part of one or a layer.
        tokens: rows of the input; 1 is a decoding step.
        dtype: dtype of the input; None = the model's.
        cache: explain the ops of its layers, too: `kv_attention` over codes (size: tokens in the
            cache x head_dim) and `kv_append` of keys and of values (new tokens x head_dim); for a
            compiled cache also both of its static memory. An empty cache has the head sizes of the
            config. On a CPU it also says whether decoding steps are one call of the library, for
            which it runs the model on some random tokens.
    """
    dtype = dtype or getattr(model, "dtype", None) or torch.get_default_dtype()
    names: dict[Problem, list[str]] = {}
    for name, module in _layers(model):
        for part, problem in _problems(module, tokens, dtype):
            names.setdefault(problem, []).append(".".join(filter(None, (name, part))) or "layer")
    for layer in [] if cache is None else cache.coded_layers:
        for problem in _cache_problems(layer, model, tokens, dtype):
            names.setdefault(problem, []).append(f"cache.layers.{layer.index}")
    found = Explanation(
        Row(tuple(layers), problem, tuple(dispatch.explain(problem)))
        for problem, layers in names.items()
    )
    if tokens != 1 or not isinstance(model, PreTrainedModel):
        return found
    found.head = embeddings.advice(model) if found else ""
    if model.device.type == "cpu" and type(cache) is VQCache:
        reason = step.why_not(model, cache)
        one_call = f"one call of libhf_vq_cpu{step.when()}"
        how = one_call if reason is None else f"PyTorch, because {reason}"
        found.step = f"decoding step: {how}"
    return found


def _name(row: Row) -> str:
    spec = getattr(row.problem, "scheme", None)
    if spec is None:
        return "codes of another project"
    scheme = linear_scheme(spec)
    if isinstance(scheme, VQScheme) and scheme.activations_bits != 16:
        plain = scheme.with_activations(16)
        return f"{scheme_name(plain) or plain.spec()}, {scheme.activations_bits}-bit inputs"
    return scheme_name(scheme) or spec


def _faster(problem: Any) -> str | None:
    """The scheme of the most similar size whose layers would not be slow; None if none is known."""
    if not isinstance(problem, dispatch.LinearProblem):
        return None
    bits = linear_scheme(problem.scheme).bits()
    for name in sorted(_FAST, key=lambda name: abs(linear_scheme(name).bits() - bits)):
        same = problem._replace(scheme=linear_scheme(name).spec())
        if not dispatch.select(same).implementation.is_slow(same):
            return name
    return None


_warned: set[str] = set()


def warn_of_kernels(model: nn.Module) -> None:
    """Say once that layers of a model are slower, where they are, than dense ones would be, and
    that layers keep inputs of 16 bits which were to have 8."""
    if env.BACKEND.get():  # somebody chose the kernels
        return
    found = explain(model)
    said = [found.summary] if any(row.is_slow for row in found) else []
    if any(module.activations_bits == 8 for _, module in _layers(model)):
        said += filter(None, [_without_8_bits(explain(model, tokens=_MANY_TOKENS))])
    for message in said:
        if message not in _warned:
            _warned.add(message)
            logger.warning("hf_vq: %s", message)


def _without_8_bits(found: Explanation) -> str | None:
    """A sentence on the layers whose kernel does not round inputs to 8 bits, and why."""
    rows = [row for row in found if row.problem.op == "linear" and row.kernel != _INT8]
    if not rows:
        return None
    count, total = (sum(len(row.layers) for row in each) for each in (rows, found))
    reasons = {v.reason for row in rows for v in row.verdicts if v.entry.name == _INT8}
    return (
        f"activations_bits=8 changes nothing in {count} of {total} layers: "
        f"{'; '.join(sorted(reasons))}."
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, VQLinear | VQExperts]]:
    yield from vq_modules(model).items()


def _problems(
    module: VQLinear | VQExperts, tokens: int, dtype: torch.dtype
) -> Iterator[tuple[str, Problem]]:
    sizes = (
        [("", module.out_features, module.in_features)]
        if isinstance(module, VQLinear)
        else [(name, p.out_features, p.in_features) for name, p in module.projections.items()]
    )
    device = next(parameter.device.type for parameter in module.parameters())
    hook = getattr(module, "_hf_hook", None)
    if device == "meta" and hook is not None:  # offloaded: it is brought to this device to run
        device = torch.device(hook.execution_device).type
    kind = str(dtype).removeprefix("torch.")
    for part, n, k in sizes:
        yield part, dispatch.PROBLEMS[module.op](device, kind, module.spec, bucket(tokens), n, k)


def _cache_problems(
    layer: VQCacheLayer, model: nn.Module, tokens: int, dtype: torch.dtype
) -> Iterator[Problem]:
    """Problems of one cache layer when its sequence grows by `tokens`."""
    schemes = layer.scheme.key, layer.scheme.value
    specs = schemes[0].spec(), schemes[1].spec()
    device = next(model.parameters()).device
    if layer.is_initialized:
        dims = layer.k.dim, layer.v.dim
        layouts = layer.k.codes.layout, layer.v.codes.layout
    else:
        whole: Any = model
        config = whole.config.get_text_config()
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dims = dim, dim
        layouts = layouts_for(*schemes, *dims, torch.empty(0, dtype=dtype, device=device))
    num_cached, limit = layer.length + tokens, layer.get_max_length()
    num_cached = min(num_cached, limit - 1 + tokens) if layer.is_sliding else max(num_cached, limit)

    rotary = layer.is_initialized and layer.k.rotary_mean is not None

    def attention(memory: str) -> Problem:
        return attention_problem(
            device, dtype, *specs, *dims, tokens, num_cached, *layouts, memory=memory, rotary=rotary
        )  # fmt: skip

    yield attention(GROWING)
    sides = zip(specs, dims, layouts, (rotary, False), strict=True)
    for spec, dim, layout, with_mean in dict.fromkeys(sides):
        yield append_problem(device, dtype, spec, tokens, dim, layout, rotary=with_mean)
    if layer.is_compileable:
        yield attention(STATIC)
        yield static_append_problem(device, dtype, specs, tokens, dims, layouts, rotary)
