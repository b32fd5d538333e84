"""Results of ops that every processor must compute to the last bit.

A sum of floats depends on its order, and so on vector units and threads. Here it does not, because
nothing is ever rounded: codebook entries are small integers (one of each codebook 127, so that
rounding it to 8 bits changes nothing), scales are powers of two, rotations are of 64 or 16 (whose
factor 1/8 or 1/4 is exact), and inputs are what rotates to integers with a 127 in every scale
group. Every partial sum then is a multiple of a power of two with less than 24 bits. In attention
all weights but one are less than exp(-200), which is 0 in float32. Fits start from weights that lie
on the grid of their scheme: the nearest entry is then far nearer than the next one, and a scale
lies in the middle of what rounds to it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hf_vq import QoQScheme, VQCache, VQScheme, ops
from hf_vq.cache import attend
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.formats import (
    WEIGHT_SCHEMES,
    kv_codebook_spec,
    kv_scheme,
    linear_scheme,
    pack_bits,
    tensor_specs,
)
from hf_vq.formats.stored_weight import rotation_of
from hf_vq.nn import VQLinear, W4A8Linear
from tests.golden.seeded import seeded_bytes, seeded_integers, seeded_scales, tensor_row
from tests.golden.stored_caches import CASES as KV_CASES
from tests.golden.stored_caches import DIM, HEADS, llama, saved_cache, seeded_states
from tests.golden.stored_caches import NAMES as KV_NAMES

OUT, IN = 48, 128
LINEARS = [
    "vq2x8r1-universal-g64-random_hadamard64",
    "vq2x6r1-universal-g64-random_hadamard64",
    "vq4x8r1-universal-g64-hadamard64",
    "vq8x16r1-e8p-g64-random_hadamard64",
    "vq8x16r2-e8p-g64-random_hadamard64",
    *[f"vq1x{bits}r1-universal-g64-random_hadamard64" for bits in (1, 2, 3, 4, 5, 6, 7, 8)],
    "vq1x4r2-universal-g64-random_hadamard64-nested",
    "vq1x2+4r2-universal-g64-random_hadamard64-nested",
    "vq1x4r2-universal-g64-random_hadamard64-rerotated",
    "vq1x3+2r2-universal-g64-random_hadamard64-shared",
    "vq2x8r1-universal-g64-scaled_hadamard64",
    "vq4x8r1-universal-g64-scaled_hadamard64",
    "vq8x16r1-e8p-g64-scaled_hadamard64",
    "vq1x4r1-universal-g64-scaled_hadamard64",
    "vq1x4r2-universal-g64-scaled_hadamard64-nested",
    "vq1x4r2-universal-g64-scaled_hadamard64-rerotated",
    "vq1x3+2r2-universal-g64-scaled_hadamard64-shared",
    "vq8x12r2-tensor-g0-none",
    "vq8x8r2-tensor-g0-none",
    "vq8x12r2-tensor-int7-g0-none",
    "vq8x8r2-tensor-int7-g0-none",
    "vq4x8r1-tile16x64-g0-none",
    "vq4x8r1-tile16x64-int7-g0-none",
    "qoq-w4a8",
    "qoq-w4a8-g128",
]
FITS = [
    name
    for name, scheme in WEIGHT_SCHEMES.items()
    if scheme.codebook == "universal" and scheme.residuals == 1
    if scheme.vector_size > 1 or scheme.entries <= 64
]
"""Schemes whose fit finds the codes again that a matrix was made with: universal ones of one pass.
Where two passes or stages add up, the first one rounds what is no longer on its grid; and 128
points on a line lie so close that other scales do as well."""
DECODED_KV = [name for name in KV_NAMES if kv_scheme(name).key.mode != "product"]
"""KV schemes whose rows are decoded exactly: the sketch of mode `product` is no small integer."""
ATTENTION = ["learned-4", "learned-2", "cq-4", "cq-2", "cq-1", "qserve-kv4"]
"""KV schemes without universal codebooks, whose entries kernels round to 8 bits."""
ENCODED_KV = ["cq-4", "cq-2", "cq-1", "nomad-4", "nomad-2", "nomad-1", "qserve-kv4"]
"""KV schemes whose rows are not divided by their length, which is a rounded root."""


def stored(spec: str) -> dict[str, Tensor]:
    """Seeded tensors of a matrix, shared ones too, by key."""
    scheme = linear_scheme(spec)
    tensors = fixed_tensors(scheme, IN, 0)
    for key, found in tensor_specs(scheme, OUT, IN).items():
        name, shape = f"{spec} {key}", found.shape
        if key in ("step", "zero"):
            low, high = (1, 8) if key == "step" else (0, 7)
            if found.dtype == torch.float32:  # the zero of a whole row: its scale, multiplied
                tensors[key] = tensors["scale"].float() * seeded_integers(name, 0, 15, *shape)
            else:
                tensors[key] = seeded_integers(name, low, high, *shape).to(found.dtype)
        elif key.startswith("scale"):
            tensors[key] = seeded_scales(name, *shape)
        elif key.startswith("diagonal"):
            sign = 1 - 2 * seeded_integers(f"{name} signs", 0, 1, *shape)
            tensors[key] = sign * torch.exp2(seeded_integers(name, -2, 2, *shape).float()).half()
        elif key.startswith("codebook"):
            if "e8p" not in spec:  # its entries are halves and quarters as it is
                most = 1 if found.largest else 15
                entries = seeded_integers(name, -most, most, *shape)
                entries[..., 0, 0] = 1 if found.largest else 127
                entries *= found.largest or 1  # of integers only 0 and the ends stay as they are
                tensors[key] = entries.to(found.dtype)
        else:
            tensors[key] = seeded_bytes(name, *shape)
    return tensors


def layer_of(spec: str) -> VQLinear:
    """A layer of these tensors."""
    scheme = linear_scheme(spec)
    kind = W4A8Linear if isinstance(scheme, QoQScheme) else VQLinear
    layer = kind(IN, OUT, False, scheme)
    tensors = stored(spec)
    specs = tensor_specs(scheme, OUT, IN)
    own = {key: tensors[key] for key, found in specs.items() if found.shared_name is None}
    layer.assign(own, None)
    layer.set_shared({s.shared_name: tensors[key] for key, s in specs.items() if s.shared_name})
    return layer


def inputs_of(spec: str, tokens: int) -> Tensor:
    """float32 [tokens, IN] that the rotation of a scheme turns to integers of 8 bits."""
    rotated = seeded_integers(f"{spec} x", -15, 15, tokens, IN).float()
    rotated[:, ::32] = 127
    scheme = linear_scheme(spec)
    if isinstance(scheme, QoQScheme) or scheme.rotation == "none":
        return rotated
    rotation = rotation_of(stored(spec))
    if scheme.is_scaled:
        rotated = ops.rotate(rotated, rotation, scheme, inverse=True)
        return rotated / rotation.float().square()  # what `rotate` multiplies by is undone
    return ops.rotate(rotated, rotation, scheme, inverse=True)


def linear_results(spec: str) -> dict[str, str]:
    """The dense weight and products of 1, 5 and 150 tokens, which different kernels compute."""
    layer = layer_of(spec)
    found = {"decoded": tensor_row(layer.decoded() + 0.0)}  # -0 is 0
    if "rerotated" in spec:
        return found  # no input turns to integers under both rotations
    with torch.no_grad():
        for tokens in (1, 5, 150):
            found[f"{tokens} tokens"] = tensor_row(layer(inputs_of(spec, tokens)) + 0.0)
    return found


def decode_kv_results(name: str) -> dict[str, str]:
    """Rows of keys and of values, decoded with codebooks of small integers."""
    found = {}
    for side in ("key", "value"):
        scheme: VQScheme = getattr(kv_scheme(name), side)
        codes = seeded_bytes(
            f"{side} codes", HEADS, 8, DIM // scheme.vector_size * scheme.entry_bits // 8
        )
        scale = seeded_scales(f"{side} scale", HEADS, 8, scheme.row_numbers)
        shape = kv_codebook_spec(scheme, HEADS, DIM).shape
        book = seeded_integers(f"{side} codebook", -15, 15, *shape).half()
        rows = ops.decode_kv(codes, scale, book, scheme, DIM)
        found[side] = tensor_row(rows + 0.0)
    return found


def encode_kv_results(name: str) -> dict[str, str]:
    """Codes and scales of rows that are entries of the codebook, or 16 levels.

    Raises:
        AssertionError: they are not those that the rows were made with.
    """
    found = {}
    for side in ("key", "value"):
        scheme: VQScheme = getattr(kv_scheme(name), side)
        if scheme.codebook not in ("channel_group", "integers"):
            continue
        codes = seeded_bytes(f"{side} encode", HEADS, 8, DIM // scheme.vector_size)
        codes = codes.long() % scheme.entries
        if scheme.has_zero:  # the ends of the range, which decide about scale and zero
            codes[..., 0], codes[..., 1] = 0, scheme.entries - 1
        packed = pack_bits(codes, scheme.entry_bits)
        scale = seeded_scales(f"{side} scale", HEADS, 8, scheme.row_numbers)
        shape = kv_codebook_spec(scheme, HEADS, DIM).shape
        book = seeded_integers(f"{side} codebook", -15, 15, *shape)
        book[..., 0] = torch.arange(scheme.entries)  # no two entries are the same
        rows = ops.decode_kv(packed, scale, book.half(), scheme, DIM)
        again = ops.encode_kv(rows, book.half(), scheme)
        for what, tensor, made in (("codes", again[0], packed), ("scale", again[1], scale)):
            assert torch.equal(tensor, made), f"{name}: other {what} of {side} are found"
            found[f"{side} {what}"] = tensor_row(tensor)
    return found


def attention_results(name: str, work: Path) -> dict[str, str]:
    """One query over 16 tokens, of which 11 are seeded codes, that picks one token."""
    path = saved_cache(name, work, tokens=15, spare=1)
    cache, found = VQCache.load(path, llama(len(KV_CASES[name]))), {}
    for layer in range(len(cache.layers)):
        handles = cache.update(*seeded_states(f"{layer} next", 1), layer)
        for part in range(8):
            query = seeded_integers(f"query {part}", -127, 127, 1, 2 * HEADS, 1, DIM).float()
            query[..., 0] = 127
            check_one_weight(name, 1024 * query, handles[0].decode())
            out = attend(1024 * query, *handles, scaling=1.0)
            assert out is not None, f"{name}: attention does not read these codes"
            found[f"layer {layer}, query {part}"] = tensor_row(out + 0.0)
    return found


def check_one_weight(name: str, query: Tensor, keys: Tensor) -> None:
    """Fail where a query [1, 2 H, 1, D] gives weight to more than one of the keys [1, H, n, D]."""
    scores = query.double() @ keys.double().repeat_interleave(2, 1).mT
    first, second = scores.topk(2).values.unbind(-1)
    assert bool((first - second > 200).all()), f"{name}: two tokens have about the same score"


def on_grid(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Stored tensors of a matrix of about normal weights, and these weights."""
    scheme = linear_scheme(name)
    assert isinstance(scheme, VQScheme)
    tensors = fixed_tensors(scheme, IN, 0)
    shape = tensor_specs(scheme, OUT, IN)["codes"].shape
    if scheme.lattice:
        tensors["codes"] = seeded_bytes(f"{name} codes", *shape)
    else:
        # Sums of twelve bytes are about normal; the entry nearest to them, in float64.
        sums = seeded_bytes(
            f"{name} weights", 12, OUT, IN // scheme.vector_size, scheme.vector_size
        )
        vectors = (sums.double().sum(0) - 12 * 127.5) / 256
        entries = tensors["codebook"][0].double()
        distance = sum(
            (vectors[..., i, None] - entries[:, i]).square() for i in range(entries.shape[1])
        )
        tensors["codes"] = pack_bits(distance.argmin(-1), scheme.entry_bits)
    tensors["scale"] = seeded_scales(f"{name} scale", *tensor_specs(scheme, OUT, IN)["scale"].shape)
    return tensors, ops.decode_weight(tensors, scheme, IN)


