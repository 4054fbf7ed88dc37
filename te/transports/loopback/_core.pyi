# SPDX-License-Identifier: Apache-2.0
from te.core.engine import Engine
from te.core.handles import LinkHandle

class LoopbackLink(LinkHandle):
    """A link without its connection yet, which moves nothing but lives and dies with the link."""

    def __init__(self, engine: Engine, is_incoming: bool) -> None: ...
    def add_connection(self, fd: int, other: LoopbackLink | None = None) -> bool:
        """Takes over a connected, non-blocking socket; False (not taken) on a dead link.
        ``OSError`` (not taken). Of an incoming link ``other`` is the source's end."""
