# SPDX-License-Identifier: Apache-2.0
"""``te doctor --listen``: the far side as a process of its own, for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from te.doctor.channel import REQUEST_BYTES_MAX, Channel, ChannelError, answer
from te.doctor.messages import REQUESTS, Host, Refused
from te.doctor.service import serve
from te.errors import Error, UsageError
from te.proof import Key

__all__ = ["Listener"]

#: Of a caller, for its first words.
CALL_TIMEOUT_S: Final = 3.0
#: For the end of the check before: the next call of the same person may come a moment earlier.
TURN_TIMEOUT_S: Final = 2.0
#: Connections that have not said them yet; one more is closed.
CALLS_MAX: Final = 16
_POLL_S: Final = 0.2

Say = Callable[[str], None]


class Listener:
    """Accepts doctors with a key in common, and serves one at a time."""

    def __init__(self, host: str, port: int, keys: tuple[Key, ...]) -> None:
        """``UsageError`` when the address cannot be had; 0 takes any free port."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._sock = socket.create_server((host, port), family=family)
        except OSError as exc:
            raise UsageError(f"cannot listen on {host} port {port}: {exc.strerror or exc}") from exc
        self._sock.settimeout(_POLL_S)
        self._keys = keys
        self._calls = threading.Semaphore(CALLS_MAX)
        self._turn = threading.Lock()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._sock.getsockname()[1])

    def run(
        self,
        describe: Callable[[str], Host],
        lifetime_s: float,
        say: Say,
        is_over: threading.Event | None = None,
    ) -> None:
        """Serves for so long, and then until the session under way is over.

        Args:
            describe: this host, by the address at which it was reached.
            say: told of sessions and of what was refused, a sentence each.
            is_over: ends it earlier.
        """
        deadline_s = time.monotonic() + lifetime_s
        is_over = is_over or threading.Event()
        with self._sock:
            while time.monotonic() < deadline_s and not is_over.is_set():
                try:
                    sock, (where, *_) = self._sock.accept()
                except TimeoutError:
                    continue
                if not self._calls.acquire(blocking=False):
                    sock.close()
                    continue
                arguments = (sock, where, describe, say)
                threading.Thread(target=self._greet, args=arguments, daemon=True).start()
        with self._turn:
            pass

    def _greet(
        self, sock: socket.socket, where: str, describe: Callable[[str], Host], say: Say
    ) -> None:
        try:
            address = str(sock.getsockname()[0])
            channel = answer(sock, self._keys, CALL_TIMEOUT_S)
            has_turn = self._turn.acquire(timeout=TURN_TIMEOUT_S)
            if not has_turn:
                _refuse(channel, "another check is under way")
        except (ChannelError, OSError) as exc:
            say(f"{where}: refused: {exc}")
            return
        finally:
            self._calls.release()
        if has_turn:
            self._serve(channel, where, lambda: describe(address), say)
        else:
            say(f"{where}: refused: another check is under way")

    def _serve(self, channel: Channel, where: str, describe: Callable[[], Host], say: Say) -> None:
        try:
            say(f"{where}: a check begins")
            serve(channel, describe())
        except Error as exc:
            say(f"{where}: the check is over ({exc})")
        finally:
            channel.close()
            self._turn.release()


def _refuse(channel: Channel, reason: str) -> None:
    """Says so to its first request."""
    with contextlib.closing(channel):
        channel.receive(REQUESTS, REQUEST_BYTES_MAX, CALL_TIMEOUT_S)
        channel.send(Refused(reason), CALL_TIMEOUT_S)
