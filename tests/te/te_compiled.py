# SPDX-License-Identifier: Apache-2.0
"""Functions of compiled modules, as their .pxd files declare them."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

__all__ = ["address_in", "function"]

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype = ctypes.c_char_p
_name_of.argtypes = [ctypes.py_object]


def address_in(capsule: object, name: bytes) -> int:
    """What a capsule of that name holds."""
    return int(_pointer_of(capsule, name))


def function(
    module: str, name: str, result: Any, *arguments: Any, factory: Any = ctypes.CFUNCTYPE
) -> Any:
    """A ``cdef`` function of a module's .pxd file; called without the interpreter's lock, unless
    ``factory`` is ``ctypes.PYFUNCTYPE``."""
    exported = importlib.import_module(module).__pyx_capi__[name]  # type: ignore[attr-defined]
    return factory(result, *arguments)(_pointer_of(exported, _name_of(exported)))
