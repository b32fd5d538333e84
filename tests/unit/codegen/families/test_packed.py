"""Structs that are packed as a whole are those of the headers, byte by byte."""

import ctypes
import re

import pytest

from hf_vq import paths
from hf_vq.backends.cpu import kv as cpu_attention
from hf_vq.backends.cpu import step as cpu_step
from hf_vq.backends.cuda.kv import attention as cuda_attention
from hf_vq.backends.cuda.kv import key_means as cuda_means
from hf_vq.backends.cuda.kv.rotary_mean import ROTARY_MEAN
from hf_vq.codegen.packed import FLOAT, INT32, INT64, POINTER, UINT32, Packed

KINDS = {
    "int64_t": INT64, "int32_t": INT32, "int": INT32, "uint32_t": UINT32, "float": FLOAT,
}  # fmt: skip
TYPES = {
    POINTER: ctypes.c_void_p, INT64: ctypes.c_int64, INT32: ctypes.c_int32,
    UINT32: ctypes.c_uint32, FLOAT: ctypes.c_float,
}  # fmt: skip
ATTENTION = ("cuda/kv/attention/attention_arguments.cuh", r"struct {} {{\n(.*?)}};")
ROTARY = ("cuda/primitives/rotary.cuh", ATTENTION[1])
API = ("cpu/api.h", r"typedef struct {0} {{\n(.*?)}} {0};")
STRUCTS = [
    (ATTENTION, "Floats", cuda_attention.FLOATS),
    (ATTENTION, "Coded", cuda_attention.CODED),
    (ATTENTION, "Arguments", cuda_attention.ARGUMENTS),
    (ROTARY, "RotaryMean", ROTARY_MEAN),
    (("cuda/kv/key_means.cu", ATTENTION[1]), "Arguments", cuda_means.MEANS_ARGUMENTS),
    (("cuda/kv/key_smoothing.cu", ATTENTION[1]), "Arguments", cuda_means.SMOOTHING_ARGUMENTS),
    (API, "hf_vq_floats", cpu_attention.FLOATS),
    (API, "hf_vq_codes", cpu_attention.CODES),
    (API, "hf_vq_attention_step", cpu_attention.STEP),
    (API, "hf_vq_operand", cpu_step.OPERAND),
    (API, "hf_vq_instruction", cpu_step.INSTRUCTION),
    (API, "hf_vq_dense", cpu_step.DENSE),
    (API, "hf_vq_token", cpu_step.LAYER),
]


def members(where, name):
    """(name, kind) of each number of a struct in a header; nested structs are opened."""
    file, pattern = where
    text = (paths.kernel_sources() / file).read_text(encoding="utf-8")
    body = re.search(pattern.format(name), text, re.DOTALL)[1]
    for line in re.sub("//.*", "", body).split(";"):
        found = re.fullmatch(r"\s*(?:const )?(\w+)( ?\* ?| )(.*)", line, re.DOTALL)
        if found is None:
            assert not line.strip(), line
            continue
        kind, star, names = found[1], found[2].strip(), found[3]
        for each in names.split(","):
            stem, _, count = each.strip().partition("[")
            several = [f"{stem}.{i}" for i in range(int(count.rstrip("]")))] if count else [stem]
            for one in several:
                if star:
                    yield one, POINTER
                elif kind in KINDS:
                    yield one, KINDS[kind]
                else:
                    yield from ((f"{one}.{inner}", of) for inner, of in members(where, kind))


def structure(where, name):
    """The same as ctypes lays it out, which pads as C does."""
    file, pattern = where
    text = (paths.kernel_sources() / file).read_text(encoding="utf-8")
    fields, nested = [], {}
    for full, kind in members(where, name):
        head, _, inner = full.partition(".")
        if inner and not inner.isdigit():
            nested.setdefault(head, None)
        fields.append((full, kind))
    if not nested:
        return type(name, (ctypes.Structure,), {"_fields_": [(n, TYPES[k]) for n, k in fields]})
    body = re.sub("//.*", "", re.search(pattern.format(name), text, re.DOTALL)[1])
    of = {
        one.strip(): match[1]
        for match in re.finditer(r"(\w+) ([\w, ]+);", body)
        for one in match[2].split(",")
    }
    whole, done = [], set()
    for full, kind in fields:
        head = full.partition(".")[0]
        if head not in nested:
            whole.append((full, TYPES[kind]))
        elif head not in done:
            done.add(head)
            whole.append((head, structure(where, of[head])))
    return type(name, (ctypes.Structure,), {"_fields_": whole})


def offsets(kind, prefix="", begin=0):
    """Where each number of a ctypes structure begins."""
    for name, of in kind._fields_:
        at = begin + getattr(kind, name).offset
        if issubclass(of, ctypes.Structure):
            yield from offsets(of, f"{prefix}{name}.", at)
        else:
            yield prefix + name, at


@pytest.mark.parametrize(("where", "name", "packed"), STRUCTS, ids=lambda x: str(x)[:40])
def test_names_and_kinds_are_those_of_the_header(where, name, packed):
    kinds = [kind for kind in packed.format.replace("0q", "")]
    assert list(zip(packed.names, kinds, strict=True)) == list(members(where, name))


@pytest.mark.parametrize(("where", "name", "packed"), STRUCTS, ids=lambda x: str(x)[:40])
def test_every_number_lies_where_a_compiler_puts_it(where, name, packed):
    """Each number is packed alone, as one, and found by its bytes."""
    mirror = structure(where, name)
    assert ctypes.sizeof(mirror) == packed.size
    kinds = packed.format.replace("0q", "")
    for index, (found, at) in enumerate(offsets(mirror)):
        assert found == packed.names[index]
        numbers = [0] * len(kinds)
        numbers[index] = 1
        image = packed.pack(*numbers)
        first = next(i for i, byte in enumerate(image) if byte)
        # 1.0f is 00 00 80 3f
        assert first == at + (2 if kinds[index] == FLOAT else 0), found


def test_members_are_named_once():
    inner = Packed([("a b", INT32)])
    outer = Packed([("x", POINTER), ("y z", inner), ("w", FLOAT)])
    assert outer.names == ["x", "y.a", "y.b", "z.a", "z.b", "w"]
    assert (inner.size, outer.size) == (8, 32)
    assert ctypes.sizeof(outer.structure()) == 32
