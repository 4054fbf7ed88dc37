# SPDX-License-Identifier: Apache-2.0
from te.core.engine import Engine
from te.core.handles import LinkHandle

def nic_failed(engine: Engine, nic: int, code: int) -> None:
    """Has every rail by that RDMA device given up for the reason ``code``, at either side."""

def look_at_qps(engine: Engine) -> None:
    """After events of devices: has the workers look for queue pairs that are broken."""

class RdmaLink(LinkHandle):
    """A link without its connection yet, which carries words about rails, and without rails."""

    def __init__(self, engine: Engine, is_incoming: bool) -> None: ...
    def add_connection(self, fd: int) -> bool:
        """Takes over a connected, non-blocking socket, once; False (not taken) on a dead link.
        ``OSError`` (not taken)."""

    def add_qp(
        self, endpoint: int, index: int, epoch: int, local_nic: int, remote_nic: int, fences: int
    ) -> None:
        """Takes over a connected queue pair (``te.verbs``) as the rail ``index``; ``OSError``, and
        then it is not taken. A source's rail sends nothing before ``fences`` were heard of."""

    @property
    def fences(self) -> int:
        """How often a destination has broken all rails of the link."""

    def rail_flows(self, count: int) -> list[tuple[int, int, int, float]]:
        """For each of the first ``count`` rails: bytes done and under way; and of the times that it
        was measured, always with work under way, the bytes done in them and their seconds."""
