# SPDX-License-Identifier: Apache-2.0
"""An HTTP connection of the standard library with one deadline for the whole of a request, and one
bound for the whole of an answer: a socket's own timeout begins anew with each byte that comes, and
``http.client`` reads a chunk that says of itself that it has -1 bytes for as long as more come."""

from __future__ import annotations

import http.client
import socket
import time
from typing import Any, Final

__all__ = ["ANSWER_BYTES_MAX", "DIAL_S", "DeadlineConnection"]

#: Of the body of an answer. An instance of 65,536 ranks, the most a registry takes, makes about
#: 10 MB of JSON.
ANSWER_BYTES_MAX: Final = 64 << 20
#: For its headers, and around its chunks.
AROUND_BYTES_MAX: Final = 1 << 20

#: An address that does not answer is dialled anew after so long. TCP asks again after 1, 3 and 7 s:
#: a host that was cut off would be found up to 4 s after it is back.
DIAL_S: Final = 0.9


class _DeadlineSocket(socket.socket):
    """No call waits beyond `deadline_s`, however the other side deals out its bytes, and no more of
    them are taken than `left_bytes`."""

    #: Of the monotonic clock.
    deadline_s = 0.0
    left_bytes = 0

    def recv_into(self, *args: Any) -> int:
        self._allow_what_is_left()
        nbytes = super().recv_into(*args)
        self.left_bytes -= nbytes
        if self.left_bytes < 0:
            raise http.client.HTTPException("an answer that is longer than any that is expected")
        return nbytes

    def sendall(self, *args: Any) -> None:
        self._allow_what_is_left()
        super().sendall(*args)

    def _allow_what_is_left(self) -> None:
        self.settimeout(_left_s(self.deadline_s))


class DeadlineConnection(http.client.HTTPConnection):
    """One connection whose requests each have one deadline for all that they are made of: to
    connect, to send, and for the answer's headers and body. (The resolver of names has limits of
    its own.) Reading an answer raises ``HTTPException`` if it is much longer than
    ``ANSWER_BYTES_MAX``."""

    #: Of the monotonic clock, for the request under way.
    deadline_s = 0.0

    def connect(self) -> None:
        """To the first address that answers. They are asked again and again, unless all refuse."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        while True:
            problems: list[OSError] = []
            for tried, one in enumerate(found):
                try:
                    # One address that does not answer leaves time for the others.
                    share_s = _left_s(self.deadline_s) / (len(found) - tried)
                    self.sock = self._dial(one, min(share_s, DIAL_S))
                except OSError as error:
                    problems.append(error)
                else:
                    return
            is_silent = any(isinstance(one, TimeoutError) for one in problems)
            if not is_silent or time.monotonic() >= self.deadline_s:
                raise problems[-1]  # getaddrinfo never returns an empty list

    def _dial(self, found: Any, timeout_s: float) -> _DeadlineSocket:
        """To one address, as getaddrinfo has told it; ``OSError``."""
        family, kind, protocol, _, address = found
        sock = _DeadlineSocket(family, kind, protocol)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            raise
        self._bound(sock)
        return sock

    def begin(self, deadline_s: float) -> None:
        """The next request has to be over by then."""
        self.deadline_s = deadline_s
        if isinstance(self.sock, _DeadlineSocket):
            self._bound(self.sock)

    def _bound(self, sock: _DeadlineSocket) -> None:
        sock.deadline_s = self.deadline_s
        sock.left_bytes = ANSWER_BYTES_MAX + AROUND_BYTES_MAX


def _left_s(deadline_s: float) -> float:
    """Raises TimeoutError when nothing is left."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
