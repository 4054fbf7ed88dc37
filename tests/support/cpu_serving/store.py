# SPDX-License-Identifier: Apache-2.0
"""Servers whose prefix cache is on the store."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpu_serving.servers import Server, ServerOptions

__all__ = ["flush", "with_hicache", "with_linker", "with_store"]

_LINKER = "sglang_mooncake.sglang.store.linker"

FLUSH_TIMEOUT_S = 120.0


def with_store(
    options: ServerOptions, directory: Path, memory: str = "64MiB", **more: Any
) -> ServerOptions:
    """The options of a server whose host lends that much memory. ``more``: settings of
    ``kvstore.Config`` and of the linker."""
    config = {
        "linker": "StoreLinker",
        "linker_module_path": _LINKER,
        "linker_extra_config": {"directory": str(directory), "memory": memory, **more},
    }
    flags = (
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend",
        "dynamic",
        "--unified-cache-external-linker-config",
        json.dumps(config),
    )
    return replace(options, page_size=16, extra_args=(*options.extra_args, *flags))


def with_linker(options: ServerOptions, module: str, name: str) -> ServerOptions:
    """The options of a server on the store, whose linker is another class: one made of the
    store's."""
    args = tuple(
        one.replace('"StoreLinker"', f'"{name}"').replace(_LINKER, module)
        for one in options.extra_args
    )
    if args == options.extra_args:
        raise ValueError("the server has no linker: with_store gives it one")
    return replace(options, extra_args=args)


def with_hicache(
    options: ServerOptions, directory: Path, memory: str = "64MiB", **more: Any
) -> ServerOptions:
    """As ``with_store``, of a server that has HiCache's host pools between its own and the store's.
    A request waits for its pages."""
    config = {
        "backend_name": "kvstore",
        "module_path": "sglang_mooncake.sglang.store.hicache",
        "class_name": "HiCacheStore",
        "interface_v1": 1,
        "prefetch_threshold": 16,
        "directory": str(directory),
        "memory": memory,
        **more,
    }
    flags = (
        "--enable-hierarchical-cache",
        "--hicache-storage-backend",
        "dynamic",
        "--hicache-storage-prefetch-policy",
        "wait_complete",
        "--hicache-mem-layout",
        "page_first_direct",
        "--hicache-io-backend",
        "direct",
        "--hicache-storage-backend-extra-config",
        json.dumps(config),
    )
    return replace(options, page_size=16, extra_args=(*options.extra_args, *flags))


def flush(server: Server) -> None:
    """Empties the server's own prefix cache. It refuses while it still works on a request."""
    deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
    while True:
        request = urllib.request.Request(f"{server.url}/flush_cache", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=FLUSH_TIMEOUT_S):
                return
        except urllib.error.HTTPError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
