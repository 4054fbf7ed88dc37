# SPDX-License-Identifier: Apache-2.0
"""Rooms that a decode server gives up before it is linked to all their prefill ranks: left as
notices at the prefill server's registry by decode ranks, and asked for there by prefill ranks
(`bootstrap_server/ranks/given_up.py` says why)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

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
    told: called in the thread with each room, the reason, and whether both servers do not serve
        each other.
    """

    def __init__(
        self, make_client: Callable[[], BootstrapClient], told: Callable[[int, str, bool], None]
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
                for room, said in found.rooms.items():
                    if not self._closing.is_set():
                        self._told(room, said.reason, said.refused)


class GivenUpNotices:
    """Leaves notices at registries, in threads. `leave` never waits, and what cannot be told costs
    the prefill side its deadline alone."""

    def __init__(self, make_client: Callable[..., BootstrapClient] = BootstrapClient) -> None:
        self._make_client = make_client
        self._workers = Workers("kv-given-up", _THREADS, _NOTICES_MAX, 1)

    def leave(
        self, address: str, room: int, reason: str, refused: bool, keys: Sequence[bytes] = ()
    ) -> None:
        """``refused``: both servers do not serve each other. ``keys``: those of the registry,
        unless it has others; then the notice proves nothing."""
        self._workers.submit(lambda _: self._leave(address, room, reason, refused, keys), address)

    def close(self) -> None:
        self._workers.close()

    def _leave(
        self, address: str, room: int, reason: str, refused: bool, keys: Sequence[bytes]
    ) -> None:
        try:
            with self._make_client(address, keys=keys) as client:
                client.give_up([room], reason, refused)
        except BootstrapError as error:
            logger.debug("room %d: its prefill server is not told: %s", room, error)
