# SPDX-License-Identifier: Apache-2.0
"""The worker's part on a decode server: blocks are named to the prefill server that has computed
their prompt, and filled by it. Knows the hand-over, and nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sglang_mooncake.decode_side import DecodeSide
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.vllm.pd_requests import Load, Release

__all__ = ["DecodeWorker"]

logger = logging.getLogger("vllm.sglang_mooncake")

#: A prefill server has one rank for each request.
DP_RANK = 0
NO_METADATA_SLOT = 0


@dataclass(slots=True)
class _Job:
    """Of a load, or of a release."""

    work: Load | Release
    room: Room
    #: Its prefill ranks were chosen.
    is_linked: bool = False
    #: Why it does not come, if so. Its prefill ranks are told, and need not wait: as soon as they
    #: are chosen, since nobody hears of it before.
    given_up: str = ""


class DecodeWorker:
    """One rank's. The model runner's thread calls everything here, and waits for nothing."""

    def __init__(self, side: DecodeSide) -> None:
        self._side = side
        self._loads: dict[str, _Job] = {}
        self._releases: list[_Job] = []
        #: Blocks of loads that have failed.
        self._failed: set[int] = set()

    def load(self, work: Load) -> None:
        """Into blocks that nobody reads, or uses for anything else, before ``take_loaded`` names
        the request."""
        self._loads[work.request_id] = self._open(work, work.refusal)

    def release(self, work: Release) -> None:
        """Has the prefill server told that it need not wait."""
        self._releases.append(self._open(work, work.reason))

    def abort(self, request_ids: Collection[str]) -> None:
        """vLLM has ended these requests; ``take_loaded`` still names those that load."""
        for name in request_ids:
            job = self._loads.get(name)
            if job is not None:
                job.given_up = job.given_up or "the decode server ended the request"
                self._tell_given_up(job)

    def take_loaded(self) -> set[str]:
        """Requests whose blocks nobody writes any more: all is there, or will not come. Each is
        told once."""
        over = [name for name, job in self._loads.items() if self._load_ended(job)]
        for name in over:
            del self._loads[name]
        return set(over)

    def take_released(self) -> set[str]:
        """Requests that vLLM has kept until their prefill server was told."""
        over = [job for job in self._releases if self._release_ended(job)]
        self._releases = [job for job in self._releases if job not in over]
        works = [job.work for job in over]
        return {one.request_id for one in works if isinstance(one, Release) and one.holds}

    def take_failed(self) -> set[int]:
        """Blocks of the requests that ``take_loaded`` has told of, which may have any bytes."""
        failed, self._failed = self._failed, set()
        return failed

    # -- inside

    def _open(self, work: Load | Release, given_up: str) -> _Job:
        job = _Job(work, self._side.new_room(work.room), given_up=given_up)
        refusal = self._side.instances.refusal(work.registry)
        if refusal is not None:
            self._side.fail(job.room, refusal)
        else:
            self._side.instances.ensure(work.registry)
            self._link(job)
        return job

    def _link(self, job: _Job) -> None:
        """Chooses the prefill ranks once their instance is known. Where it is not to be had, word
        of that is left at its registry."""
        instances, address = self._side.instances, job.work.registry
        job.room.registry = address
        is_asked = instances.looks_up(address)  # before the answer is read, which comes first
        if instances.get(address) is not None:
            job.is_linked = True
            self._side.choose_sources(job.room, address, DP_RANK)
        elif not is_asked:
            problem = instances.problem(address) or "it was lost meanwhile"
            self._side.fail(job.room, f"prefill server with the registry {address}: {problem}")

    def _tell_given_up(self, job: _Job) -> None:
        if job.is_linked and not job.room.withdrawn:
            # The ranks hear of it over their links, or over the next ones.
            self._side.abort(job.room, job.given_up)

    def _load_ended(self, job: _Job) -> bool:
        room, work = job.room, job.work
        assert isinstance(work, Load)
        if room.view.over:
            if not room.releasable:
                return False
            # An abort is vLLM's own doing, unless it is ours.
            if room.view.state is not RoomState.ABORTED or work.refusal:
                logger.warning(
                    "request %s: its prompt did not come: %s",
                    work.request_id,
                    work.refusal or room.view.reason,
                )
                self._failed.update(work.blocks)
            return True
        if room.withdrawn:
            return False
        if not job.is_linked:
            self._link(job)
        elif job.given_up:
            self._tell_given_up(job)
        elif not room.named:
            if room.nameable:
                blocks = np.array(work.blocks, np.int64)
                self._side.name_pages(room, blocks, NO_METADATA_SLOT, work.first_token)
        elif room.view.state is RoomState.REQUESTED and self._side.has_arrived(room):
            self._side.arrived(room)
            return True
        return False

    def _release_ended(self, job: _Job) -> bool:
        room, work = job.room, job.work
        assert isinstance(work, Release)
        if job.is_linked:
            self._tell_given_up(job)
        elif not room.view.over and not room.withdrawn:
            self._link(job)
        if room.view.over and not job.is_linked:
            logger.info(
                "request %s: its prefill server was not reached. It keeps the blocks until it finds"
                " word of that at its registry, or for its hold_timeout_s: %s",
                work.request_id,
                room.view.reason,
            )
        return room.view.over
