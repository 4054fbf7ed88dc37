# SPDX-License-Identifier: Apache-2.0
"""What a decode room asks of each of its sources, and what it awaits from them."""

from __future__ import annotations

from sglang_mooncake.layout import Verify
from sglang_mooncake.messages import RoomRequest, Target, indices_to_bytes, states_to_bytes
from sglang_mooncake.rooms.arrival import Expected
from sglang_mooncake.rooms.decode_events import PagesNamed, RoomSource

__all__ = ["Targets"]


class Targets:
    """What the sources of one room are asked for, encoded once for all of them.

    Raises:
        ValueError: an index is no int32 above -1.
    """

    def __init__(self, named: PagesNamed) -> None:
        self._named = named
        self._pages = indices_to_bytes(named.pages)
        self._states = states_to_bytes(named.states)
        device = named.device_pages
        self._device_pages = None if device is None else indices_to_bytes(device)

    def expected(
        self,
        source: RoomSource,
        layers: int,
        generation: int,
        tag: int,
        slot: int,
        verify: Verify,
    ) -> Expected:
        lists = [indices is not None for indices in self._states] if source.state else []
        least = sum(given for at, given in enumerate(lists) if at in source.required_states)
        return Expected(
            tag,
            slot,
            generation,
            pages=self._expected(source),
            layers=layers,
            states=range(least, sum(lists) + 1),
            aux=int(source.aux),
            dealt_over=source.dealt_over,
            digests=int(verify is Verify.ALL),
        )

    def _expected(self, source: RoomSource) -> range:
        """How many pages it may send; exactly one number, as a rule."""
        count = len(self._named.pages)
        if source.dealt_over > 1:
            return range(count + 1)
        if source.page_span > 1:  # the last of ours may be filled in part
            return range(max((count - 1) * source.page_span + 1, 0), count * source.page_span + 1)
        count = len(source.share.bounds(count))
        return range(count, count + 1)

    def request(
        self,
        source: RoomSource,
        number: int,
        generation: int,
        expected: Expected | None,
        verify: Verify,
    ) -> RoomRequest:
        """`expected`: None for a source that sends nothing."""
        target = None
        if expected is not None:
            target = Target(
                expected.tag,
                len(self._named.pages),
                self._pages,
                source.share,
                self._states if source.state else (),
                self._named.aux_slot if source.aux else None,
                expected.slot,
                source.page_span,
                self._device_pages,
            )
        prefix_len = self._named.decode_prefix_len
        return RoomRequest(number, generation, prefix_len, source.destinations, target, verify)
