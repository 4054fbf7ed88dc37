# SPDX-License-Identifier: Apache-2.0
"""NIXL's notifications as te's notes."""

from __future__ import annotations

import te

__all__ = ["TeNotices"]


class TeNotices:
    """See `impl.Notices`."""

    def __init__(self, engine: te.Engine) -> None:
        self._engine = engine

    def send(self, peer: te.Peer, data: bytes) -> None:
        peer.send_note(data)

    def take(self) -> list[tuple[str, bytes]]:
        return [(one.peer.id, one.data) for one in self._engine.take_notes()]
