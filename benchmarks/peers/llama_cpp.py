"""llama.cpp's product of Q4_K weights and one token, by the shared libraries of a build of it.

Weights have the layout of a loaded model: repacked, if llama.cpp has a kernel for that on this
processor. One thread computes.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_vq.errors import VQError

from ..timing import Candidate, cold_copies

_F32, _Q4_K = 0, 12  # ggml_type
_BLOCK, _BLOCK_BYTES = 256, 144  # weights of a block of Q4_K, and its bytes
_ROWS = 64  # that are random; the others repeat them
_CONTEXT_BYTES = 1 << 20  # for what describes tensors
_MOST_ERROR = 0.15  # of a product: 4 bits a weight, 8 bits a number of the token
_SILENCE = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda *_: None)


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Plan(ctypes.Structure):
    _fields_ = (
        ("work_size", c_size_t), ("work_data", c_void_p), ("threads", c_int),
        ("threadpool", c_void_p), ("abort", c_void_p), ("abort_data", c_void_p),
        ("use_ref", c_bool),
    )  # fmt: skip


# Of each library: name, after "ggml_" -> result, arguments.
_BASE = {
    "init": (c_void_p, _InitParams),
    "free": (None, c_void_p),
    "log_set": (None, c_void_p, c_void_p),
    "new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "build_forward_expand": (None, c_void_p, c_void_p),
    "get_data": (c_void_p, c_void_p),
    "quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "backend_cpu_buffer_type": (c_void_p,),
    "backend_buft_name": (c_char_p, c_void_p),
    "backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "backend_buffer_free": (None, c_void_p),
    "backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
    "backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
}
_CPU = {
    "backend_cpu_reg": (c_void_p,),
    "graph_plan": (_Plan, c_void_p, c_int, c_void_p),
    "graph_compute": (c_int, c_void_p, c_void_p),
}


def candidate(folder: Path, out_features: int, in_features: int) -> Candidate:
    """One token through a layer of Q4_K weights, which come from main memory.

    Args:
        folder: with libggml-base.so and libggml-cpu.so.

    Raises:
        VQError: they are not there, or compute something else.
    """
    if in_features % _BLOCK or out_features % _ROWS:
        raise VQError(
            f"Q4_K has no weight of {out_features} x {in_features}: rows must be a multiple of "
            f"{_ROWS} here, columns of {_BLOCK}. Leave --ggml out."
        )
    library = _Library(folder)
    rows, x = torch.randn(_ROWS, in_features), torch.randn(in_features)
    codes = library.quantized(rows) * (out_features // _ROWS)
    products = [_Product(library, codes, out_features, x) for _ in range(cold_copies(len(codes)))]
    expected = (rows @ x).repeat(out_features // _ROWS)
    error = (products[0]() - expected).norm() / expected.norm()
    if not error < _MOST_ERROR:
        raise VQError(
            f"the libraries in {folder} compute products with an error of {error:.2f}, as if their "
            "functions had changed. Take another version of llama.cpp, or leave --ggml out."
        )
    return Candidate(lambda i: products[i].compute(), len(products))


class _Library:
    """llama.cpp's tensor library.

    Attributes:
        ggml: its functions, by name.
        place: the kind of memory that weights lie in.
    """

    def __init__(self, folder: Path) -> None:
        self.ggml: Any = SimpleNamespace()
        for file, functions in (("libggml-base.so", _BASE), ("libggml-cpu.so", _CPU)):
            try:
                library = ctypes.CDLL(str(folder / file), ctypes.RTLD_GLOBAL)
                for name, (result, *arguments) in functions.items():
                    function = getattr(library, f"ggml_{name}")
                    function.restype, function.argtypes = result, arguments
                    setattr(self.ggml, name, function)
            except (OSError, AttributeError) as error:
                raise VQError(
                    f"{folder} holds no libraries of llama.cpp: {error}. Build it with "
                    "-DBUILD_SHARED_LIBS=ON, and name the folder that they are in."
                ) from None
        self.ggml.log_set(_SILENCE, None)
        self.place: int = self._repacked() or self.ggml.backend_cpu_buffer_type()

    def _repacked(self) -> int | None:
        """The kind of memory that repacks what is written to it, if there is one."""
        registry = self.ggml.backend_cpu_reg()
        device = self.ggml.backend_reg_dev_get(registry, 0)
        found = self.ggml.backend_reg_get_proc_address(
            registry, b"ggml_backend_dev_get_extra_bufts"
        )
        if not found:
            return None
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(found)(device)
        at = 0
        while kind := kinds[at]:
            if self.ggml.backend_buft_name(kind) == b"CPU_REPACK":
                return int(kind)
            at += 1
        return None

    def quantized(self, rows: Tensor) -> bytes:
        """Float32 rows [n, k] as Q4_K."""
        count, columns = rows.shape
        codes = (ctypes.c_char * (count * columns // _BLOCK * _BLOCK_BYTES))()
        self.ggml.quantize_chunk(_Q4_K, rows.data_ptr(), codes, 0, count, columns, None)
        return bytes(codes)


class _Product:
    """A graph of one product with separate weights; a call returns the result."""

    def __init__(self, library: _Library, codes: bytes, out_features: int, x: Tensor) -> None:
        ggml = self._ggml = library.ggml
        self._out_features = out_features
        self._of_weights = self._memory = self._of_graph = None  # until there are such
        self._of_weights = ggml.init(_InitParams(_CONTEXT_BYTES, None, True))
        weights = ggml.new_tensor_2d(self._of_weights, _Q4_K, len(x), out_features)
        self._memory = ggml.backend_alloc_ctx_tensors_from_buft(self._of_weights, library.place)
        ggml.backend_tensor_set(weights, codes, 0, len(codes))
        floats = x.nbytes + 4 * out_features
        self._of_graph = ggml.init(_InitParams(_CONTEXT_BYTES + floats, None, False))
        token = ggml.new_tensor_2d(self._of_graph, _F32, len(x), 1)
        ctypes.memmove(ggml.get_data(token), x.data_ptr(), x.nbytes)
        self._y = ggml.mul_mat(self._of_graph, weights, token)
        self._graph = ggml.new_graph_custom(self._of_graph, 8, False)
        ggml.build_forward_expand(self._graph, self._y)
        self._plan = ggml.graph_plan(self._graph, 1, None)
        self._work = (ctypes.c_char * max(self._plan.work_size, 1))()
        self._plan.work_data = ctypes.addressof(self._work)
        self._pointer = ctypes.byref(self._plan)

    def compute(self) -> None:
        """Once."""
        self._ggml.graph_compute(self._graph, self._pointer)

    def __call__(self) -> Tensor:
        self.compute()
        found = (ctypes.c_float * self._out_features).from_address(self._ggml.get_data(self._y))
        return torch.tensor(list(found))

    def __del__(self) -> None:
        self._ggml.backend_buffer_free(self._memory)
        for context in (self._of_weights, self._of_graph):
            self._ggml.free(context)
