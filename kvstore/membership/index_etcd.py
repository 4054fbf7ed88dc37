# SPDX-License-Identifier: Apache-2.0
"""A list of entries in etcd (3.4 and later), each of which lives as long as its owner renews a
lease. By etcd's JSON gateway, which needs no package."""

from __future__ import annotations

import base64
import http.client
import math
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from bootstrap_server.client.deadline import ANSWER_BYTES_MAX, DeadlineConnection

__all__ = ["DEFAULT_PORT", "PREFIX", "SCHEMES", "EtcdIndex"]

SCHEMES: Final = ("etcd",)
DEFAULT_PORT: Final = 2379
PREFIX: Final = b"kvstore/owners/"
_BEHIND: Final = b"kvstore/owners0"
"""The first key behind all that begin with the prefix."""
LIST_EVERY: Final = 10
"""The list is read again after so many questions, even if its revision is the known one: one that
was lost and written again may have the same."""


class _Header(msgspec.Struct, frozen=True):
    revision: int = 0


class _Entry(msgspec.Struct, frozen=True):
    value: bytes = b""


class _Range(msgspec.Struct, frozen=True):
    header: _Header = _Header()
    kvs: list[_Entry] = []


class _Lease(msgspec.Struct, frozen=True):
    """Granted, or renewed; a lease that is not there any more has no time left."""

    header: _Header = _Header()
    id: int = msgspec.field(name="ID", default=0)
    ttl_s: int = msgspec.field(name="TTL", default=0)


class _Renewed(msgspec.Struct, frozen=True):
    result: _Lease = _Lease()


class _Done(msgspec.Struct, frozen=True):
    """An answer of which nothing is used."""


Answer = TypeVar("Answer")


class EtcdIndex:
    """See ``members.Index``."""

    def __init__(self, url: str, timeout_s: float, kept_s: float) -> None:
        """``timeout_s`` is for a whole question, from connecting to the answer's last byte.
        ``kept_s``: an entry that was not renewed for so long is removed; etcd has leases of
        whole seconds, and none below 2. ``ValueError`` if the URL names what is not served."""
        parts = urlsplit(url)
        if parts.username is not None or parts.path.strip("/"):
            raise ValueError("etcd is used without users and without a path: give etcd://HOST:2379")
        self.errors: Final[tuple[type[Exception], ...]] = (
            OSError,
            http.client.HTTPException,
            ValueError,  # msgspec's, and http.client's of a chunk that has less than no bytes.
            RecursionError,  # Of what is nested too deeply.
        )
        self._timeout_s = timeout_s
        self._connection = DeadlineConnection(str(parts.hostname), parts.port or DEFAULT_PORT)
        self._ttl_s = math.ceil(kept_s)
        #: Of this process's entry; 0 before there is one.
        self._lease = 0
        self._questions = 0

    def exchange(
        self, name: str, entry: bytes, known: bytes
    ) -> tuple[bytes, Sequence[bytes] | None]:
        """See ``members.Index``."""
        if entry:
            self._renew(name, entry)
        self._questions += 1
        # Any key of etcd that changes gives it another revision.
        found = self._ask("kv/range", _range_of(count_only=True), _Range)
        if b"%d" % found.header.revision == known and self._questions % LIST_EVERY:
            return known, None
        found = self._ask("kv/range", _range_of(), _Range)
        entries = [one.value for one in found.kvs]
        if entry and entry not in entries:
            self._lease = 0  # Somebody has removed it: it is written anew with the next question.
        return b"%d" % found.header.revision, entries

    def leave(self, name: str, entry: bytes) -> None:  # noqa: ARG002
        """See ``members.Index``."""
        if self._lease:
            self._ask("lease/revoke", {"ID": str(self._lease)}, _Done)

    def close(self) -> None:
        """See ``members.Index``."""
        self._connection.close()

    def _renew(self, name: str, entry: bytes) -> None:
        """The entry and its lease are there afterwards: a lease that has run out, or that etcd has
        lost, is replaced."""
        if self._lease:
            renewed = self._ask("lease/keepalive", {"ID": str(self._lease)}, _Renewed)
            if renewed.result.ttl_s > 0:
                return
        granted = self._ask("lease/grant", {"TTL": str(self._ttl_s)}, _Lease)
        put = {
            "key": _text(PREFIX + name.encode()),
            "value": _text(entry),
            "lease": str(granted.id),
        }
        self._ask("kv/put", put, _Done)
        self._lease = granted.id

    def _ask(self, what: str, question: dict[str, Any], kind: type[Answer]) -> Answer:
        """One of ``errors`` if there is no answer, or one that is not understood."""
        try:
            raw = self._post(what, msgspec.json.encode(question))
        except BaseException:
            self._connection.close()  # The next question makes a new connection.
            raise
        return msgspec.json.decode(raw, type=kind, strict=False)  # Numbers come as texts.

    def _post(self, what: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        is_used = self._connection.sock is not None
        self._connection.begin(time.monotonic() + self._timeout_s)
        try:
            self._connection.request("POST", f"/v3/{what}", body, headers)
            response = self._connection.getresponse()
        except (ConnectionError, http.client.BadStatusLine):
            # A connection that was used before may have been closed meanwhile.
            self._connection.close()
            if not is_used:
                raise
            self._connection.request("POST", f"/v3/{what}", body, headers)
            response = self._connection.getresponse()
        raw = response.read(ANSWER_BYTES_MAX + 1)
        if len(raw) > ANSWER_BYTES_MAX:
            raise http.client.HTTPException(
                f"{what}: an answer of more than {ANSWER_BYTES_MAX} bytes"
            )
        if response.status != http.HTTPStatus.OK:
            said = raw[:200].decode("utf-8", "replace").strip()
            raise http.client.HTTPException(f"{what}: HTTP {response.status}: {said}")
        return raw


def _range_of(**more: Any) -> dict[str, Any]:
    return {"key": _text(PREFIX), "range_end": _text(_BEHIND), **more}


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
