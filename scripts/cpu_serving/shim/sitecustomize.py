# SPDX-License-Identifier: Apache-2.0
"""Test support: lets the unmodified SGLang run on a machine without a GPU.

This directory stands first on PYTHONPATH of every server process. Three gaps are closed, each when
the module it concerns is imported and not otherwise:

- PyPI's torchvision is built for CUDA; beside a CPU torch its C extension does not load and the
  import fails for want of two op schemas, which are declared here.
- With DP attention an idle rank asks its attention backend for a fill value that only the AMX
  backend knows; the torch-native one gets the same answer.
- DeepSeek's MLA has an absorbed form (one latent per token, as the KV pool stores it) that the
  torch-native backend computes correctly. SGLang's dispatch has no rule for that backend and would
  pick the form with a key per head, which does not fit the pool. The rule is added.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _declare_torchvision_ops() -> None:
    import torch

    registered = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    try:
        registered("torchvision::nms", "Meta")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _keep_alive.append(library)


def _teach_idle_ranks(module: ModuleType) -> None:
    module.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _self: 1


def _dispatch_to_absorbed_mla(module: ModuleType) -> None:
    method = module.AttnForwardMethod.MLA
    module.AttentionBackendRegistry.register("torch_native", lambda _attn, _batch: method)


_keep_alive: list[Any] = []
_BEFORE_SUBMODULES_OF = {"torchvision": _declare_torchvision_ops}
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.layers.attention.torch_native_backend": _teach_idle_ranks,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _dispatch_to_absorbed_mla,
}


class _PatchingLoader(Loader):
    """Loads a module as its own loader would, then patches it."""

    def __init__(self, loader: Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, _path: object = None, _target: object = None
    ) -> ModuleSpec | None:
        parent = fullname.partition(".")[0]
        if parent != fullname and parent in _BEFORE_SUBMODULES_OF:
            _BEFORE_SUBMODULES_OF.pop(parent)()
        patch = _AFTER.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)  # this finder has forgotten the name by now
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, patch)
        return spec


sys.meta_path.insert(0, _Finder())
