# SPDX-License-Identifier: Apache-2.0
"""Which weights a server computes with, as a text that differs when they do.

The name of a model does not tell: two directories of one name may hold different weights, and a
directory may hold others than yesterday. Nor does a part of the bytes: training may touch some rows
of one tensor alone. So every byte counts (``kvstore.objects.file_digests``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.objects.file_digests import FileDigests

__all__ = ["identity", "identity_of_config", "identity_of_file"]

TENSORS: Final = ".safetensors"
SUFFIXES: Final = (TENSORS, ".json", ".py")
#: Of these: what names tokens, and what is done with logits. Keys name tokens by their numbers.
CHANGE_NOTHING: Final = {
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
#: Of a model's resolved configuration: where it was found.
SAYS_WHERE: Final = ("_name_or_path", "transformers_version")


def identity(folder: Path) -> str:
    """Of the safetensors files, the configuration and the code in the directory of a model or of an
    adapter. Reads all of it, unless it has been read before.

    Raises:
        ValueError: there are no safetensors files.
        OSError: a file cannot be read.
    """
    paths = sorted(_files(folder))
    if not any(path.suffix == TENSORS for path in paths):
        raise ValueError(f"{folder} has no safetensors files, by which its weights could be told")
    with FileDigests(folder) as digests:
        found = digests.of(paths)
    text = "".join(f"{one.relative_to(folder)}\0{found[one]}\0" for one in paths)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def identity_of_config(said: Mapping[str, Any]) -> str:
    """Of a model's configuration as an engine has resolved it: from whatever files and flags."""
    counts = {name: one for name, one in said.items() if name not in SAYS_WHERE}
    text = json.dumps(counts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def identity_of_file(path: Path) -> str:
    """Of one file outside a model's directory. Raises ``OSError``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Those that count. Raises ``OSError`` for a directory that cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [one for one in folders if not one.startswith(".")]
        for name in names:
            if name.endswith(SUFFIXES) and name not in CHANGE_NOTHING and name[0] != ".":
                yield Path(here, name)
