# SPDX-License-Identifier: Apache-2.0
"""Which weights a server computes with, as a text that differs when they do.

The name of a model does not tell: two directories of one name may hold different weights. Hashing
all of 140 GB takes minutes, so that a few bytes of every tensor are hashed. Training changes nearly
all numbers of the tensors that it touches.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["identity"]

HEADER_BYTES_MAX: Final = 256 << 20
SAMPLES: Final = 4
SAMPLE_BYTES: Final = 64


def identity(folder: Path) -> str:
    """Of the safetensors files and the configuration in a model's directory.

    Raises ``ValueError`` for a directory without safetensors files, or with one that cannot be
    read: give the identity by hand then.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors files, by which its weights could be told")
    digest = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    if config.exists():
        digest.update(config.read_bytes())
    for path in files:
        for part in _samples(path):
            digest.update(part)
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file, and bytes from the begin to the end of each tensor."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        raw = file.read(size) if size <= HEADER_BYTES_MAX else b""
        try:
            header: dict[str, Any] = json.loads(raw)
            ranges = [
                header[name]["data_offsets"] for name in sorted(header) if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError) as exc:
            raise ValueError(f"{path} is no safetensors file: {exc!r}") from exc
        yield raw
        for begin, end in ranges:
            last = max(end - SAMPLE_BYTES, begin)
            for i in range(SAMPLES):
                file.seek(8 + size + begin + (last - begin) * i // (SAMPLES - 1))
                yield file.read(min(SAMPLE_BYTES, end - begin))
