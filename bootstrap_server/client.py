# SPDX-License-Identifier: Apache-2.0
"""A synchronous client of the bootstrap server, for ranks."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Final, Self

import msgspec
import requests

from bootstrap_server.errors import BootstrapError, NotReady, RegistrationRefused, Unreachable
from bootstrap_server.records import Instance, RankCoords, RankRecord
from bootstrap_server.sglang_http import ROOMS_PER_QUERY_MAX

__all__ = ["BootstrapClient"]

logger = logging.getLogger(__name__)

#: An instance of 65,536 ranks, the most a registry takes, makes about 10 MB of JSON.
ANSWER_BYTES_MAX: Final = 64 << 20
ANSWER_EXCERPT_CHARS: Final = 160
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
PORT_MAX: Final = 65_535
PORT_FLAG: Final = "--disaggregation-bootstrap-port"
_ADDRESS: Final = re.compile(
    r"(?:\[(?P<v6>[^\s/@?#\[\]]+)\]|(?P<name>[^\s/@?#\[\]:]+)):(?P<port>[0-9]{1,5})"
)
#: Addresses that a server may listen on but nobody can be told to call.
_LOOPBACK_OF_WILDCARD: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class _NotReadyBody(msgspec.Struct, frozen=True):
    """Body of a 503 to `GET /v1/instance`."""

    error: str
    registered: int
    expected: int
    missing: tuple[RankCoords, ...]
    note: str | None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: str


class BootstrapClient:
    """Talks to the bootstrap server at `address` (`host:port`, IPv6 as `[host]:port`).

    Waits `timeout_s` at most to connect, and again for each packet of an answer. Raises
    `BootstrapError` with a sentence, and `Unreachable`, a kind of it, when asking again later
    can help. Keeps one connection open and must be used from one thread. `sleep` and `clock`
    are for tests.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 5.0,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._url = _url(address)
        self._timeout_s = timeout_s
        self._sleep = sleep
        self._clock = clock
        self._session = requests.Session()
        # Ranks talk to each other directly; a proxy from the environment must not get between.
        self._session.trust_env = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._session.close()

    def register(self, record: RankRecord, deadline_s: float = 60.0) -> None:
        """Register a rank. The server may come up later: tries for `deadline_s`.

        Raises `RegistrationRefused` at once when the server refuses the record, and
        `Unreachable` when nothing has answered by the deadline.
        """
        body = msgspec.json.encode(record)
        give_up_at_s = self._clock() + deadline_s
        backoff_s = BACKOFF_FIRST_S
        while True:
            try:
                status, answer = self._request("PUT", "/v1/ranks", body)
                break
            except Unreachable as error:
                left_s = give_up_at_s - self._clock()
                if left_s <= 0:
                    raise Unreachable(
                        f"rank {record.rank.coords} could not register "
                        f"for {deadline_s:g} s: {error}"
                    ) from error
                logger.debug("registration will be tried again: %s", error)
                self._sleep(min(backoff_s, left_s))
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
        if status == 200 and answer == b"OK":
            return
        refusal = self._error_of(answer)
        if refusal is None or not 400 <= status < 500:
            raise self._stranger("PUT /v1/ranks", status, answer)
        raise RegistrationRefused(refusal)

    def instance(self) -> Instance:
        """The whole prefill instance; `NotReady` until all of its ranks have registered."""
        status, answer = self._request("GET", "/v1/instance")
        try:
            if status == 200:
                return msgspec.json.decode(answer, type=Instance)
            if status == 503:
                absent = msgspec.json.decode(answer, type=_NotReadyBody)
                raise NotReady(absent.registered, absent.expected, absent.missing, absent.note)
        except msgspec.DecodeError as error:
            raise self._stranger("GET /v1/instance", status, answer) from error
        raise self._stranger("GET /v1/instance", status, answer)

    def register_dp_rank(self, room: int, dp_rank: int) -> None:
        """Say that prefill DP rank `dp_rank` serves `room`."""
        body = msgspec.json.encode({"bootstrap_room": room, "dp_rank": dp_rank})
        status, answer = self._request("POST", "/register_dp_rank", body)
        if (status, answer) != (200, b"OK"):
            raise self._stranger("POST /register_dp_rank", status, answer)

    def query_dp_ranks(self, rooms: Sequence[int]) -> dict[int, int]:
        """Prefill DP rank per room, for those of `rooms` that are registered."""
        found: dict[int, int] = {}
        for first in range(0, len(rooms), ROOMS_PER_QUERY_MAX):
            batch = list(rooms[first : first + ROOMS_PER_QUERY_MAX])
            body = msgspec.json.encode({"bootstrap_rooms": batch})
            status, answer = self._request("POST", "/query_dp_ranks", body)
            if status != 200:
                raise self._stranger("POST /query_dp_ranks", status, answer)
            try:
                found |= msgspec.json.decode(answer, type=dict[int, int])
            except msgspec.DecodeError as error:
                raise self._stranger("POST /query_dp_ranks", status, answer) from error
        return found

    def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of one request; `Unreachable` when there is no complete answer."""
        try:
            with self._session.request(
                method,
                self._url + path,
                data=body,
                headers={"Content-Type": "application/json"} if body is not None else None,
                timeout=self._timeout_s,
                allow_redirects=False,
                stream=True,
            ) as response:
                return response.status_code, self._read(response)
        except requests.RequestException as error:
            raise Unreachable(
                f"the bootstrap server at {self.address} cannot be reached: {_root_cause(error)}"
            ) from error

    def _read(self, response: requests.Response) -> bytes:
        parts: list[bytes] = []
        size_bytes = 0
        for part in response.iter_content(chunk_size=1 << 16):
            parts.append(part)
            size_bytes += len(part)
            if size_bytes > ANSWER_BYTES_MAX:
                raise BootstrapError(
                    f"{self.address} answers with more than {ANSWER_BYTES_MAX} bytes, "
                    f"so it is no bootstrap server ({PORT_FLAG})"
                )
        return b"".join(parts)

    def _stranger(self, what: str, status: int, answer: bytes) -> BootstrapError:
        """Error for a refusal, or for an answer that our server would not give."""
        sentence = self._error_of(answer)
        if sentence is None:
            sentence = repr(answer[:ANSWER_EXCERPT_CHARS].decode(errors="replace"))
            # Our server's refusals on SGLang's routes are plain text with this status.
            if status != 400:
                sentence += (
                    f"; is this address ({PORT_FLAG}) a bootstrap server of sglang-mooncake, "
                    "and not a stock SGLang or another service?"
                )
        return BootstrapError(f"{self.address} answers {what} with status {status}: {sentence}")

    @staticmethod
    def _error_of(answer: bytes) -> str | None:
        try:
            return msgspec.json.decode(answer, type=_ErrorBody).error
        except msgspec.DecodeError:
            return None


def _url(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= PORT_MAX:
        raise BootstrapError(f"bootstrap address {address!r} is not of the form host:port")
    host, port = match["v6"] or match["name"], match["port"]
    host = _LOOPBACK_OF_WILDCARD.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _root_cause(error: BaseException) -> BaseException:
    """The innermost error: the layers of requests and urllib3 bury the errno."""
    seen: BaseException | None = error
    while seen is not None:
        error, seen = seen, seen.__cause__ or seen.__context__
    return error
