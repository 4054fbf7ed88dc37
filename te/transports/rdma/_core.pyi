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

    def plan_rails(self, rails: list[tuple[int, float]]) -> None:
        """Of a source, before anything is submitted: by which local device each rail leaves, and
        how many bytes a second that is taken to carry until it was measured. ``ValueError``."""

    def rail_flows(self) -> list[tuple[int, int, float]]:
        """For each rail: bytes done, bytes under way, and its rate in bytes per second."""
