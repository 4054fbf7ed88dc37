# SPDX-License-Identifier: Apache-2.0
"""The transports of this build. A new one is a folder and a line here."""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

__all__ = ["BY_DEFAULT", "NAMES", "WITHOUT_DEVICES", "load"]


class _Entry(NamedTuple):
    name: str
    #: Where its class is: it is imported when an engine wants it.
    module: str
    kind: str
    #: Whether engines use it without being told.
    by_default: bool
    #: Whether it needs devices, with which memory is registered and pinned.
    needs_devices: bool


_ENTRIES: Final = (  # the preferred one first
    _Entry("samehost", "te.transports.samehost.transport", "SameHost", True, False),
    _Entry("rdma", "te.transports.rdma.transport", "Rdma", True, True),
    _Entry("tcp", "te.transports.tcp.transport", "Tcp", True, False),
    _Entry("loopback", "te.transports.loopback.transport", "Loopback", False, False),
)

NAMES: Final = tuple(one.name for one in _ENTRIES)
"""All of them, the preferred one first."""

BY_DEFAULT: Final = tuple(one.name for one in _ENTRIES if one.by_default)
"""The transports that engines use without being told."""

WITHOUT_DEVICES: Final = tuple(
    one.name for one in _ENTRIES if one.by_default and not one.needs_devices
)
"""The default transports that pin no memory: enough between processes of one host."""


def load(name: str) -> Any:
    """The class of a transport, a ``te.transports.base.Transport``; ``KeyError``.

    By its name, since configurations are checked by this list, and transports know configurations.
    """
    entry = {one.name: one for one in _ENTRIES}[name]
    return getattr(importlib.import_module(entry.module), entry.kind)
