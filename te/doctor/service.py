# SPDX-License-Identifier: Apache-2.0
"""The far side of a check: opens engines as it is asked to, one at a time, and says what came."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from te.config import Config
from te.doctor.channel import REQUEST_BYTES_MAX, Channel, ChannelError, answer
from te.doctor.facts import Facts, gather
from te.doctor.findings import Finding
from te.doctor.messages import (
    BUFFER_NBYTES,
    REQUESTS,
    Digest,
    Digested,
    EngineOpened,
    Host,
    Look,
    OpenEngine,
    Refused,
    Reply,
    Request,
)
from te.engine import Engine
from te.errors import Error
from te.handshake import PROTOCOL_VERSION
from te.proof import NO_KEY
from te.topology import read_addresses
from te.topology.gids import is_overlay
from te.version import version

__all__ = ["LOOPBACK", "Service", "describe", "engine_config", "host_addresses", "main", "serve"]

CONNECT_TIMEOUT_S: Final = 5.0
STALL_TIMEOUT_S: Final = 3.0
RAIL_TIMEOUT_S: Final = 1.5
#: Between two requests: the near side tries pairs that do not connect meanwhile.
IDLE_TIMEOUT_S: Final = 120.0
REPLY_TIMEOUT_S: Final = 10.0
ADDRESSES_MAX: Final = 32
LOOPBACK: Final = "127.0.0.1"
PR_SET_PDEATHSIG: Final = 1

_INTERFACES: Final = Path("/sys/class/net")


def engine_config(
    transport: str, nic: str, address: str, gid_index: int | None, key: bytes
) -> Config:
    """The settings of a check's engines, on both sides. No spinning: several may share a core."""
    return Config(
        host=address,
        transports=(transport,),
        nics=(nic,) if nic else (),
        gid_index=gid_index,
        keys=(key,),
        workers=1,
        spin_s=0.0,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        stall_timeout_s=STALL_TIMEOUT_S,
        rail_timeout_s=RAIL_TIMEOUT_S,
    )


def host_addresses(interfaces: Path = _INTERFACES) -> tuple[str, ...]:
    """IP addresses of this host's interfaces, without the loopback one, those of container
    networks and link-local ones."""
    found = []
    for path in sorted(interfaces.iterdir()):
        if path.name != "lo" and not is_overlay(path.name):
            found += [gid.text.removeprefix("::ffff:") for gid in read_addresses(path.name)]
    return tuple(found[:ADDRESSES_MAX])


def describe(
    facts: Facts, findings: Sequence[Finding], gid_index: int | None, address: str
) -> Host:
    """This side of a check, which is reached at ``address``."""
    others = (one for one in host_addresses() if one != address)
    return Host(
        name=socket.gethostname(),
        version=version(),
        protocol=PROTOCOL_VERSION,
        addresses=(address, *others),
        facts=facts,
        findings=tuple(findings),
        gid_index=gid_index,
    )


class Service:
    """Answers the requests of one session. Use it as a context manager."""

    def __init__(self, host: Host, key: bytes) -> None:
        """``key``: of the engines."""
        self._host = host
        self._key = key
        self._engine: Engine | None = None
        self._memory = np.zeros(BUFFER_NBYTES, np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def reply(self, request: Request) -> Reply:
        """``Refused`` with the reason for what cannot be done."""
        try:
            match request:
                case Look():
                    return self._host
                case OpenEngine():
                    return self._open(request)
                case Digest():
                    return Digested(hashlib.sha256(self._memory.data).digest())
        except (Error, OSError, ValueError) as exc:
            return Refused(str(exc))

    def _open(self, request: OpenEngine) -> EngineOpened:
        if request.address not in self._host.addresses:
            raise ValueError(f"{request.address} is no address of {self._host.name}")
        names = [port.nic.name for port in self._host.facts.ports]
        if request.nic and request.nic not in names:
            raise ValueError(f"{request.nic} is not among the devices of {self._host.name}")
        self._close()
        self._memory[:] = 0
        engine = Engine(
            engine_config(
                request.transport,
                request.nic,
                request.address,
                self._host.gid_index,
                self._key,
            )
        )
        self._engine = engine
        engine.register(self._memory, remote="read-write")
        return EngineOpened(card=engine.card(), memory=self._memory.ctypes.data)

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def serve(channel: Channel, host: Host) -> None:
    """Answers until the near side has gone. ``ChannelError`` for that, for what it says, or when it
    says nothing for long."""
    with Service(host, channel.engine_key) as service:
        while True:
            request: Any = channel.receive(REQUESTS, REQUEST_BYTES_MAX, IDLE_TIMEOUT_S)
            channel.send(service.reply(request), REPLY_TIMEOUT_S)


def main(arguments: Sequence[str]) -> None:
    """Serves the parent on the inherited socket until that hangs up: ``python -m te.doctor.service
    FD [GID_INDEX]``."""
    # The kernel ends this process with the parent's, whatever it hangs in.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.getLogger("te").addHandler(logging.NullHandler())
    gid_index = int(arguments[1]) if len(arguments) > 1 else None
    channel = answer(socket.socket(fileno=int(arguments[0])), (NO_KEY,), REPLY_TIMEOUT_S)
    with contextlib.suppress(ChannelError):  # The parent has hung up.
        serve(channel, describe(gather(), (), gid_index, LOOPBACK))


if __name__ == "__main__":
    main(sys.argv[1:])
