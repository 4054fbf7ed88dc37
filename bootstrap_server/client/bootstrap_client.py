# SPDX-License-Identifier: Apache-2.0
"""A synchronous client of the bootstrap server, for ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final, Self

import msgspec

from bootstrap_server.client.http import HttpClient
from bootstrap_server.decoding import BadText, decoded, excerpt
from bootstrap_server.ranks.errors import (
    BootstrapError,
    LeaseLost,
    NeverServed,
    NotReady,
    PlaceTaken,
    RegistrationRefused,
    Unreachable,
    Why,
)
from bootstrap_server.ranks.given_up import GIVEN_UP_PATH, GivenUp, Notice
from bootstrap_server.ranks.rank_status import RankStatus
from bootstrap_server.ranks.records import (
    DEFAULT_INSTANCE,
    Instance,
    Rank,
    RankCoords,
    RankLife,
    RankRecord,
    Renewal,
    Role,
    check_instance_name,
)
from bootstrap_server.ranks.router_report import ROUTERS_PATH, RouterReport
from bootstrap_server.ranks.sglang_http import ROOMS_PER_QUERY_MAX

__all__ = ["BootstrapClient"]

logger = logging.getLogger(__name__)

ANSWER_EXCERPT_CHARS: Final = 160
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
#: A place whose former holder should be gone is asked for this often, first sooner, and so long
#: after.
TAKEN_POLL_MAX_S: Final = 1.0
TAKEN_MARGIN_S: Final = 2.0
PORT_FLAG: Final = "--disaggregation-bootstrap-port"


class _NotReadyBody(msgspec.Struct, frozen=True):
    """Body of a 503 to `GET /v1/instance`."""

    error: str
    registered: int
    expected: int
    missing: tuple[RankCoords, ...]
    note: str | None
    instance: str | None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: str
    left_s: float | None = None


class _LeaseBody(msgspec.Struct, frozen=True):
    lease_s: float


class _Listed(msgspec.Struct, frozen=True):
    """An entry of the answer to `GET /v1/instances`."""

    registered: int
    expected: int
    revision: int

    @property
    def is_ready(self) -> bool:
        return self.registered == self.expected > 0


class _OtherConfig(msgspec.Struct, frozen=True):
    protocol: int


class _OtherInstance(msgspec.Struct, frozen=True):
    """As much of an `Instance` as all releases have."""

    config: _OtherConfig


# Made by the one thread that imports this: msgspec crashes when two threads decode a type for the
# first time at once.
_INSTANCE = msgspec.json.Decoder(Instance)
_OTHER_INSTANCE = msgspec.json.Decoder(_OtherInstance)
_LISTED = msgspec.json.Decoder(dict[str, _Listed])
_NOT_READY = msgspec.json.Decoder(_NotReadyBody)
_ROOMS = msgspec.json.Decoder(dict[int, int])
_LEASE = msgspec.json.Decoder(_LeaseBody)
_ERROR = msgspec.json.Decoder(_ErrorBody)
_GIVEN_UP = msgspec.json.Decoder(GivenUp)


class BootstrapClient:
    """Talks to the bootstrap server at `address` (`host:port`, IPv6 as `[host]:port`) about one
    of its instances; the one that SGLang serves is `default`. With the `role` "decode" instances
    are the decode servers that the registry knows, whose ranks are called by SGLang's HTTP port.

    A request takes `timeout_s` at most, plus the time for which the server is asked to wait. Raises
    `BootstrapError` with a sentence, and `Unreachable`, a kind of it, when asking again later
    can help. Keeps one connection open and must be used from one thread. With `keys`
    (`secret.Keys.registry`) requests and answers are proved. `sleep` and `clock` are for tests.
    What a rank needs all its life is `RankLease`.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 5.0,
        *,
        instance: str = DEFAULT_INSTANCE,
        keys: Sequence[bytes] = (),
        role: Role = "prefill",
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._http = HttpClient(address, timeout_s, keys=keys)
        try:
            check_instance_name(instance)
        except ValueError as error:
            raise BootstrapError(str(error)) from error
        self._name = instance
        kind = "instances" if role == "prefill" else "decode-servers"
        self._all_path = f"/v1/{kind}"
        self._path = f"{self._all_path}/{instance}"
        self._sleep = sleep
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._http.close()

    def register(self, record: RankRecord, deadline_s: float = 60.0) -> float:
        """Register a rank; returns how long its lease lasts, in seconds.

        The server may come up later: tries for `deadline_s`. A place that a live rank holds is
        asked for until that rank's lease must have ended: after a crash it ends, at once where the
        registry can tell, and this rank is a restart; if not, the holder is another server. Raises
        `RegistrationRefused` then, and at once for a record that the server refuses otherwise;
        `Unreachable` when nothing has answered by the deadline.
        """
        give_up_at_s = self._clock() + deadline_s
        free_at_s: float | None = None
        backoff_s = poll_s = BACKOFF_FIRST_S
        while True:
            try:
                return self.try_register(record)
            except Unreachable as error:
                left_s = give_up_at_s - self._clock()
                if left_s <= 0:
                    raise Unreachable(
                        f"rank {record.rank.coords} could not register "
                        f"with its bootstrap server within {deadline_s:g} s: {error}"
                    ) from error
                logger.debug("registration will be tried again: %s", error)
                self._sleep(min(backoff_s, left_s))
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            except PlaceTaken as error:
                now_s = self._clock()
                if free_at_s is None:
                    free_at_s = min(now_s + error.left_s + TAKEN_MARGIN_S, give_up_at_s)
                    logger.warning("registration waits: %s", error)
                if now_s >= free_at_s:
                    raise
                self._sleep(min(poll_s, free_at_s - now_s))
                poll_s = min(2 * poll_s, TAKEN_POLL_MAX_S)

    def try_register(self, record: RankRecord) -> float:
        """Register a rank or raise, as `register` but without waiting for anything."""
        path = f"{self._path}/ranks"
        status, answer = self._http.request("PUT", path, msgspec.json.encode(record))
        refusal = self._error_of(answer)
        if refusal is None or not 400 <= status < 500:
            return self._lease_s(f"PUT {path}", status, answer)
        if refusal.left_s is not None:
            raise PlaceTaken(refusal.error, refusal.left_s)
        raise RegistrationRefused(refusal.error)

    def renew(self, rank: Rank, status: RankStatus | None = None) -> float:
        """Prolong the lease of this life of a rank; returns how long it lasts, in seconds.

        `status` is for the registry's status page. Raises `LeaseLost` when there is no such lease:
        the rank should register again.
        """
        path = f"{self._path}/leases"
        body = _life(rank) if status is None else _renewal(rank, status)
        code, answer = self._http.request("PUT", path, body)
        self._check_held(code, answer)
        return self._lease_s(f"PUT {path}", code, answer)

    def release(self, rank: Rank) -> None:
        """End the lease of this life of a rank, so that its place is free at once.

        Raises `LeaseLost` when there is no such lease.
        """
        path = f"{self._path}/leases"
        status, answer = self._http.request("DELETE", path, _life(rank))
        self._check_held(status, answer)
        if (status, answer) != (200, b"OK"):
            raise self._stranger(f"DELETE {path}", status, answer)

    def instance(self, wait_s: float = 0.0, after: int = 0) -> Instance:
        """The whole instance; `NotReady` while ranks are missing.

        The server waits `wait_s` (at most 60) for it to become ready, with a `revision` above
        `after`, and answers at that moment: wait here instead of asking again and again.
        """
        path = f"{self._path}?wait_s={wait_s:.3f}&after={after}"
        status, answer = self._http.request("GET", path, wait_s=wait_s)
        what = f"GET {self._path}"
        try:
            if status == 200:
                return decoded(_INSTANCE, answer)
            if status == 503:
                absent = decoded(_NOT_READY, answer)
                note = None if absent.note is None else excerpt(absent.note)
                raise NotReady(
                    absent.registered, absent.expected, absent.missing, note, absent.instance
                )
        except BadText as error:
            self._check_release(status, answer)
            raise self._stranger(what, status, answer) from error
        raise self._stranger(what, status, answer)

    def _check_release(self, status: int, answer: bytes) -> None:
        """Raise `NeverServed` for an instance that another release of ours has described."""
        if status == 200:
            with contextlib.suppress(BadText):
                protocol = decoded(_OTHER_INSTANCE, answer).config.protocol
                raise NeverServed(
                    f"the prefill ranks at {self.address} speak version {protocol} of the "
                    "hand-over protocol, and are described in a way that this server's release "
                    "does not know: install the same release of sglang-mooncake on both",
                    Why.RELEASE,
                )

    def instances(self) -> dict[str, int]:
        """The revisions of all instances that are ready, by name."""
        what = f"GET {self._all_path}"
        status, answer = self._http.request("GET", self._all_path)
        try:
            if status == 200:
                found = decoded(_LISTED, answer)
                return {n: one.revision for n, one in found.items() if one.is_ready}
        except BadText as error:
            raise self._stranger(what, status, answer) from error
        raise self._stranger(what, status, answer)

    def report_router(self, report: RouterReport) -> bool:
        """Has the registry's status page show a router. False where the registry does not take it,
        as one of an older release."""
        body = msgspec.json.encode(report)
        return self._http.request("PUT", ROUTERS_PATH, body) == (200, b"OK")

    def register_dp_rank(self, room: int, dp_rank: int) -> None:
        """Say that prefill DP rank `dp_rank` serves `room`."""
        body = msgspec.json.encode(
            {"bootstrap_room": room, "dp_rank": dp_rank, "instance": self._name}
        )
        status, answer = self._http.request("POST", "/register_dp_rank", body)
        if (status, answer) != (200, b"OK"):
            raise self._stranger("POST /register_dp_rank", status, answer)

    def query_dp_ranks(self, rooms: Sequence[int]) -> dict[int, int]:
        """Prefill DP rank per room, for those of `rooms` that are registered."""
        found: dict[int, int] = {}
        for first in range(0, len(rooms), ROOMS_PER_QUERY_MAX):
            batch = list(rooms[first : first + ROOMS_PER_QUERY_MAX])
            body = msgspec.json.encode({"bootstrap_rooms": batch})
            status, answer = self._http.request("POST", "/query_dp_ranks", body)
            if status != 200:
                raise self._stranger("POST /query_dp_ranks", status, answer)
            try:
                dp_ranks = decoded(_ROOMS, answer)
            except BadText as error:
                raise self._stranger("POST /query_dp_ranks", status, answer) from error
            found |= dp_ranks
        return found

    def give_up(self, rooms: Sequence[int], reason: str, refused: bool = False) -> None:
        """Say that a decode server will never ask for these rooms, `ROOMS_PER_NOTICE_MAX` at most
        (`given_up.py`); works without the registry's keys. `refused`: see `Notice`."""
        body = msgspec.json.encode(Notice(tuple(rooms), reason, refused))
        status, answer = self._http.request("POST", GIVEN_UP_PATH, body)
        if (status, answer) != (200, b"OK"):
            raise self._stranger(f"POST {GIVEN_UP_PATH}", status, answer)

    def given_up(self, after: int, wait_s: float) -> GivenUp:
        """Rooms that decode servers have given up since revision `after`; waits `wait_s` (at most
        60) for one."""
        path = f"{GIVEN_UP_PATH}?wait_s={wait_s:.3f}&after={after}"
        status, answer = self._http.request("GET", path, wait_s=wait_s)
        if status == 200:
            with contextlib.suppress(BadText):
                return decoded(_GIVEN_UP, answer)
        raise self._stranger(f"GET {GIVEN_UP_PATH}", status, answer)

    def _check_held(self, status: int, answer: bytes) -> None:
        refusal = self._error_of(answer)
        if status == 410 and refusal is not None:
            raise LeaseLost(refusal.error)

    def _lease_s(self, what: str, status: int, answer: bytes) -> float:
        try:
            lease_s = decoded(_LEASE, answer).lease_s
        except BadText as error:
            raise self._stranger(what, status, answer) from error
        if status != 200 or not 0 < lease_s < math.inf:
            raise self._stranger(what, status, answer)
        return lease_s

    def _stranger(self, what: str, status: int, answer: bytes) -> BootstrapError:
        """Error for a refusal, or for an answer that our server would not give."""
        refusal, why = self._error_of(answer), None
        if status == 401:
            why = Why.SECRET
            sentence = (
                "it serves only SGLang servers that have its secret: start this one with the same "
                "SGLANG_MOONCAKE_SECRET_FILE"
            )
        elif refusal is not None:
            sentence = refusal.error
        else:
            sentence = repr(answer[:ANSWER_EXCERPT_CHARS].decode(errors="replace"))
            # Our server's refusals on SGLang's routes are plain text with this status.
            if status != 400:
                if status < 500 and status not in (408, 429):
                    why = Why.REGISTRY
                sentence += (
                    f"; is this address ({PORT_FLAG}) a bootstrap server of sglang-mooncake, "
                    "and not a stock SGLang or another service?"
                )
        sentence = f"{self.address} answers {what} with status {status}: {sentence}"
        return BootstrapError(sentence) if why is None else NeverServed(sentence, why)

    @staticmethod
    def _error_of(answer: bytes) -> _ErrorBody | None:
        try:
            found = decoded(_ERROR, answer)
        except BadText:
            return None
        return _ErrorBody(excerpt(found.error), found.left_s)


def _renewal(rank: Rank, status: RankStatus) -> bytes:
    encoded = msgspec.Raw(msgspec.json.encode(status))
    return msgspec.json.encode(Renewal(rank.coords, rank.epoch, encoded))


def _life(rank: Rank) -> bytes:
    return msgspec.json.encode(RankLife(rank.coords, rank.epoch))
