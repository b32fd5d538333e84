"""libhf_vq_cpu through ctypes: the mirror of `kernels/cpu/api.h`."""

from __future__ import annotations

import ctypes
import functools
import weakref
from pathlib import Path

import torch
from torch import Tensor

from ... import env, paths
from ...errors import VQBackendError

ABI_VERSION = 14  # HF_VQ_ABI_VERSION of the api.h that this module was written for

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.bool: 3}
"""torch dtype -> enum hf_vq_dtype."""

OK, NO_MEMORY, UNSUPPORTED, CALL_ENDED = range(4)
"""enum hf_vq_status."""


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason why there is none."""
    path = paths.cpu_library()
    if path is None:
        return None, "libhf_vq_cpu was not built: reinstall hf_vq with a C++ compiler"
    try:
        library = ctypes.CDLL(str(path))
        library.hf_vq_abi_version.argtypes = []
        library.hf_vq_abi_version.restype = ctypes.c_int
        found = library.hf_vq_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"{path} does not load: {error}"
    if found != ABI_VERSION:
        return None, f"{path} is ABI {found}, hf_vq needs {ABI_VERSION}: reinstall hf_vq"
    _declare(library)
    _share_threads(library)
    wanted = env.CPU_ISA.get()
    if library.hf_vq_use_isa(wanted.encode()) != OK:
        names = library.hf_vq_isas().decode()
        raise VQBackendError(
            f"HF_VQ_CPU_ISA={wanted}: this processor runs {names.replace(' ', ', ')}."
        )
    return library, ""


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name, result, arguments in (
        ("isas", ctypes.c_char_p, []),
        ("isa", ctypes.c_char_p, []),
        ("use_isa", number, [ctypes.c_char_p]),
        ("use_threads", None, [pointer, pointer]),
        ("allocate", pointer, [size]),
        ("free", None, [pointer, size]),
        ("linear_supports", number, [pointer]),
        ("linear", number, [pointer, pointer, number, size, pointer, number, pointer]),
        ("decode", number, [pointer, size, size, pointer, number]),
        ("rotate", number, [pointer, pointer, number, size, pointer, number]),
        ("rows_supported", number, [pointer]),
        ("make_cells", number, [pointer, pointer, number, pointer, pointer, pointer]),
        ("encode_weight", number, [pointer, pointer, number, number, pointer, pointer]),
        ("round_weight", number, [pointer, pointer, pointer, size, pointer]),
        ("vptq_supports", number, [pointer]),
        ("vptq_linear", number, [pointer, pointer, number, size, pointer, number, pointer]),
        ("w4a8_supports", number, [pointer]),
        ("w4a8_linear", number, [pointer, pointer, number, size, pointer, number, pointer]),
        ("rotary_table_size", size, [ctypes.c_int32]),
        ("rotary_table", None, [pointer, ctypes.c_int32, ctypes.c_int32, pointer]),
        ("codes_supported", number, [pointer, number]),
        ("append", number, [pointer, pointer, size, size, size]),
        ("attention", number, [pointer]),
        ("step_supports", number, [pointer, size]),
        ("step", number, [pointer, size]),
        ("coded_scores", number, [pointer, pointer]),
        ("use_torch", None, [pointer]),
        ("torch_linear", None, [pointer, ctypes.c_uint64, ctypes.c_uint64]),
        ("torch_append", None, [pointer, ctypes.c_uint64, ctypes.c_uint64]),
        ("torch_attention", None, [pointer, ctypes.c_uint64, ctypes.c_uint64]),
        ("use_cuda", None, [pointer]),
        ("torch_cuda_linear", None, [pointer, ctypes.c_uint64, ctypes.c_uint64]),
        ("read_memory", size, [pointer, size]),
        ("dense_scores", number, [pointer, number, pointer, size, size, pointer]),
        ("table_scores", number, [pointer, pointer, number, pointer, size, size, pointer]),
    ):
        function = getattr(library, f"hf_vq_{name}")
        function.restype, function.argtypes = result, arguments


@functools.cache
def torch_shim(part: str = "cpu") -> ctypes.CDLL | None:
    """The library that exports torch's C shim, or the part of it that is for CUDA."""
    for path in Path(torch.__file__).parent.glob(f"lib/*torch_{part}.*"):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


@functools.cache
def cuda_driver() -> ctypes.CDLL | None:
    """The driver of NVIDIA's GPUs."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _share_threads(library: ctypes.CDLL) -> None:
    """Let kernels run on torch's own threads; without its C shim they run on the caller's."""
    shim = torch_shim()
    names = ("torch_parallel_for", "torch_get_num_threads")
    if shim is not None and all(hasattr(shim, name) for name in names):
        library.hf_vq_use_threads(
            *(ctypes.cast(getattr(shim, name), ctypes.c_void_p) for name in names)
        )


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, opened once per process; None where it is missing, broken or of another ABI.

    Raises:
        VQBackendError: HF_VQ_CPU_ISA names what this processor cannot run.
    """
    return _open()[0]


def why_not() -> str:
    """Why `load()` gives None, and what to do; empty when it gives the library."""
    return _open()[1]


def available() -> str | None:
    """None where the library is, else the reason why not, for the dispatch table."""
    return why_not() or None


def abi_version() -> int | None:
    """The ABI version of the loaded library, or None without one."""
    library = load()
    return None if library is None else int(library.hf_vq_abi_version())


def isas() -> list[str]:
    """Instruction sets that have kernels and that this processor runs, best first."""
    library = load()
    return [] if library is None else library.hf_vq_isas().decode().split()


def isa() -> str | None:
    """The instruction set in use; None without the library."""
    library = load()
    return None if library is None else library.hf_vq_isa().decode()


def use_isa(name: str) -> None:
    """Use the kernels of one of `isas()` from now on; "" = the best.

    Raises:
        VQBackendError: there is no such, or no library.
    """
    library = load()
    if library is None or library.hf_vq_use_isa(name.encode()) != OK:
        raise VQBackendError(f"no CPU kernels for {name!r}: {why_not() or 'have ' + str(isas())}.")


def check(status: int, what: str) -> None:
    """Raise for a status that is not OK.

    Raises:
        MemoryError: the kernel found no memory.
        VQBackendError: it was asked for what it does not support.
    """
    if status == NO_MEMORY:
        raise MemoryError(f"{what}: no memory for its scratch space")
    if status != OK:
        raise VQBackendError(f"{what}: the CPU kernel refused a problem that it had accepted")


def allocate(shape: tuple[int, ...]) -> Tensor:
    """Zeros uint8 [shape] on huge pages; without the library, where PyTorch puts them."""
    library, size = load(), 1
    for length in shape:
        size *= length
    if library is None or size < 1 << 21:
        return torch.zeros(shape, dtype=torch.uint8)
    address = library.hf_vq_allocate(size)
    if not address:
        raise MemoryError(f"no memory for {size} bytes of codes")
    # The tensor keeps the array, and the array is all that knows the memory.
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, library.hf_vq_free, address, size)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
