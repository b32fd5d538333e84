"""libhf_vq_cpu through ctypes: the mirror of `kernels/cpu/api.h`."""

import ctypes
import functools

from hf_vq import paths

ABI_VERSION = 1  # HF_VQ_ABI_VERSION of the api.h that this module was written for


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
    return library, ""


def load() -> ctypes.CDLL | None:
    """The library, opened once per process; None where it is missing, broken or of another ABI."""
    return _open()[0]


def why_not() -> str:
    """Why `load()` gives None, and what to do; empty when it gives the library."""
    return _open()[1]


def abi_version() -> int | None:
    """The ABI version of the loaded library, or None without one."""
    library = load()
    return None if library is None else int(library.hf_vq_abi_version())
