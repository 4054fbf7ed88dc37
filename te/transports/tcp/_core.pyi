# SPDX-License-Identifier: Apache-2.0
from te.core.engine import Engine
from te.core.handles import LinkHandle

class TcpLink(LinkHandle):
    """A link without rails yet."""

    def __init__(self, engine: Engine, is_incoming: bool) -> None: ...
    def add_rail(self, fd: int, secrets: tuple[bytes, bytes] | None = None) -> bool:
        """Takes over a connected, non-blocking socket; False (not taken) on a dead or full link.
        ``OSError`` (not taken). ``secrets``: what goes out is encrypted with the first, what comes
        in with the second."""
