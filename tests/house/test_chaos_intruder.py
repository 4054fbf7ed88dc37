# SPDX-License-Identifier: Apache-2.0
"""Who comes to real ports with a secret: the right one lets him in, another one does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Self

import pytest
from chaos_run import intruder
from chaos_run.intruder import Attack, attempts

import te
from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankRecord,
    Topology,
)
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.signatures import signed
from sglang_mooncake.control import ControlLoop
from sglang_mooncake.links.curve import Gatekeeper, new_pair
from sglang_mooncake.links.sockets import open_router

HOST = "127.0.0.1"
WAIT_S = 60.0
#: For a lease that must not end.
NEVER_S = 1_000.0
OURS, OTHER = (Keys.from_secrets([text]) for text in (b"0123456789abcdef-a", b"0123456789abcdef-b"))


class Door:
    """The control port of a prefill rank."""

    def __init__(self, keys: Keys) -> None:
        self.pair = new_pair()
        self._keys, self._open = keys, threading.Event()
        self.loop = ControlLoop("door", self)

    def __enter__(self) -> Self:
        self.loop.start()
        assert self._open.wait(WAIT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.close()

    def started(self, loop: ControlLoop) -> None:
        self._gate = Gatekeeper(loop, self._keys.control)
        self._router, self.port = open_router(loop.zmq_context, HOST, 1 << 16, pair=self.pair)
        self._open.set()

    def on_stimulus(self, stimulus: object, now_s: float) -> None: ...

    def on_tick(self, now_s: float) -> None: ...

    def stopped(self) -> None:
        self._router.close(linger=0)
        self._gate.close()


@pytest.fixture
def spec() -> Iterator[Attack]:
    """A prefill rank's ports, for those who have `OURS`."""
    with ExitStack() as stack:
        door = stack.enter_context(Door(OURS))
        registry = stack.enter_context(BootstrapServer(HOST, 0, NEVER_S, keys=OURS.registry))
        engine = stack.enter_context(te.Engine(te.Config(keys=OURS.data, transports=("tcp",))))
        address = f"{HOST}:{registry.port}"
        client = stack.enter_context(BootstrapClient(address, WAIT_S, keys=OURS.registry))
        config = InstanceConfig(Topology(1, 1, 1, 1), KVFormat(1, "float32"), protocol=1)
        key = door.pair.public.decode()
        rank = Rank(RankCoords(0, 0, 0, 0), HOST, door.port, epoch=1, control_key=key)
        client.try_register(signed(RankRecord(config, rank), OURS.record))
        ports = [te.handshake.decode_card(engine.card()).port, door.port, registry.port]
        yield Attack(HOST, ports, address, client.instance(), 1.0)


def test_the_right_secret_opens_what_can_be_opened(
    spec: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    coords, tried = spec.instance.ranks[0].coords, attempts(spec, OURS)
    with monkeypatch.context() as patch:
        # What is let in waits for it, however late the answer comes; what is not would wait long.
        patch.setattr(intruder, "_CONNECT_TIMEOUT_S", WAIT_S)
        patch.setattr(intruder, "_ANSWER_MS", 1000 * int(WAIT_S))
        got = [attempt() for attempt in islice(tried, 4)]
    assert got == [
        "the registry tells of 1 ranks",
        f"the registry forgot {coords}",
        f"the registry gave away the place of {coords}",
        f"a control link to {coords} opens with another secret",
    ]
    assert [attempt() for attempt in tried] == [None] * (1 + len(spec.ports))


def test_another_secret_opens_nothing(spec: Attack) -> None:
    tried = [attempt() for attempt in attempts(spec, OTHER)]
    assert tried == [None] * (5 + len(spec.ports))
