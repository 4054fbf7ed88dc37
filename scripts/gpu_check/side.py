# SPDX-License-Identifier: Apache-2.0
"""One of two processes that write to each other: an engine with memory, driven by lines of JSON."""

from __future__ import annotations

import base64
import contextlib
import socket
import sys
import time
import traceback
from typing import Any, Final

import msgspec
import numpy as np

import te
from gpu_check.allocations import Allocation, Virtual, allocate
from gpu_check.blocks import GUARD, U8, contents, image, pieces
from gpu_check.child import Skipped, die_with_parent
from te_bench.gpu import Gpu
from te_bench.protocol import Channel, ChannelClosed

__all__ = ["Answer", "Ask", "Side", "main"]

STAGING_BYTES: Final = 64 << 20
WORD_BYTES: Final = 8
SETTLE_S: Final = 60.0


class Ask(msgspec.Struct, frozen=True):
    op: str
    arguments: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    ok: Any = None
    failed: str = ""
    skipped: str = ""


class Side:
    """Public methods are what can be asked of it; their values are JSON."""

    def __init__(self) -> None:
        self._gpu: Gpu | None = None
        self._engine: te.Engine | None = None
        self._allocation: Allocation | None = None
        self._host: U8 = np.empty(0, np.uint8)
        self._transfers: list[te.Transfer] = []

    # -- the engine and its memory

    def open(self, allocation: str, nbytes: int, transport: str) -> dict[str, Any]:
        """``allocation``: ``"host"`` or a name of ``allocations``. What was open is closed."""
        self.close()
        self._engine = te.Engine(te.Config(transports=(transport,)))
        if allocation == "host":
            self._host = np.zeros(nbytes, np.uint8)
            self._address = int(self._host.ctypes.data)
        else:
            self._gpu = self._gpu or Gpu()
            self._allocation = allocate(self._gpu, allocation, nbytes)
            self._address = self._allocation.address
        self._nbytes = nbytes
        self._region = self._engine.register(self._address, nbytes, remote="read-write")
        # Where the other side says how far it is.
        self._credit = np.zeros(1, np.uint64)
        self._engine.register(self._credit, remote="read-write")
        return {
            "card": base64.b64encode(self._engine.card()).decode(),
            "address": self._address,
            "nbytes": nbytes,
            "credit": int(self._credit.ctypes.data),
            "kind": self._region.kind,
        }

    def close(self) -> None:
        """Engine and memory are given back: the memory once nobody has it mapped any more."""
        if self._engine is not None:
            self._engine.deregister(self._region, SETTLE_S)
            self._engine.close()
            self._engine = None
        if self._allocation is not None:
            self._allocation.free()
            self._allocation = None

    def connect(self, there: dict[str, Any]) -> dict[str, str]:
        assert self._engine is not None
        self._there = there
        self._peer = self._engine.connect(base64.b64decode(there["card"]))
        return {"transport": self._peer.transport, "reason": self._peer.transport_reason}

    # -- contents

    def _put(self, found: U8) -> None:
        if self._allocation is None:
            self._host[:] = found
        else:
            assert self._gpu is not None
            self._gpu.upload(self._address, found)

    def _get(self) -> U8:
        if self._allocation is None:
            return self._host
        assert self._gpu is not None
        found = np.empty(self._nbytes, np.uint8)
        self._gpu.download(self._address, found)
        return found

    def fill(self, seed: int) -> None:
        self._put(contents(seed, self._nbytes))

    def guard(self) -> None:
        self._put(np.full(self._nbytes, GUARD, np.uint8))

    def wrong_bytes(self, seed: int, largest: int) -> int:
        """In a target that has got the pieces of this seed."""
        return int((self._get() != image(seed, self._nbytes, largest)).sum())

    def touched_bytes(self, wait_s: float) -> int:
        """Of a target that was guarded: how many are something else, after so long."""
        time.sleep(wait_s)
        return int((self._get() != GUARD).sum())

    # -- transfers

    def _blocks(self, seed: int, largest: int) -> te.Blocks:
        given = pieces(seed, self._nbytes, largest)
        return te.Blocks.of(
            np.uint64(self._address) + given.source.astype(np.uint64),
            np.uint64(self._there["address"]) + given.target.astype(np.uint64),
            given.nbytes.astype(np.uint64),
        )

    def write(self, seed: int, largest: int, tag: int) -> dict[str, Any]:
        """The pieces of this seed; its outcome."""
        transfer = self._peer.write(self._blocks(seed, largest), tag=tag)
        return self._outcome(transfer)

    def read(self, seed: int, largest: int) -> dict[str, Any]:
        """The other way: the source of the pieces is the other side's memory."""
        given = pieces(seed, self._nbytes, largest)
        blocks = te.Blocks.of(
            np.uint64(self._there["address"]) + given.source.astype(np.uint64),
            np.uint64(self._address) + given.target.astype(np.uint64),
            given.nbytes.astype(np.uint64),
        )
        return self._outcome(self._peer.read(blocks))

    def flood(self, count: int, tag: int) -> None:
        """Begins so many transfers of all of the memory; ``settle`` or ``cancel`` ends them."""
        blocks = te.Blocks.of(self._address, self._there["address"], self._nbytes)
        self._transfers = [self._peer.write(blocks, tag=tag) for _ in range(count)]
        # Somebody is in the middle of one when this returns, unless all are over.
        until_s = time.monotonic() + SETTLE_S
        while self._transfers[0].poll() is te.Status.PENDING and time.monotonic() < until_s:
            time.sleep(0)

    def cancel(self) -> dict[str, int]:
        for transfer in self._transfers:
            transfer.cancel()
        return self.settle()

    def settle(self) -> dict[str, int]:
        """How many transfers of ``flood`` ended how."""
        found: dict[str, int] = {}
        for transfer in self._transfers:
            state = self._outcome(transfer)["status"]
            found[state] = found.get(state, 0) + 1
        return found

    @staticmethod
    def _outcome(transfer: te.Transfer) -> dict[str, Any]:
        with contextlib.suppress(te.TransferFailed):
            transfer.wait(SETTLE_S)
        return {"status": transfer.poll().value, "reason": transfer.reason or ""}

    def expect(self, tag: int) -> None:
        assert self._engine is not None
        self._engine.expect(tag)

    def arrived(self, tag: int) -> int:
        assert self._engine is not None
        return self._engine.arrived(tag)

    def fence(self, tag: int) -> float:
        """Seconds that it took."""
        assert self._engine is not None
        begun_s = time.monotonic()
        self._engine.fence(tag, SETTLE_S)
        return time.monotonic() - begun_s

    # -- arrivals: a round is a write, a look, and a word back

    def send_rounds(self, tag: int, seconds: float) -> int:
        """Writes all of the memory, full of the round's number, as often as the other side looked;
        how often. The last word tells it to stop."""
        blocks = te.Blocks.of(self._address, self._there["address"], self._nbytes)
        until_s, number, is_last = time.monotonic() + seconds, 0, False
        while not is_last:
            number += 1
            is_last = time.monotonic() >= until_s
            words = np.full(self._nbytes // WORD_BYTES, number, np.uint64)
            words[-1] |= np.uint64(is_last) << np.uint64(63)
            self._put(words.view(np.uint8))
            transfer = self._peer.write(blocks, tag=tag)
            while int(self._credit[0]) != number:
                if transfer.poll() is te.Status.FAILED:
                    raise te.TransferFailed(transfer.reason)
                if time.monotonic() > until_s + SETTLE_S:
                    raise TimeoutError(f"the other side did not answer round {number}")
                time.sleep(0)
        return number

    def look_at_rounds(self, tag: int) -> dict[str, int]:
        """Copies the memory, which is poisoned, as soon as it has arrived, in a stream of its own,
        and poisons it again. Ends after the last round, or at one with words that are older."""
        assert self._engine is not None
        word = np.zeros(1, np.uint64)
        self._engine.register(word, remote="none")
        credit = te.Blocks.of(int(word.ctypes.data), self._there["credit"], WORD_BYTES)
        number, old_words, is_last = 0, 0, False
        while not is_last and not old_words:
            number += 1
            until_s = time.monotonic() + SETTLE_S
            while self._engine.arrived(tag) < number:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"round {number} did not arrive")
            words = self._get().view(np.uint64)
            is_last = bool(words[-1] >> np.uint64(63))
            old_words = int((words & np.uint64((1 << 63) - 1) != number).sum())
            self.guard()
            word[0] = number
            self._peer.write(credit).wait(SETTLE_S)
        return {"rounds": number, "old_words": old_words}

    # -- memory that goes and comes back

    def take_memory_away(self) -> int:
        """How many bytes of the GPU are free besides, after a while."""
        assert self._engine is not None
        assert self._gpu is not None
        assert isinstance(self._allocation, Virtual)
        before = self._gpu.free_nbytes
        self._engine.deregister(self._region, SETTLE_S)
        self._allocation.unback()
        until_s = time.monotonic() + 2.0
        while (freed := self._gpu.free_nbytes - before) < self._nbytes:
            if time.monotonic() > until_s:
                break
            time.sleep(0.01)
        return freed

    def bring_memory_back(self) -> None:
        assert self._engine is not None
        assert isinstance(self._allocation, Virtual)
        self._allocation.back()
        self._region = self._engine.register(self._address, self._nbytes, remote="read-write")

    # -- PyTorch

    def has_torch(self) -> str:
        from gpu_check.with_torch import problem

        return problem()

    def capture(self, graphs: int) -> int:
        from gpu_check.with_torch import capture

        return capture(graphs)

    def flood_and_capture(self, graphs: int, tag: int) -> dict[str, int]:
        """Outcomes of the transfers that were under way meanwhile."""
        self.flood(16 * graphs, tag)
        self.capture(graphs)
        return self.settle()


def main() -> None:
    """Serves the step on the inherited socket until it hangs up."""
    die_with_parent()
    channel, side = Channel(socket.socket(fileno=int(sys.argv[1]))), Side()
    try:
        while True:
            ask = channel.receive(Ask, None)
            try:
                answer = Answer(ok=getattr(side, ask.op)(**ask.arguments))
            except Skipped as exc:
                answer = Answer(skipped=str(exc))
            except Exception as exc:  # noqa: BLE001 - the step's to judge
                traceback.print_exc()
                answer = Answer(failed=f"{type(exc).__name__}: {exc}")
            channel.send(answer)
    except ChannelClosed:
        return
