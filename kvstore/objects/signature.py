# SPDX-License-Identifier: Apache-2.0
"""What a cached object's bytes mean: two objects are interchangeable only if all of it is equal."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Final

import msgspec

__all__ = ["DIGEST_BYTES", "Signature"]

DIGEST_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The meaning of the bytes under a key, beside the tokens that the key stands for.

    A key names tokens. It does not say which model computed the cache, in which format, or which
    part of it: servers with another quantisation, another TP size or other weights make the same
    keys. So the store looks objects up by key and signature.
    """

    #: The weights: for example a hash of the model's configuration and revision, and the version of
    #: the weights on a server whose weights are updated while it runs.
    weights: str
    #: The logical format of the cache, such as ``"bfloat16"`` or ``"fp8_e4m3"``.
    dtype: str
    #: Tokens in a page.
    page_size: int
    #: The first layer, and the one behind the last.
    layers: tuple[int, int]
    #: The first KV head, and the one behind the last; (0, 0) where every rank has all of it (MLA).
    heads: tuple[int, int]
    #: How the bytes of an object are arranged, with a version: "kv-layer-major/1".
    layout: str
    #: Which kind of cache, as SGLang's pools are named: "kv", "swa", "mamba", "draft", ...
    pool: str = "kv"

    def __post_init__(self) -> None:
        for name, (first, end) in (("layers", self.layers), ("heads", self.heads)):
            if not 0 <= first <= end:
                raise ValueError(f"{name}={(first, end)} is no range: give the first and the end")
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size} must be at least 1 token")
        for name in ("weights", "dtype", "layout", "pool"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")

    @property
    def digest(self) -> bytes:
        """16 bytes that differ if anything in the signature differs."""
        text = msgspec.json.encode(sorted(asdict(self).items()))
        return hashlib.blake2b(text, digest_size=DIGEST_BYTES, person=b"kv signature").digest()
