# SPDX-License-Identifier: Apache-2.0
"""Rails of iWARP, the destination's side: listens by rdma_cm where a source was told to dial."""

from __future__ import annotations

import errno
import logging
import secrets
import struct
import threading
import time
from dataclasses import dataclass

from te.connect.throttle import Throttle
from te.core.wire import RECEIVE_DEPTH
from te.transports.base import Local, Watch
from te.transports.rdma._core import RdmaLink
from te.transports.rdma.direct import BUILD_TIMEOUT_S, add_queue_pair
from te.transports.rdma.messages import RailAnswer, RailOffer
from te.verbs._core import CmListener, CmRequest
from te.verbs.fabric import Nic

__all__ = ["CmAcceptor"]

logger = logging.getLogger(__name__)

# Number of the link, its rail, and a secret.
TOKEN = struct.Struct("<QI16s")


@dataclass(frozen=True)
class _Expected:
    """A source that was told to dial."""

    token: bytes
    link: RdmaLink
    offer: RailOffer
    nic: Nic
    until_s: float
    hello: int


class CmAcceptor:
    """One listener for each address that a source has asked for. Any thread may call anything."""

    def __init__(self, local: Local, watch: Watch) -> None:
        """Its listeners are watched for as long as it lives."""
        self._local = local
        self._watch = watch
        self._lock = threading.Lock()
        #: Under the lock: the listener of each device and address, and the connection that is
        #: expected for each link and rail: the offer of the newest hello.
        self._listeners: dict[tuple[int, int], CmListener] = {}
        self._expected: dict[tuple[int, int], _Expected] = {}
        #: Used by the loop's thread alone.
        self._throttle = Throttle()

    def expect(self, link: RdmaLink, offer: RailOffer, nic: Nic, hello: int) -> RailAnswer:
        """Where the source shall dial that has made the offer in the hello of that number;
        ``OSError``."""
        index = offer.remote_gid_index
        if index >= len(nic.gids):
            raise OSError(
                errno.EADDRNOTAVAIL, f"{nic.name} has no address {index} here, but {len(nic.gids)}"
            )
        token = TOKEN.pack(link.number, offer.rail, secrets.token_bytes(16))
        now_s = time.monotonic()
        with self._lock:
            listener = self._listeners.get((nic.index, index))
            if listener is None:
                listener = self._listen(nic.gids[index].raw)
                self._listeners[nic.index, index] = listener
                self._watch(listener.fd, lambda _, one=listener: self._on_ready(one))  # type: ignore[misc]
            self._expected = {k: one for k, one in self._expected.items() if one.until_s > now_s}
            newest = self._expected.get((link.number, offer.rail))
            if newest is None or newest.hello < hello:
                self._expected[link.number, offer.rail] = _Expected(
                    token, link, offer, nic, now_s + BUILD_TIMEOUT_S, hello
                )
        return RailAnswer(port=listener.port, token=token)

    def _listen(self, address: bytes) -> CmListener:
        """On the first free port of those that are configured; ``OSError``."""
        config = self._local.config
        if config.port_last is None:
            return CmListener(address, 0)
        for port in range(config.port, config.port_last + 1):
            try:
                return CmListener(address, port)
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
        raise OSError(
            errno.EADDRINUSE,
            f"none of the ports from {config.port} to {config.port_last} is free; give a wider"
            " range",
        )

    def close(self) -> None:
        """Expects nobody any more; its listeners go with the loop that watches them."""
        with self._lock:
            self._listeners.clear()
            self._expected.clear()

    def _on_ready(self, listener: CmListener) -> None:
        """A request that nobody expects is rejected as it is dropped: a stranger's waits for no
        thread."""
        for request in listener.requests():
            expected = self._known(request.token)
            if expected is not None:
                # Making a queue pair may take a device milliseconds.
                self._local.run(lambda one=request, of=expected: self._take(one, of))  # type: ignore[misc]
            elif self._throttle.admits(time.monotonic()):
                logger.warning(
                    "rejected a connection by rdma_cm that nobody expects any more%s",
                    self._throttle.more(),
                )

    def _take(self, request: CmRequest, expected: _Expected) -> None:
        """Makes this side's end."""
        nic, offer = expected.nic, expected.offer
        try:
            queue_pair = request.queue_pair(nic.device, RECEIVE_DEPTH, nic.max_message_bytes)
            add_queue_pair(
                queue_pair, expected.link, offer, offer.remote_nic, offer.nic, 0, expected.hello
            )
        except OSError as exc:
            logger.warning("rejected rail %d by %s: %s", offer.rail, nic.name, exc.strerror)

    def _known(self, token: bytes) -> _Expected | None:
        if len(token) < TOKEN.size:
            return None
        number, rail, _ = TOKEN.unpack_from(token)
        with self._lock:
            expected = self._expected.get((number, rail))
            if expected is None or time.monotonic() > expected.until_s:
                return None
            # A device may pad what the other side said.
            if not secrets.compare_digest(expected.token, token[: TOKEN.size]):
                return None
            return self._expected.pop((number, rail))
