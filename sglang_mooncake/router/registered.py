# SPDX-License-Identifier: Apache-2.0
"""Caches that publish KV events and are no servers of the router: whoever starts them registers
them, in the form of Mooncake's RFC 1403. The router sends nothing there; it answers for them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

import msgspec

from sglang_mooncake.router.cache_view import CacheView
from sglang_mooncake.router.kv_events import PAGES_MAX, Room
from sglang_mooncake.router.sglang_http import RequestError

__all__ = [
    "REGISTER",
    "REGISTERED_MAX",
    "TENANT",
    "UNREGISTER",
    "Cache",
    "Registered",
    "Registration",
    "Unregistration",
]

REGISTER: Final = "/register"
UNREGISTER: Final = "/unregister"
#: Where the router has no secret, whoever reaches it may register.
REGISTERED_MAX: Final = 1024
TENANT: Final = "default"
"""Of caches and questions that name none, and of the router's own servers."""
_ENDPOINT: Final = re.compile(r"tcp://[^\s/*]+:\d{1,5}")
#: Its pages have the names that can be told from tokens.
_TYPE: Final = "sglang"


class _Key(NamedTuple):
    instance: str
    tenant: str
    rank: int

    def __str__(self) -> str:
        return "|".join(map(str, self))


class Unregistration(msgspec.Struct, kw_only=True):
    """Which cache is meant: that of a DP rank of an instance."""

    instance_id: str | int
    tenant_id: str = TENANT
    dp_rank: int = 0

    @property
    def key(self) -> _Key:
        return _Key(str(self.instance_id), self.tenant_id, self.dp_rank)


class Registration(Unregistration, kw_only=True):
    """A cache and where it publishes. The model's name is taken as either of two members."""

    endpoint: str
    replay_endpoint: str | None = None
    type: str = "SGLang"
    modelname: str | None = None
    model_name: str | None = None
    block_size: int
    lora_name: str | None = None
    additionalsalt: str | None = None

    @property
    def model(self) -> str | None:
        return self.modelname or self.model_name


class Cache:
    """One that is registered, and what is known of it."""

    def __init__(self, registration: Registration) -> None:
        self.registration: Final = registration
        self.view: Final = CacheView(f"the registered cache {registration.key}")

    def __repr__(self) -> str:
        return repr(self.view)


class Registered:
    """Those that there are."""

    def __init__(self, caches_max: int = REGISTERED_MAX, pages_max: int = PAGES_MAX) -> None:
        """So many at most, and so many pages of all of them: else each could take as much memory as
        one of the router's servers."""
        self._caches_max, self._pages_max = caches_max, pages_max
        #: For what their streams tell.
        self.room: Final = Room(pages_max)
        self._caches: dict[_Key, Cache] = {}

    def all(self) -> Collection[Cache]:
        """One that is registered anew is another one."""
        return self._caches.values()

    def add(self, one: Registration) -> None:
        """In place of what was registered for that rank. ``RequestError`` for what cannot be
        followed, or answered for."""
        for name in ("endpoint", "replay_endpoint"):
            endpoint = getattr(one, name)
            if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
                raise RequestError(f"{name}: {endpoint!r} is not of the form tcp://HOST:PORT")
        if one.type.lower() != _TYPE:
            raise RequestError(
                f"type: of {one.type!r} the names of pages cannot be told from tokens; SGLang's can"
            )
        if one.lora_name or one.additionalsalt:
            raise RequestError(
                "lora_name, additionalsalt: names of pages with them cannot be told from tokens"
            )
        if one.block_size < 1 or one.dp_rank < 0:
            raise RequestError("block_size must be positive, and dp_rank not negative")
        if one.key not in self._caches and self.room.pages <= 0:
            raise RequestError(
                f"the caches that are registered have told of {self._pages_max} pages, and the"
                " router keeps no more of all of them together: unregister some, or give their"
                " servers larger pages (--page-size)"
            )
        if one.key not in self._caches and len(self._caches) >= self._caches_max:
            raise RequestError(
                f"{self._caches_max} caches are registered already, and the router follows no more:"
                f" {REGISTERED_MAX} at most, and fewer where its process may open few files"
                " (ulimit -n)"
            )
        self._caches[one.key] = Cache(one)

    def remove(self, one: Unregistration) -> list[str]:
        """The names of those that are gone for it."""
        return [] if self._caches.pop(one.key, None) is None else [str(one.key)]

    def asked(self, tenant: str, model: str | None) -> Mapping[str, Mapping[int, CacheView]]:
        """By instance and DP rank those of a tenant, and of a model where one is named."""
        found: dict[str, dict[int, CacheView]] = {}
        for key, cache in self._caches.items():
            if key.tenant == tenant and model in (None, cache.registration.model):
                found.setdefault(key.instance, {})[key.rank] = cache.view
        return found
