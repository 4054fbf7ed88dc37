# SPDX-License-Identifier: Apache-2.0
"""The class that code written for Mooncake's store makes. Its methods, their arguments and what
they return are those of ``mooncake.store.MooncakeDistributedStore`` (mooncake-transfer-engine
0.3.13): 0 or a size for success, a negative number, nothing or ``b""`` for failure. Mooncake's log
says why one failed; here Python's does.
"""

from __future__ import annotations

import contextlib
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from sglang_mooncake.faces.mooncake_store.base import outcome
from sglang_mooncake.faces.mooncake_store.buffers import BufferHandle
from sglang_mooncake.faces.mooncake_store.codes import INVALID, MISSING, OK
from sglang_mooncake.faces.mooncake_store.impl import PORTS, StoreImpl
from sglang_mooncake.faces.mooncake_store.moving import Moving
from sglang_mooncake.faces.mooncake_store.names import ReplicaDescriptor, ReplicateConfig
from sglang_mooncake.faces.mooncake_store.objects import TIMEOUT_S, Memory
from sglang_mooncake.faces.mooncake_store.settings import Setup

__all__ = ["MooncakeDistributedStore"]

logger = logging.getLogger(__name__)

NOT_SET_UP: Final = 1

Bytes = bytes | bytearray | memoryview