def fit_results(name: str) -> dict[str, str]:
    """Codes, scales and signs that are fitted to a matrix on the grid of its scheme.

    Raises:
        AssertionError: they are not those that the matrix was made with.
    """
    tensors, weight = on_grid(name)
    fitted = fit_weight(weight, linear_scheme(name)).tensors
    for key, tensor in fitted.items():
        assert torch.equal(tensor, tensors[key]), f"{name}: the fit finds other {key}"
    return {key: tensor_row(tensor) for key, tensor in sorted(fitted.items())}


def facts(name: str, work: Path) -> dict[str, str]:
    """What is recorded of one of `ALL`.

    Args:
        work: an empty folder.
    """
    kind, _, scheme = name.partition(": ")
    if kind == "attention":
        return attention_results(scheme, work)
    find = {
        "linear": linear_results,
        "fit": fit_results,
        "decode_kv": decode_kv_results,
        "encode_kv": encode_kv_results,
    }
    return find[kind](scheme)


ALL = [
    *(f"linear: {spec}" for spec in LINEARS),
    *(f"fit: {name}" for name in FITS),
    *(f"decode_kv: {name}" for name in DECODED_KV),
    *(f"encode_kv: {name}" for name in ENCODED_KV),
    *(f"attention: {name}" for name in ATTENTION),
]
"""Names of all that data/results.json has."""
