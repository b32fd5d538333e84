"""The layers of a dense model that become codes, and those that stay dense without being named:
heads, and what codes cannot replace."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from typing import Any

from torch import nn
from transformers.utils import logging

from ..errors import VQConfigError, VQSchemeError
from ..formats.catalog import LinearScheme
from ..nn.experts import holds_experts
from ..nn.replace import candidates, check_fits
from .calibration_options import choices
from .checkpoint.new_parts import is_outside
from .config import VQConfig
from .module_patterns import check_entries, matches

logger = logging.get_logger("hf_vq")

_NOT_FORWARD = (
    "__init__", "_init", "init", "reset", "tie", "_tie", "set_", "resize", "_resize",
    "fuse_projections", "fix_init", "load", "_load",
)  # fmt: skip
_RARE = ("pretraining_tp",)  # conditions under which other code than usual runs
_NEVER = ("_is_quantized",)  # conditions that hold for a quantized model
_TRAINS_ALL = ("mamba_inner_fn", "split_conv1d_scan_combined")  # kernels for all weights


def choose_layers(
    model: nn.Module, config: VQConfig, defaults: Iterable[str], exact: Iterable[str] = ()
) -> dict[str, LinearScheme]:
    """Schemes of the layers to quantize, by name.

    Writes the layers that stay dense, and those with another scheme than the default, to `config`.

    Args:
        defaults: entries as in `modules_to_not_convert`, of layers that stay dense in any case.
        exact: names of more such layers.

    Raises:
        VQConfigError: an entry of `config` matches no layer, or experts in an unknown layout.
        VQSchemeError: no layer fits its scheme, or one that `layers` names does not.
    """
    found = list(candidates(model))
    names = [name for name, _ in found]
    entries = config.modules_to_not_convert or []
    modules = [name for name, _ in model.named_modules() if name]
    check_entries("modules_to_not_convert", entries, modules, model)
    skips, kept = [*entries, *defaults], {*exact, *gates(found)}
    left = [n for n in names if n in kept or any(matches(n, entry) for entry in skips)]
    if (head := requested_head(model, config, names)) in left:
        if head in kept:
            raise VQConfigError(
                f"layers: {head} stays dense: the model's code reads its weight, or other modules "
                "share it. Leave the entry out."
            )
        left.remove(head)
    config.modules_to_not_convert = sorted({*entries, *left})
    wanted = {name: config.scheme_of(name) for name in names if name not in left}
    if config.layers is not None:
        check_entries("layers", config.layers, list(wanted), model)
        requested = {name: scheme for name in wanted if (scheme := config.asked_of(name))}
        if config.target_bits is None:
            requested = {name: s for name, s in requested.items() if s != config.vq_scheme}
        config.use({name: scheme.spec() for name, scheme in requested.items()})
    schemes = {name: tuple(choices(config, name)) or (s,) for name, s in wanted.items()}
    named = [name for name in wanted if config.asked_of(name) is not None]
    misfits = leave_misfits(model, schemes, named)
    config.modules_to_not_convert = sorted({*config.modules_to_not_convert, *misfits})
    return {name: scheme for name, scheme in wanted.items() if name not in misfits}


def requested_head(model: Any, config: VQConfig, names: Iterable[str]) -> str:
    """Name of the output head, if an entry of `layers` matches it and no other of the layers
    `names`; else "".

    Raises:
        VQConfigError: that head is tied to the embedding.
    """
    if not config.layers:
        return ""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # it has none, or Transformers does not know
        return ""
    name = next((name for name in names if model.get_submodule(name) is head), "")
    others = [other for other in names if other != name]
    entries = [entry for entry in config.layers or () if name and matches(name, entry)]
    entries = [entry for entry in entries if not any(matches(other, entry) for other in others)]
    if not entries or any(matches(name, entry) for entry in config.modules_to_not_convert or ()):
        return ""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if f"{name}.weight" in {*tied, *tied.values()}:
        raise VQConfigError(
            f"layers: {name} is tied to the embedding. Where the model allows, both are stored as "
            'codes by VQConfig(embeddings="turboquant-6").'
        )
    return name


def gates(layers: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Names of the linear layers with one output, as gates of shared experts: codes would save
    nothing, and other engines keep them dense."""
    return [name for name, layer in layers if getattr(layer, "out_features", 0) == 1]


def task_heads(model: Any) -> list[str]:
    """Names of the linear layers behind the base model that compute one output for each label."""
    labels = getattr(model.config, "num_labels", None)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == labels
        and is_outside(model, name)
    ]


def tied_experts(model: Any) -> list[str]:
    """Names of the experts whose tensors other experts have, too: a decoder those of its encoder.
    Files hold them once. (Tied linear layers are among the default patterns.)"""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    owners = {name.rpartition(".")[0] for pair in tied.items() for name in pair}
    return [name for name, m in candidates(model) if name in owners and holds_experts(m)]


