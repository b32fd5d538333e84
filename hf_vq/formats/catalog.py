"""The named schemes: what a user writes in `VQConfig("vq-4")` and `VQCache(scheme="u4")`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from ..errors import VQSchemeError, shown
from .qoq import QoQScheme
from .scheme import VQScheme
from .universal import universal_codebook


def _gauss(vector_size: int, entry_bits: int, **fields: Any) -> VQScheme:
    return VQScheme(vector_size, entry_bits, **fields)


def _learned(
    vector_size: int, entry_bits: int, residuals: int, codebook: str, **fields: Any
) -> VQScheme:
    unrotated: dict[str, Any] = {"scale_group": 0, "rotation": "none"}
    return VQScheme(vector_size, entry_bits, residuals, codebook, **unrotated, **fields)


WEIGHT_SCHEMES: dict[str, VQScheme] = {
    "vq-4": _gauss(2, 8),
    "vq-3": _gauss(2, 6),
    "vq-2": _gauss(4, 8),
    **{f"turboquant-{bits}": _gauss(1, bits) for bits in range(1, 9)},
    **{
        f"turboquant-{first}+{second}": _gauss(
            1, first, residuals=2, stages="nested", second_bits=second
        )
        for first in range(1, 5)
        for second in range(1, 5)
    },
    "quip-sharp-4": _gauss(8, 16, residuals=2, lattice="e8p"),
    "quip-sharp-2": _gauss(8, 16, lattice="e8p"),
    "aqlm-3": _learned(8, 12, 2, "tensor"),
    "aqlm-2": _learned(8, 8, 2, "tensor"),
    "aqlm-3-int7": _learned(8, 12, 2, "tensor", codebook_bits=7),
    "aqlm-2-int7": _learned(8, 8, 2, "tensor", codebook_bits=7),
    "gptvq-2": _learned(4, 8, 1, "tile"),
    "gptvq-2-int7": _learned(4, 8, 1, "tile", codebook_bits=7),
}
"""Weight schemes with codebooks by name (the papers of each: docs/architecture.md)."""

SCALED = "-scaled"
"""At the end of the name of a rotated scheme: the same, activation-aware (`VQScheme.scaled`)."""

QOQ_SCHEMES: dict[str, QoQScheme] = {
    scheme.spec(): scheme for scheme in (QoQScheme(), QoQScheme(group=128))
}
"""Weight schemes without codebooks, whose layers round their inputs too (formats/qoq.py)."""

LinearScheme = VQScheme | QoQScheme
"""How the weight of a linear layer is stored."""


@dataclass(frozen=True)
class KVScheme:
    """Storage of keys and values: one `VQScheme` each; a row is the head_dim numbers of one token
    and head.

    Args:
        key: scheme of the keys (after RoPE).
        value: scheme of the values.
        centre_keys: subtract a frozen per-head mean from the keys before encoding.
    """

    key: VQScheme
    value: VQScheme
    centre_keys: bool = True

    def __post_init__(self) -> None:
        if self.key.activations_bits != 16 or self.value.activations_bits != 16:
            raise VQSchemeError("activations_bits are of weights: a cache has none.")


def _row(vector_size: int, entry_bits: int, codebook: str = "universal") -> VQScheme:
    return VQScheme(
        vector_size,
        entry_bits,
        codebook=codebook,
        scale_group=0,
        rotation="hadamard",
        rotation_block=0,
    )


def _per_channel(vector_size: int, entry_bits: int) -> VQScheme:
    return VQScheme(
        vector_size, entry_bits, codebook="channel_group", scale_group=0, rotation="none"
    )


def _same(scheme: VQScheme, centre_keys: bool = True) -> KVScheme:
    return KVScheme(scheme, scheme, centre_keys)


KV_SCHEMES: dict[str, KVScheme] = {
    "u4": _same(_row(2, 8)),
    "u3": _same(_row(2, 6)),
    "u2": _same(_row(4, 8)),
    "k4v2": KVScheme(_row(2, 8), _row(4, 8)),
    "learned-4": _same(_row(2, 8, "tensor")),
    "learned-2": _same(_row(4, 8, "tensor")),
    "cq-4": _same(_per_channel(2, 8), centre_keys=False),
    "cq-2": _same(_per_channel(4, 8), centre_keys=False),
    "cq-1": _same(_per_channel(8, 8), centre_keys=False),
    "nomad-4": KVScheme(_per_channel(1, 4), _row(1, 4), centre_keys=False),
    "nomad-2": KVScheme(_per_channel(2, 4), _row(1, 4), centre_keys=False),
    "nomad-1": KVScheme(_per_channel(4, 4), _row(1, 4), centre_keys=False),
    "nomad-u4": _same(_row(1, 4)),
    "qserve-kv4": _same(
        VQScheme(1, 4, codebook="integers", scale_group=0, rotation="none"), centre_keys=False
    ),
}
"""KV cache schemes by name.

