# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own, so that they can be killed, frozen and put on other hosts.

As a program (`rank_process.py ROLE HOST PORT TRANSPORT`) it is one rank, which obeys the lines of
its standard input and answers each with one line; `RankProcess` is the other end of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import handover
import numpy as np
from handover import DecodeRank, Pool, PrefillRank, make_context, until

from bootstrap_server import BootstrapServer
from sglang_mooncake.context import Deadlines, Role
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config

ANSWER_S = 60.0
AUX = 0
SOURCE_PAGES, TARGET_PAGES = [0, 1], [3, 4]


class RankProcess:
    """One rank. A prefill rank brings its instance's registry along, as SGLang's servers do."""

    def __init__(self, role: Role, host: str, port: int = 0, transport: str = "tcp") -> None:
        argv = [sys.executable, __file__, role, host, str(port), transport]
        places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": places},
            start_new_session=True,
        )
        try:
            self.registry_port = int(self.answer())
        except BaseException:
            self.kill()
            raise
        self.address = f"{host}:{self.registry_port}"

    def tell(self, *words: object) -> None:
        """Has it do something, see `_obey`; `answer` waits until that is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.answer()

    def has_answered(self, wait_s: float = 0.0) -> bool:
        assert self._process.stdout is not None
        waiting = select.poll()  # select(2) knows no descriptor above 1023
        waiting.register(self._process.stdout, select.POLLIN)
        return bool(waiting.poll(wait_s * 1e3))

    def answer(self) -> str:
        assert self._process.stdout is not None
        assert self.has_answered(ANSWER_S), "the rank says nothing"
        line = self._process.stdout.readline()
        assert line, "the rank has ended; its standard error says why"
        return line.strip()

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # its last thread has stopped

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def request(rank: DecodeRank, room: int, address: str) -> Room:
    """Asks the instance for a room; its pages are named unless it is over before."""
    until(lambda: rank.side.instances.ensure(address), "the instance is known")
    use = rank.side.new_room(room)
    rank.side.choose_sources(use, address, 0)
    until(lambda: use.view.state is RoomState.READY or use.view.over, "the decode room is ready")
    if not use.view.over:
        rank.side.name_pages(use, np.array(TARGET_PAGES), AUX, 0)
    return use


def take(rank: DecodeRank, room: int, address: str) -> str | None:
    """The same, until all has arrived; why it failed otherwise."""
    use = request(rank, room, address)
    until(lambda: use.view.over or rank.side.has_arrived(use), "the room is over")
    return use.view.reason


@contextlib.contextmanager
def decode_rank(transport: str = "tcp") -> Iterator[DecodeRank]:
    """One in this process."""
    config, memory = Config(transports=(transport,)), Pool()
    rank = DecodeRank(make_context("decode", "", Deadlines()), config, memory)
    try:
        yield rank
    finally:
        rank.close()
        del memory  # nothing else keeps it


@contextlib.contextmanager
def prefill_rank(transport: str = "tcp", port: int = 0) -> Iterator[tuple[PrefillRank, str]]:
    """One in this process, and the address of its registry, which has that port."""
    with contextlib.ExitStack() as undo:
        server = BootstrapServer(host=handover.HOST, port=port)
        undo.callback(server.close)
        address = f"{handover.HOST}:{server.port}"
        config, memory = Config(transports=(transport,)), Pool(seed=1)
        rank = PrefillRank(make_context("prefill", address, Deadlines()), config, memory)
        undo.callback(rank.close)
        yield rank, address
        del memory  # nothing else keeps it


def _prefill(rank: PrefillRank, held: dict[int, Room], command: str, room: int) -> str:
    """`hold ROOM`: opens it, and sends nothing. `send ROOM`: opens it, and sends the whole prompt
    once it is asked for; if nobody does, other rooms do not wait for that. `give ROOM`: sends that
    of one that is held."""
    use = held.get(room) or rank.side.open_room(room, register_dp_rank=False)
    held[room] = use

    def send() -> None:
        while use.view.state is RoomState.OPEN:
            time.sleep(0.002)
        if use.view.state is RoomState.READY:
            rank.send(use, SOURCE_PAGES, 0, AUX)

    if command != "hold":
        threading.Thread(target=send, daemon=True).start()
    return command


def _decode(rank: DecodeRank, command: str, room: int, address: str) -> str:
    """`ask ROOM ADDRESS`: for a room of that instance. `take ROOM ADDRESS`: and waits for it."""
    if command == "ask":
        return request(rank, room, address).view.state.name
    return take(rank, room, address) or "taken"


def _obey(role: str, host: str, port: int, transport: str) -> None:
    handover.HOST = host
    with contextlib.ExitStack() as undo:
        if role == "prefill":
            prefill, address = undo.enter_context(prefill_rank(transport, port))
            held: dict[int, Room] = {}
            _say(address.rpartition(":")[2])
        else:
            decode = undo.enter_context(decode_rank(transport))
            _say("0")
        for line in sys.stdin:
            match line.split():
                case "busy", seconds:  # any thread, Python's lock is held all the time
                    ctypes.PyDLL(None).sleep(int(seconds))
                    _say("busy")
                case command, room:
                    _say(_prefill(prefill, held, command, int(room)))
                case command, room, address:
                    _say(_decode(decode, command, int(room), address))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _obey(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