def dense_in_any_case(model: Any) -> list[str]:
    """Names of the layers of a model of Transformers that stay dense unless files have codes."""
    return [*task_heads(model), *tied_experts(model), *weights_read(model)]


def weights_read(model: nn.Module) -> list[str]:
    """Names of the linear layers whose `weight`, or its dtype, the code of the model reads: Mamba's
    `dt_proj`, T5's `wo`. It would find codes."""
    found: dict[str, None] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        start = f"{name}." if name else ""
        for owner, path in _reads(type(module)):  # type: ignore[arg-type]
            if owner == "self":
                found[start + path] = None
            else:
                inside = (n for n in modules if n.startswith(start) and n.endswith(f".{path}"))
                found |= dict.fromkeys(inside)
    return [name for name in found if isinstance(modules.get(name), nn.Linear)]


@cache
def _reads(kind: Hashable) -> tuple[tuple[str, str], ...]:
    """Whose layer's weight the methods of a class read: "self" or another name, and the path."""
    found = _Reads()
    for base in kind.__mro__:  # type: ignore[attr-defined]
        if base.__module__.startswith(("torch.", "builtins", "transformers.modeling_utils")):
            continue
        for name, method in vars(base).items():
            if not inspect.isfunction(method) or name.startswith(_NOT_FORWARD):
                continue
            try:
                source = textwrap.dedent(inspect.getsource(method))
                tree = ast.parse(source) if ".weight" in source else None
            except (OSError, TypeError, SyntaxError):  # made at run time
                continue
            if tree is not None:
                found.visit(tree)
    return tuple(found.paths)


class _Reads(ast.NodeVisitor):
    """Collects `x` of every `x.weight` that is read, but for its device."""

    def __init__(self) -> None:
        self.paths: dict[tuple[str, str], None] = {}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Take the path of a layer: `self.blocks[0].up` is ("self", "blocks.0.up")."""
        inner = node.value
        if node.attr == "device" and isinstance(inner, ast.Attribute) and inner.attr == "weight":
            return
        if node.attr == "weight" and isinstance(node.ctx, ast.Load):
            path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", ast.unparse(inner))
            owner, _, rest = path.partition(".")
            if rest and re.fullmatch(r"[\w.]+", path):
                self.paths[owner, rest] = None
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Leave out branches that do not run."""
        test = ast.unparse(node.test)
        self.visit(node.test)
        for condition, branch in ((_RARE, node.body), (_NEVER, node.orelse)):
            if not any(word in test for word in condition):
                for statement in branch:
                    self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        """Leave out kernels that take all weights of a layer: only training calls them."""
        if not ast.unparse(node.func).endswith(_TRAINS_ALL):
            self.generic_visit(node)


def leave_misfits(
    model: Any, wanted: Mapping[str, Iterable[LinearScheme]], named: Iterable[str]
) -> list[str]:
    """Names of the modules that one of their schemes cannot store; one warning lists them.

    Args:
        wanted: the schemes that may store a module, by its name.
        named: modules that the user gave a scheme by name, which must fit.

    Raises:
        VQSchemeError, VQConfigError: a module that is named does not fit, or none fits.
    """
    modules, named = dict(candidates(model)), set(named)
    why: dict[str, VQSchemeError | VQConfigError] = {}
    for name, schemes in wanted.items():
        try:
            for scheme in schemes:
                check_fits(modules[name], scheme, where=name)
        except (VQSchemeError, VQConfigError) as error:
            if name in named:
                raise
            why[name] = error
    if why and len(why) == len(wanted):
        raise next(iter(why.values()))
    if why:
        sizes = {n: sum(p.numel() for p in modules[n].parameters()) for n in wanted}
        share = sum(sizes[name] for name in why) / sum(sizes.values())
        logger.warning(
            "hf_vq: %d of %d layers (%.1f %% of their weights) stay dense, because the scheme does "
            "not fit them, or they have hooks or parts that codes would lose: %s. To be silent "
            "about them, add them to VQConfig(modules_to_not_convert=[...]).",
            len(why), len(wanted), 100 * share, _listed(why, modules),
        )  # fmt: skip
    return list(why)


def _listed(names: Iterable[str], modules: Mapping[str, nn.Module]) -> str:
    """Names with their sizes; layers that differ in their number only are one."""

    def described(name: str) -> str:
        shapes = " and ".join(str(list(weight.shape)) for weight in modules[name].parameters())
        return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) + f" {shapes}"

    counts = Counter(map(described, names))
    return ", ".join(f"{what} ({n})" if n > 1 else what for what, n in counts.items())
