# SPDX-License-Identifier: Apache-2.0
"""Requests to an object store, each with a deadline, through the package obstore."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from kvstore.tiers.directories import make_own

__all__ = ["SCHEMES", "Bucket", "BucketError", "open_bucket"]

SCHEMES: Final = ("s3", "gs", "az", "file", "memory")
RETRIES: Final = 2
"""Of a request that the object store refuses with a server's error, within its deadline."""
COALESCED_BYTES: Final = 128 << 10
"""Ranges with less between them are read together."""

T = TypeVar("T")
Result = TypeVar("Result")


class BucketError(Exception):
    """A request has failed."""

    def __init__(self, reason: str, *, is_missing: bool = False, is_late: bool = False) -> None:
        super().__init__(reason)
        #: There is no such object.
        self.is_missing: Final = is_missing
        #: The deadline has passed; whether the request was obeyed is not known.
        self.is_late: Final = is_late


def open_bucket(url: str, timeout_s: float) -> Bucket:
    """What a URL names. ``ValueError`` if it cannot be one, or is a directory that other users can
    enter; ``OSError`` if the directory cannot be made."""
    try:
        obstore: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
    except ImportError as exc:
        raise ValueError(
            f"objects={url!r} needs the Python package obstore, which cannot be imported ({exc}):"
            " pip install 'sglang-mooncake[objects]'"
        ) from exc
    parts = urlsplit(url)
    more: dict[str, Any] = {}
    if parts.scheme == "file":
        directory = Path(unquote(parts.path))
        make_own(directory, "objects")
    elif parts.scheme != "memory":
        # Not client_options: with these, obstore leaves out what the environment says of http.
        more["retry_config"] = {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=timeout_s),
        }
    try:
        store = stores.from_url(url, **more)
    except (obstore.exceptions.BaseError, ValueError) as exc:
        raise ValueError(f"objects={url!r} is no object store: {_first_line(exc)}") from exc
    return Bucket(store, timeout_s)


class Bucket:
    """All methods are thread-safe. Coroutines are for ``each`` alone."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        """
        Args:
            store: of obstore.
            timeout_s: of each request.
        """
        self._obstore: Any = importlib.import_module("obstore")
        self._store = store
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvstore-objects", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """After all other calls have returned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def each(
        self,
        request: Callable[[T], Coroutine[Any, Any, Result]],
        items: Sequence[T],
        at_once: int,
    ) -> list[Result | BucketError]:
        """Makes a request for each item, so many at once, and waits for all. What has not begun
        when one is late is not begun, and late as well: so this takes two deadlines at most."""
        if not items:
            return []
        return asyncio.run_coroutine_threadsafe(
            self._each(request, items, at_once), self._loop
        ).result()

    def sizes(self) -> dict[str, tuple[int, float]]:
        """The size of each object by its name, and when it was written (seconds since 1970). Raises
        ``BucketError``. The deadline is of each thousand."""
        (found,) = self.each(lambda _: self._sizes(), [None], 1)
        if isinstance(found, BucketError):
            raise found
        return found

    async def put(self, name: str, data: bytes | bytearray) -> None:
        """Stores an object: all of it, or nothing."""
        await self._ask(
            self._obstore.put_async(self._store, name, data, use_multipart=False), "stored", name
        )

    async def delete(self, name: str) -> None:
        """Deletes an object, if there is one."""
        try:
            await self._ask(self._obstore.delete_async(self._store, name), "deleted", name)
        except BucketError as exc:
            if not exc.is_missing:
                raise

    async def begin(self, name: str, nbytes: int) -> bytes:
        """So many bytes of an object; fewer if it has no more."""
        found = await self._ask(
            self._obstore.get_range_async(self._store, name, start=0, length=nbytes), "read", name
        )
        return bytes(found)

    async def ranges(
        self, name: str, starts: Sequence[int], lengths: Sequence[int]
    ) -> Sequence[memoryview]:
        """Ranges of an object; they are shorter if it has no more."""
        found = await self._ask(
            self._obstore.get_ranges_async(
                self._store, name, starts=starts, lengths=lengths, coalesce=COALESCED_BYTES
            ),
            "read",
            name,
        )
        return [memoryview(one) for one in found]

    async def _sizes(self) -> dict[str, tuple[int, float]]:
        found: dict[str, tuple[int, float]] = {}
        stream = self._obstore.list(self._store, chunk_size=1000)
        while part := await self._ask(_next(stream), "listed", ""):
            for one in part:
                found[one["path"]] = one["size"], one["last_modified"].timestamp()
        return found

    async def _each(
        self,
        request: Callable[[T], Coroutine[Any, Any, Result]],
        items: Sequence[T],
        at_once: int,
    ) -> list[Result | BucketError]:
        turns = asyncio.Semaphore(at_once)
        late: list[BucketError] = []

        async def one(item: T) -> Result | BucketError:
            async with turns:
                if late:
                    return late[0]
                try:
                    return await request(item)
                except BucketError as exc:
                    if exc.is_late:
                        late.append(exc)
                    return exc

        return await asyncio.gather(*(one(item) for item in items))

    async def _ask(self, request: Awaitable[Any], what: str, name: str) -> Any:
        """The answer to a request; ``BucketError`` if there is none."""
        subject = f"{name or 'it'} cannot be {what}"
        try:
            async with asyncio.timeout(self._timeout_s):
                return await request
        except TimeoutError:
            raise BucketError(
                f"{subject}: no answer for {self._timeout_s:g} s", is_late=True
            ) from None
        except FileNotFoundError:
            raise BucketError(f"{subject}: there is no such object", is_missing=True) from None
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as exc:
            raise BucketError(f"{subject}: {_first_line(exc)}") from exc


async def _next(stream: Any) -> Sequence[Any]:
    """The next part of a list; an empty one at its end."""
    try:
        part: Sequence[Any] = await anext(stream)
    except StopAsyncIteration:
        return ()
    return part


def _first_line(exc: Exception) -> str:
    """obstore's messages go on with what its libraries know."""
    return str(exc).partition("\n")[0]
