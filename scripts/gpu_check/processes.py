# SPDX-License-Identifier: Apache-2.0
"""The processes of a step that has two sides, each a `side.Side`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpu_check.child import Failed, Skipped, Task
from gpu_check.side import Answer, Ask
from te_bench.protocol import Channel, ChannelClosed

__all__ = ["SideProcess", "connected", "sides"]

CODE: Final = "from gpu_check.side import main; main()"
ANSWER_S: Final = 75.0


class SideProcess:
    """What is asked of it is answered in time, or the step fails with its name."""

    def __init__(self, task: Task, name: str, environment: Mapping[str, str]) -> None:
        self._name = name
        self._op = ""
        near, far = socket.socketpair()
        # In the group of the step, which ends with it.
        self._process = subprocess.Popen(
            [task.python, "-P", "-c", CODE, str(far.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[far.fileno()],
            env=os.environ | environment,
        )
        far.close()
        self._channel = Channel(near)

    def post(self, op: str, **arguments: Any) -> None:
        self._op = op
        with contextlib.suppress(ChannelClosed):  # its end shows when the answer is read
            self._channel.send(Ask(op, arguments))

    def answer(self) -> Any:
        """Of what was posted last; ``Failed``, or ``Skipped`` as there."""
        try:
            answer = self._channel.receive(Answer, ANSWER_S)
        except TimeoutError:
            raise Failed(f"the {self._name}'s {self._op} took more than {ANSWER_S} s") from None
        except ChannelClosed:
            status = self._process.wait()
            raise Failed(f"the {self._name} ended in {self._op}, status {status}") from None
        if answer.skipped:
            raise Skipped(answer.skipped)
        if answer.failed:
            raise Failed(f"the {self._name}'s {self._op}: {answer.failed}")
        return answer.ok

    def ask(self, op: str, **arguments: Any) -> Any:
        self.post(op, **arguments)
        return self.answer()

    def kill(self) -> None:
        """At once, whatever it does. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._channel.close()


@contextlib.contextmanager
def sides(task: Task, *names: str, **environment: str) -> Iterator[list[SideProcess]]:
    """Processes of these names; all are gone afterwards."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in names:
            found.append(SideProcess(task, name, environment))
            stack.callback(found[-1].kill)
        yield found


def connected(
    source: SideProcess, target: SideProcess, transport: str, places: tuple[str, str], nbytes: int
) -> None:
    """Opens both anew with memory at these places, and connects them both ways."""
    for side, place in zip((source, target), places, strict=True):
        side.post("open", allocation=place, nbytes=nbytes, transport=transport)
    here, there = source.answer(), target.answer()
    chosen = source.ask("connect", there=there)
    target.ask("connect", there=here)
    if chosen["transport"] != transport:
        raise Failed(f"{chosen['transport']} was taken in place of {transport}")
