# SPDX-License-Identifier: Apache-2.0
"""Digests of what a prefill rank has sent, made in a thread of their own: they read megabytes, and
neither SGLang's scheduler nor the loop of a rank waits for that."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import te
from bootstrap_server.admission.refusals import Pace
from sglang_mooncake.digest_thread import DigestThread, Job, Pause
from sglang_mooncake.digesting import (
    Bytes,
    Unmade,
    Unwanted,
    close_all,
    drawn,
    in_words,
    make_digests,
    read_bytes,
    why_of,
)
from sglang_mooncake.kept_bytes import KeptBytes
from sglang_mooncake.layout import differences
from sglang_mooncake.messages import ListDigests, RoomDiffers, RoomDigests
from sglang_mooncake.rooms.prefill_events import Digest, Digested, LookAgain
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.sent_lately import Found, SentDigest, SentLately, look
from sglang_mooncake.stats import Recorder

__all__ = ["SentDigests"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SentDigests:
    """Of a prefill rank.

    digester: None of a rank whose rules ask for no digest.
    rank: of this rank, for sentences.
    post: hands what has come of a `Digest` to the loop, from the thread or from the loop itself.
    kept: takes the bytes of what differs where it arrived; None where they are not kept.
    """

    digester: te.Digester | None
    recorder: Recorder
    rank: str
    post: Callable[[Digested], None]
    kept: KeptBytes | None = None
    _lately: SentLately = field(default_factory=SentLately)
    _lately_lock: threading.Lock = field(default_factory=threading.Lock)
    _unmade: Unmade = field(default_factory=Unmade)
    _pace: Pace = field(default_factory=Pace)  # of what looks again have found
    #: Beside `_unmade`, since any decode rank can have as many lines of these as it likes.
    _unasked: Unmade = field(default_factory=Unmade)
    _thread: DigestThread = field(default_factory=lambda: DigestThread("kv-prefill-digests"))

    def start(self) -> None:
        self._thread.start()
        if self.kept is not None:
            self.kept.start()

    def make(self, asked: Digest) -> None:
        """`post` is called with `Digested`."""
        if failure := self._thread.add(self._made(asked)):
            self.gave_up(asked.room, failure)
            self.post(Digested(asked.room, asked.peer, None, failure))

    def gave_up(self, room: Room, reason: str) -> None:
        """The room does not wait for its digests, or no longer."""
        self._unmade.log(f"no digests of room {room.number}: {reason}", te.DigestError(reason))

    def look_again(self, asked: LookAgain, decode_rank: str) -> None:
        """Only an answer to digests that were sent becomes a job: a decode rank that floods this
        one with others keeps no request waiting, and takes no memory."""
        message = asked.message
        try:
            with self._lately_lock:
                sent = self._lately.take(asked.peer, message)
        except ValueError as error:
            self._unasked.log(self._not_looked(message.room, decode_rank, error), error)
            return
        if failure := self._thread.add(self._looked(sent, message, decode_rank)):
            full = te.DigestError(failure)
            self._unmade.log(self._not_looked(message.room, decode_rank, full), full)

    def close(self) -> None:
        close_all(self._thread, self.digester, self.kept)

    def _made(self, asked: Digest) -> Job:
        room, message, failure = asked.room, None, None
        try:
            message = yield from self._message(asked)
        except Unwanted:
            pass
        except Exception as error:  # noqa: BLE001 - it is logged, and told to the peer
            failure = why_of(error)
            self._unmade.log(f"no digests of room {room.number}: {failure}", error)
        self.post(Digested(room, asked.peer, message, failure))

    def _message(self, asked: Digest) -> Generator[Pause, None, RoomDigests]:
        assert self.digester is not None
        # The engine has all writes of the room by now: nothing that moves them can know the seed.
        verify, seed = asked.verify, secrets.randbits(64)
        found = yield from make_digests(
            asked.lists(), verify, seed, self.digester, asked.room, self.recorder
        )
        lists = tuple(ListDigests.of(one) for one in found)
        number, generation = asked.room.number, asked.generation
        message = RoomDigests(number, generation, verify, seed, asked.nbytes, lists)
        with self._lately_lock:
            self._lately.add(asked, message)
        return message

    def _looked(self, sent: SentDigest, message: RoomDiffers, decode_rank: str) -> Job:
        try:
            yield from self._look(sent, message, decode_rank)
        except Exception as error:  # noqa: BLE001 - it is logged, and the room has failed
            self._unmade.log(self._not_looked(message.room, decode_rank, error), error)

    def _not_looked(self, number: int, decode_rank: str, error: Exception) -> str:
        what = f"room {number}: what {decode_rank} has is not what was sent, and {self.rank}"
        return f"{what} cannot look again at what it has sent: {why_of(error)}"

    def _look(
        self, sent: SentDigest, message: RoomDiffers, decode_rank: str
    ) -> Generator[Pause, None, None]:
        assert self.digester is not None
        lists, said = sent.asked.lists(), sent.message
        before = [one.digests for one in said.lists]
        landed = [one.digests for one in message.lists]
        differ = differences(lists, before, landed)
        if not differ:
            raise ValueError(f"{decode_rank} has told the digests that were sent")
        cells: Bytes | None = None
        is_kept = self.kept is not None and self.kept.claim(said.room)
        reason = ""
        try:
            # First the bytes: what has the right digests behind that had them all the while. Of
            # cells without a digest nothing tells that.
            chosen = drawn(lists, said.verify, said.seed)
            copied = (
                (yield from read_bytes(lists, differ, chosen, self.digester)) if is_kept else None
            )
            now = yield from make_digests(
                lists, said.verify, said.seed, self.digester, None, self.recorder
            )
            found = look(lists, now, before, landed)
            reason = (
                f"the KV cache that {decode_rank} has of room {said.room} is not the one that was "
                f"sent: {in_words(differ)}. The memory of {self.rank} {found.value}"
            )
            cells = None if found is Found.OTHER else copied
        finally:
            if self.kept is not None and is_kept:
                self.kept.keep(said.room, reason, cells)
        more = self._pace.more()
        if more is not None:
            logger.warning("%s%s", reason, more)
