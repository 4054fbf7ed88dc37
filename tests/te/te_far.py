# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, driven by lines of JSON; and waiting for conditions."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import te
from te.transports.samehost import reach

DEADLINE_S = 60.0


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Looks again until the condition holds; fails loudly when it does not within the deadline."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"after {DEADLINE_S} s still not: {what}"
        time.sleep(0.002)


def wait_until_stopped(pid: int) -> None:
    """A SIGSTOP is on its way for a while; then the process has the state T."""
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it has stopped")


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that both processes can make from the seed."""
    # Byte by byte it would take four times as long.
    words = np.random.default_rng(seed).integers(0, 1 << 64, -(-nbytes // 8), np.uint64)
    return words.view(np.uint8)[:nbytes]


class FarError(Exception):
    """The far engine raised; the message is ``type: text``."""


class FarEngine:
    """The near end. ``far.op(**arguments)`` runs ``Far.op`` in the process."""

    #: What runs there.
    program: ClassVar[str] = __file__
    #: How long an operation may take.
    patience_s: ClassVar[float] = 1.5 * DEADLINE_S

    def __init__(self, **config: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, self.program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        self.engine_id = self.start(config=config)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([op, arguments]).encode() + b"\n")
            self.process.stdin.flush()
            return self._reply(op)

        return call

    def _reply(self, op: str) -> Any:
        out = self.process.stdout
        assert out is not None
        assert is_readable(out, self.patience_s), f"the far engine does not answer {op}"
        value, error = json.loads(out.readline())
        if error is not None:
            raise FarError(error)
        return value

    def bytes_card(self) -> bytes:
        return base64.b64decode(self.card())

    def memory(self, address: int) -> np.ndarray:
        return np.frombuffer(base64.b64decode(self.read(address=address)), np.uint8)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            wait_until_stopped(self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def is_readable(file: Any, wait_s: float) -> bool:
    """Whether there is something to read, or the end. select(2) knows no descriptor above 1023."""
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(wait_s * 1e3))


class Far:
    """The far end: each method is an operation."""

    def __init__(self) -> None:
        self.buffers: dict[int, np.ndarray] = {}
        self.peers: dict[str, te.Peer] = {}
        self.transfers: list[te.Transfer] = []

    def start(self, config: dict[str, Any]) -> str:
        reach.LOOK_TIMEOUT_S = DEADLINE_S  # A thread of this process may stand still for seconds.
        config = {name: tuple(v) if isinstance(v, list) else v for name, v in config.items()}
        self.engine = te.Engine(te.Config(**config))
        return self.engine.id

    def register(self, nbytes: int, seed: int | None = None) -> int:
        buffer = np.zeros(nbytes, np.uint8) if seed is None else pattern(seed, nbytes)
        self.engine.register(buffer, remote="read-write")
        self.buffers[buffer.ctypes.data] = buffer
        return int(buffer.ctypes.data)

    def card(self) -> str:
        return base64.b64encode(self.engine.card()).decode()

    def connect(self, card: str) -> str:
        peer = self.engine.connect(base64.b64decode(card))
        self.peers[peer.id] = peer
        return peer.id

    def write(self, peer: str, src: Any, dst: Any, nbytes: Any, tag: int = 0) -> int:
        self.transfers.append(self.peers[peer].write(te.Blocks.of(src, dst, nbytes), tag))
        return len(self.transfers) - 1

    def outcome(self, number: int) -> tuple[str, str | None]:
        transfer = self.transfers[number]
        with contextlib.suppress(te.TransferFailed):
            transfer.wait(DEADLINE_S)
        return transfer.poll().value, transfer.reason

    def expect(self, tag: int) -> None:
        self.engine.expect(tag)

    def arrived(self, tag: int) -> int:
        return self.engine.arrived(tag)

    def fence(self, tag: int) -> int:
        return self.engine.fence(tag, DEADLINE_S)

    def read(self, address: int) -> str:
        return base64.b64encode(self.buffers[address].tobytes()).decode()

    def status_path(self) -> str:
        return str(self.engine.status_path)

    def bytes_received(self) -> int:
        return self.engine.stats().bytes_received


def commands() -> Iterator[tuple[str, dict[str, Any]]]:
    for line in sys.stdin.buffer:
        op, arguments = json.loads(line)
        yield op, arguments


def main(far: Far) -> None:
    for op, arguments in commands():
        try:
            reply = [getattr(far, op)(**arguments), None]
        except (te.Error, ValueError, OSError) as exc:
            reply = [None, f"{type(exc).__name__}: {exc}"]
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Far())
