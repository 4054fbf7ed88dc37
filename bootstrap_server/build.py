# SPDX-License-Identifier: Apache-2.0
"""The metric that says which release runs: the same one in SGLang's metrics, in the registry's and
in those of `kvstore serve`."""

from __future__ import annotations

import importlib.metadata
from typing import Final

from bootstrap_server.prometheus_text import family

__all__ = ["HELP", "NAME", "build_text", "version"]

NAME: Final = "sglang_mooncake_build_info"
HELP: Final = "Always 1; the label says which release runs there."


def version() -> str:
    """The installed release of the package, such as `0.1.0`. `te.version` tells the same to those
    who have te, without which a registry runs."""
    try:
        return importlib.metadata.version("sglang-mooncake")
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout"


def build_text(release: str) -> str:
    """The metric in Prometheus' text format, with a newline at the end."""
    return "\n".join([*family(NAME, "gauge", HELP, ["version"], {(release,): 1}), ""])
