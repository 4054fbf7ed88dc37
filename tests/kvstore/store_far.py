# SPDX-License-Identifier: Apache-2.0
"""A process that lends memory to the store: for tests that kill or freeze it.

python store_far.py DIRECTORY MEMORY COUNT NBYTES SEED
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from store_host import freeze
from store_makers import SIG, Room, config, contents, keys
from store_meeting import enter, leave, owning

from kvstore.rules.object_table import Verdict
from kvstore.store import Store


class Far:
    """The process, from outside."""

    def __init__(
        self, directory: Path, memory: int, count: int, nbytes: int, seed: int = 0
    ) -> None:
        """Returns when its objects are stored."""
        arguments = [str(one) for one in (directory, memory, count, nbytes, seed)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[:1] == ["ready"]
        self.name = words[1]
        self._directory = directory
        enter(directory, self.name, words[2])

    def number_in(self, store: Store) -> int:
        """Its number in a store's table."""
        (number,) = (
            one.number for one in store._owners._following.owners() if one.name == self.name
        )
        return number

    def signal(self, number: signal.Signals) -> None:
        """To this process alone. Returns after a SIGSTOP when all of its threads stand still."""
        if number is signal.SIGSTOP:
            freeze(self.process.pid)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        """As if the machine had lost it."""
        leave(self._directory, self.name)
        self.process.kill()
        self.process.communicate()


def main() -> None:
    directory, memory, count, nbytes, seed = sys.argv[1:]
    with owning(config(Path(directory), int(memory))) as store:
        if int(count):
            put(store, int(count), int(nbytes), int(seed))
        print("ready", store._memory.engine.id, store._owners._endpoint, flush=True)  # noqa: T201
        sys.stdin.read()


def put(store: Store, count: int, nbytes: int, seed: int) -> None:
    room = Room(store, count, nbytes)
    room.bytes[:] = contents(count, nbytes, seed)
    own = store._owners.own
    assert own is not None
    verdicts = own.storing.take(keys(count, seed), SIG, room.pieces)  # Whatever others have.
    assert set(verdicts) == {Verdict.GRANTED}, verdicts
    own.tell()


if __name__ == "__main__":
    main()
