# SPDX-License-Identifier: Apache-2.0
"""Who may open a control link, and encryption of what is said over it: CURVE (RFC 26, CurveZMQ) and
ZAP (RFC 27), both in libzmq.

Each prefill rank makes a random key pair when it starts, and its signed record in the registry has
the public key. Decode ranks prove that they have the deployment's secret with the one key pair that
follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import zmq
from zmq.utils import z85

from bootstrap_server.admission.refusals import Refusals
from bootstrap_server.admission.secret import KEY_BYTES, hkdf
from sglang_mooncake.links.sockets import CurvePair, Readers

__all__ = ["Gatekeeper", "decode_pair", "new_pair"]

_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_SALT: Final = b"sglang-mooncake control links, version 2"
_LABEL: Final = b"decode rank"


def new_pair() -> CurvePair:
    """A random one."""
    return CurvePair(*zmq.curve_keypair())


def decode_pair(control_key: bytes) -> CurvePair:
    """That of all decode ranks with the secret that `control_key` belongs to."""
    secret = z85.encode(hkdf(control_key, _SALT, _LABEL, KEY_BYTES))
    return CurvePair(zmq.curve_public(secret), secret)


class Gatekeeper:
    """Answers libzmq's question whether a connection may be made: yes for those who prove a secret.
    For the loop thread alone."""

    def __init__(self, readers: Readers, keys: Iterable[bytes]) -> None:
        """`keys`: those of `secret.Keys.control`. Must be there before the socket that it guards is
        bound. Raises zmq.ZMQError when the context has a gatekeeper already."""
        self._allowed = [[z85.decode(decode_pair(key).public)] for key in keys]
        self._refusals = Refusals("control connection")
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
        if credentials in self._allowed:
            return [version, request_id, b"200", b"", b"", b""]
        self._refusals.note(
            address.decode("ascii", "replace"),
            "its secret differs from this rank's; give all servers of the deployment the same "
            "secret",
        )
        return [version, request_id, b"400", b"", b"", b""]
