# SPDX-License-Identifier: Apache-2.0
"""Digests of what was sent and of what has landed, made and compared in a thread of their own: they
read megabytes, and neither SGLang's scheduler nor the loop of a rank waits for that. Which requests
and cells are digested is for the rules (`rooms/`, `layout/chosen.py`)."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

import te
from bootstrap_server.admission.refusals import Pace
from sglang_mooncake.digest_thread import DigestThread, Job, Pause
from sglang_mooncake.kept_bytes import KeptBytes
from sglang_mooncake.layout import (
    Cells,
    CompletionRecord,
    Difference,
    Digests,
    DigestsDisagree,
    Layout,
    Place,
    Plan,
    Sent,
    Verify,
    bytes_of,
    chosen_cells,
    differences,
    digest,
    sample_size,
)
from sglang_mooncake.layout.indices import Indices
from sglang_mooncake.messages import (
    ListDigests,
    RoomDiffers,
    RoomDigests,
    indices_from_bytes,
    states_from_bytes,
)
from sglang_mooncake.rooms.arrival import CompletionDisagrees
from sglang_mooncake.rooms.decode_events import Compare, Tell, Verified
from sglang_mooncake.rooms.prefill_events import Digest, Digested, LookAgain
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.sent_lately import Found, SentDigest, SentLately, look
from sglang_mooncake.stats import Recorder

__all__ = ["LandedDigests", "SentDigests", "digester_of"]

logger = logging.getLogger(__name__)

#: Plans of the copy from prefill ranks, of which each life is another one.
_PLANS_MAX = 256
#: How many pages and buffers a sentence names.
_NAMED_MAX = 8

#: Of cells, by name.
Bytes = dict[str, npt.NDArray[np.uint8]]


class _Unwanted(Exception):
    """The end of the room is decided: SGLang may give its pages to another request."""


class _Unmade:
    """Digests that could not be made or compared, in the log at a bounded rate."""

    def __init__(self) -> None:
        self._pace = Pace()

    def log(self, what: str, error: Exception) -> None:
        more = self._pace.more()
        if more is not None:
            logger.warning("%s%s", what, more, exc_info=None if _is_ordinary(error) else error)


def _why(error: Exception) -> str:
    return str(error) if _is_ordinary(error) else f"internal error: {error!r}"


def _is_ordinary(error: Exception) -> bool:
    return isinstance(error, te.Error | ValueError)


def digester_of(engine: te.Engine, verify: Verify) -> te.Digester | None:
    """None where registered memory cannot be read, such as a GPU's in a context of somebody else's:
    then nothing is digested here.

    Raises:
        te.DigestError: that is so, and everything is to be digested.
    """
    try:
        return engine.digester()
    except te.DigestError as error:
        if verify is Verify.ALL:
            raise
        logger.warning("no digests are made on this rank: %s", error)
        return None


@dataclass(eq=False)
class SentDigests:
    """Of a prefill rank.

    digester: None of a rank whose rules ask for no digest.
    rank: of this rank, for sentences.
    post: hands what has come of a `Digest` to the loop, from the thread.
    kept: takes the bytes of what differs where it arrived; None where they are not kept.
    """

    digester: te.Digester | None
    recorder: Recorder
    rank: str
    post: Callable[[Digested], None]
    kept: KeptBytes | None = None
    _lately: SentLately = field(default_factory=SentLately)
    _lately_lock: threading.Lock = field(default_factory=threading.Lock)
    _unmade: _Unmade = field(default_factory=lambda: _Unmade())
    _pace: Pace = field(default_factory=Pace)  # of what looks again have found
    #: Beside `_unmade`, since any decode rank can have as many lines of these as it likes.
    _unasked: _Unmade = field(default_factory=lambda: _Unmade())
    _thread: DigestThread = field(default_factory=lambda: DigestThread("kv-prefill-digests"))

    def start(self) -> None:
        self._thread.start()
        if self.kept is not None:
            self.kept.start()

    def make(self, asked: Digest) -> None:
        """`post` is called with `Digested`."""
        self._thread.add(self._made(asked))

    def look_again(self, asked: LookAgain, decode_rank: str) -> None:
        """Only an answer to digests that were sent becomes a job: a decode rank that floods this
        one with others keeps no request waiting, and takes no memory."""
        message = asked.message
        try:
            with self._lately_lock:
                sent = self._lately.take(asked.peer, message)
        except ValueError as error:
            self._unasked.log(self._not_looked(message.room, decode_rank, error), error)
        else:
            self._thread.add(self._looked(sent, message, decode_rank))

    def close(self) -> None:
        _close(self._thread, self.digester, self.kept)

    def _made(self, asked: Digest) -> Job:
        room, message, failure = asked.room, None, None
        try:
            message = yield from self._message(asked)
        except _Unwanted:
            pass
        except Exception as error:  # noqa: BLE001 - it is logged, and told to the peer
            failure = _why(error)
            self._unmade.log(f"no digests of room {room.number}: {failure}", error)
        self.post(Digested(room, asked.peer, message, failure))

    def _message(self, asked: Digest) -> Generator[Pause, None, RoomDigests]:
        assert self.digester is not None
        # The engine has all writes of the room by now: nothing that moves them can know the seed.
        verify, seed = asked.verify, secrets.randbits(64)
        found = yield from _digests(
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
        return f"{what} cannot look again at what it has sent: {_why(error)}"

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
            chosen = _chosen(lists, said.verify, said.seed)
            copied = (yield from _bytes(lists, differ, chosen, self.digester)) if is_kept else None
            now = yield from _digests(
                lists, said.verify, said.seed, self.digester, None, self.recorder
            )
            found = look(lists, now, before, landed)
            reason = (
                f"the KV cache that {decode_rank} has of room {said.room} is not the one that was "
                f"sent: {_told(differ)}. The memory of {self.rank} {found.value}"
            )
            cells = None if found is Found.OTHER else copied
        finally:
            if self.kept is not None and is_kept:
                self.kept.keep(said.room, reason, cells)
        more = self._pace.more()
        if more is not None:
            logger.warning("%s%s", reason, more)


@dataclass(frozen=True, slots=True)
class _Landed:
    """Of a source: everything is here, and what its completion record says."""

    compare: Compare
    completion: CompletionRecord


@dataclass(eq=False)
class LandedDigests:
    """Of a decode rank.

    digester: None of a rank that cannot compare.
    layout, place, rank: of this rank; the last for sentences.
    landed: the completion record of what was asked for, once all of it is here, else None; raises
        `CompletionDisagrees`.
    post: hands what has come of a `Compare` to the loop, from the thread.
    kept: takes the bytes of what differs; None where they are not kept.
    """

    digester: te.Digester | None
    recorder: Recorder
    layout: Layout
    place: Place
    rank: str
    landed: Callable[[Compare], CompletionRecord | None]
    post: Callable[[Verified], None]
    kept: KeptBytes | None = None
    _plans: dict[Hashable, tuple[Layout, Plan]] = field(default_factory=dict)
    _unmade: _Unmade = field(default_factory=lambda: _Unmade())
    _thread: DigestThread = field(default_factory=lambda: DigestThread("kv-decode-digests"))

    def start(self) -> None:
        self._thread.start()
        if self.kept is not None:
            self.kept.start()

    def compare(self, asked: Compare, source: tuple[Layout, Place]) -> None:
        """`post` is called with `Verified`, unless the room ends before. source: what the prefill
        rank has, and where."""
        self._thread.add(self._compared(asked, source))

    def close(self) -> None:
        _close(self._thread, self.digester, self.kept)

    def _compared(self, asked: Compare, source: tuple[Layout, Place]) -> Job:
        room, failure, tell = asked.room, None, None
        try:
            while (completion := self._landed(asked)) is None:
                yield Pause.NOT_YET
            failure, tell = yield from self._outcome(_Landed(asked, completion), source)
        except _Unwanted:
            return
        except CompletionDisagrees as error:
            failure = str(error)
        except DigestsDisagree as error:
            if room.view.decided:
                return
            self.recorder.compared("different")
            failure = f"what arrived is not what {asked.link} has sent digests of: {error}"
        except Exception as error:  # noqa: BLE001 - it is logged, and ends a request that needs it
            if room.view.decided:
                return
            failure = self._not_compared(asked, error)
        self.post(Verified(room, asked.expected.tag, failure, tell))

    def _landed(self, asked: Compare) -> CompletionRecord | None:
        if asked.room.view.decided:
            raise _Unwanted
        return self.landed(asked)

    def _not_compared(self, asked: Compare, error: Exception) -> str | None:
        """None for a request that is one of a sample: nothing says that its bytes are wrong."""
        reason = f"cannot compare what arrived with what {asked.link} sent: {_why(error)}"
        self.recorder.compared("not compared")
        self._unmade.log(f"room {asked.room.number}: {reason}", error)
        is_for_all = Verify.ALL in (asked.message.verify, asked.request.verify)
        return reason if is_for_all else None

    def _outcome(
        self, landed: _Landed, source: tuple[Layout, Place]
    ) -> Generator[Pause, None, tuple[str | None, Tell | None]]:
        """Why the request fails, and what the source hears of it; None if all is as it was sent."""
        asked, message = landed.compare, landed.compare.message
        if message.failure is not None:
            raise te.DigestError(f"it has made no digests: {message.failure}")
        if self.digester is None:
            raise te.DigestError(f"{self.rank} cannot read its memory, as it logged at its start")
        theirs = [one.digests for one in message.lists]
        lists = self._cells(landed, theirs, source)
        found = yield from _digests(
            lists, message.verify, message.seed, self.digester, asked.room, self.recorder
        )
        if asked.room.view.decided:
            raise _Unwanted
        differ = differences(lists, found, theirs)
        self.recorder.compared("different" if differ else "equal")
        if not differ:
            return None, None
        reason = (
            f"the KV cache that arrived is not the one that was sent: {_told(differ)}. Digests of "
            f"{asked.link} and {self.rank} differ there, of room {asked.room.number}: memory was "
            "used again too early, or something between the two ranks changes bytes"
        )
        yield from self._keep(asked.room, reason, lists, differ)
        digests = tuple(ListDigests.of(one) for one in found)
        return reason, Tell(asked.link, RoomDiffers(message.room, message.generation, digests))

    def _keep(
        self, room: Room, reason: str, lists: Sequence[Cells], differ: Sequence[Difference]
    ) -> Generator[Pause, None, None]:
        """Raises _Unwanted once the end of the room is decided: the pages may be another's."""
        if self.kept is None or not self.kept.claim(room.number):
            return
        assert self.digester is not None
        cells: Bytes | None = None
        try:
            all_cells = range(_sizes(lists)[0])
            cells = yield from _bytes(lists, differ, all_cells, self.digester, room)
        except (te.Error, MemoryError) as error:  # the request fails for the difference
            self._unmade.log(f"room {room.number}: bytes that differ: {_why(error)}", error)
        finally:
            self.kept.keep(room.number, reason, cells)

    def _cells(
        self, landed: _Landed, theirs: Sequence[Digests], source: tuple[Layout, Place]
    ) -> tuple[Cells, ...]:
        asked = landed.compare
        target = asked.request.target
        assert target is not None, "nothing arrives from a source that sends nothing"
        if asked.message.verify < asked.request.verify:
            raise ValueError("digests of some pages where all were asked for")
        device = target.device_pages
        return self._plan(asked.link, source).cells.of_target(
            [(one.which, one.positions) for one in theirs],
            indices_from_bytes(target.pages),
            None if device is None else indices_from_bytes(device),
            states_from_bytes(target.states),
            target.aux_slot,
            Sent(landed.completion.pages, asked.message.nbytes),
        )

    def _plan(self, link: Hashable, source: tuple[Layout, Place]) -> Plan:
        layout, place = source
        known = self._plans.get(link)
        if known is not None and known[0] is layout:
            return known[1]
        if len(self._plans) >= _PLANS_MAX:
            del self._plans[next(iter(self._plans))]
        plan = Plan(layout, self.layout, place, self.place)
        self._plans[link] = layout, plan
        return plan


