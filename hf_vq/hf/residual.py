"""The two passes of a model's layers: where the second one is, and merging them into one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import VQConfigError
from ..fit import fit_weight
from ..formats.catalog import LinearScheme, weight_scheme
from ..formats.scheme import VQScheme
from ..nn.experts import VQExperts
from ..nn.linear import VQLinear
from ..nn.published import PublishedLinear
from ..nn.quantized_module import digest
from ..nn.replace import vq_modules
from ..nn.residual_offload import place
from .checkpoint import headers as stored_files
from .config import VQConfig, quantization_of
from .embeddings import put_module
from .module_patterns import check_entries
from .tensor_parallel import ranks

MOST_BITS = 8  # of one pass


def place_pass2(model: Any, pass2: str | dict[str, str] | None) -> None:
    """Place the second passes of a model's layers by a policy, now and after later moves.

    Args:
        pass2: as in `VQConfig`; None is `resident`.

    Raises:
        VQConfigError: an unknown policy, an entry without layers, or a model without second passes.
    """
    config = quantization_of(model)
    requested = VQConfig(config.vq_scheme, pass2=pass2, provenance={})
    if requested.leaves_out_second_passes():
        raise VQConfigError(
            'pass2="absent" is for loading: from_pretrained(..., quantization_config='
            'VQConfig(pass2="absent")).'
        )
    modules = _two_passes(model)
    if requested.pass2 not in (None, "resident") and ranks(model) > 1:
        raise VQConfigError(
            "second passes of a model that is split over devices stay with the first: leave pass2 "
            "out."
        )
    if isinstance(requested.pass2, dict):
        check_entries("pass2", requested.pass2, list(modules), model)
    if requested.pass2 not in (None, "resident") and not modules:
        raise VQConfigError(
            f"no layer of {type(model).__name__} has a second pass to place: {config.scheme_name} "
            "has one pass. Leave pass2 out."
        )
    place(list(modules.values()), [requested.pass2_of(name) for name in modules])
    config.pass2 = requested.pass2


def _two_passes(model: Any) -> dict[str, VQLinear | VQExperts]:
    return {name: m for name, m in _of_schemes(model).items() if m.scheme.two_passes}


def _of_schemes(model: Any) -> dict[str, VQLinear | VQExperts]:
    found = vq_modules(model).items()
    return {name: module for name, module in found if not isinstance(module, PublishedLinear)}


def leave_out_pass2(model: Any, layers: list[str]) -> None:
    """Record in the config that layers were loaded without their second pass: a later save writes
    a model of one pass.

    Raises:
        VQConfigError: there are none.
    """
    config = quantization_of(model)
    if not layers:
        raise VQConfigError(
            f"no layer of {type(model).__name__} that pass2 names has a second pass to leave out."
        )
    rest = config.pass2 if isinstance(config.pass2, dict) else {}
    config.pass2 = {e: policy for e, policy in rest.items() if policy != "absent"} or None
    describe(model, layers)


def merge_passes(model: Any, bits: int | None = None) -> None:
    """Merge the two passes of every layer into one, in place: encode their sum.

    One pass needs no second set of codes, and every kernel supports it. The error is about that of
    a direct quantization to so many bits; the choices of a calibration are lost.

    Args:
        bits: of the new codes; None is those of both passes together, 8 at most.

    Raises:
        VQConfigError: no layer has two passes, a layer is offloaded, or bits are not 1 to 8.
    """
    config = quantization_of(model)
    modules = _two_passes(model)
    if not modules:
        raise VQConfigError(f"no layer of {type(model).__name__} has two passes to merge.")
    if bits is not None and (isinstance(bits, bool) or bits not in range(1, MOST_BITS + 1)):
        raise VQConfigError(f"bits of merged passes must be 1 to {MOST_BITS}; got {bits!r}.")
    for name, module in modules.items():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            raise VQConfigError(
                f"cannot merge the passes of {name}: its codes are offloaded. Load the model "
                "without offloading first."
            )
    schemes = {name: _one_pass(module.scheme, bits) for name, module in modules.items()}
    for name, module in modules.items():
        put_module(model, module, _merged(module, schemes[name], config.seed, name))
    new = {name: module for name, module in vq_modules(model).items() if name in modules}
    shared = stored_files.packaged(new.values(), config.seed)
    for module in new.values():
        module.set_shared(shared)
    config.pass2 = None
    describe(model, list(modules))


def _one_pass(scheme: LinearScheme, bits: int | None) -> VQScheme:
    assert isinstance(scheme, VQScheme)  # it has two
    both = bits or min(scheme.entry_bits + scheme.second_bits, MOST_BITS)
    return weight_scheme(replace(scheme.first_pass(), entry_bits=both))


def _merged(
    module: VQLinear | VQExperts, scheme: VQScheme, seed: int, where: str
) -> VQLinear | VQExperts:
    """Make a module of one pass that encodes the sum of both passes, behind the same diagonal."""

    def fitted(matrix: Tensor, before: dict[str, Tensor]) -> dict[str, Tensor]:
        found = before.get("diagonal")
        scale = None if found is None else 1 / found.abs().float()
        return fit_weight(matrix, scheme, seed=seed, where=where, input_scale=scale).tensors

    new: VQLinear | VQExperts
    if isinstance(module, VQLinear):
        sizes, bias = (module.in_features, module.out_features), module.bias
        new = VQLinear(
            *sizes, bias is not None, scheme, seed=seed, where=where, source=module.source
        )
        new.input_parts = module.input_parts
        new.assign(fitted(module.decoded(), module.tensors()), bias)
    else:
        stored = {*module.specs, *module.deltas.values()}
        kept = {n: p for n, p in module._parameters.items() if n not in stored}
        experts = {name: module.decoded(name) for name in module.weights()}
        new = type(module)(module.restored(torch.float32), scheme, seed=seed, where=where)
        new._parameters.update(kept)
        for name, dense in experts.items():
            found = [
                fitted(matrix, module.tensors(name, expert))
                for expert, matrix in enumerate(new.matrices(name, dense))
            ]
            new.assign(name, {key: torch.stack([one[key] for one in found]) for key in found[0]})
    home = next(new.parameters(recurse=False)).device
    for name in new.shared_names():
        new._buffers[name] = torch.empty(0, device=home)  # where `fill` puts it
    new.set_activations_bits(module.activations_bits)
    return new.train(module.training)


def describe(model: Any, changed: list[str]) -> None:
    """Record the present schemes of a model's layers in the config, and drop the measured errors of
    the changed ones."""
    config = quantization_of(model)
    schemes = {name: module.scheme for name, module in _of_schemes(model).items()}
    if config.vq_scheme not in schemes.values() and changed:
        config.scheme = schemes[changed[0]].to_dict()
    others = {name: s.spec() for name, s in schemes.items() if s != config.vq_scheme}
    if others or config.layers is not None:
        config.use(others)
    found = dict(config.provenance or {})
    errors = found.get("relative_error", {})
    gone = tuple(f"{name}." for name in changed)
    kept = {n: e for n, e in errors.items() if n not in changed and not n.startswith(gone)}
    bits, weights = stored_files.storage(model)
    recorded = found.get("codebooks", {})
    shared = stored_files.packaged(vq_modules(model).values(), config.seed)
    codebooks = {n: recorded.get(n) or digest(tensor) for n, tensor in sorted(shared.items())}
    found |= {"relative_error": kept, "bits_per_weight": round(bits / weights, 4)}
    found.pop("evaluation", None)
    config.provenance = {**found, "codebooks": codebooks}
