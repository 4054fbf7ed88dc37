# SPDX-License-Identifier: Apache-2.0
"""A rank's transfer engine, and its memory there."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable

import te
from sglang_mooncake.sglang.config import Config
from te import doctor
from te.config import TRANSPORTS
from te.memory import Remote
from te.topology import read_machine

__all__ = ["HandoverUnavailable", "open_engine", "register"]

logger = logging.getLogger(__name__)

#: Chunks on their way to one decode rank; far more than requests that a prefill rank can hold, and
#: the layers that may go before them (`rooms.prefill.EARLY_WRITES_MAX`).
_TRANSFERS_MAX = 16_384


class HandoverUnavailable(RuntimeError):
    """This rank cannot take part in the hand-over; the sentence says why and what to do."""


def open_engine(
    config: Config, host: str, nics: tuple[str, ...], is_first: bool = True, label: str = ""
) -> te.Engine:
    """The engine over the transports of the settings, or over all; says in the log what became of
    Mooncake's variables.

    Args:
        nics: RDMA devices that SGLang's flags name.
        is_first: whether this is the first rank of its host: it alone logs what `te doctor` finds,
            which is the same for all.
        label: see `te.Config.label`.

    Raises:
        HandoverUnavailable: devices that were named are not there, or the only transport cannot be
            used; it says where they were named, and what `te doctor` finds.
        te.Error: what else te says of its configuration.
    """
    if config.courtesies:
        logger.info("variables of Mooncake's engine: %s", "; ".join(config.courtesies))
    port, port_last = config.ports or (0, None)
    source, devices = _devices(config, nics)
    transports = config.transports or TRANSPORTS
    try:
        engine = te.Engine(
            te.Config(
                host=host,
                keys=config.keys.data,
                encrypt=config.encrypt,
                port=port,
                port_last=port_last,
                transports=transports,
                status_dir=config.status_dir,
                nics=devices,
                topology=config.topology,
                stall_timeout_s=config.stall_timeout_s,
                max_queued_transfers=_TRANSFERS_MAX,
                label=label,
                **config.engine,
            )
        )
    except te.TopologyError as error:
        raise HandoverUnavailable(f"{error}; asked for by {source}") from error
    except te.DeviceError as error:
        findings = _verdict(config, transports, devices)
        if not findings:
            raise
        raise HandoverUnavailable(f"{error}; te doctor finds: {findings}") from error
    findings = _verdict(config, transports, devices)
    if findings:
        logger.log(logging.WARNING if is_first else logging.DEBUG, "te doctor: %s", findings)
    return engine


def _verdict(config: Config, transports: tuple[str, ...], devices: tuple[str, ...]) -> str:
    """What `te doctor` finds, above hints, of these transports, in one line; empty for nothing.
    Measured on a host without RDMA devices: 6 ms."""
    asked = transports if len(transports) == 1 else ()
    found = doctor.verdict(transports, asked, devices, config.engine.get("gid_index"))
    return " ".join(one.sentence for one in found)


def _devices(config: Config, nics: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """RDMA devices to use, and what names them; none where a topology names its own."""
    if config.topology is not None:
        return "SGLANG_MOONCAKE_TOPOLOGY or MC_CUSTOM_TOPO_JSON", ()
    if config.nics:
        return "SGLANG_MOONCAKE_NICS", config.nics
    if nics:
        return "--disaggregation-ib-device", nics
    return "MC_TE_FILTERS or MC_TE_FILTERS_EXCLUDE", _that_match(config.nics_of_mooncake)


def _that_match(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Without those that no device here has: one list for a whole fleet names them all."""
    there = [name for nic in read_machine().nics for name in (nic.name, nic.device)]
    kept = tuple(one for one in patterns if one.startswith("!") or fnmatch.filter(there, one))
    if kept != patterns:
        missing = ", ".join(one for one in patterns if one not in kept)
        logger.warning("MC_TE_FILTERS: no RDMA device here is called %s", missing)
    return kept


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
