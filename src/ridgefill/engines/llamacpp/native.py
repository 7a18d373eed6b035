"""llama-cpp-python, and ggml's public functions out of the very libraries that it ships.

Nothing is compiled: the late layers' keys and values are a small ggml graph, put together through ctypes from the
functions that ``ggml.h``, ``ggml-alloc.h``, ``ggml-backend.h`` and ``gguf.h`` declare (docs/decisions/0020).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from ridgefill.errors import EngineMissingError

TESTED = ("0.3.36", "0.3.37")  # llama-cpp-python, upper end excluded; pyproject's extra names the same

_P, _I, _F, _S, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_size_t, ctypes.c_int64


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("mem_size", _S), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool)]


class GgufParams(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", _P)]


# name -> (result, arguments)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_P, [InitParams]),
    "ggml_free": (None, [_P]),
    "ggml_tensor_overhead": (_S, []),
    "ggml_graph_overhead": (_S, []),
    "ggml_type_name": (ctypes.c_char_p, [_I]),
    "ggml_row_size": (_S, [_I, _L]),
    "ggml_is_quantized": (ctypes.c_bool, [_I]),
    "ggml_get_name": (ctypes.c_char_p, [_P]),
    "ggml_nbytes": (_S, [_P]),
    "ggml_nelements": (_L, [_P]),
    "ggml_new_tensor_1d": (_P, [_P, _I, _L]),
    "ggml_new_tensor_2d": (_P, [_P, _I, _L, _L]),
    "ggml_mul_mat": (_P, [_P, _P, _P]),
    "ggml_mul_mat_set_hint": (None, [_P, _I]),
    "ggml_add": (_P, [_P, _P, _P]),
    "ggml_mul": (_P, [_P, _P, _P]),
    "ggml_rms_norm": (_P, [_P, _P, _F]),
    "ggml_reshape_2d": (_P, [_P, _P, _L, _L]),
    "ggml_reshape_3d": (_P, [_P, _P, _L, _L, _L]),
    "ggml_rope_ext": (_P, [_P, _P, _P, _P, _I, _I, _I, _F, _F, _F, _F, _F, _F]),
    "ggml_cast": (_P, [_P, _P, _I]),
    "ggml_set_input": (None, [_P]),
    "ggml_set_output": (None, [_P]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_gallocr_new": (_P, [_P]),
    "ggml_gallocr_free": (None, [_P]),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, [_P, _P]),
    "ggml_backend_alloc_ctx_tensors": (_P, [_P, _P]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_init_by_type": (_P, [_I, ctypes.c_char_p]),
    "ggml_backend_free": (None, [_P]),
    "ggml_backend_get_default_buffer_type": (_P, [_P]),
    "ggml_backend_get_device": (_P, [_P]),
    "ggml_backend_dev_backend_reg": (_P, [_P]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
    "ggml_backend_tensor_set": (None, [_P, _P, _S, _S]),
    "ggml_backend_tensor_get": (None, [_P, _P, _S, _S]),
    "ggml_backend_graph_compute": (_I, [_P, _P]),
    "gguf_init_from_file": (_P, [ctypes.c_char_p, GgufParams]),
    "gguf_free": (None, [_P]),
    "gguf_get_data_offset": (_S, [_P]),
    "gguf_find_key": (_L, [_P, ctypes.c_char_p]),
    "gguf_get_kv_type": (_I, [_P, _L]),
    "gguf_get_val_str": (ctypes.c_char_p, [_P, _L]),
    "gguf_get_val_data": (_P, [_P, _L]),
    "gguf_get_arr_type": (_I, [_P, _L]),
    "gguf_get_arr_n": (_S, [_P, _L]),
    "gguf_get_arr_data": (_P, [_P, _L]),
    "gguf_find_tensor": (_L, [_P, ctypes.c_char_p]),
    "gguf_get_tensor_offset": (_S, [_P, _L]),
    "gguf_get_tensor_ne": (ctypes.POINTER(_L), [_P, _L]),
    "gguf_get_tensor_type": (_I, [_P, _L]),
    "gguf_get_tensor_size": (_S, [_P, _L]),
}


@cache
def llama_cpp() -> Any:
    """The llama_cpp module.

    Raises:
        EngineMissingError: it is not installed, cannot be loaded, or is of a release that was not tested.
    """
    try:
        import llama_cpp as module
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineMissingError(
            "run a GGUF on llama.cpp", f"llama-cpp-python cannot be imported ({error})", _ADVICE
        ) from error
    if not Version(TESTED[0]) <= Version(module.__version__) < Version(TESTED[1]):
        raise EngineMissingError(
            "run a GGUF on llama.cpp",
            f"llama-cpp-python {module.__version__} is not in the tested range {TESTED[0]} to {TESTED[1]} (excluded)",
            _ADVICE,
        )
    return module


_ADVICE = 'pip install "ridgefill[llamacpp]" (it is built from source: a C++ compiler and some minutes)'


class Ggml:
    """ggml's functions as attributes, without their prefix: ``ggml.mul_mat(ctx, a, b)``."""

    def __init__(self, folder: Path) -> None:
        names = [f"{lead}{name}" for name in ("ggml", "ggml-base", "ggml-cpu") for lead in ("lib", "")]
        endings = {"win32": (".dll",), "darwin": (".dylib", ".so")}.get(sys.platform, (".so",))
        found = [folder / f"{name}{end}" for name in names for end in endings]
        libraries = [ctypes.CDLL(str(path)) for path in found if path.exists()]
        for name, (result, arguments) in _FUNCTIONS.items():
            function = next((getattr(lib, name) for lib in libraries if hasattr(lib, name)), None)
            if function is None:
                raise EngineMissingError(
                    "use ggml as llama-cpp-python ships it", f"its libraries have no {name}", _ADVICE
                )
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def cpu_backend(self, threads: int) -> int:
        """A CPU backend that computes with so many threads."""
        backend = self.backend_init_by_type(0, None)  # GGML_BACKEND_DEVICE_TYPE_CPU
        register = self.backend_dev_backend_reg(self.backend_get_device(backend))
        if address := self.backend_reg_get_proc_address(register, b"ggml_backend_set_n_threads"):
            ctypes.CFUNCTYPE(None, _P, _I)(address)(backend, threads)
        return int(backend)

    def type_called(self, number: int) -> str:
        """ggml's own name of a type, such as "q8_0"."""
        return (self.type_name(number) or b"?").decode()


@cache
def ggml() -> Ggml:
    """The functions of the ggml that llama_cpp loads."""
    return Ggml(Path(llama_cpp().__file__).parent / "lib")