def _close(thread: DigestThread, digester: te.Digester | None, kept: KeptBytes | None) -> None:
    thread.close()
    if digester is not None:
        digester.close()
    if kept is not None:
        kept.close()


def _check_wanted(room: Room | None) -> None:
    if room is not None and room.view.decided:
        raise _Unwanted


def _bytes(
    lists: Sequence[Cells],
    differ: Sequence[Difference],
    chosen: Indices | range,
    digester: te.Digester,
    room: Room | None = None,
) -> Generator[Pause, None, Bytes]:
    """Of the chosen cells that differ. Raises _Unwanted once the end of the room, if any, is
    decided."""
    cells: Bytes = {}
    for some in bytes_of(lists, differ, chosen, digester.read):
        yield Pause.OTHERS_TURN
        _check_wanted(room)
        cells |= some
    return cells


def _digests(
    lists: Sequence[Cells],
    verify: Verify,
    seed: int,
    digester: te.Digester,
    room: Room | None,
    recorder: Recorder,
) -> Generator[Pause, None, tuple[Digests, ...]]:
    """Raises _Unwanted once the end of the room, if any, is decided."""
    _check_wanted(room)
    began_s, spent_s = time.monotonic(), 0.0
    chosen = _chosen(lists, verify, seed)
    made: list[Digests] = []
    for found in digest(lists, chosen, digester.digests):
        made += found
        spent_s += time.monotonic() - began_s
        yield Pause.OTHERS_TURN
        _check_wanted(room)
        began_s = time.monotonic()
    cells, nbytes = _sizes(lists)
    part = len(chosen) / cells if cells else 1.0
    recorder.digested(len(chosen), int(nbytes * part), spent_s)
    return tuple(made)


def _chosen(lists: Sequence[Cells], verify: Verify, seed: int) -> Indices | range:
    cells, nbytes = _sizes(lists)
    return chosen_cells(seed, sample_size(verify, cells, nbytes), cells)


def _sizes(lists: Sequence[Cells]) -> tuple[int, int]:
    """How many cells there are, and of how many bytes."""
    return sum(len(cells) for cells in lists), sum(cells.nbytes for cells in lists)


def _told(differ: Sequence[Difference]) -> str:
    return "; ".join(
        f"{one.name} {_some([str(item) for item in one.items])} in {_some(one.buffers)}"
        for one in differ
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_MAX])
    return shown + (f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else "")
