# SPDX-License-Identifier: Apache-2.0
"""An HTTP connection of the standard library with one deadline for the whole of a request: a
socket's own timeout begins anew with each byte that comes."""

from __future__ import annotations

import http.client
import socket
import time
from typing import Any, Final

__all__ = ["DIAL_S", "DeadlineConnection"]

#: An address that does not answer is dialled anew after so long. TCP asks again after 1, 3 and 7 s:
#: a host that was cut off would be found up to 4 s after it is back.
DIAL_S: Final = 0.9


class _DeadlineSocket(socket.socket):
    """No call waits beyond `deadline_s`, however the other side deals out its bytes."""

    #: Of the monotonic clock.
    deadline_s = 0.0

    def recv_into(self, *args: Any) -> int:
        self._allow_what_is_left()
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        self._allow_what_is_left()
        super().sendall(*args)

    def _allow_what_is_left(self) -> None:
        self.settimeout(_left_s(self.deadline_s))


class DeadlineConnection(http.client.HTTPConnection):
    """One connection whose requests each have one deadline for all that they are made of: to
    connect, to send, and for the answer's headers and body. (The resolver of names has limits of
    its own.)"""

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
        sock.deadline_s = self.deadline_s
        return sock

    def begin(self, deadline_s: float) -> None:
        """The next request has to be over by then."""
        self.deadline_s = deadline_s
        if isinstance(self.sock, _DeadlineSocket):
            self.sock.deadline_s = deadline_s


def _left_s(deadline_s: float) -> float:
    """Raises TimeoutError when nothing is left."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
