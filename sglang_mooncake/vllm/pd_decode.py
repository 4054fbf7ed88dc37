# SPDX-License-Identifier: Apache-2.0
"""The worker's part on a decode server: blocks are named to the prefill server that has computed
their prompt, and filled by it. Knows the hand-over, and nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sglang_mooncake.decode_side import DecodeSide
from sglang_mooncake.rooms.states import RoomState, RoomView
from sglang_mooncake.vllm.pd_requests import Load, Release

__all__ = ["DecodeWorker"]

logger = logging.getLogger("vllm.sglang_mooncake")

#: A prefill server has one rank for each request.
DP_RANK = 0
NO_METADATA_SLOT = 0


@dataclass(slots=True)
class _Room:
    """Of a load, or of a release."""

    work: Load | Release
    view: RoomView
    #: Its prefill ranks were chosen.
    is_linked: bool = False


class DecodeWorker:
    """One rank's. The model runner's thread calls everything here, and waits for nothing."""

    def __init__(self, side: DecodeSide) -> None:
        self._side = side
        self._loads: dict[str, _Room] = {}
        self._releases: list[_Room] = []
        #: Blocks of loads that have failed.
        self._failed: set[int] = set()

    def load(self, work: Load) -> None:
        """Into blocks that nobody reads, or uses for anything else, before ``take_loaded`` names
        the request."""
        self._loads[work.request_id] = self._open(work)

    def release(self, work: Release) -> None:
        """Has the prefill server told that it need not wait."""
        self._releases.append(self._open(work))

    def abort(self, request_ids: Collection[str]) -> None:
        """vLLM has ended these requests; ``take_loaded`` still names those that load."""
        for name in request_ids:
            room = self._loads.get(name)
            if room is not None:
                self._side.abort(room.view, "the decode server ended the request")

    def take_loaded(self) -> set[str]:
        """Requests whose blocks nobody writes any more: all is there, or will not come. Each is
        told once."""
        over = [name for name, room in self._loads.items() if self._load_ended(room)]
        for name in over:
            del self._loads[name]
        return set(over)

    def take_released(self) -> set[str]:
        """Requests that vLLM has kept until their prefill server was told."""
        over = [room for room in self._releases if self._release_ended(room)]
        self._releases = [room for room in self._releases if room not in over]
        works = [room.work for room in over]
        return {one.request_id for one in works if isinstance(one, Release) and one.holds}

    def take_failed(self) -> set[int]:
        """Blocks of the requests that ``take_loaded`` has told of, which may have any bytes."""
        failed, self._failed = self._failed, set()
        return failed

    # -- inside

    def _open(self, work: Load | Release) -> _Room:
        room = _Room(work, self._side.new_room(work.room))
        refusal = self._side.instances.refusal(work.registry)
        if refusal is not None:
            self._side.fail(room.view, refusal)
        else:
            self._side.instances.ensure(work.registry)
            self._link(room)
        return room

    def _link(self, room: _Room) -> None:
        """Chooses the prefill ranks once their instance is known. Where it is not to be had, word
        of that is left at its registry."""
        instances, address = self._side.instances, room.work.registry
        room.view.registry = address
        is_asked = instances.looks_up(address)  # before the answer is read, which comes first
        if instances.get(address) is not None:
            room.is_linked = True
            self._side.choose_sources(room.view, address, DP_RANK)
        elif not is_asked:
            problem = instances.problem(address) or "it was lost meanwhile"
            self._side.fail(room.view, f"prefill server with the registry {address}: {problem}")

    def _load_ended(self, room: _Room) -> bool:
        view, work = room.view, room.work
        assert isinstance(work, Load)
        if view.over:
            if not view.releasable:
                return False
            # An abort is vLLM's own doing, unless it is ours.
            if view.state is not RoomState.ABORTED or work.refusal:
                logger.warning(
                    "request %s: its prompt did not come: %s",
                    work.request_id,
                    work.refusal or view.reason,
                )
                self._failed.update(work.blocks)
            return True
        if view.withdrawn:
            return False
        if not room.is_linked:
            self._link(room)
        elif work.refusal:
            # Its prefill server hears of it, and need not wait.
            self._side.abort(view, work.refusal)
        elif not view.named:
            if view.nameable:
                blocks = np.array(work.blocks, np.int64)
                self._side.name_pages(view, blocks, NO_METADATA_SLOT, work.first_token)
        elif view.state is RoomState.REQUESTED and self._side.has_arrived(view):
            self._side.arrived(view)
            return True
        return False

    def _release_ended(self, room: _Room) -> bool:
        view, work = room.view, room.work
        assert isinstance(work, Release)
        if room.is_linked and not view.withdrawn:
            # The rank hears of it over this link, or over the next one.
            self._side.abort(view, work.reason)
        elif not room.is_linked and not view.over and not view.withdrawn:
            self._link(room)
        if view.over and not room.is_linked:
            logger.info(
                "request %s: its prefill server was not reached. It keeps the blocks until it finds"
                " word of that at its registry, or for its hold_timeout_s: %s",
                work.request_id,
                view.reason,
            )
        return view.over
