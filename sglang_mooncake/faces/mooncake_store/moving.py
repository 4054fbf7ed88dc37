# SPDX-License-Identifier: Apache-2.0
"""The methods of Mooncake's store class that move bytes between the store and memory that the
caller has registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_mooncake.faces.mooncake_store.base import Base, memories, outcome
from sglang_mooncake.faces.mooncake_store.codes import INVALID, MISSING, OK
from sglang_mooncake.faces.mooncake_store.names import ReplicateConfig
from sglang_mooncake.faces.mooncake_store.objects import Keys, Memory, Objects, Range

__all__ = ["Moving"]

Ranges = Sequence[Sequence[Sequence[int]]]
"""By buffer, key and range."""


class Moving(Base):
    """Results are Mooncake's numbers: 0 or a size for success, negative for a failure."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """0; -600 for memory that is registered already, or is none."""

        def work() -> int:
            self._ready().register(buffer_ptr, size)
            return OK

        return outcome(f"register_buffer({buffer_ptr:#x}, {size})", work, int)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """0; -600 if nothing that is registered begins there."""

        def work() -> int:
            self._ready().deregister(buffer_ptr)
            return OK

        return outcome(f"unregister_buffer({buffer_ptr:#x})", work, int)

    # -- into the store

    def put_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """See ``batch_put_from``."""
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """0 for each object that is stored now, by whom ever: the first value stays."""
        pointers, numbers = [[one] for one in buffer_ptrs], [[one] for one in sizes]
        return self.batch_put_from_multi_buffers(keys, pointers, numbers, config)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """As ``batch_put_from``, of objects whose bytes lie in several buffers."""
        return self._store("put", Objects.put, keys, all_buffer_ptrs, all_sizes, config)

    def upsert_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """See ``batch_upsert_from``."""
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Removes objects of these keys, then stores the new ones; others find neither meanwhile.
        If two do it at once, one of the new values stays."""
        pointers, numbers = [[one] for one in buffer_ptrs], [[one] for one in sizes]
        return self._store("upsert", Objects.replace, keys, pointers, numbers, config)

    # -- out of the store

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """See ``batch_get_into``."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Each object's size, which may be smaller than its buffer."""
        pointers, numbers = [[one] for one in buffer_ptrs], [[one] for one in sizes]
        return self.batch_get_into_multi_buffers(keys, pointers, numbers)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,  # noqa: ARG002 - nothing is allocated
    ) -> list[int]:
        """As ``batch_get_into``; the buffers are filled one after another."""

        def work() -> list[int]:
            objects = self._ready().objects
            rooms = memories(keys, all_buffer_ptrs, all_sizes)
            return objects.get(objects.keys(keys), rooms)

        return outcome(f"a get of {len(keys)} objects", work, lambda code: [code] * len(keys))

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Ranges,
        all_src_offsets: Ranges,
        all_sizes: Ranges,
    ) -> list[list[list[int]]]:
        """Parts of objects into parts of registered buffers: how many bytes came of each."""

        def failed(code: int) -> list[list[list[int]]]:
            return [[[code] * len(key) for key in buffer] for buffer in all_dst_offsets]

        def work() -> list[list[list[int]]]:
            return self._read_ranges(
                buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes
            )

        return outcome(f"a read of parts into {len(buffer_ptrs)} buffers", work, failed)

    # -- sessions

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """0 for each object that is there. They stay in memory until the session ends, for a minute
        at most."""
        return outcome(
            f"the start of a session of {len(keys)} objects",
            lambda: self._ready().sessions.start(keys),
            lambda code: [code] * len(keys),
        )

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Parts of objects in a session: how many bytes came of each object. Their checksums cannot
        be compared."""
        return outcome(
            f"a read of parts of {len(keys)} objects",
            lambda: self._ready().sessions.read(keys, all_buffer_ptrs, all_sizes, all_src_offsets),
            lambda code: [code] * len(keys),
        )

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """0. The objects may be evicted from now on."""

        def work() -> int:
            self._ready().sessions.end(keys)
            return OK

        return outcome(f"the end of a session of {len(keys)} objects", work, int)

    def _store(
        self,
        what: str,
        by: Callable[[Objects, Keys, list[Memory]], list[int]],
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None,
    ) -> list[int]:
        def work() -> list[int]:
            objects = self._ready().objects
            if config is not None:
                config.check(len(keys))
            sources = memories(keys, all_buffer_ptrs, all_sizes)
            return by(objects, objects.keys(keys), sources)

        return outcome(f"{what} of {len(keys)} objects", work, lambda code: [code] * len(keys))

    def _read_ranges(
        self,
        buffers: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_to: Ranges,
        all_from: Ranges,
        all_sizes: Ranges,
    ) -> list[list[list[int]]]:
        impl = self._ready()
        if not len(buffers) == len(all_keys) == len(all_to) == len(all_from) == len(all_sizes):
            raise ValueError(f"{len(buffers)} buffers, and lists of other lengths for them")
        names = list(dict.fromkeys(key for keys in all_keys for key in keys))
        rows = {name: row for row, name in enumerate(names)}
        wanted = impl.objects.keys(names)
        sizes = impl.objects.sizes(wanted).tolist()
        results = [[[INVALID] * len(key) for key in buffer] for buffer in all_to]
        ranges, places = list[Range](), list[tuple[int, int, int]]()
        for i, (address, keys) in enumerate(zip(buffers, all_keys, strict=True)):
            room = impl.room_from(address)
            lists = (all_to[i], all_from[i], all_sizes[i])
            if any(len(one) != len(keys) for one in lists):
                continue
            for j, (key, to, begin, count) in enumerate(zip(keys, *lists, strict=True)):
                if not len(to) == len(begin) == len(count):
                    continue
                nbytes = sizes[rows[key]]
                for k, (dst, src, size) in enumerate(zip(to, begin, count, strict=True)):
                    if not nbytes:
                        results[i][j][k] = MISSING
                    elif size and 0 <= dst <= room - size and 0 <= src <= nbytes - size:
                        memory = Memory((address + dst,), (size,))
                        ranges.append(Range(rows[key], nbytes, src, memory))
                        places.append((i, j, k))
        came = impl.objects.get_ranges(wanted, ranges)
        for (i, j, k), number in zip(places, came, strict=True):
            results[i][j][k] = number
        return results
