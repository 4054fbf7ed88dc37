# SPDX-License-Identifier: Apache-2.0
"""The links of a prefill rank by themselves, and decode ranks' ends by hand."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Self

import zmq
from handover import HOST, PATIENT, WAIT_S, Pool, make_context
from zmq.utils.monitor import recv_monitor_message

import te
from bootstrap_server.admission.secret import Keys
from sglang_mooncake.control import ControlLoop
from sglang_mooncake.layout import Buffers, Plan
from sglang_mooncake.links import prefill as links
from sglang_mooncake.links.sockets import CurvePair, open_dealer
from sglang_mooncake.messages import Hello, HelloReply, decode, encode

__all__ = ["FRIEND", "NEW", "OLD", "OTHER", "Dealer", "Prefill", "hello"]

OLD, NEW, OTHER = (
    Keys.from_secrets([text.encode()])
    for text in ("0123456789abcdef-old", "0123456789abcdef-new", "0123456789abcdef-other")
)


FRIEND = b"a friend's card"


def hello(name: str = "decode rank", card: bytes = b"card") -> Hello:
    context = make_context("decode", "", PATIENT)
    return Hello(name, context.place, card, Pool().layout(Buffers((), (), ())))


@dataclass
class Prefill:
    """The links of a prefill rank on a loop of their own; engines are not connected before they
    are told to, and then those of friends alone."""

    keys: Keys
    events: list[object] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    may_connect: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.loop = ControlLoop("prefill", self)
        self.links = links.PrefillLinks(
            "prefill rank",
            self.loop,
            self,  # type: ignore[arg-type]
            self.plan,
            HelloReply(None, "0a" * 16, 7),
            self.events.append,
            PATIENT,
            self.keys.control,
        )

    def plan(self, hello: Hello) -> Plan:
        return Plan(Pool().layout(Buffers((), (), ())), hello.layout, hello.place, hello.place)

    def connect(self, card: bytes) -> te.Peer:
        self.may_connect.wait(WAIT_S)
        if card != FRIEND:
            raise te.Error("no engine")
        return SimpleNamespace(  # type: ignore[return-value]
            id="0b" * 16,
            epoch=8,
            address=(HOST, 1),
            alive=True,
            transport="loopback",
            transport_reason="",
            bytes_per_s=0.0,
            is_encrypted=False,
            close=lambda: None,
        )

    def started(self, loop: ControlLoop) -> None:
        self.port = self.links.listen(HOST, None)
        self.ready.set()

    def on_stimulus(self, stimulus, now_s) -> None:
        self.links.connected(stimulus)

    def on_tick(self, now_s) -> None:
        self.links.tick(now_s)

    def stopped(self) -> None:
        self.links.close()

    def __enter__(self) -> Self:
        self.loop.start()
        assert self.ready.wait(WAIT_S)
        return self

    def __exit__(self, *_) -> None:
        self.may_connect.set()
        self.loop.close()

    @property
    def router_key(self) -> bytes:
        return self.links.control_key.encode()


class Dealer:
    """A decode rank's end, by hand."""

    def __init__(self, prefill: Prefill, pair: CurvePair | None, router_key: bytes = b"") -> None:
        self.context = zmq.Context()
        self.socket, self.monitor = open_dealer(
            self.context,
            HOST,
            prefill.port,
            PATIENT,
            1 << 20,
            pair,
            router_key or prefill.router_key,
        )

    def say(self, message) -> None:
        self.socket.send(encode(message))

    def try_to_say(self, message) -> None:
        """As a stranger, whose connection may have ended before: then nobody is there to hear it,
        and `say` would wait for ever."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(encode(message), zmq.NOBLOCK)

    def hear(self):
        assert self.socket.poll(WAIT_S * 1000), "no answer"
        return decode(self.socket.recv())

    def event(self) -> int:
        """What became of the connection, once there was one."""
        event = zmq.EVENT_CONNECTED
        while event == zmq.EVENT_CONNECTED:
            assert self.monitor.poll(WAIT_S * 1000), "nothing became of the connection"
            event = recv_monitor_message(self.monitor)["event"]
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        self.context.term()
