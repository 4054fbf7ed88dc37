# SPDX-License-Identifier: Apache-2.0
"""Which release this is."""

from __future__ import annotations

import importlib.metadata

__all__ = ["version"]


def version() -> str:
    """The installed release of the package, such as ``0.1.0``, from its metadata."""
    try:
        return importlib.metadata.version("sglang-mooncake")
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout"
