# SPDX-License-Identifier: Apache-2.0
"""What stands behind an agent once it has te's engine, and what the operator says of it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

import te
from bootstrap_server.admission.refusals import Pace
from sglang_mooncake.faces.exposed import check_exposure
from sglang_mooncake.faces.nixl.inbox import packed, unpacked
from sglang_mooncake.faces.nixl.links import Job, Link
from sglang_mooncake.faces.nixl.memory import Memory
from sglang_mooncake.faces.nixl.metadata import encode
from sglang_mooncake.faces.nixl.names import Backend
from sglang_mooncake.faces.nixl.options import Notices, Options
from sglang_mooncake.faces.nixl.registrations import Range
from sglang_mooncake.faces.nixl.remotes import Remote, Remotes
from sglang_mooncake.workers import Workers

__all__ = ["AgentImpl"]

logger = logging.getLogger(__name__)

CONNECTING_THREADS: Final = 16
"""Agents that are connected to at once; the sum of calls that wait is bounded, too."""
ENDING_THREADS: Final = 16
"""For transfers that have failed or that nobody wants any more. A peer that stands still holds each
of its own for a second or more: of one peer `ENDING_OF_ONE` end at a time, and nobody who is being
connected waits for them."""
ENDING_OF_ONE: Final = 4
CALLS_MAX: Final = 65_536


class _Notification:
    """A job of a link, which is tried once."""

    def __init__(
        self, notices: Notices, data: bytes, whom: str, then: Callable[[], None] | None
    ) -> None:
        self._notices, self._data, self._whom, self._then = notices, data, whom, then

    def begin(self, peer: te.Peer) -> None:
        """See `links.Job`."""
        try:
            self._notices.send(peer, self._data)
        except te.QueueFull as exc:  # Not to be tried again: others wait behind it.
            self.fail(exc)
            return
        self._sent()

    def fail(self, problem: Exception) -> None:
        """See `links.Job`."""
        logger.warning(
            "nixl over te: a notification of %d bytes to %s was not sent: %s",
            len(self._data),
            self._whom,
            problem,
        )
        self._sent()

    def _sent(self) -> None:
        if self._then is not None:
            self._then()


class Abandoned:
    """What is to be done for handles that have gone. A handle may go in the middle of any line, in
    whichever thread collects garbage, and that thread may hold any lock: `put` takes none."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_make, args=(self._calls,), name=name, daemon=True).start()

    def put(self, call: Callable[[], None]) -> None:
        """Has it called in a thread of its own. It must not wait."""
        self._calls.put(call)

    def close(self) -> None:
        """Ends the thread, behind what was put before. Idempotent."""
        self._calls.put(None)


def _make(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except Exception:
            logger.exception("nixl over te: a transfer that nobody wants any more goes on")


class AgentImpl:
    """Does not know the agent, so that the agent can go."""

    def __init__(self, name: str, options: Options, engine: te.Engine) -> None:
        self.name: Final = name
        self.engine: Final = engine
        self.connecting: Final = Workers(f"nixl-{engine.id[:8]}", CONNECTING_THREADS, CALLS_MAX)
        self.ending: Final = Workers(
            f"nixl-ends-{engine.id[:8]}", ENDING_THREADS, CALLS_MAX, ENDING_OF_ONE
        )
        self.memory: Final = Memory(engine)
        self.remotes: Final = Remotes(name, self._link)
        self._notices: Final = options.make_notices(engine)
        self._foreign: Final = Pace()
        self._itself: Remote | None = None
        self.abandoned: Final = Abandoned(f"nixl-gone-{engine.id[:8]}")

    @classmethod
    def open(cls, name: str, options: Options, devices: tuple[str, ...], threads: int) -> AgentImpl:
        """``nixlBackendError`` with the reason for which te has no engine, or may have none."""
        host = options.host
        try:
            check_exposure(host, options.has_secret, options.insecure, options.how_to_insist)
            engine = options.open_engine(host, devices, threads)
        except (te.Error, ValueError, OSError, RuntimeError) as exc:
            raise Backend(str(exc)) from exc
        try:
            return cls(name, options, engine)
        except BaseException:
            engine.close()
            raise

    def metadata(self) -> bytes:
        """All of it."""
        generation, ranges = self.memory.ranges()
        return encode(self.name, self.engine.card(), True, generation, ranges)

    def part(self, ranges: list[Range], with_card: bool) -> bytes:
        """Of these registrations alone."""
        card = self.engine.card() if with_card else b""
        return encode(self.name, card, False, 0, ranges)

    def itself(self) -> Remote:
        """This agent as its own peer."""
        if self._itself is None:
            identity = (self.engine.id, self.engine.epoch)
            self._itself = Remote(self.name, identity, self._link(self.engine.card()))
        return self._itself

    def notification(
        self, remote: Remote, message: bytes, then: Callable[[], None] | None = None
    ) -> Job:
        """``then`` is called once it was sent, or cannot be."""
        return _Notification(self._notices, packed(self.name, message), remote.name, then)

    def arrived(self) -> list[tuple[str, bytes]]:
        """Notifications that have come: the name that each sender gives itself, and the message. A
        name proves nothing; whoever may send at all may read and write the memory as well."""
        found = []
        for engine_id, data in self._notices.take():
            try:
                sender, message = unpacked(data)
            except ValueError as exc:
                more = self._foreign.more()
                if more is not None:  # A peer may send as many of them as it likes.
                    logger.warning("nixl over te: engine %s sent %s%s", engine_id, exc, more)
                continue
            found.append((sender, message))
        return found

    def close(self) -> None:
        """Fails what is under way. Idempotent."""
        self.abandoned.close()
        self.connecting.close()
        self.ending.close()
        self.engine.close()

    def _link(self, card: bytes) -> Link:
        return Link(self.engine, card, self.connecting)
