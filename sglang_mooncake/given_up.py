# SPDX-License-Identifier: Apache-2.0
"""Rooms that a decode server gives up because the prefill server's registry does not serve it: left
as notices at that registry by decode ranks, and asked for there by prefill ranks
(`bootstrap_server/ranks/given_up.py` says why)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bootstrap_server import BootstrapClient, BootstrapError
from sglang_mooncake.workers import Workers

__all__ = ["GivenUpNotices", "GivenUpWatch"]

logger = logging.getLogger(__name__)

#: How long the registry may keep a question: a watch ends at most this long after it was told to.
_ASK_S = 10.0
_RETRY_S = 2.0
_THREADS = 2
_NOTICES_MAX = 1_024


class GivenUpWatch:
    """Asks a registry for rooms that were given up, in a thread, until it is closed.

    make_client: the registry's client; called once, in the thread.
    told: called in the thread with each room and the reason.
    """

    def __init__(
        self, make_client: Callable[[], BootstrapClient], told: Callable[[int, str], None]
    ) -> None:
        self._make_client, self._told = make_client, told
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-given-up", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Does not wait for a question that is under way. Idempotent."""
        self._closing.set()

    def _run(self) -> None:
        revision = 0
        with self._make_client() as client:
            while not self._closing.is_set():
                try:
                    found = client.given_up(revision, _ASK_S)
                except BootstrapError as error:
                    # The rank's lease tells the log what is wrong with its registry.
                    logger.debug("no notices of rooms that were given up: %s", error)
                    self._closing.wait(_RETRY_S)
                    continue
                revision = found.revision
                for room, reason in found.rooms.items():
                    if not self._closing.is_set():
                        self._told(room, reason)


class GivenUpNotices:
    """Leaves notices at registries, in threads. `leave` is for the scheduler thread: it never
    waits, and what cannot be told costs the prefill side its deadline alone."""

    def __init__(self, make_client: Callable[[str], BootstrapClient] = BootstrapClient) -> None:
        self._make_client = make_client
        self._workers = Workers("kv-given-up", _THREADS, _NOTICES_MAX, 1)

    def leave(self, address: str, room: int, reason: str) -> None:
        self._workers.submit(lambda _: self._leave(address, room, reason), address)

    def close(self) -> None:
        self._workers.close()

    def _leave(self, address: str, room: int, reason: str) -> None:
        try:
            with self._make_client(address) as client:
                client.give_up([room], reason)
        except BootstrapError as error:
            logger.debug("room %d: its prefill server is not told: %s", room, error)