class MooncakeDistributedStore(Moving):
    """``mooncake.store.MooncakeDistributedStore``. All methods are thread-safe; those that move
    bytes block, and release the interpreter meanwhile."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"sglang-mooncake's {type(self).__name__} has no {name}: it stores and reads bytes, and"
            " has no tensors, no sessions of puts, no tasks that copy or move, and no segments that"
            " are mounted; those are in the mooncake package"
        )

    # -- the store

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Lends memory, and finds what others lend. 0; else a negative number. Arguments:
        `settings.Setup.of`, or one dictionary."""
        is_mapping = len(args) == 1 and isinstance(args[0], Mapping) and not kwargs

        def work() -> int:
            # A TypeError is the caller's: SGLang finds out by it which arguments there are.
            return self._set_up(
                Setup.of_mapping(args[0]) if is_mapping else Setup.of(*args, **kwargs)
            )

        return outcome("setup", work, int)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:  # noqa: ARG002 - memory of one's own needs no pool in common
        """As ``setup``, for who lends nothing: what a ``kvstore serve`` lends is used. Those who
        name the same server share objects."""
        return self.setup("localhost", "", 0, local_buffer_size, master_server_addr=server_address)

    def close(self) -> int:
        """0. What the owner of the host has stays there."""
        impl, self._impl = self._impl, None
        if impl is not None:
            self._end()
        return OK

    def health_check(self) -> int:
        """0, or 1 before ``setup`` and after ``close``."""
        return NOT_SET_UP if self._impl is None else OK

    def get_hostname(self) -> str:
        """The name of this process, a host and a port; empty before ``setup``."""
        return "" if self._impl is None else self._impl.hostname

    # -- bytes of Python

    def put(self, key: str, value: Bytes, config: ReplicateConfig | None = None) -> int:
        """0 if it is stored now; the first value stays."""
        return self._put(key, [value], config, self.put_from)

    def put_parts(self, key: str, *parts: Bytes, config: ReplicateConfig | None = None) -> int:
        """As ``put``, of several parts that are one object."""
        return self._put(key, parts, config, self.put_from)

    def put_batch(
        self, keys: Sequence[str], values: Sequence[Bytes], config: ReplicateConfig | None = None
    ) -> int:
        """0 if all are stored now, else the number of the first that is not."""
        return self._batch(keys, values, config, self.put)

    def upsert(self, key: str, value: Bytes, config: ReplicateConfig | None = None) -> int:
        """As ``put``, but the last value stays; see ``batch_upsert_from``."""
        return self._put(key, [value], config, self.upsert_from)

    def upsert_parts(self, key: str, *parts: Bytes, config: ReplicateConfig | None = None) -> int:
        """As ``upsert``, of several parts that are one object."""
        return self._put(key, parts, config, self.upsert_from)

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Bytes], config: ReplicateConfig | None = None
    ) -> int:
        """0 if all are stored now, else the number of the first that is not."""
        return self._batch(keys, values, config, self.upsert)

    def get(self, key: str) -> bytes:
        """The object; empty if there is none."""
        with self._fetched(key) as found:
            return bytes(found)

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """As ``get``, for each key."""
        return [self.get(one) for one in keys]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """The object; None if there is none."""
        with self._fetched(key) as found:
            return BufferHandle(found) if len(found) else None

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """As ``get_buffer``, for each key."""
        return [self.get_buffer(one) for one in keys]

    # -- what is there

    def is_exist(self, key: str) -> int:
        """1 or 0, as far as this process knows; -1 if it cannot tell."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """As ``is_exist``, for each key. Asks nobody."""

        def work() -> list[int]:
            objects = self._ready().objects
            return [int(one) for one in objects.exist(objects.keys(keys))]

        return outcome(f"a question for {len(keys)} objects", work, lambda _: [-1] * len(keys))

    def get_size(self, key: str) -> int:
        """In bytes; -704 if there is no such object."""

        def work() -> int:
            objects = self._ready().objects
            return int(objects.sizes(objects.keys([key]))[0]) or MISSING

        return outcome(f"get_size({key!r})", work, int)

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Where it lies; empty if there is no such object."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """As ``get_replica_desc``, for each key that there is: one place, however many copies."""

        def work() -> dict[str, list[ReplicaDescriptor]]:
            objects = self._ready().objects
            exist = objects.exist(objects.keys(keys))
            there = [key for key, found in zip(keys, exist, strict=True) if found]
            if not there:
                return {}
            in_memory = objects.are_in_memory(objects.keys(there))
            return {
                key: [ReplicaDescriptor(one)] for key, one in zip(there, in_memory, strict=True)
            }

        return outcome(f"where {len(keys)} objects lie", work, lambda _: {})

    # -- removing

    def remove(self, key: str, force: bool = False) -> int:
        """0; -704 if there was none, -900 if somebody who may have it does not answer. Objects that
        were read a moment ago are removed like others."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:  # noqa: ARG002 - nothing holds them
        """As ``remove``, for each key."""

        def work() -> list[int]:
            objects = self._ready().objects
            return objects.remove(objects.keys(keys))

        return outcome(f"a removal of {len(keys)} objects", work, lambda code: [code] * len(keys))

    def remove_all(self, force: bool = False) -> int:  # noqa: ARG002 - nothing holds them
        """Of this deployment, at all processes that answer: how many, copies counted."""
        return outcome("remove_all", lambda: self._ready().objects.clear(), int)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:  # noqa: ARG002
        """-600: the store knows keys by their digests alone."""
        logger.error("mooncake.store over kvstore: remove_by_regex: keys are kept as digests alone")
        return INVALID

    def _set_up(self, setup: Setup) -> int:
        if self._impl is not None:
            raise ValueError("it was set up before, and not closed")
        impl = self._impl = StoreImpl(self.options, setup, random.randint(*PORTS))
        self._end = weakref.finalize(self, impl.close)
        logger.info(
            "mooncake.store is sglang-mooncake's store: %s lends %d bytes; who names %r shares"
            " its objects",
            impl.hostname,
            setup.segment_bytes,
            setup.deployment,
        )
        return OK

    def _put(
        self,
        key: str,
        parts: Sequence[Bytes],
        config: ReplicateConfig | None,
        store: Callable[[str, int, int, ReplicateConfig | None], int],
    ) -> int:
        views = [memoryview(one).cast("B") for one in parts]
        nbytes = sum(one.nbytes for one in views)

        def work() -> int:
            with self._ready().arena.room(nbytes, TIMEOUT_S) as (address, room):
                at = 0
                for one in views:
                    room[at : at + one.nbytes] = one
                    at += one.nbytes
                return store(key, address, nbytes, config)

        return outcome(f"a put of {nbytes} bytes", work, int)

    def _batch(
        self,
        keys: Sequence[str],
        values: Sequence[Bytes],
        config: ReplicateConfig | None,
        put: Callable[[str, Bytes, ReplicateConfig | None], int],
    ) -> int:
        """One after the other: the arena has room for each, and not for all."""
        if len(keys) != len(values):
            logger.error("mooncake.store over kvstore: %d keys, %d values", len(keys), len(values))
            return INVALID
        numbers = [put(key, value, config) for key, value in zip(keys, values, strict=True)]
        return next((one for one in numbers if one != OK), OK)

    @contextlib.contextmanager
    def _fetched(self, key: str) -> Iterator[memoryview]:
        """The bytes of an object; none if it is not there."""
        with contextlib.ExitStack() as held:

            def work() -> memoryview:
                impl = self._ready()
                keys = impl.objects.keys([key])
                nbytes = int(impl.objects.sizes(keys)[0]) if impl.objects.exist(keys)[0] else 0
                if not nbytes:
                    return memoryview(b"")
                address, room = held.enter_context(impl.arena.room(nbytes, TIMEOUT_S))
                came = impl.objects.get(keys, [Memory((address,), (nbytes,))])[0]
                return room if came == nbytes else memoryview(b"")

            yield outcome(f"a get of {key!r}", work, lambda _: memoryview(b""))
