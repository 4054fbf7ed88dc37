# SPDX-License-Identifier: Apache-2.0
"""Digests of what has landed at a decode rank, compared with those that were sent, in a thread of
their own: they read megabytes, and neither SGLang's scheduler nor the loop of a rank waits for
that."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field

import te
from sglang_mooncake.digest_thread import DigestThread, Job, Pause
from sglang_mooncake.digesting import (
    Bytes,
    Unmade,
    Unwanted,
    check_wanted,
    close_all,
    in_words,
    make_digests,
    read_bytes,
    sizes,
    why_of,
)
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
    differences,
)
from sglang_mooncake.messages import (
    ListDigests,
    RoomDiffers,
    indices_from_bytes,
    states_from_bytes,
)
from sglang_mooncake.rooms.arrival import CompletionDisagrees
from sglang_mooncake.rooms.decode_events import Compare, Differs, Tell, Verified
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.stats import Recorder

__all__ = ["LandedDigests"]

#: Plans of the copy from prefill ranks, of which each life is another one.
_PLANS_MAX = 256


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
    post: hands what has come of a `Compare` to the loop, from the thread or from the loop itself; a
        difference twice.
    kept: takes the bytes of what differs; None where they are not kept.
    """

    digester: te.Digester | None
    recorder: Recorder
    layout: Layout
    place: Place
    rank: str
    landed: Callable[[Compare], CompletionRecord | None]
    post: Callable[[Differs | Verified], None]
    kept: KeptBytes | None = None
    _plans: dict[Hashable, tuple[Layout, Plan]] = field(default_factory=dict)
    _unmade: Unmade = field(default_factory=Unmade)
    _thread: DigestThread = field(default_factory=lambda: DigestThread("kv-decode-digests"))

    def start(self) -> None:
        self._thread.start()
        if self.kept is not None:
            self.kept.start()

    def compare(self, asked: Compare, source: tuple[Layout, Place]) -> None:
        """`post` is called with `Verified`, unless the room ends before. source: what the prefill
        rank has, and where."""
        if full := self._thread.add(self._compared(asked, source)):
            failure = self._not_compared(asked, te.DigestError(full))
            self.post(Verified(asked.room, asked.expected.tag, failure))

    def close(self) -> None:
        close_all(self._thread, self.digester, self.kept)

    def _compared(self, asked: Compare, source: tuple[Layout, Place]) -> Job:
        room, failure = asked.room, None
        try:
            while (completion := self._landed(asked)) is None:
                yield Pause.NOT_YET
            failure = yield from self._outcome(_Landed(asked, completion), source)
        except Unwanted:
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
        self.post(Verified(room, asked.expected.tag, failure))

    def _landed(self, asked: Compare) -> CompletionRecord | None:
        check_wanted(asked.room)
        return self.landed(asked)

    def _not_compared(self, asked: Compare, error: Exception) -> str | None:
        """None for a request that is one of a sample: nothing says that its bytes are wrong."""
        reason = f"cannot compare what arrived with what {asked.link} sent: {why_of(error)}"
        self.recorder.compared("not compared")
        self._unmade.log(f"room {asked.room.number}: {reason}", error)
        is_for_all = Verify.ALL in (asked.message.verify, asked.request.verify)
        return reason if is_for_all else None

    def _outcome(
        self, landed: _Landed, source: tuple[Layout, Place]
    ) -> Generator[Pause, None, str | None]:
        """Why the request fails; None if all is as it was sent. The source hears of a difference
        before any byte is read here, since its memory may soon be another request's."""
        asked, message = landed.compare, landed.compare.message
        if message.failure is not None:
            raise te.DigestError(f"it has made no digests: {message.failure}")
        if self.digester is None:
            raise te.DigestError(f"{self.rank} cannot read its memory, as it logged at its start")
        theirs = [one.digests for one in message.lists]
        lists = self._cells(landed, theirs, source)
        found = yield from make_digests(
            lists, message.verify, message.seed, self.digester, asked.room, self.recorder
        )
        check_wanted(asked.room)
        differ = differences(lists, found, theirs)
        self.recorder.compared("different" if differ else "equal")
        if not differ:
            return None
        reason = (
            f"the KV cache that arrived is not the one that was sent: {in_words(differ)}. Digests "
            f"of {asked.link} and {self.rank} differ there, of room {asked.room.number}: memory "
            "was used again too early, or something between the two ranks changes bytes"
        )
        digests = tuple(ListDigests.of(one) for one in found)
        tell = Tell(asked.link, RoomDiffers(message.room, message.generation, digests))
        self.post(Differs(asked.room, tell))
        try:
            yield from self._keep(asked.room, reason, lists, differ)
        except Unwanted:
            raise
        except Exception as error:  # noqa: BLE001 - the request fails for the difference
            unkept = f"room {asked.room.number}: bytes that differ: {why_of(error)}"
            self._unmade.log(unkept, error)
        return reason

    def _keep(
        self, room: Room, reason: str, lists: Sequence[Cells], differ: Sequence[Difference]
    ) -> Generator[Pause, None, None]:
        """Raises Unwanted once the end of the room is decided: the pages may be another's."""
        if self.kept is None or not self.kept.claim(room.number):
            return
        assert self.digester is not None
        cells: Bytes | None = None
        try:
            all_cells = range(sizes(lists)[0])
            cells = yield from read_bytes(lists, differ, all_cells, self.digester, room)
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
