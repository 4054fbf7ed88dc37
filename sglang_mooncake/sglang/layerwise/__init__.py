# SPDX-License-Identifier: Apache-2.0
"""Prefill: KV leaves in groups of layers while the forward that computes it still runs.

`hooks` is told by SGLang what runs, `forward` says which layers are there, `spans` which pages;
`internals` names all of SGLang's that these rely on.
"""

from sglang_mooncake.sglang.layerwise.hooks import Layerwise

__all__ = ["Layerwise"]
