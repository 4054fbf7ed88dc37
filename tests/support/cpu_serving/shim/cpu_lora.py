# SPDX-License-Identifier: Apache-2.0
"""Test support: LoRA adapters without a GPU. SGLang has their weights in pinned memory, and what it
tells its kernels of a batch, too. torch makes such memory for a GPU alone: it gets ordinary one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["compute_unpinned", "keep_unpinned", "make_unpinned"]


def make_unpinned(module: ModuleType) -> None:
    """For `lora.layers`."""
    module.torch = _TorchUnpinned(module.torch)


def keep_unpinned(module: ModuleType) -> None:
    """For `lora.lora`."""
    module.LoRAAdapter.pin_weights_in_cpu = lambda _self: None


def compute_unpinned(module: ModuleType) -> None:
    """For `lora.backend.torch_backend`."""
    backend = module.TorchNativeLoRABackend
    backend.prepare_lora_batch = _unpinned(module.torch.Tensor, backend.prepare_lora_batch)
    module.torch = _TorchUnpinned(module.torch)


class _TorchUnpinned:
    """torch, whose new tensors are never pinned."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in ("tensor", "zeros", "empty"):
            return found
        return lambda *args, pin_memory=False, **kwargs: found(*args, **kwargs)


def _unpinned(tensor: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, during which tensors are pinned by nothing at all."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        pin, tensor.pin_memory = tensor.pin_memory, lambda one: one
        try:
            return function(*args, **kwargs)
        finally:
            tensor.pin_memory = pin

    return wrapped
