# SPDX-License-Identifier: Apache-2.0
"""A rank's place in its registry, kept for as long as the rank lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Self

from bootstrap_server.client.bootstrap_client import BootstrapClient
from bootstrap_server.ranks.errors import BootstrapError, LeaseLost, Unreachable
from bootstrap_server.ranks.rank_status import RankStatus
from bootstrap_server.ranks.records import DEFAULT_INSTANCE, RankRecord
from bootstrap_server.ranks.registry import RENEWALS_PER_LEASE

__all__ = ["AGAIN_S", "RankLease", "close_leases"]

logger = logging.getLogger(__name__)

#: A registry that did not answer is asked again after so long: a rank that was cut off from it for
#: longer than a lease is unknown to all until it has registered again.
AGAIN_S: Final = 1.0
_CLOSE_DEADLINE_S: Final = 5.0


class RankLease:
    """Registers a rank and keeps it registered, from a thread of its own, until closed.

    The constructor waits until the registry has taken the rank (see `BootstrapClient.register`:
    `deadline_s`, and the errors that it raises; `keys` as for the client); without a deadline
    (None) the thread registers it when it can. No later call waits for the registry, except
    `close()`, for a few seconds at most.

    Each renewal carries what `status` returns, for the registry's status page. It is called in the
    lease's thread; when it raises, the error is logged and it is not called again.

    What comes later is healed here: a registry that was restarted, or forgot the rank while this
    process was held, gets the rank again at the next renewal; one that cannot be reached is asked
    again after `AGAIN_S`, and one that has given the place to another life each time. `problem`
    says what is wrong in that case, None when all is well; it is logged whenever it changes.

    A manager uses it as follows::

        lease = RankLease(bootstrap_address, record, deadline_s=60.0)   # instead of register()
        ...
        lease.close()                                                    # in its own close()
    """

    def __init__(
        self,
        address: str,
        record: RankRecord,
        *,
        instance: str = DEFAULT_INSTANCE,
        deadline_s: float | None = 60.0,
        keys: Sequence[bytes] = (),
        status: Callable[[], RankStatus | None] | None = None,
        make_client: Callable[..., BootstrapClient] = BootstrapClient,
    ) -> None:
        self._record, self._status = record, status
        self._client = make_client(address, instance=instance, keys=keys)
        self._closing = threading.Event()
        #: Why the registry does not show this rank, or may soon cease to; None when it does.
        self.problem: str | None = None
        self._is_reached = True
        #: 0.0 before the registry has taken the rank.
        self._lease_s = 0.0
        if deadline_s is not None:
            try:
                self._lease_s = self._client.register(record, deadline_s)
            except BaseException:
                self._client.close()
                raise
        self._thread = threading.Thread(target=self._run, name="bootstrap-lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the place back, so that a restarted rank gets it at once. Idempotent."""
        self.let_go()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_DEADLINE_S)

    def let_go(self) -> None:
        """The same without waiting for the registry; `close` follows."""
        self._closing.set()

    def _run(self) -> None:
        with self._client:
            while not self._closing.wait(self.pause_s()):
                self.renew()
            try:
                self._client.release(self._record.rank)
            except BootstrapError as error:
                # The lease ends by itself.
                logger.debug("%s", error)

    def pause_s(self) -> float:
        """How long the thread waits before the next renewal."""
        if not self._lease_s:
            return 0.0 if self.problem is None else AGAIN_S
        pause_s = self._lease_s / RENEWALS_PER_LEASE
        return pause_s if self._is_reached else min(pause_s, AGAIN_S)

    def renew(self) -> None:
        """One renewal, as the thread makes it; sets `problem`."""
        rank = self._record.rank
        self._is_reached = True
        try:
            try:
                self._lease_s = self._client.renew(rank, self._report())
            except LeaseLost as lost:
                if self._lease_s:
                    logger.warning("registering again: %s", lost)
                self._lease_s = self._client.try_register(self._record)
        except BootstrapError as error:
            self._is_reached = not isinstance(error, Unreachable)
            self._say(
                f"rank {rank.coords} is not registered, or will soon lose its registration, at "
                "the registry "
                f"{self._client.address}: {error}"
            )
        else:
            self._say(None)

    def _report(self) -> RankStatus | None:
        if self._status is None:
            return None
        try:
            return self._status()
        except Exception:  # whatever is wrong with the report, the lease must go on
            self._status = None
            logger.exception(
                "rank %s reports no status to its registry any more", self._record.rank.coords
            )
            return None

    def _say(self, problem: str | None) -> None:
        if problem is not None and self.problem is None:
            logger.error("%s", problem)
        elif problem is None and self.problem is not None:
            logger.warning("rank %s is registered again", self._record.rank.coords)
        self.problem = problem


def close_leases(leases: Iterable[RankLease]) -> None:
    """Close several together: registries that do not answer are waited for at once, and not one
    after the other."""
    closing = list(leases)
    for lease in closing:
        lease.let_go()
    for lease in closing:
        lease.close()
