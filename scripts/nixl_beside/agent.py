# SPDX-License-Identifier: Apache-2.0
"""A process with one NIXL agent, whoever's that is: `python -m nixl_beside.agent FD` does what
comes on its connection, and ends with that."""

from __future__ import annotations

import base64
import importlib
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

__all__: list[str] = []

_LOOK_S: Final = 0.0005
_KIND: Final = "DRAM"


class Agent:
    """Each method is an operation, whose arguments and result are sent."""

    def open(self, name: str, nbytes: int, value: int) -> tuple[str, int]:
        """Memory of one value. The agent's metadata, and the memory's address."""
        api: Any = importlib.import_module("nixl._api")
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._memory = np.full(nbytes, value, np.uint8)
        self._here = self._memory.ctypes.data
        self._agent.register_memory([(self._here, nbytes, 0, "")], _KIND)
        return base64.b64encode(self._agent.get_agent_metadata()).decode(), self._here

    def add(self, metadata: str) -> None:
        self._far = self._agent.add_remote_agent(base64.b64decode(metadata))

    def fill(self, value: int) -> None:
        self._memory[:] = value

    def count(self, value: int) -> int:
        """Bytes of the memory that have it."""
        return int(np.count_nonzero(self._memory == value))

    def post(self, operation: str, there: int, nbytes: int) -> str:
        """One block, from the beginning of the memory. The state, or the error's name."""
        here, far = (
            self._agent.get_xfer_descs([(address, nbytes, 0)], _KIND)
            for address in (self._here, there)
        )
        self._handle = self._agent.initialize_xfer(operation, here, far, self._far)
        self._posted_s = time.monotonic()
        return _state_of(lambda: self._agent.transfer(self._handle))

    def ended(self, patience_s: float) -> tuple[str, float]:
        """The state that follows `PROC`, and seconds since the post."""
        while True:
            state = _state_of(lambda: self._agent.check_xfer_state(self._handle))
            after_s = time.monotonic() - self._posted_s
            if state != "PROC" or after_s > patience_s:
                return state, after_s
            time.sleep(_LOOK_S)

    def released(self, patience_s: float) -> float | None:
        """Seconds until it could be; None if it could not."""
        began_s = time.monotonic()
        while True:
            state = _state_of(lambda: self._agent.release_xfer_handle(self._handle))
            after_s = time.monotonic() - began_s
            if state == "None":
                return after_s
            if after_s > patience_s:
                return None
            time.sleep(_LOOK_S)

    def reads(self, there: int, nbytes: int, number: int, patience_s: float) -> int:
        """How many of so many reads, one after another, were done."""
        done = 0
        for _ in range(number):
            self.post("READ", there, nbytes)
            done += self.ended(patience_s)[0] == "DONE"
            self.released(patience_s)
        return done

    def lists(self, there: int, blocks: int, nbytes: int, seed: int) -> tuple[float, float, float]:
        """A read of blocks from random places to random places, by prepared lists: seconds for the
        handle, for the post, and from the post until it was done. Raises if it was not, or a byte
        is wrong; the peer's memory has one value, and this one's becomes another."""
        agent, random = self._agent, np.random.default_rng(seed)
        sides = [
            self._prepared(name, base, nbytes)
            for name, base in (("", self._here), (self._far, there))
        ]
        places = self._memory.nbytes // nbytes
        here, far = (random.permutation(places)[:blocks] for _ in sides)
        self._memory[:] = 0
        began_s = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", sides[0], here, sides[1], far)
        made_s = time.perf_counter()
        state = agent.transfer(handle)
        posted_s = time.perf_counter()
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        done_s = time.perf_counter()
        agent.release_xfer_handle(handle)
        for side in sides:
            agent.release_dlist_handle(side)
        landed = np.count_nonzero(self._memory)
        if state != "DONE" or landed != blocks * nbytes:
            raise RuntimeError(f"{state}: {landed} of {blocks * nbytes} bytes have landed")
        return made_s - began_s, posted_s - made_s, done_s - made_s

    def _prepared(self, name: Any, base: int, nbytes: int) -> Any:
        rows = np.zeros((self._memory.nbytes // nbytes, 3), np.uint64)
        rows[:, 0] = np.arange(len(rows), dtype=np.uint64) * np.uint64(nbytes) + np.uint64(base)
        rows[:, 1] = nbytes
        return self._agent.prep_xfer_dlist(name, rows, _KIND)


def _state_of(call: Callable[[], Any]) -> str:
    """What it returned, or the name of NIXL's error."""
    try:
        return str(call())
    except Exception as error:  # NVIDIA's have nothing in common
        if not type(error).__name__.startswith("nixl"):
            raise
        return type(error).__name__


def main(descriptor: int) -> None:
    agent, connection = Agent(), Connection(descriptor)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(agent, name)(*arguments)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            connection.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
