"""`Packed`: a C struct that is filled as a whole, described once by the names of its members.

The names are those of the header, and tests compare them, so a list of values that is packed can be
read next to it. Packing all bytes at once is faster than setting the fields of a ctypes structure.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

POINTER, INT64, INT32, UINT32, FLOAT = "P", "q", "i", "I", "f"
_ALIGNED = "0q"  # a struct of pointers ends at a multiple of 8 bytes


class Packed:
    """A struct with members of 8 bytes, padded as a C compiler pads it.

    Args:
        members: (names, kind): names apart by spaces, of one kind: a letter of `struct`, or another
            `Packed` whose members come in order.

    Attributes:
        names: of all numbers in order, those of a member after its name and a dot.
        size: bytes.
    """

    def __init__(self, members: Sequence[tuple[str, str | Packed]]) -> None:
        self.members = [(name, kind) for names, kind in members for name in names.split()]
        self.names: list[str] = []
        self.format = ""
        for name, kind in self.members:
            inner = [""] if isinstance(kind, str) else [f".{each}" for each in kind.names]
            self.names += [name + each for each in inner]
            self.format += kind if isinstance(kind, str) else kind.format
        self.format += _ALIGNED
        packed = struct.Struct(f"@{self.format}")
        self.size, self.pack, self.pack_into = packed.size, packed.pack, packed.pack_into

    def offset(self, name: str) -> int:
        """Bytes before a member."""
        before = ""
        for each, kind in self.members:
            inner = kind if isinstance(kind, str) else kind.format
            if each == name:
                return struct.calcsize(f"@{before}0{inner[0]}")
            before += inner
        raise KeyError(name)

    def structure(self) -> type[ctypes.Structure]:
        """The struct as bytes, for `launch.LoadedKernel`."""
        fields: Any = [("packed", ctypes.c_char * self.size)]
        return type("Arguments", (ctypes.Structure,), {"_fields_": fields})
