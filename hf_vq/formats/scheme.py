"""`VQScheme`: everything that decides which numbers are stored for a tensor.

    W[o, :] ~ R^-1( scale[o, g] * concat_j( sum_z codebook[z][ code[o, j, z] ] ) )      VQ<x, y, z>

<x, y, z> is the notation of VQ-LLM: vector size, log2 of a codebook's entries, residual stages.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

from ..errors import VQSchemeError, shown

CODEBOOKS = ("universal", "tensor", "tile", "channel_group", "integers")
ROTATIONS = ("none", "hadamard", "random_hadamard", "scaled_hadamard", "qr")
STAGES = ("independent", "rerotated", "shared", "nested")
CODEBOOK_BITS = (16, 7)
ACTIVATIONS_BITS = (16, 8)
MODES = ("unbiased", "norm_corrected", "mse", "product")
SMALLEST_GROUP = 16  # a smaller scale group would add more than one bit per weight
_LIMITS = {
    "vector_size": (1, 64),
    "entry_bits": (1, 16),
    "residuals": (1, 8),
    "scale_group": (0, 1 << 20),
    "rotation_block": (0, 1 << 20),
    "second_bits": (0, 16),
}
_SPEC = re.compile(
    r"vq(?P<x>\d+)x(?P<y>\d+)(\+(?P<second>\d+))?r(?P<z>\d+)-(?P<codebook>universal|e8p|tensor|integers|channel_group"
    r"|tile(?P<rows>\d+)x(?P<columns>\d+))(-int(?P<bits>7))?-g(?P<group>\d+)"
    r"-(?P<rotation>none|hadamard|random_hadamard|scaled_hadamard|qr)(?P<block>\d+)?"
    r"(-(?P<stages>rerotated|shared|nested))?"
    r"(-(?P<mode>norm_corrected|mse|product))?(-a(?P<activations_bits>8))?"
)


@dataclass(frozen=True)
class VQScheme:
    """Storage of one tensor as codes into codebooks.

    Args:
        vector_size: x, weights that share one code.
        entry_bits: y, log2 of the entries of one codebook; the bits of one code.
        residuals: z, stages whose entries are added (VQ-LLM, section II).
        codebook: scope of a codebook: `universal` (computed once for Gaussian data), `tensor`,
            `tile` (`tile` rows x columns share one) or `channel_group` (one per KV head and group
            of `vector_size` channels; its entries have the data's own size, so rows have no scale);
            or `integers`, of keys and values: the entries are 0 .. 2^y - 1, and a row has a scale s
            and a zero z, s (code - z) (QServe's KV4).
        lattice: `"e8p"` for the structured 2^16-entry codebook of QuIP#, else None.
        tile: rows and columns of a tile; only read when `codebook == "tile"`.
        scale_group: weights along in_features that share one fp16 scale; 0 = the whole row. A
            power of two, times `odd_factor`.
        rotation: `none`, `hadamard`, `random_hadamard` (with stored signs), `scaled_hadamard` (with
            a stored number in the place of each sign: weights of inputs that are large are stored
            more precisely) or `qr`.
        rotation_block: size of the rotation; 0 = the whole row.
        codebook_bits: of a number of the codebook: 16 for fp16, or 7 for integers, stored as int8.
            Their size is in the rows' scales. Half as many bytes are looked up on a GPU
            (kernels/cuda/linear/table.cuh).
        stages: `independent` residuals in one stream, or two passes, the second of which is stored
            apart: `rerotated` (TurboQuant: with a second rotation and second scales), `shared`
            (with second scales) or `nested` (it refines the cell of the first pass and uses its
            rotation and scales: codes of both are looked up together, in one table).
        second_bits: bits of a code of the second pass; 0 = `entry_bits`.
        mode: rule for the scale of a row x with entries q in a KV cache: `unbiased` |x|^2 / <x, q>,
            `norm_corrected` |x| / |q|, or `mse` |x| / sqrt(head_dim) (TurboQuant, algorithm 1).
            `product` is TurboQuant's algorithm 2: the last bit of a code is the sign of a
            projection of the residual of `mode="mse"` with one bit less; the norm of the residual
            is a second scale. Weights ignore `mode`: their scales are searched.
        activations_bits: bits of a number of the input of a product: 16, a float; or 8, an integer
            where a kernel computes with such (docs/cuda.md). Nothing that is stored depends on it.

    Raises:
        VQSchemeError: a field is of the wrong type, out of range, or contradicts another one.
    """

    vector_size: int
    entry_bits: int
    residuals: int = 1
    codebook: str = "universal"
    lattice: str | None = None
    tile: tuple[int, int] = (256, 256)
    scale_group: int = 128
    rotation: str = "random_hadamard"
    rotation_block: int = 128
    codebook_bits: int = 16
    stages: str = "independent"
    second_bits: int = 0
    mode: str = "unbiased"
    activations_bits: int = 16

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            _check_int(name, getattr(self, name), low, high)
        for name, allowed in (
            ("codebook", CODEBOOKS),
            ("rotation", ROTATIONS),
            ("stages", STAGES),
            ("mode", MODES),
            ("lattice", (None, "e8p")),
        ):
            value = getattr(self, name)
            if (value is not None and not isinstance(value, str)) or value not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise VQSchemeError(
                    f"VQScheme.{name} must be one of {choices}; got {shown(value)}."
                )
        bits = self.codebook_bits
        if isinstance(bits, bool) or not isinstance(bits, int) or bits not in CODEBOOK_BITS:
            raise VQSchemeError(f"VQScheme.codebook_bits must be 16 or 7; got {shown(bits)}.")
        bits = self.activations_bits
        if isinstance(bits, bool) or not isinstance(bits, int) or bits not in ACTIVATIONS_BITS:
            raise VQSchemeError(f"VQScheme.activations_bits must be 16 or 8; got {shown(bits)}.")
        if not isinstance(self.tile, tuple) or len(self.tile) != 2:
            raise VQSchemeError(f"VQScheme.tile must be (rows, columns); got {shown(self.tile)}.")
        for size in self.tile:
            _check_int("tile", size, 1, 1 << 20)
        # Fields that nothing reads take their defaults, so that equal schemes compare equal.
        if self.rotation == "none":
            object.__setattr__(self, "rotation_block", 128)
        if self.codebook != "tile":
            object.__setattr__(self, "tile", (256, 256))
        if self.two_passes and not self.second_bits:
            object.__setattr__(self, "second_bits", self.entry_bits)
        for problem, wrong in self._contradictions().items():
            if wrong:
                raise VQSchemeError(f"{self.notation()} cannot be stored: {problem}.")
        hash(self)  # composes the spec, which a compiler that looks on later could not trace

    def _contradictions(self) -> dict[str, bool]:
        tiled, second = self.codebook == "tile", self.two_passes
        odd, group, block = self.odd_factor, self.scale_group, self.rotation_block
        times = f" times {odd}" if odd > 1 else ""
        return {
            'lattice "e8p" is a universal codebook of VQ<8,16,z>': self.lattice is not None
            and (self.vector_size, self.entry_bits, self.codebook) != (8, 16, "universal"),
            "a tile needs columns divisible by vector_size": tiled
            and self.tile[1] % self.vector_size > 0,
            "integer entries are learned, for vectors of 4, 8, .. weights": self.largest_entry > 0
            and (self.codebook not in ("tensor", "tile") or self.vector_size % 4 > 0),
            "a codebook per tile has one stage": tiled and self.residuals > 1,
            "rows of integers have vector_size=1, residuals=1, scale_group=0 and up to 8 bits": (
                self.has_zero
                and (
                    (self.vector_size, self.residuals, self.scale_group) != (1, 1, 0)
                    or self.entry_bits > 8
                )
            ),
            "codebooks per channel group have one stage and no scale (scale_group=0)": (
                not self.has_scale and (self.residuals, self.scale_group) != (1, 0)
            ),
            f"{self.stages} stages need residuals=2 and a universal codebook": second
            and (self.residuals, self.codebook) != (2, "universal"),
            "nested stages need vector_size=1 and at most 4 bits": self.stages == "nested"
            and (self.vector_size > 1 or max(self.entry_bits, self.second_bits) > 4),
            "second_bits are those of a second pass": not second and self.second_bits > 0,
            "both passes of a lattice have 16 bits": self.lattice is not None
            and second
            and self.second_bits != 16,
            "rerotated stages need a random rotation": self.stages == "rerotated"
            and self.rotation not in ("random_hadamard", "scaled_hadamard", "qr"),
            f"mode {self.mode!r} is for rows with a universal codebook, one stage and one scale": (
                self.mode != "unbiased"
                and (self.codebook, self.residuals, self.scale_group) != ("universal", 1, 0)
            ),
            "mode 'product' needs vector_size=1 and 2 bits or more": self.mode == "product"
            and (self.vector_size > 1 or self.entry_bits < 2),
            f"scale_group must be 0 or a power of two{times}": group % odd > 0
            or _power_of_two(group // odd) < group // odd,
            "rotation_block must be 0 or a power of two": _power_of_two(block) < block,
            "scale_group and rotation_block must be multiples of vector_size": (
                group % self.vector_size > 0 or (odd == 1 and block % self.vector_size > 0)
            ),
        }

    def notation(self) -> str:
        """The paper's notation, e.g. `VQ<2,8,1>`; with two sizes of codes `VQ<1,4+2,2>`."""
        return f"VQ<{self.vector_size},{self._code_bits()},{self.residuals}>"

    def _code_bits(self) -> str:
        both = self.second_bits not in (0, self.entry_bits)
        return f"{self.entry_bits}+{self.second_bits}" if both else f"{self.entry_bits}"

    @property
    def odd_factor(self) -> int:
        """The largest odd factor of `vector_size`: a group of weights with one scale has this times
        a power of two. Unless it is 1, vectors cross the borders of rotated blocks."""
        return self.vector_size // _power_of_two(self.vector_size)

    @property
    def entries(self) -> int:
        """Entries of one codebook."""
        return 1 << self.entry_bits

    @property
    def largest_entry(self) -> int:
        """Largest integer of an entry (the least is its negative); 0 where entries are fp16."""
        return 0 if self.codebook_bits == 16 else (1 << self.codebook_bits - 1) - 1

    @property
    def has_scale(self) -> bool:
        """True if rows are stored with fp16 scales."""
        return self.codebook != "channel_group"

    @property
    def has_zero(self) -> bool:
        """True if rows are stored with a zero behind their scale."""
        return self.codebook == "integers"

    @property
    def row_numbers(self) -> int:
        """Number of fp16 values stored with the codes of a row of keys or values: 0, 1 (scale), or
        2 (scale and zero, or in mode `product` scale and norm)."""
        return int(self.has_scale) + int(self.has_zero or self.mode == "product")

    @property
    def two_passes(self) -> bool:
        """True if there is a second pass, stored in separate tensors."""
        return self.stages != "independent"

    @property
    def streams(self) -> int:
        """Code streams stored side by side in `codes` (a second pass is stored apart)."""
        return 1 if self.two_passes else self.residuals

    def first_pass(self) -> VQScheme:
        """The scheme of the first pass; a scheme with one pass returns itself."""
        return self._single_pass(self.entry_bits) if self.two_passes else self

    def second_pass(self) -> VQScheme:
        """The scheme of the second pass, read for itself (not of nested stages)."""
        return self._single_pass(self.second_bits)

    def merged(self) -> VQScheme:
        """Nested stages as one: both codes, (first << second_bits) | second, are one code."""
        return self._single_pass(self.entry_bits + self.second_bits)

    def _single_pass(self, entry_bits: int) -> VQScheme:
        return replace(
            self, entry_bits=entry_bits, residuals=1, stages="independent", second_bits=0
        )

    @property
    def is_scaled(self) -> bool:
        """True if a number for each input is stored in the place of a sign."""
        return self.rotation == "scaled_hadamard"

    def scaled(self) -> VQScheme:
        """The same with a number for each input in the place of a random sign; itself where there
        are no random signs."""
        return self._rotated_by("scaled_hadamard", instead_of="random_hadamard")

    def unscaled(self) -> VQScheme:
        """The inverse of `scaled`."""
        return self._rotated_by("random_hadamard", instead_of="scaled_hadamard")

    def with_activations(self, bits: int) -> VQScheme:
        """The same for inputs of so many bits."""
        return self if bits == self.activations_bits else replace(self, activations_bits=bits)

    def _rotated_by(self, rotation: str, instead_of: str) -> VQScheme:
        return replace(self, rotation=rotation) if self.rotation == instead_of else self

    def spec(self) -> str:
        """One line that says the whole scheme; `VQScheme.parse` is its exact inverse."""
        return self.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property  # read by every layer at every call, as is the hash
    def key(self) -> str:
        """`spec()` as an attribute."""
        scope = self.lattice or self.codebook
        if self.codebook == "tile":
            scope = f"tile{self.tile[0]}x{self.tile[1]}"
        integers = f"-int{self.codebook_bits}" if self.largest_entry else ""
        block = "" if self.rotation == "none" else str(self.rotation_block)
        tail = f"-{self.stages}" if self.two_passes else ""
        tail += f"-{self.mode}" if self.mode != "unbiased" else ""
        tail += f"-a{self.activations_bits}" if self.activations_bits < 16 else ""
        return (
            f"vq{self.vector_size}x{self._code_bits()}r{self.residuals}-{scope}{integers}"
            f"-g{self.scale_group}-{self.rotation}{block}{tail}"
        )

    @classmethod
    def parse(cls, spec: str) -> VQScheme:
        """The scheme that `spec()` wrote.

        Raises:
            VQSchemeError: `spec` is not the spec string of a scheme.
        """
        return _parse(spec)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types, but for those that all stored weights have."""
        found = {**asdict(self), "tile": list(self.tile)}
        if self.mode == "unbiased":
            del found["mode"]
        if self.activations_bits == 16:
            del found["activations_bits"]
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> VQScheme:
        """The scheme of `to_dict()`.

        Raises:
            VQSchemeError: a field is unknown, missing or of the wrong type.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(map(str, set(data) - known)):
            raise VQSchemeError(
                f"unknown scheme field {', '.join(map(repr, unknown))}; known: {sorted(known)}."
            )
        if missing := {"vector_size", "entry_bits"} - set(data):
            raise VQSchemeError(f"a scheme needs {sorted(missing)}; got {shown(data)}.")
        tile = data.get("tile", (256, 256))
        return cls(**{**data, "tile": tuple(tile) if isinstance(tile, list) else tile})

    def group(self, in_features: int, where: str = "the tensor") -> int:
        """Effective scale group for rows of `in_features` weights: the largest power of two (times
        `odd_factor`) that is at most `scale_group` and divides the row, e.g. 32 for 288 = 9 x 32.

        Raises:
            VQSchemeError: no such group of at least 16 (or of a vector) exists.
        """
        return self._divisor(self.scale_group, in_features, where, "scale group")

    def block(self, in_features: int, where: str = "the tensor") -> int:
        """Effective rotation block for rows of `in_features` weights (see `group`); 1 = none."""
        if self.rotation == "none":
            return 1
        return self._divisor(self.rotation_block, in_features, where, "rotation block")

    def _divisor(self, size: int, in_features: int, where: str, what: str) -> int:
        if in_features <= 0 or in_features % self.vector_size:
            raise VQSchemeError(
                f"{self.notation()} needs in_features divisible by {self.vector_size}; {where} has "
                f"{in_features}. Add it to VQConfig(modules_to_not_convert=[...])."
            )
        power = _power_of_two(in_features)
        if what == "scale group":
            power *= self.odd_factor
        if size == 0:
            # The whole row; a rotation of the whole row is made of blocks of its power of two.
            if what == "rotation block" and power < min(4, in_features):
                raise self._too_small(where, in_features, power, what)
            return in_features if what == "scale group" else power
        found = min(size, power)
        if found < min(size, SMALLEST_GROUP):
            raise self._too_small(where, in_features, power, what)
        return found

    @staticmethod
    def _too_small(where: str, in_features: int, power: int, what: str) -> VQSchemeError:
        return VQSchemeError(
            f"{where} has in_features={in_features}: the largest {what} that divides them, "
            f"{power}, is too small. "
            "Add it to VQConfig(modules_to_not_convert=[...])."
        )

    def bits(self, in_features: int | None = None, out_features: int | None = None) -> float:
        """Nominal bits per weight: codes and fp16 scales; with both dimensions of a matrix given,
        also its learned codebooks and diagonal (universal codebooks are stored once per checkpoint,
        those of a KV cache once per model)."""
        group = self.scale_group if in_features is None else self.group(in_features)
        group = group if self.has_scale else 0
        scales = 2 if self.stages in ("rerotated", "shared") else max(self.row_numbers, 1)
        codes = self.streams * self.entry_bits + self.second_bits
        bits = codes / self.vector_size
        bits += 16 * scales / group if group else 0.0
        if in_features and out_features and self.codebook in ("tensor", "tile"):
            books = self.residuals
            if self.codebook == "tile":
                books = math.ceil(out_features / self.tile[0]) * math.ceil(
                    in_features / self.tile[1]
                )
            stored = 8 if self.largest_entry else 16
            bits += stored * books * self.entries * self.vector_size / (in_features * out_features)
        if out_features and self.is_scaled:
            bits += 16 * (2 if self.stages == "rerotated" else 1) / out_features
        return bits


def _power_of_two(number: int) -> int:
    """The largest power of two that divides a number; 0 for 0."""
    return number & -number


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise VQSchemeError(
            f"VQScheme.{name} must be an integer in [{low}, {high}]; got {shown(value)}."
        )


@cache
def _parse(spec: str) -> VQScheme:
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) and len(spec) < 200 else None
    if match is None:
        raise VQSchemeError(
            f"{shown(spec)} is not a scheme; write e.g. "
            "'vq2x8r1-universal-g128-random_hadamard128'."
        )
    part = match.groupdict()
    scope = part["codebook"]
    scheme = VQScheme(
        vector_size=int(part["x"]),
        entry_bits=int(part["y"]),
        residuals=int(part["z"]),
        codebook="universal" if scope == "e8p" else "tile" if part["rows"] else scope,
        lattice="e8p" if scope == "e8p" else None,
        tile=(int(part["rows"]), int(part["columns"])) if part["rows"] else (256, 256),
        scale_group=int(part["group"]),
        rotation=part["rotation"],
        rotation_block=128 if part["rotation"] == "none" else int(part["block"] or 128),
        codebook_bits=int(part["bits"] or 16),
        stages=part["stages"] or "independent",
        second_bits=int(part["second"] or 0),
        mode=part["mode"] or "unbiased",
        activations_bits=int(part["activations_bits"] or 16),
    )
    return scheme
