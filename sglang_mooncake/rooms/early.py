# SPDX-License-Identifier: Apache-2.0
"""What decode ranks say of a room before the prefill scheduler opens it: the last word of each.

Pure, like the rest of this package. Bounded: peers that name rooms which no request ever uses must
not fill our memory, nor crowd out those of others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_mooncake.messages import RoomAbort, RoomRequest, RoomWait

__all__ = ["EARLY_BYTES_MAX", "EARLY_PEER_BYTES_MAX", "Early", "EarlyRooms"]

#: A decode rank that asks for its whole pool of 16 million pages in advance fills its share.
EARLY_PEER_BYTES_MAX = 64 << 20
EARLY_BYTES_MAX = 256 << 20
#: What a message takes beside its indices and its reason, our tables included.
_OVERHEAD_BYTES = 1_024


@dataclass(frozen=True, slots=True)
class Early:
    """A peer's last word on a room that is not open."""

    peer: str
    message: RoomRequest | RoomWait | RoomAbort
    since_s: float

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        if isinstance(self.message, RoomAbort):
            return _OVERHEAD_BYTES + 4 * len(self.message.reason)
        target = self.message.target if isinstance(self.message, RoomRequest) else None
        if target is None:
            return _OVERHEAD_BYTES
        states = sum(len(indices or b"") for indices in target.states)
        pages = len(target.pages) + len(target.device_pages or b"")
        return _OVERHEAD_BYTES + pages + states


@dataclass(slots=True)
class _Peer:
    """The messages of one peer by room, the one that waits longest first."""

    nbytes: int = 0
    messages: dict[int, Early] = field(default_factory=dict)


class EarlyRooms:
    """Rooms that are not open yet.

    Args:
        timeout_s: how long what is said of one is kept; `timeout_name` is the setting, for
            sentences.
    """

    def __init__(self, timeout_s: float, timeout_name: str) -> None:
        self._timeout_s, self._timeout_name = timeout_s, timeout_name
        self._peers: dict[str, _Peer] = {}
        #: Who has said something of a room. It is in `_peers`.
        self._rooms: dict[int, dict[str, None]] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """About what all of them take in memory."""
        return self._nbytes

    def request(self, peer: str, request: RoomRequest | RoomWait, now_s: float) -> None:
        """Keeps a request (or that there will be one), unless its own abort has overtaken it, or a
        newer one."""
        known = self._known(peer, request.room)
        if known is None or known.generation < request.generation:
            self._keep(Early(peer, request, now_s))

    def abort(self, peer: str, abort: RoomAbort, now_s: float) -> None:
        """Keeps an abort, unless the peer has asked again since: that is another use."""
        known = self._known(peer, abort.room)
        if known is None or known.generation <= abort.generation:
            self._keep(Early(peer, abort, now_s))

    def take(self, room: int) -> list[Early]:
        """What is known of a room that opens now; it is early no more."""
        names = list(self._rooms.get(room, ()))
        found = [self._drop(self._peers[name].messages[room]) for name in names]
        return sorted(found, key=lambda early: early.since_s)

    def lose(self, peer: str, reason: str, now_s: float) -> None:
        """A peer cannot be written to any more: its requests count as given up, so that a room that
        opens later does not wait for somebody who is gone."""
        known = self._peers.get(peer)
        for early in list(known.messages.values()) if known else ():
            request = early.message
            if not isinstance(request, RoomAbort):
                lost = f"its link was lost before the prefill server had the request: {reason}"
                abort = RoomAbort(request.room, request.generation, lost)
                self._keep(Early(peer, abort, now_s))

    def overdue(self, now_s: float) -> list[tuple[Early, str]]:
        """Takes out what waited too long, and says why."""
        reason = (
            f"no request with this room reached the prefill server within {self._timeout_s:.0f} s "
            f"({self._timeout_name})"
        )
        found = []
        for name in list(self._peers):
            while (oldest := self._oldest(name)) and now_s - oldest.since_s >= self._timeout_s:
                found.append((self._drop(oldest), reason))
        return found

    def crowd(self, peer: str) -> list[tuple[Early, str]]:
        """Takes out what is too much after a message of this peer, and says why."""
        found = []
        while (oldest := self._oldest(peer)) and self._peers[peer].nbytes > EARLY_PEER_BYTES_MAX:
            found.append(self._drop(oldest))
        while self._nbytes > EARLY_BYTES_MAX:
            # Who has the most gives way, so that nobody can crowd out the others.
            most = max(self._peers, key=lambda name: self._peers[name].nbytes)
            oldest = self._oldest(most)
            assert oldest is not None
            found.append(self._drop(oldest))
        reason = (
            "decode ranks ask for more rooms, or name more pages, than the prefill server keeps "
            f"before their requests reach it ({EARLY_PEER_BYTES_MAX >> 20} MiB of each rank, "
            f"{EARLY_BYTES_MAX >> 20} MiB in all)"
        )
        return [(early, reason) for early in found]

    def _oldest(self, name: str) -> Early | None:
        peer = self._peers.get(name)
        return next(iter(peer.messages.values())) if peer else None

    def _known(self, peer: str, room: int) -> RoomRequest | RoomWait | RoomAbort | None:
        known = self._peers.get(peer)
        early = known.messages.get(room) if known else None
        return early.message if early else None

    def _keep(self, early: Early) -> None:
        room = early.message.room
        known = self._peers.get(early.peer)
        if known is not None and room in known.messages:
            self._drop(known.messages[room])
        peer = self._peers.setdefault(early.peer, _Peer())
        peer.messages[room] = early
        peer.nbytes += early.nbytes
        self._nbytes += early.nbytes
        self._rooms.setdefault(room, {})[early.peer] = None

    def _drop(self, early: Early) -> Early:
        name, room = early.peer, early.message.room
        peer = self._peers[name]
        del peer.messages[room]
        peer.nbytes -= early.nbytes
        self._nbytes -= early.nbytes
        if not peer.messages:
            del self._peers[name]
        names = self._rooms[room]
        del names[name]
        if not names:
            del self._rooms[room]
        return early
