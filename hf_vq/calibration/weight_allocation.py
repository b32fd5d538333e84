"""`VQConfig(target_bits=...)`: what each scheme would cost in each layer, and which one it gets.

A layer with codes instead of weights W returns y + E x instead of y = W x. To second order, that
changes the predictions of the model by

    KL = 1/2 mean over tokens of (g^T E x)^2  ~  1/2 sum over rows o of  G_o (E H E^T)_oo

with g the gradient of log p(word) with respect to y, for words drawn from the model's predictions
(so G, the mean of g^2, is the diagonal of Fisher's information of the outputs), H the mean of x x^T
of the inputs, and g and x taken to be independent (K-FAC, arXiv 1503.05671, section 3). Layers' KL
are taken to add up (HIGGS, arXiv 2411.17525, section 4).

    text -> blocks forward -> words drawn -> blocks backward, one at a time: H and G of its layers
         -> some rows of each layer coded with each scheme, errors fed back -> costs -> table
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import VQCalibrationError, VQConfigError
from ..fit import fit_weight, fixed_tensors
from ..fit.allocation import allocate
from ..fit.ldlq import Feedback
from ..formats.catalog import weight_scheme
from ..formats.stored_weight import rotation_of
from ..hf.calibration_options import choices
from ..hf.checkpoint.headers import shared_specs, storage
from ..hf.config import VQConfig
from ..hf.quantize_op import Progress
from .blocks import Blocks
from .hessians import Listener, Site
from .targets import Part
from .text import spread

TOKENS = 1 << 13
"""Of the text, to measure on."""

_ROWS = 64  # of a layer, that are coded with every scheme

Costs = dict[str, dict[str, float]]
"""Layer -> spec string of a scheme -> KL divergence in nats per token."""


def measure_costs(
    blocks: Blocks,
    sequences: Tensor,
    parts: Sequence[Part],
    config: VQConfig,
    device: torch.device | None,
) -> Costs:
    """What each scheme costs in each layer that has a choice.

    Args:
        blocks: with the hidden states of all `sequences` [sequences, tokens] before the first.
        device: where blocks are computed; None: where they are.

    Raises:
        VQCalibrationError: the model gives no logits, or gradients or inputs are not finite.
    """
    some = spread(len(sequences), min(len(sequences), max(1, TOKENS // sequences.shape[1])))
    progress = Progress("Measuring layers", len(parts))
    states = [[blocks.hidden[row] for row in some]]
    for index in range(len(blocks)):
        with blocks.on(index, device) as place:
            states.append([blocks.run(index, hidden, place) for hidden in states[-1]])
    generator = torch.Generator().manual_seed(config.seed)
    gradients = [
        _gradient(blocks, sequences[row][None], hidden, generator)
        for row, hidden in zip(some, states.pop(), strict=True)
    ]
    tokens = len(some) * sequences.shape[1]
    costs: Costs = {}
    try:
        for index in reversed(range(len(blocks))):
            inside = {part.name: part for part in blocks.parts(index, parts)}
            layers = {p.layer: blocks.model.get_submodule(p.layer) for p in inside.values()}
            with blocks.on(index, device) as place:
                listener = Listener(gradients=True)
                for row, hidden in enumerate(states.pop()):
                    with torch.enable_grad(), listener.listening(layers):
                        given = hidden.detach().requires_grad_()
                        returned = blocks.run(index, given, place)
                        (gradients[row],) = torch.autograd.grad(returned, given, gradients[row])
                for site in listener.sites:
                    for name in site.layers:
                        progress.start(name)
                        part = inside[name]
                        if len(choices(config, part.layer)) == 1:
                            progress.done()
                            continue
                        if name not in listener.weights:
                            raise VQCalibrationError(
                                f"{name} is computed without gradients, so what it costs cannot "
                                "be measured. Name its scheme in VQConfig(layers=...), or leave "
                                "target_bits out."
                            )
                        weights = listener.weights[name]
                        for spec, cost in _costs(part, layers[part.layer], site, weights, config):
                            whole = costs.setdefault(part.layer, {})
                            whole[spec] = whole.get(spec, 0.0) + cost / tokens
                        progress.done()
                    site.release()
    finally:
        progress.close()
    return costs


def _gradient(blocks: Blocks, ids: Tensor, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Of the sum of log p(word) over the tokens of one sequence, for words drawn from p, with
    respect to the last hidden states."""
    with torch.enable_grad():
        last = hidden.detach().requires_grad_()
        chances = blocks.logits(ids.to(last.device), last)[0].float().log_softmax(-1)
        if not bool(chances.isfinite().all()):
            raise VQCalibrationError(
                "the model's predictions on the calibration text hold NaN or infinity. Load it in "
                "bfloat16 or float32."
            )
        words = torch.multinomial(chances.detach().exp().cpu(), 1, generator=generator)
        total = chances.gather(1, words.to(chances.device)).sum()
        (found,) = torch.autograd.grad(total, last)
    return found


