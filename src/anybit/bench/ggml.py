"""ggml's matrix products on the CPU, through the libraries that llama-cpp-python brings: a peer, never a dependency."""

from __future__ import annotations

import ctypes
import importlib.util
import weakref
from collections.abc import Iterator
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {"q8_0": 8, "q6_K": 14, "q5_K": 13, "q4_0": 2, "q4_K": 12, "q3_K": 11, "q2_K": 10}  # enum ggml_type
BLOCK = {"q8_0": 32, "q4_0": 32}  # weights in a row come in multiples of; the others: 256
FLOAT32 = 0
ROWS = 64  # that are quantized; the matrix repeats them
PARAMETERS = 1024  # bytes, more than any struct of the library that is passed by pointer


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


@cache
def library() -> Any:
    """The functions used here; None where llama-cpp-python is not installed or has other libraries."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    try:
        folder = Path(spec.origin).parent / "lib"
        base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        return _Functions(base, cpu)
    except (OSError, AttributeError):
        return None


class _Functions:
    def __init__(self, base: Any, cpu: Any) -> None:
        p, n = c_void_p, c_int64
        for source, name, result, *arguments in (
            (base, "ggml_init", p, _InitParams),
            (base, "ggml_free", None, p),
            (base, "ggml_version", c_char_p),
            (base, "ggml_log_set", None, p, p),
            (base, "ggml_new_tensor_2d", p, p, c_int, n, n),
            (base, "ggml_mul_mat", p, p, p, p),
            (base, "ggml_new_graph", p, p),
            (base, "ggml_build_forward_expand", None, p, p),
            (base, "ggml_row_size", c_size_t, c_int, n),
            (base, "ggml_quantize_chunk", c_size_t, c_int, p, p, n, n, n, p),
            (base, "ggml_backend_alloc_ctx_tensors_from_buft", p, p, p),
            (base, "ggml_backend_get_default_buffer_type", p, p),
            (base, "ggml_backend_buft_name", c_char_p, p),
            (base, "ggml_backend_buffer_free", None, p),
            (base, "ggml_backend_tensor_set", None, p, p, c_size_t, c_size_t),
            (base, "ggml_backend_tensor_get", None, p, p, c_size_t, c_size_t),
            (base, "ggml_backend_graph_compute", c_int, p, p),
            (base, "ggml_backend_free", None, p),
            (base, "ggml_backend_reg_dev_get", p, p, c_size_t),
            (base, "ggml_backend_reg_get_proc_address", p, p, c_char_p),
            (base, "ggml_backend_dev_supports_op", c_bool, p, p),
            (base, "ggml_threadpool_params_init", None, p, c_int),
            (cpu, "ggml_backend_cpu_init", p),
            (cpu, "ggml_backend_cpu_reg", p),
            (cpu, "ggml_backend_cpu_set_n_threads", None, p, c_int),
            (cpu, "ggml_backend_cpu_set_threadpool", None, p, p),
            (cpu, "ggml_threadpool_new", p, p),
            (cpu, "ggml_threadpool_free", None, p),
            (cpu, "ggml_threadpool_pause", None, p),
            (cpu, "ggml_threadpool_resume", None, p),
        ):
            function = getattr(source, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.silent = ctypes.CFUNCTYPE(None, c_int, c_char_p, p)(lambda *_: None)
        self.log_set(self.silent, None)  # type: ignore[attr-defined]
        self.device = self.backend_reg_dev_get(self.backend_cpu_reg(), 0)  # type: ignore[attr-defined]

    def arranging(self, tokens: int) -> Iterator[Any]:
        """Buffer types whose matrices lie in the order of the fastest kernels, in the library's order of preference.

        But those for AMX with several tokens, which end the process where GCC 12 built them: it takes the tiles'
        configuration for unused.
        """
        get: Any = self.backend_reg_get_proc_address  # type: ignore[attr-defined]
        address = get(self.backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts")  # type: ignore[attr-defined]
        if not address:
            return
        found = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)(self.device)
        i = 0
        while found and found[i]:
            if tokens == 1 or self.backend_buft_name(found[i]) != b"AMX":  # type: ignore[attr-defined]
                yield found[i]
            i += 1


class Threads:
    """A pool of threads that sleeps until `wake`; given back with the last that holds it."""

    def __init__(self, count: int) -> None:
        lib = library()
        parameters = ctypes.create_string_buffer(PARAMETERS)
        lib.threadpool_params_init(parameters, count)
        self.count, self.pool = count, lib.threadpool_new(parameters)
        self._resume, self._pause = lib.threadpool_resume, lib.threadpool_pause
        weakref.finalize(self, lib.threadpool_free, self.pool)
        self.rest()

    def wake(self) -> None:
        self._resume(self.pool)

    def rest(self) -> None:
        """Let the threads sleep: awake ones spin."""
        self._pause(self.pool)


class Product:
    """`matrix [out, in] @ x [in]` for some tokens; its memory is given back with it.

    Args:
        kind: a key of `TYPES`; the matrix is arranged as the library prefers.
        x: float32 [tokens, in].
        threads: awake.
    """

    def __init__(self, kind: str, out: int, x: Tensor, threads: Threads) -> None:
        self.lib = lib = library()
        tokens, columns = x.shape
        self.shape, self.threads = (tokens, out), threads
        self.backend = lib.backend_cpu_init()
        lib.backend_cpu_set_n_threads(self.backend, threads.count)
        lib.backend_cpu_set_threadpool(self.backend, threads.pool)
        plain = lib.backend_get_default_buffer_type(self.backend)
        self.contexts: list[Any] = []
        self.buffers: list[Any] = []
        weakref.finalize(self, _give_back, lib, self.backend, self.buffers, self.contexts)
        inputs = self._context()
        activations = lib.new_tensor_2d(inputs, FLOAT32, columns, tokens)
        self._allocate(inputs, plain)
        for kind_of_buffer in (*lib.arranging(tokens), plain):
            weights = self._context()
            matrix = lib.new_tensor_2d(weights, TYPES[kind], columns, out)
            self._allocate(weights, kind_of_buffer)
            outputs = self._context()
            self.result = lib.mul_mat(outputs, matrix, activations)
            self.order = lib.backend_buft_name(kind_of_buffer).decode()
            if lib.backend_dev_supports_op(lib.device, self.result):
                break
        self.graph = lib.new_graph(outputs)
        lib.build_forward_expand(self.graph, self.result)
        self._allocate(outputs, plain)
        _set(lib, activations, x.float().contiguous())
        _set(lib, matrix, _quantized(lib, kind, out, columns))

    def __call__(self) -> None:
        self.lib.backend_graph_compute(self.backend, self.graph)

    def output(self) -> Tensor:
        """What the last call computed, float32 [tokens, out]."""
        y = torch.empty(self.shape)
        self.lib.backend_tensor_get(self.result, y.data_ptr(), 0, y.nbytes)
        return y

    def _context(self) -> Any:
        context = self.lib.init(_InitParams(1 << 20, None, True))
        self.contexts.append(context)
        return context

    def _allocate(self, context: Any, kind: Any) -> None:
        buffer = self.lib.backend_alloc_ctx_tensors_from_buft(context, kind)
        if not buffer:
            raise MemoryError("ggml could not allocate a matrix")
        self.buffers.append(buffer)


def _give_back(lib: Any, backend: Any, buffers: list[Any], contexts: list[Any]) -> None:
    lib.backend_free(backend)
    for buffer in buffers:
        lib.backend_buffer_free(buffer)
    for context in contexts:
        lib.free(context)


def nbytes(kind: str, out: int, columns: int) -> int:
    """Of a matrix."""
    return out * int(library().row_size(TYPES[kind], columns))


def kinds(columns: int) -> list[str]:
    """Types that are here and take rows of so many weights."""
    return [kind for kind in TYPES if library() is not None and columns % BLOCK.get(kind, 256) == 0]


def version() -> str | None:
    """Of the library, "ggml 0.25.3"; None where there is none."""
    return None if library() is None else f"ggml {library().version().decode()}"


def why_not() -> str | None:
    """Why there is no `library`; None where there is."""
    if library() is not None:
        return None
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama-cpp-python is not installed"
    return "llama-cpp-python has other libraries than are known here"


@cache
def _quantized(lib: Any, kind: str, out: int, columns: int) -> Tensor:
    """The bytes of a matrix, uint8."""
    few = min(out, ROWS)
    weight = torch.randn(few, columns, generator=torch.Generator().manual_seed(0))
    rows = torch.empty(few, lib.row_size(TYPES[kind], columns), dtype=torch.uint8)
    lib.quantize_chunk(TYPES[kind], weight.data_ptr(), rows.data_ptr(), 0, few, columns, None)
    return rows.repeat(-(-out // few), 1)[:out].contiguous()


def _set(lib: Any, tensor: Any, data: Tensor) -> None:
    lib.backend_tensor_set(tensor, data.data_ptr(), 0, data.nbytes)
