# SPDX-License-Identifier: Apache-2.0
"""Somebody who has all the programs of the deployment and knows all that its registry tells, but
holds another secret: `python -m chaos_run.intruder SPEC`, in JSON (`Attack`).

He asks the registry, takes a rank's place in it, opens control links, and has a transfer engine
connect to every port. What lets him in is printed, as a list of sentences in JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import zmq

import te
from bootstrap_server import BootstrapClient, BootstrapError, Instance, Rank, RankRecord
from bootstrap_server.admission.secret import Keys, new_secret
from bootstrap_server.admission.signatures import signed
from sglang_mooncake.links.curve import decode_pair
from sglang_mooncake.links.sockets import CurvePair
from te.handshake import decode_card, encode

__all__ = ["Attack", "Found", "attempts"]

_ANSWER_MS = 500
_CONNECT_TIMEOUT_S = 1.0


class Attack(msgspec.Struct, frozen=True):
    """ports: all that answer on `host`. instance: what the registry at `registry` tells those who
    have the secret."""

    host: str
    ports: list[int]
    registry: str
    instance: Instance
    lasts_s: float


class Found(msgspec.Struct):
    """attempts: how often he tried. let_in: what he got, in sentences; nothing, hopefully."""

    attempts: int = 0
    let_in: list[str] = msgspec.field(default_factory=list)


def attempts(spec: Attack, keys: Keys) -> Iterator[Callable[[], str | None]]:
    """One after the other. Each returns what it got, or None."""
    rank = spec.instance.ranks[0]
    for ask in (_tell_instance, _end_lease, _take_place):
        yield lambda ask=ask: _of_registry(ask, spec, keys)
    for pair in (decode_pair(keys.control[0]), None):
        yield lambda pair=pair: _control_link(rank, pair)
    with te.Engine(te.Config(keys=keys.data, transports=("tcp",))) as engine:
        for port in spec.ports:
            yield lambda port=port: _engine_link(engine, spec.host, port)


def _of_registry(
    ask: Callable[[BootstrapClient, Attack, Keys], str], spec: Attack, keys: Keys
) -> str | None:
    with BootstrapClient(spec.registry, timeout_s=_CONNECT_TIMEOUT_S, keys=keys.registry) as client:
        try:
            return ask(client, spec, keys)
        except BootstrapError:
            return None


def _tell_instance(client: BootstrapClient, _spec: Attack, _keys: Keys) -> str:
    return f"the registry tells of {len(client.instance().ranks)} ranks"


def _take_place(client: BootstrapClient, spec: Attack, keys: Keys) -> str:
    """As a later life of a rank, at the same port."""
    rank = spec.instance.ranks[0]
    later = msgspec.structs.replace(rank, epoch=time.time_ns())
    client.try_register(signed(RankRecord(spec.instance.config, later), keys.record))
    return f"the registry gave away the place of {rank.coords}"


def _end_lease(client: BootstrapClient, spec: Attack, _keys: Keys) -> str:
    client.release(spec.instance.ranks[0])
    return f"the registry forgot {spec.instance.ranks[0].coords}"


def _control_link(rank: Rank, pair: CurvePair | None) -> str | None:
    """In plain without a pair. He knows the public key of the rank."""
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        if pair is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, rank.control_key.encode())
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        dealer.connect(f"tcp://{rank.host}:{rank.port}")
        open_after = monitor.poll(_ANSWER_MS)
        dealer.disable_monitor()
    finally:
        context.destroy(linger=0)
    how = "with another secret" if pair else "in plain"
    return f"a control link to {rank.coords} opens {how}" if open_after else None


def _engine_link(engine: te.Engine, host: str, port: int) -> str | None:
    """What he knows of the engine there is where it listens. With keys that alone says nothing:
    the engine proves first who it is."""
    card = msgspec.structs.replace(decode_card(engine.card()), host=host, port=port, id="e" * 32)
    try:
        engine.connect(encode(card), _CONNECT_TIMEOUT_S).close()
    except te.Error:
        return None
    return f"the engine at port {port} lets an engine with another secret connect"


def main(text: str) -> Found:
    spec, found = msgspec.json.decode(text, type=Attack), Found()
    until_s = time.monotonic() + spec.lasts_s
    while time.monotonic() < until_s:
        keys = Keys.from_secrets([new_secret().encode()])
        for attempt in attempts(spec, keys):
            got = attempt()
            found.attempts += 1
            if got is not None and got not in found.let_in:
                found.let_in.append(got)
    return found


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(main(sys.argv[1])).decode())