def _costs(
    part: Part, module: torch.nn.Module, site: Site, weights: Tensor, config: VQConfig
) -> Iterator[tuple[str, float]]:
    """What each scheme costs in one part, summed over the tokens, by spec string."""
    if not bool(weights.isfinite().all()):
        raise VQCalibrationError(
            f"the gradients of {part.name} hold NaN or infinity. Load the model in bfloat16 or "
            "float32."
        )
    root = weights.sqrt()
    matrices = part.matrices(module)
    moments = site.pooled
    # With rows times the root of what they weigh, the squared error of outputs is the cost.
    which = spread(part.count * part.shape[0], min(_ROWS, part.count * part.shape[0])).tolist()
    rows = [divmod(row, part.shape[0]) for row in which]
    sample = torch.stack([matrices[i][row].float() * root[i, row] for i, row in rows])
    sample = sample / sample.abs().max().clamp_min(1e-30)  # what fp16 scales can hold
    energy, feedbacks = 0.0, {}
    for scheme in map(weight_scheme, config.candidates or ()):
        kind = scheme.rotation, scheme.rotation_block
        if kind not in feedbacks:
            fixed = fixed_tensors(scheme, part.shape[1], config.seed, moments.device)
            feedbacks[kind] = Feedback(moments, scheme, rotation_of(fixed), where=part.name)
            weighed = (m.float() * root[i][:, None] for i, m in enumerate(matrices))
            energy = energy or sum(map(feedbacks[kind].energy, weighed))
        error = 0.0
        if bool(sample.any()):
            options: dict[str, Any] = {"search": config.search, "feedback": feedbacks[kind]}
            fitted = fit_weight(sample, scheme, seed=config.seed, where=part.name, **options)
            error = fitted.output_error
        yield scheme.spec(), 0.5 * energy * error


def allocation(model: Any, parts: Sequence[Part], costs: Costs, config: VQConfig) -> dict[str, str]:
    """Spec string of every layer's scheme: the least cost within `target_bits` for the weights of
    all quantized layers, those outside of the blocks and what layers share included.

    Raises:
        VQConfigError: no choice stores so few bits.
    """
    assert config.target_bits is not None
    layers: dict[str, list[Part]] = {}
    for part in parts:
        layers.setdefault(part.layer, []).append(part)
    used, weights = storage(model)
    shared = dict(shared_specs(model))
    options = {layer: choices(config, layer) for layer in layers}
    for layer, listed in layers.items():
        for scheme in options[layer]:
            for spec in listed[0].specs(scheme, config.seed).values():
                if spec.shared_name is not None and spec.shared_name not in shared:
                    shared[spec.shared_name] = spec
                    used += 8 * spec.dtype.itemsize * torch.Size(spec.shape).numel()
    weights += sum(part.weights for part in parts)
    bits = [
        [sum(part.bits(scheme) for part in listed) for scheme in options[layer]]
        for layer, listed in layers.items()
    ]
    prices = [
        [costs.get(layer, {}).get(scheme.spec(), 0.0) for scheme in options[layer]]
        for layer in layers
    ]
    chosen = allocate(bits, prices, int(config.target_bits * weights) - used)
    if chosen is None:
        least = (used + sum(map(min, bits))) / weights
        raise VQConfigError(
            f"target_bits={config.target_bits:g} cannot be reached: the smallest of the candidates "
            f"store {least:.3f} bits per weight. Ask for more, or give other candidates."
        )
    return {layer: options[layer][one].spec() for layer, one in zip(layers, chosen, strict=True)}
