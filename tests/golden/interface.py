"""The names that users and other programs write: schemes, Python, ops, shell, environment."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import pkgutil
from enum import Enum
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import hf_vq
from hf_vq import KVScheme, QoQScheme, VQScheme, cache, cli, dispatch, env, formats, ops
from hf_vq.formats import KV_SCHEMES, QOQ_SCHEMES, WEIGHT_SCHEMES, kv_scheme, linear_scheme
from tests.golden.stored_caches import TURBOQUANT

SPECS = [
    "vq2x8r1-universal-g128-hadamard",
    "vq2x8r1-universal-g0-hadamard0",
    "vq2x8r1-universal-g128-qr128",
    "vq8x16r2-e8p-g128-random_hadamard64",
    "vq4x8r1-tile128x64-int7-g32-none",
    "vq8x12r4-tensor-g16-random_hadamard128",
    "vq1x4+2r2-universal-g128-random_hadamard128-nested",
    "vq1x4+4r2-universal-g128-random_hadamard128-rerotated",
    "vq2x6r2-universal-g64-qr64-shared",
    "vq1x4r1-universal-g0-hadamard0-product",
    "vq1x4r1-integers-g0-none",
    "vq8x8r1-channel_group-g0-none",
    "qoq-w4a8",
    "qoq-w4a8-g32",
]
"""Spec strings beside those of the catalogue. One that is read and written differently is an alias
that old files may hold."""


def schemes() -> dict[str, Any]:
    """What each name of the catalogue means, and how each spec string is read and written."""
    kv = [*KV_SCHEMES, *TURBOQUANT]
    return {
        "weights": {name: _about(linear_scheme(name)) for name in (*WEIGHT_SCHEMES, *QOQ_SCHEMES)},
        "specs": {spec: _about(_parsed(spec)) for spec in SPECS},
        "kv": {name: _about_kv(kv_scheme(name)) for name in kv},
        "bits": {str(bits): hf_vq.VQConfig(bits=bits).scheme_name for bits in (2, 3, 4)},
        "default": hf_vq.VQConfig().scheme_name,
    }


def _parsed(spec: str) -> VQScheme | QoQScheme:
    return QoQScheme.parse(spec) if spec.startswith("qoq") else VQScheme.parse(spec)


def _about(scheme: VQScheme | QoQScheme) -> dict[str, Any]:
    """Its spec, notation and bits, and the fields that config.json holds.

    Raises:
        AssertionError: one of them does not lead back to the scheme.
    """
    spec, fields = scheme.spec(), scheme.to_dict()
    assert _parsed(spec) == scheme, f"{spec} is read as {_parsed(spec).spec()}"
    assert type(scheme).from_dict(fields) == scheme, f"{spec} is not what its fields say: {fields}"
    usual = VQScheme(1, 1).to_dict()
    said = {key: value for key, value in fields.items() if usual.get(key, ...) != value}
    return {"spec": spec, "notation": scheme.notation(), "bits": scheme.bits(), **said}


def _about_kv(scheme: KVScheme) -> dict[str, Any]:
    return {
        "key": scheme.key.spec(),
        "value": scheme.value.spec(),
        "centre_keys": scheme.centre_keys,
    }


def python() -> dict[str, Any]:
    """Public names, the arguments of functions, and the methods of classes."""
    modules = {
        "hf_vq": hf_vq,
        "hf_vq.formats": formats,
        "hf_vq.cache": cache,
    }
    found: dict[str, Any] = {name: sorted(module.__all__) for name, module in modules.items()}
    for name in hf_vq.__all__:
        value = getattr(hf_vq, name)
        if inspect.isclass(value):
            found[f"hf_vq.{name}"] = _class(value)
        elif callable(value):
            found[f"hf_vq.{name}"] = _arguments(value)
    return found


def _class(cls: type) -> dict[str, Any]:
    """Its bases, its arguments and its own public methods and properties."""
    found: dict[str, Any] = {"bases": [base.__name__ for base in cls.__bases__]}
    if issubclass(cls, Exception):
        return found
    found["arguments"] = _arguments(cls)
    for name, member in sorted(vars(cls).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, (property, classmethod, staticmethod)) or callable(member):
            called = getattr(cls, name)
            found[name] = _arguments(called) if callable(called) else "property"
    return found


def _arguments(called: Any) -> list[str]:
    """Arguments with their defaults, without annotations: `*` before those given by name."""
    found, by_name = [], False
    for parameter in inspect.signature(called).parameters.values():
        kind, text = parameter.kind, parameter.name
        if kind is parameter.KEYWORD_ONLY and not by_name:
            found.append("*")
        by_name = by_name or kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        default = "" if parameter.default is parameter.empty else f"={_shown(parameter.default)}"
        found.append(f"{stars}{text}{default}")
    return found


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Enum) else repr(value)


def torch_ops() -> dict[str, str]:
    """Schemas of `torch.ops.hf_vq`, by name. Backends register ops of their own when they are first
    needed (`hf_vq::cpu_linear`): nobody else calls those."""
    for module in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
        importlib.import_module(module.name)  # some are imported when they are first needed
    found = [str(schema) for schema in torch._C._jit_get_all_schemas()]
    ours = sorted(schema for schema in found if schema.startswith("hf_vq::"))
    named = {schema.split("(")[0]: schema[schema.index("(") :] for schema in ours}
    own = ("hf_vq::cpu_", "hf_vq::cuda_")
    return {name: schema for name, schema in named.items() if not name.startswith(own)}


def command_line() -> dict[str, Any]:
    """Verbs of hf-vq and their options: how they are written, and what they take."""
    return _options(cli.build_parser())


def _options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {verb: _options(inner) for verb, inner in action.choices.items()}
        elif action.dest != "help":
            name = " ".join(action.option_strings) or action.dest.upper()
            choices = list(action.choices) if action.choices is not None else None
            about = {
                "kind": type(action).__name__.strip("_").removesuffix("Action").lower(),
                "default": action.default, "choices": choices, "values": action.nargs,
                "required": action.required and bool(action.option_strings),
            }  # fmt: skip
            usual = {"default": None, "choices": None, "values": None, "required": False}
            said = {key: value for key, value in about.items() if usual.get(key, ...) != value}
            found[name] = " ".join(f"{key}={value!r}" for key, value in said.items())
    return found


def environment() -> dict[str, Any]:
    """Environment variables and their defaults."""
    return {variable.name: variable.default for variable in env.VARIABLES}


def registrations() -> dict[str, Any]:
    """Where other programs find hf_vq: entry points, and the name in config.json."""
    points = importlib.metadata.distribution("hf-vq").entry_points
    return {
        "entry points": {f"{point.group} / {point.name}": point.value for point in points},
        "quantizer of vq": AUTO_QUANTIZER_MAPPING["vq"].__name__,
        "config of vq": AUTO_QUANTIZATION_CONFIG_MAPPING["vq"].__name__,
        "backend names": sorted({e.name.partition(".")[0] for e in dispatch.entries("linear")}),
    }


PARTS = {
    "schemes": schemes,
    "python": python,
    "torch.ops.hf_vq": torch_ops,
    "hf-vq": command_line,
    "environment": environment,
    "registrations": registrations,
}
"""What finds each part of the interface, by its name in data/interface.json."""
