# SPDX-License-Identifier: Apache-2.0
"""What applications hold beside an agent: its configuration, and handles of what it has made."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

from sglang_mooncake.faces.nixl.low import Agent
from sglang_mooncake.faces.nixl.names import ThreadSync

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]

DEFAULT_COMM_PORT: Final = 8888
nixl_backend_handle = int


class nixl_thread_sync_t(enum.Enum):  # noqa: N801 - NIXL's name
    NIXL_THREAD_SYNC_NONE = ThreadSync.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = ThreadSync.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = ThreadSync.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = ThreadSync.NIXL_THREAD_SYNC_DEFAULT


class nixl_agent_config:  # noqa: N801 - NIXL's name
    """``TypeError`` if ``sync_mode`` is of another type."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(
                f"sync_mode must be a nixl_thread_sync_t (got {type(sync_mode).__name__!r})"
            )
        self.enable_pthread, self.enable_listen = enable_prog_thread, enable_listen_thread
        self.port, self.capture_telemetry = listen_port, capture_telemetry
        self.num_threads, self.backends, self.sync_mode = num_threads, list(backends), sync_mode


class _Handle:
    """Truthy, whatever it stands for."""

    __slots__ = ("__weakref__", "_agent", "_released", "number")

    def __init__(self, agent: Agent, value: int) -> None:
        self._agent, self.number, self._released = agent, value, False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(0x{self.number:x}, released={self._released})"


class nixl_prepped_dlist_handle(_Handle):  # noqa: N801 - NIXL's name
    """Descriptors that are ready for transfers."""

    __slots__ = ()

    def release(self) -> None:
        self._agent.releasedDlistH(self.number)
        self._released = True

    def __del__(self) -> None:
        if not self._released:
            self._agent.releasedDlistH(self.number)


class nixl_xfer_handle(_Handle):  # noqa: N801 - NIXL's name
    """A transfer. One that goes without a release ends as soon as te has done with its memory."""

    __slots__ = ()

    def release(self) -> None:
        """``nixlRepostActiveError``: it has not ended yet; to be called again."""
        if not self._released:
            self._agent.releaseXferReq(self.number)
            self._released = True

    def __del__(self) -> None:
        if not self._released:
            self._agent.abandon(self.number)