`nomad-<bits per key>` are the keys of NoMAD-Attention (d_sub 1, 2, 4; the paper keeps values as
floats, here they are codes too); `cq-*` are those of VQ-LLM. Both need codebooks learned from
recorded keys (`hf_vq.calibrate_kv`), as `learned-*` do: these are `u4` and `u2`, with one learned
codebook for the keys and one for the values of each layer. `nomad-u4` has NoMAD's 16 entries
and no learned codebook. `qserve-kv4` is the KV4 of QServe: integers of 4 bits, and a scale and a
zero for each token and head.
"""


_SUFFIXES = {"unbiased": "", "norm_corrected": "-nc", "mse": "-mse", "product": "-prod"}

TURBOQUANT_KV_SCHEMES: dict[str, KVScheme] = {
    f"turboquant-{bits}{suffix}": _same(replace(_row(1, bits), mode=mode), centre_keys=False)
    for mode, suffix in _SUFFIXES.items()
    for bits in (4, 3, 2)
}
"""KV caches as TurboQuant's paper has them, to compare with: keys are not centred, and kernels do
not encode them. `-mse` and `-prod` are its two algorithms, `-nc` divides by the norm of what was
decoded, and without a suffix the scale is that of all other schemes. docs/kv_cache.md says what is
better."""


def weight_scheme(scheme: str | dict[str, Any] | VQScheme) -> VQScheme:
    """The weight scheme of a name, a spec string, a dict of fields or a `VQScheme`.

    Raises:
        VQSchemeError: no such scheme; the message lists the names.
    """
    if isinstance(scheme, str):
        named = WEIGHT_SCHEMES.get(scheme)
        if named is None and scheme.endswith(SCALED):
            named = _scaled(scheme.removesuffix(SCALED))
        if named is not None:
            return named
    if isinstance(scheme, dict):
        scheme = VQScheme.from_dict(scheme)
    elif isinstance(scheme, str) and scheme.startswith("vq") and "x" in scheme:
        scheme = VQScheme.parse(scheme)
    if not isinstance(scheme, VQScheme):
        raise _unknown("weight", scheme, [*WEIGHT_SCHEMES, *QOQ_SCHEMES])
    if scheme.has_zero:
        raise VQSchemeError(f"{scheme.spec()} is for keys and values; choose vq-4 for weights.")
    return _available(scheme)


def _scaled(name: str) -> VQScheme | None:
    """The scaled scheme of a plain one's name; None where that has no random signs."""
    plain = WEIGHT_SCHEMES.get(name)
    found = None if plain is None else plain.scaled()
    return found if found is not None and found.is_scaled else None


def linear_scheme(scheme: str | dict[str, Any] | LinearScheme) -> LinearScheme:
    """The scheme of a linear layer: what `weight_scheme` takes, or one of QoQ as its name, dict of
    fields or object.

    Raises:
        VQSchemeError: no such scheme; the message lists the names.
    """
    if isinstance(scheme, QoQScheme):
        return scheme
    if isinstance(scheme, dict) and "format" in scheme:
        return QoQScheme.from_dict(scheme)
    if isinstance(scheme, str) and scheme.startswith("qoq-w4a8"):
        return QoQScheme.parse(scheme)
    return weight_scheme(scheme)


def _available(scheme: VQScheme) -> VQScheme:
    """The scheme, if its universal codebook exists; VQSchemeError lists those that do."""
    if scheme.codebook == "universal" and not scheme.lattice:
        universal_codebook(scheme.vector_size, scheme.entry_bits)
        if scheme.two_passes:
            universal_codebook(scheme.vector_size, scheme.second_bits)
    return scheme


def kv_scheme(scheme: str | KVScheme) -> KVScheme:
    """The KV scheme of a name or a `KVScheme`.

    Raises:
        VQSchemeError: no such scheme; the message lists the names.
    """
    if isinstance(scheme, KVScheme):
        for part in (scheme.key, scheme.value):
            _available(part)
        return scheme
    known = KV_SCHEMES | TURBOQUANT_KV_SCHEMES
    if isinstance(scheme, str) and scheme in known:
        return known[scheme]
    raise _unknown("KV cache", scheme, list(known))


Allocation = KVScheme | tuple[KVScheme, ...]
"""The scheme of all layers of a cache, or one for each layer."""


def kv_allocation(scheme: str | KVScheme | Sequence[str | KVScheme]) -> Allocation:
    """The KV scheme of all layers, or, of a list, that of each.

    Raises:
        VQSchemeError: a scheme is unknown; the message lists the names.
    """
    if isinstance(scheme, Sequence) and not isinstance(scheme, str):
        return tuple(kv_scheme(each) for each in scheme)
    return kv_scheme(scheme)


def of_layer(allocation: Allocation, layer: int) -> KVScheme:
    """The scheme of one layer."""
    return allocation[layer] if isinstance(allocation, tuple) else allocation


def scheme_name(scheme: LinearScheme | Allocation) -> str | None:
    """The catalogue name of a scheme, None if it has none."""
    if isinstance(scheme, QoQScheme):
        return scheme.spec()
    if isinstance(scheme, VQScheme) and scheme.is_scaled:
        name = scheme_name(scheme.unscaled())
        return name and name + SCALED
    weights = isinstance(scheme, VQScheme)
    known: dict[str, Any] = WEIGHT_SCHEMES if weights else KV_SCHEMES | TURBOQUANT_KV_SCHEMES
    return next((name for name, candidate in known.items() if candidate == scheme), None)


_ELSEWHERE = {
    **dict.fromkeys(("4bit", "int4", "nf4", "fp4", "bnb4bit", "w4a16"), "vq-4"),
    **dict.fromkeys(("8bit", "int8", "fp8", "bnb8bit", "w8a16", "vq8"), "turboquant-8"),
}
"""What other libraries call their formats, and the scheme with as many bits."""


def _unknown(kind: str, scheme: object, names: list[str]) -> VQSchemeError:
    near = get_close_matches(scheme, names, 1) if isinstance(scheme, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if (
        kind == "weight"
        and isinstance(scheme, str)
        and (same := _ELSEWHERE.get(scheme.lower().replace("-", "")))
    ):
        hint = f" Did you mean {same!r}?"
    return VQSchemeError(f"unknown {kind} scheme {shown(scheme)}.{hint} Known: {', '.join(names)}.")
