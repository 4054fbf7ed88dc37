# SPDX-License-Identifier: Apache-2.0
"""Which silence of an owner is its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bootstrap_server.running import RunningClock
from kvstore.far import STILL_S, Followed
from kvstore.sockets import Where


class Socket:
    """Takes all that is sent, and has no answer."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_multipart(self, frames: Any, _flags: int) -> None:
        self.sent.append(frames)

    def close(self) -> None:
        pass


class World:
    """What an owner's follower has around it, and the time."""

    def __init__(self) -> None:
        self.time_s = 1000.0
        self.clock = RunningClock(lambda: self.time_s, STILL_S)
        self.made: list[Socket] = []
        self.heard: list[bool] = []
        self.sockets = SimpleNamespace(connect=self._connect)
        self.loop = SimpleNamespace(add=lambda *_: None, remove=lambda _: None)

    def _connect(self, _where: Where) -> Socket:
        self.made.append(Socket())
        return self.made[-1]

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
