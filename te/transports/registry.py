# SPDX-License-Identifier: Apache-2.0
"""The transports of this build. A new one is a folder and a line here."""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

__all__ = ["NAMES", "WITHOUT_DEVICES", "load"]


class _Entry(NamedTuple):
    name: str
    #: Where its class is: it is imported when an engine wants it.
    module: str
    kind: str
    #: Whether it needs devices, with which memory is registered and pinned.
    needs_devices: bool


_ENTRIES: Final = (  # the preferred one first
    _Entry("samehost", "te.transports.samehost.transport", "SameHost", False),
    _Entry("rdma", "te.transports.rdma.transport", "Rdma", True),
    _Entry("tcp", "te.transports.tcp.transport", "Tcp", False),
)

NAMES: Final = tuple(one.name for one in _ENTRIES)
"""All of them, the preferred one first."""

WITHOUT_DEVICES: Final = tuple(one.name for one in _ENTRIES if not one.needs_devices)
"""Those that pin no memory: enough between processes of one host."""


def load(name: str) -> Any:
    """The class of a transport, a ``te.transports.base.Transport``; ``KeyError``.

    By its name, since configurations are checked by this list, and transports know configurations.
    """
    entry = {one.name: one for one in _ENTRIES}[name]
    return getattr(importlib.import_module(entry.module), entry.kind)
