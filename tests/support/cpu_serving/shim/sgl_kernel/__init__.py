# SPDX-License-Identifier: Apache-2.0
"""Stand-in for SGLang's compiled CPU kernel package, which no package index has for this platform.

Without Intel AMX SGLang computes every layer of the tiny models with its own torch code. What plain
and speculative decoding call is written out here, and every other kernel raises when it is called.
`sgl_kernel.scalar_type` is left out on purpose: SGLang has a fallback for it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from sgl_kernel import attention
from sgl_kernel.speculative import *  # noqa: F403

attention.register()


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    _pool_len: int,
) -> None:
    taken = 0
    for i, row in enumerate(req_pool_indices.tolist()):
        start, end = int(start_offset[i]), int(end_offset[i])
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no stand-in in tests/support/cpu_serving/shim"
        )

    missing.__name__ = name
    return missing


def _name_kernels_of_models() -> None:
    """Kernels that models name as they are imported. Qwen's processor of images imports models that
    nobody runs here."""
    import torch

    for name in (
        "fused_sigmoid_mul_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    ):
        setattr(torch.ops.sgl_kernel, name, __getattr__(name))


_name_kernels_of_models()
