# SPDX-License-Identifier: Apache-2.0
"""Who may open a control link, and encryption of what is said over it: CURVE (RFC 26, CurveZMQ) and
ZAP (RFC 27), both in libzmq.

Each prefill rank makes a random key pair when it starts, and its signed record in the registry has
the public key. A decode rank proves that it has the deployment's secret with one of `SEATS` key
pairs that follow from it: libzmq tells who is to decide about a connection its public key and
nothing else, so that the prefill rank must know all of these beforehand.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

import zmq
from zmq.utils import z85

from bootstrap_server.refusals import Refusals
from bootstrap_server.secret import KEY_BYTES, hkdf
from sglang_mooncake.links.sockets import CurvePair, Readers

__all__ = ["SEATS", "Gatekeeper", "new_pair", "seat_pair", "take_seat"]

#: Key pairs for decode ranks, per secret. To derive them all takes a prefill rank 20 ms at its
#: start.
SEATS: Final = 256
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_SALT: Final = b"sglang-mooncake control links, version 1"


def new_pair() -> CurvePair:
    """A random one."""
    return CurvePair(*zmq.curve_keypair())


def seat_pair(control_key: bytes, seat: int) -> CurvePair:
    """The pair of a seat, 0 to `SEATS` - 1, of the secret that `control_key` belongs to."""
    label = b"decode rank, seat %d" % seat
    secret = z85.encode(hkdf(control_key, _SALT, label, KEY_BYTES))
    return CurvePair(zmq.curve_public(secret), secret)


def take_seat(control_key: bytes) -> CurvePair:
    """The pair of any seat. Ranks that have the same one do not disturb each other."""
    return seat_pair(control_key, secrets.randbelow(SEATS))


class Gatekeeper:
    """Answers libzmq's question whether a connection may be made: yes for holders of a seat.

    Each connection gets a name that no other one has had, which libzmq attaches to all that comes
    over it (`User-Id`). Its part before the dot is the seat. For the loop thread alone.
    """

    def __init__(self, readers: Readers, keys: Sequence[bytes]) -> None:
        """`keys`: those of `secret.Keys.control`, at least one. Must be there before the socket
        that it guards is bound. Raises zmq.ZMQError when the context has a gatekeeper already."""
        self._seats: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            for seat in range(SEATS):
                self._seats[z85.decode(seat_pair(key, seat).public)] = index * SEATS + seat
        self._refusals = Refusals("control connection")
        self._admitted = 0
        self._questions = readers.zmq_context.socket(zmq.REP)
        self._questions.bind(_ZAP_ENDPOINT)
        readers.add_reader(self._questions, self._answer)

    def close(self) -> None:
        """From now on nobody is let in: the guarded socket insists on an answer."""
        self._questions.close(linger=0)

    def _answer(self) -> None:
        while True:
            try:
                question = self._questions.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._questions.send_multipart(self._reply(question))

    def _reply(self, question: list[bytes]) -> list[bytes]:
        version, request_id, _, address, _, _, *credentials = question
        seat = self._seats.get(credentials[0]) if len(credentials) == 1 else None
        if seat is None:
            self._refusals.note(
                address.decode("ascii", "replace"),
                "its secret differs from this rank's; give all servers of the deployment the "
                "same secret",
            )
            return [version, request_id, b"400", b"", b"", b""]
        self._admitted += 1
        return [version, request_id, b"200", b"", b"%d.%d" % (seat, self._admitted), b""]
