"""`VQConfig(target_bits=...)`: measure the cost of each scheme in each layer, then choose.

A layer with codes instead of weights W returns y + E x instead of y = W x. To second order, that
changes the predictions of the model by

    KL = 1/2 mean over tokens of (g^T E x)^2  ~  1/2 sum over rows o of  G_o (E H E^T)_oo

with g the gradient of log p(word) with respect to y, for words drawn from the model's predictions
(so G, the mean of g^2, is the diagonal of Fisher's information of the outputs), H the mean of x x^T
of the inputs, and g and x taken to be independent (K-FAC, arXiv 1503.05671, section 3). Layers' KL
are taken to add up (HIGGS, arXiv 2411.17525, section 4).

    text -> blocks forward -> words drawn -> blocks backward, block by block: H and G of its layers
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
from ..progress import Progress
from .blocks import Blocks
from .hessians import Listener, Site
from .targets import Target
from .text import spread

TOKENS = 1 << 13
"""Number of tokens of the text that costs are measured on."""

_ROWS = 64  # rows of a layer that are encoded with every scheme

Costs = dict[str, dict[str, float]]
"""Layer -> spec string of a scheme -> KL divergence in nats per token."""


def measure_costs(
    blocks: Blocks,
    sequences: Tensor,
    targets: Sequence[Target],
    config: VQConfig,
    device: torch.device | None,
) -> Costs:
    """Measure the cost of each scheme in each layer that has a choice.

    Args:
        blocks: the blocks; their `hidden` must be the inputs of the first block.
        sequences: token ids [sequences, tokens].
        targets: dense tensors of the layers.
        device: device that computes the blocks; None = the device of each block.

    Raises:
        VQCalibrationError: the model gives no logits, or gradients or inputs are not finite.
    """
    some = spread(len(sequences), min(len(sequences), max(1, TOKENS // sequences.shape[1])))
    progress = Progress("Measuring layers", len(targets))
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
            inside = {target.name: target for target in blocks.targets(index, targets)}
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
                        target = inside[name]
                        if len(choices(config, target.layer)) == 1:
                            progress.done()
                            continue
                        if name not in listener.weights:
                            raise VQCalibrationError(
                                f"{name} is computed without gradients, so the cost of its "
                                "schemes cannot be measured. Name its scheme in "
                                "VQConfig(layers=...), or leave target_bits out."
                            )
                        weights = listener.weights[name]
                        for spec, cost in _costs(
                            target, layers[target.layer], site, weights, config
                        ):
                            whole = costs.setdefault(target.layer, {})
                            whole[spec] = whole.get(spec, 0.0) + cost / tokens
                        progress.done()
                    site.release()
    finally:
        progress.close()
    return costs


def _gradient(blocks: Blocks, ids: Tensor, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient of the log-likelihood of one sequence with respect to the last hidden states.

    The words are drawn from the model's predictions p; the log-likelihood is the sum of log p(word)
    over the tokens.
    """
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
    target: Target, module: torch.nn.Module, site: Site, weights: Tensor, config: VQConfig
) -> Iterator[tuple[str, float]]:
    """Yield the cost of each scheme in one dense tensor, summed over the tokens, by spec string."""
    if not bool(weights.isfinite().all()):
        raise VQCalibrationError(
            f"the gradients of {target.name} hold NaN or infinity. Load the model in bfloat16 or "
            "float32."
        )
    root = weights.sqrt()
    matrices = target.matrices(module)
    hessian = site.pooled
    # With each row times the root of its weight G, the squared error of the outputs is the cost.
    which = spread(
        target.count * target.shape[0], min(_ROWS, target.count * target.shape[0])
    ).tolist()
    rows = [divmod(row, target.shape[0]) for row in which]
    sample = torch.stack([matrices[i][row].float() * root[i, row] for i, row in rows])
    sample = sample / sample.abs().max().clamp_min(1e-30)  # what fp16 scales can hold
    energy, by_rotation = 0.0, {}
    for scheme in map(weight_scheme, config.candidates or ()):
        kind = scheme.rotation, scheme.rotation_block
        if kind not in by_rotation:
            fixed = fixed_tensors(scheme, target.shape[1], config.seed, hessian.device)
            by_rotation[kind] = Feedback(hessian, scheme, rotation_of(fixed), where=target.name)
            weighed = (m.float() * root[i][:, None] for i, m in enumerate(matrices))
            energy = energy or sum(map(by_rotation[kind].energy, weighed))
        error = 0.0
        if bool(sample.any()):
            options: dict[str, Any] = {"search": config.search, "feedback": by_rotation[kind]}
            fitted = fit_weight(sample, scheme, seed=config.seed, where=target.name, **options)
            error = fitted.output_error
        yield scheme.spec(), 0.5 * energy * error


def allocation(
    model: Any, targets: Sequence[Target], costs: Costs, config: VQConfig
) -> dict[str, str]:
    """Choose every layer's scheme: the least total cost within `target_bits`.

    The bits count all quantized layers, layers outside of the blocks and shared tensors included.

    Returns:
        Spec string by layer.

    Raises:
        VQConfigError: no choice stores so few bits.
    """
    assert config.target_bits is not None
    layers: dict[str, list[Target]] = {}
    for target in targets:
        layers.setdefault(target.layer, []).append(target)
    used, weights = storage(model)
    shared = dict(shared_specs(model))
    options = {layer: choices(config, layer) for layer in layers}
    for layer, listed in layers.items():
        for scheme in options[layer]:
            for spec in listed[0].specs(scheme, config.seed).values():
                if spec.shared_name is not None and spec.shared_name not in shared:
                    shared[spec.shared_name] = spec
                    used += 8 * spec.dtype.itemsize * torch.Size(spec.shape).numel()
    weights += sum(target.weights for target in targets)
    bits = [
        [sum(target.bits(scheme) for target in listed) for scheme in options[layer]]
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
