# SPDX-License-Identifier: Apache-2.0
from te.core.engine import Engine
from te.core.handles import LinkHandle

def nic_failed(engine: Engine, nic: int, code: int) -> None:
    """Has every rail by that RDMA device given up for the reason ``code``, at either side."""

def nic_returned(engine: Engine, nic: int) -> None:
    """The port of that RDMA device has its link again, or another address: what waits for it is
    tried soon."""

def rail_changes(engine: Engine) -> tuple[int, int]:
    """How many rails went down while they carried and their link stood, and how many came back."""

def look_at_qps(engine: Engine) -> None:
    """After events of devices: has the workers look for queue pairs that are broken."""

class RdmaLink(LinkHandle):
    """A link without its connection yet, which carries words about rails, and without rails."""

    def __init__(self, engine: Engine, is_incoming: bool) -> None: ...
    def add_connection(self, fd: int) -> bool:
        """Takes over a connected, non-blocking socket, once; False (not taken) on a dead link.
        ``OSError`` (not taken)."""

    def add_qp(
        self,
        endpoint: int,
        index: int,
        epoch: int,
        local_nic: int,
        remote_nic: int,
        fences: int,
        hello: int = 0,
    ) -> None:
        """Takes over a connected queue pair (``te.verbs``) as the rail ``index``; ``OSError``, and
        then it is not taken. It is destroyed if nobody waits for that epoch of the rail any more.
        A source's rail sends nothing before ``fences`` were heard of. ``hello``: at a destination,
        which it was made for; of one epoch the last counts."""

    @property
    def fences(self) -> int:
        """How often a destination has broken all rails of the link."""

    def plan_rails(
        self,
        rails: list[tuple[int, float, int]],
        build_timeout_s: float,
        probe_timeout_s: float,
        backoff_s: float,
        backoff_max_s: float,
        steady_s: float,
    ) -> None:
        """Of a source, before its connection: by which local device each rail leaves, how many
        bytes a second that is taken to carry until it was measured, and in how many ways it could
        lead. The link's worker asks for each of them from now on: see ``rails_now``. For the times
        see ``RailTiming`` in rails.pxd. ``ValueError``."""

    def refuse_rail(self, index: int, epoch: int, reason: str) -> None:
        """The attempt to make the rail, of that epoch, has come to nothing."""

    def rails_now(
        self,
    ) -> list[tuple[int, int, int, int, int, int, bool, int, int, str, int, float]]:
        """Of each rail that was planned: its state, a ``RailState``; epoch, which way, failures
        since it was steady, how often it went down and came up, whether it carried before it last
        failed; why that was: code, errno, text; bytes under way, and its rate in bytes per second.
        One that is RAIL_BUILDING waits for ``add_qp``, or ``refuse_rail``, with this epoch."""
