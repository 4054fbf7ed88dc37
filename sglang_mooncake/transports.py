# SPDX-License-Identifier: Apache-2.0
"""A rank's transfer engine, over the transports that its settings and its memory allow."""

from __future__ import annotations

from collections.abc import Iterable

import te
from sglang_mooncake.config import Config
from te.config import TRANSPORTS
from te.memory import Remote
from te.memory_kinds import Reach, kind_of

__all__ = ["HandoverUnavailable", "open_engine", "register"]

#: Chunks on their way to one decode rank; far more than requests that a prefill rank can hold.
_TRANSFERS_MAX = 16_384


class HandoverUnavailable(RuntimeError):
    """This rank cannot take part in the hand-over; the sentence says why and what to do."""


def open_engine(
    config: Config, host: str, nics: tuple[str, ...], ranges: Iterable[tuple[int, int]]
) -> te.Engine:
    """The engine for memory at `ranges` (address, bytes). GPU memory goes over RDMA alone, so that
    where no transport is named such memory decides.

    Args:
        nics: RDMA devices that SGLang's flags name.

    Raises:
        HandoverUnavailable: what the memory needs is not allowed, or not there.
        te.Error: what te says of its configuration.
    """
    on_gpu = any(Reach.KERNEL not in kind_of(address).reach for address, _ in ranges)
    transports = config.transports or (("rdma",) if on_gpu else TRANSPORTS)
    if on_gpu and transports != ("rdma",):
        raise HandoverUnavailable(
            f"the KV cache is in GPU memory, which RDMA alone can move, but {config.transports_by}"
            f" asks for {','.join(transports)}: leave it out, or give "
            "SGLANG_MOONCAKE_TRANSPORTS=rdma"
        )
    try:
        return te.Engine(
            te.Config(
                host=host,
                transports=transports,
                nics=() if config.topology else config.nics or nics,
                topology=config.topology,
                stall_timeout_s=config.stall_timeout_s,
                max_queued_transfers=_TRANSFERS_MAX,
            )
        )
    except te.DeviceError as error:
        if not on_gpu:
            raise
        raise HandoverUnavailable(
            "the KV cache is in GPU memory, which RDMA alone can move, and there is no RDMA device "
            f"to use here: {error}. `te doctor` says what this host lacks"
        ) from error


def register(
    engine: te.Engine, ranges: Iterable[tuple[int, int]], remote: Remote
) -> list[te.Region]:
    """All of them, or none.

    Args:
        remote: what peers may do there.

    Raises:
        HandoverUnavailable: memory that the engine cannot move.
    """
    regions: list[te.Region] = []
    try:
        for address, nbytes in ranges:
            regions.append(engine.register(address, nbytes, remote=remote))
    except te.RegistrationError as error:
        while regions:
            engine.deregister(regions.pop())
        raise HandoverUnavailable(
            f"cannot register the KV cache with the transfer engine: {error}"
        ) from error
    return regions
