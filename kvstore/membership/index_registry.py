# SPDX-License-Identifier: Apache-2.0
"""A list of entries in the registry of this package (``bootstrap_server``), for who has neither
Redis nor etcd. Requests and answers prove the deployment's secret."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from bootstrap_server.client.http import HttpClient
from bootstrap_server.decoding import BadText, decoded
from bootstrap_server.ranks.errors import BootstrapError
from bootstrap_server.ranks.store_owners import STORE_OWNERS_PATH, EntryOf, StoreEntries

__all__ = ["DEFAULT_PORT", "SCHEMES", "RegistryIndex"]

SCHEMES: Final = ("registry",)
DEFAULT_PORT: Final = 8998
"""SGLang's ``--disaggregation-bootstrap-port``."""
_OK: Final = 200
_ANSWER: Final = msgspec.json.Decoder(StoreEntries)


class RegistryIndex:
    """See ``members.Index``."""

    def __init__(self, url: str, timeout_s: float, kept_s: float, keys: Sequence[bytes]) -> None:
        """``keys``: of the deployment's secrets, for the registry. ``ValueError`` if the URL names
        what is not served."""
        parts = urlsplit(url)
        if parts.username is not None or parts.path.strip("/"):
            raise ValueError("a registry has no users and no path here: give registry://HOST:PORT")
        host = str(parts.hostname)
        host = f"[{host}]" if ":" in host else host
        self.errors: Final[tuple[type[Exception], ...]] = (BootstrapError,)
        self._kept_s = kept_s
        self._client = HttpClient(
            f"{host}:{parts.port or DEFAULT_PORT}", timeout_s, "the registry", keys=keys
        )

    def exchange(
        self, name: str, entry: bytes, known: bytes
    ) -> tuple[bytes, Sequence[bytes] | None]:
        """See ``members.Index``."""
        said = EntryOf(known=int(known or 0), kept_s=self._kept_s)
        if entry:
            said = msgspec.structs.replace(said, name=name, entry=entry.decode())
        try:
            told = decoded(_ANSWER, self._ask("PUT", said))
        except BadText as exc:
            raise BootstrapError(f"the registry answers what cannot be read: {exc}") from exc
        found = None if told.entries is None else [one.encode() for one in told.entries]
        return b"%d" % told.revision, found

    def leave(self, name: str, entry: bytes) -> None:  # noqa: ARG002
        """See ``members.Index``."""
        self._ask("DELETE", EntryOf(name=name))

    def close(self) -> None:
        """See ``members.Index``."""
        self._client.close()

    def _ask(self, method: str, said: EntryOf) -> bytes:
        status, raw = self._client.request(method, STORE_OWNERS_PATH, msgspec.json.encode(said))
        if status != _OK:
            text = raw[:200].decode("utf-8", "replace")
            raise BootstrapError(f"the registry answers with status {status}: {text}")
        return raw
