# SPDX-License-Identifier: Apache-2.0
"""The numbers and error classes that code written for NIXL takes from ``nixl._bindings`` (1.5.1).
Names and values are NIXL's, since its callers compare with them."""

from __future__ import annotations

import enum
from typing import Final

__all__ = [
    "ERRORS",
    "AgentConfig",
    "Backend",
    "Cancelled",
    "InvalidParam",
    "Mismatch",
    "NixlError",
    "NoTelemetry",
    "NotAllowed",
    "NotFound",
    "NotPosted",
    "NotSupported",
    "Operation",
    "RemoteDisconnect",
    "RepostActive",
    "Segment",
    "Status",
    "ThreadSync",
    "Unknown",
]


class Segment(enum.IntEnum):
    """``nixl_mem_t``: what memory is said to be. te finds out by itself what it is."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4

    @property
    def is_storage(self) -> bool:
        """Whether it is no memory, and so nothing that te could move."""
        return self not in (Segment.DRAM_SEG, Segment.VRAM_SEG)


class Operation(enum.IntEnum):
    """``nixl_xfer_op_t``."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class Status(enum.IntEnum):
    """``nixl_status_t``."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9
    NIXL_ERR_REMOTE_DISCONNECT = -10
    NIXL_ERR_CANCELED = -11
    NIXL_ERR_NO_TELEMETRY = -12


class ThreadSync(enum.IntEnum):
    """``nixl_thread_sync_t`` of the bindings. te is thread-safe whatever is chosen."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = NIXL_THREAD_SYNC_NONE


class AgentConfig:
    """``nixlAgentConfig``. te has threads of its own and no listener for metadata."""

    def __init__(
        self,
        useProgThread: bool = True,  # noqa: N803 - NIXL's names
        useListenThread: bool = False,  # noqa: N803
        listenPort: int = 0,  # noqa: N803
        syncMode: ThreadSync = ThreadSync.NIXL_THREAD_SYNC_DEFAULT,  # noqa: N803
        etcdWatchTimeout: int = 0,  # noqa: N803
        pthrDelay: int = 0,  # noqa: N803
        lthrDelay: int = 0,  # noqa: N803
        captureTelemetry: bool = False,  # noqa: N803
    ) -> None:
        self.useProgThread, self.useListenThread = useProgThread, useListenThread
        self.listenPort, self.syncMode = listenPort, syncMode
        self.etcdWatchTimeout, self.pthrDelay = etcdWatchTimeout, pthrDelay
        self.lthrDelay, self.captureTelemetry = lthrDelay, captureTelemetry


class NixlError(Exception):
    """What the classes below have in common; its text begins with NIXL's name for the status, as
    the whole text of NIXL's own exceptions is. These are no RuntimeError in 1.5.1, either."""

    status: Status = Status.NIXL_ERR_UNKNOWN

    def __init__(self, text: str) -> None:
        super().__init__(f"{self.status.name}: {text}")


class NotPosted(NixlError):
    """The transfer was never posted."""

    status = Status.NIXL_ERR_NOT_POSTED


class InvalidParam(NixlError):
    """An argument that cannot be meant."""

    status = Status.NIXL_ERR_INVALID_PARAM


class Backend(NixlError):
    """te cannot do it; its text has te's reason."""

    status = Status.NIXL_ERR_BACKEND


class NotFound(NixlError):
    """A name, a range of memory or a handle that is not known."""

    status = Status.NIXL_ERR_NOT_FOUND


class Mismatch(NixlError):
    """Metadata that is not of this kind, or of another release."""

    status = Status.NIXL_ERR_MISMATCH


class NotAllowed(NixlError):
    """A name that another agent has."""

    status = Status.NIXL_ERR_NOT_ALLOWED


class RepostActive(NixlError):
    """The transfer goes on, and what was asked for has to wait for its end."""

    status = Status.NIXL_ERR_REPOST_ACTIVE


class Unknown(NixlError):
    """NIXL has it; nothing here raises it."""


class NotSupported(NixlError):
    """NIXL can do it, and te cannot."""

    status = Status.NIXL_ERR_NOT_SUPPORTED


class RemoteDisconnect(NixlError):
    """The other agent is not reached, or was lost."""

    status = Status.NIXL_ERR_REMOTE_DISCONNECT


class Cancelled(NixlError):
    """The transfer was cancelled."""

    status = Status.NIXL_ERR_CANCELED


class NoTelemetry(NixlError):
    """The agent was made without telemetry."""

    status = Status.NIXL_ERR_NO_TELEMETRY


ERRORS: Final[dict[str, type[NixlError]]] = {
    "nixlNotPostedError": NotPosted,
    "nixlInvalidParamError": InvalidParam,
    "nixlBackendError": Backend,
    "nixlNotFoundError": NotFound,
    "nixlMismatchError": Mismatch,
    "nixlNotAllowedError": NotAllowed,
    "nixlRepostActiveError": RepostActive,
    "nixlUnknownError": Unknown,
    "nixlNotSupportedError": NotSupported,
    "nixlRemoteDisconnectError": RemoteDisconnect,
    "nixlCancelledError": Cancelled,
    "nixlNoTelemetryError": NoTelemetry,
}
"""The classes by the names that the bindings give them. Those who log the type of an exception
shall see NIXL's name, so each class is given it."""

for _name, _class in ERRORS.items():
    _class.__name__ = _class.__qualname__ = _name
    _class.__module__ = "nixl._bindings"
