# SPDX-License-Identifier: Apache-2.0
"""Which silence of an owner is its own; and what the end of its connection means."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from msgspec import structs

from bootstrap_server.running import RunningClock
from kvstore.client.following import STILL_S, Followed
from kvstore.protocol.messages import Changes, Follow, Hello, Question, decode_question, split
from kvstore.protocol.sockets import Where


class Socket:
    """Takes all that is sent, and has no answer."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, frame: Any, _flags: int) -> None:
        self.sent.append(frame)

    def recv_multipart(self, _flags: int) -> list[bytes]:
        return []

    def disable_monitor(self) -> None:
        pass

    def close(self) -> None:
        pass


class World:
    """What an owner's follower has around it, and the time."""

    def __init__(self) -> None:
        self.time_s = 1000.0
        self.clock = RunningClock(lambda: self.time_s, STILL_S)
        self.made: list[Socket] = []
        self.heard: list[bool] = []
        self.sockets = SimpleNamespace(connect_watched=self._connect)
        self.readers: dict[Socket, Callable[[], None]] = {}
        self.loop = SimpleNamespace(
            add=self.readers.__setitem__, remove=self.readers.pop, has_sent=lambda _: None
        )
        self.dropped: list[int] = []
        self.applied: list[bytes] = []
        self.table = SimpleNamespace(
            drop=self.dropped.append, apply=lambda _, changes: self.applied.append(changes)
        )
        self.monitor = Socket()

    def _connect(self, _where: Where) -> tuple[Socket, Socket]:
        self.made.append(Socket())
        self.monitor = Socket()
        return self.made[-1], self.monitor

    def admit(self, _one: Followed) -> bool:
        return True

    def set_heard(self, _number: int, is_heard: bool) -> bool:
        self.heard.append(is_heard)
        return True


def test_an_owner_is_not_silent_while_its_client_stands_still() -> None:
    world = World()
    followed = Followed(world, "name", Where("ipc:///nowhere", b""))  # type: ignore[arg-type]
    question = followed._asked.copy()
    for _ in range(3):
        world.time_s += 3600.0  # Whatever was said meanwhile has not been read.
        followed.check(world.clock.now_s(), timeout_s=2.0)
    assert followed._asked == question, "its answer is still waited for"
    assert (len(world.made), world.heard) == (1, [])
    for _ in range(4):
        world.time_s += STILL_S
        followed.check(world.clock.now_s(), timeout_s=2.0)
    assert (len(world.made), world.heard) == (2, [False]), "that silence is its own"


def test_an_owner_whose_connection_has_ended_is_greeted_at_once_and_not_when_it_is_late() -> None:
    """Its answer was lost with the connection."""
    world = World()
    followed = Followed(world, "name", Where("ipc:///nowhere", b""))  # type: ignore[arg-type]
    followed._on_hello(Hello(b"engine", 1, 0, 0, 1, 1, 0, 0))
    assert world.heard == [True]
    former = set(world.readers)
    world.readers[world.monitor]()
    assert (len(world.made), world.heard) == (2, [True, False])
    assert len(world.made[-1].sent) == 1, "it is greeted"
    assert len(world.readers) == 2
    assert not former & set(world.readers)


def test_an_owner_that_ends_connections_before_its_greeting_is_left_to_libzmq() -> None:
    """As one with another secret does: it would be dialled without end."""
    world = World()
    Followed(world, "name", Where("ipc:///nowhere", b""))  # type: ignore[arg-type]
    world.readers[world.monitor]()
    assert (len(world.made), world.heard) == (1, [])


def cut(world: World) -> None:
    world.readers[world.monitor]()


def test_what_is_known_of_an_owner_outlives_a_cut_but_not_its_next_start() -> None:
    """Whoever has found a page before a cut loads it a moment later."""
    world = World()
    followed = Followed(world, "name", Where("ipc:///nowhere", b""))  # type: ignore[arg-type]
    hello = Hello(b"engine", 1, 0, 0, 1, 1, 2, 7)
    followed._on_hello(hello)
    assert world.dropped == [0], "what an owner that had the number had"
    cut(world)
    followed._on_hello(hello)
    assert world.dropped == [0, 0], "its snapshot was not whole"
    followed._on_snapshot(Changes(1, 7, b"all"))
    assert asked(world.made[-1])[-1] == Follow(7)
    followed._on_changes(Changes(1, 9, b"more"))
    cut(world)
    followed._on_hello(structs.replace(hello, number=12))
    assert asked(world.made[-1])[-1] == Follow(9), "the changes since, and not all of it"
    assert (world.dropped, world.applied) == ([0, 0], [b"all", b"more"])
    followed._on_changes(Changes(1, 9, None))
    assert world.dropped == [0, 0]
    followed._on_hello(structs.replace(hello, number=99))
    assert world.dropped == [0] * 3, "these are not kept any more"
    followed._on_snapshot(Changes(1, 99, b"all"))
    followed._on_hello(structs.replace(hello, epoch=2, number=0))
    assert world.dropped == [0] * 4, "it was started anew"


def asked(socket: Socket) -> list[Question]:
    return [decode_question(split(frame)[1]) for frame in socket.sent]
