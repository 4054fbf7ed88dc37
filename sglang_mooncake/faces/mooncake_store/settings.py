# SPDX-License-Identifier: Apache-2.0
"""The arguments of Mooncake's ``setup``, and what they mean here. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

__all__ = ["Setup", "nbytes_of"]

DEFAULT_BYTES: Final = 16 << 20
PROTOCOLS: Final = ("tcp", "rdma")
_UNITS: Final = {"": 1, "B": 1} | {
    name: 1 << shift
    for letter, shift in (("K", 10), ("M", 20), ("G", 30), ("T", 40))
    for name in (letter, f"{letter}B", f"{letter}IB")
}
_NAMES: Final = {
    "device_name": "rdma_devices",
    "master_server_address": "master_server_addr",
}
"""What LMCache calls them, and what Mooncake does."""
_TEXTS: Final = (
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
    "ssd_offload_path",
    "tenant_id",
)


def nbytes_of(given: int | str) -> int:
    """``16777216``, ``"16777216"``, ``"16MB"`` or ``"16 MB"``, which are the same: Mooncake's units
    are powers of 1,024. ``ValueError`` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(given))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or isinstance(given, bool):
        raise ValueError(f"{given!r} is no size: give bytes, or a text such as 16MB or 4GB")
    return int(float(match[1]) * unit)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the caller of ``setup`` says."""

    #: The name of this process for others, with or without a port.
    hostname: str
    #: What the owner of this host is asked to lend.
    segment_bytes: int
    #: Memory through which ``put`` and ``get`` copy; 0: they cannot.
    buffer_bytes: int
    #: RDMA devices that are named; none: te chooses.
    devices: tuple[str, ...]
    #: Those who name the same master and tenant share objects, and nobody else does. No master
    #: runs: its address is a deployment's name.
    deployment: str

    @classmethod
    def of(
        cls,
        local_hostname: str,
        metadata_server: str,  # noqa: ARG003 - processes of the store find each other without one
        global_segment_size: int | str = DEFAULT_BYTES,
        local_buffer_size: int | str = DEFAULT_BYTES,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "127.0.0.1:50051",
        engine: object = None,  # noqa: ARG003 - the store's processes have engines of their own
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 0,  # noqa: ARG003 - see `_check_left_out`
    ) -> Self:
        """Of Mooncake's arguments. ``TypeError`` for others, ``ValueError`` for values that mean
        nothing."""
        if protocol not in PROTOCOLS:
            raise ValueError(f"protocol={protocol!r} must be one of {', '.join(PROTOCOLS)}")
        if not local_hostname:
            raise ValueError("local_hostname must not be empty")
        if enable_ssd_offload or ssd_offload_path:
            raise ValueError(
                "enable_ssd_offload and ssd_offload_path are Mooncake's: a disk below the memory is"
                " disk and disk_size among the store's own settings"
            )
        if enable_client_http_server:
            raise ValueError("enable_client_http_server: nothing is served here; see `kvstore top`")
        names = [one.strip() for one in rdma_devices.split(",")] if protocol == "rdma" else []
        return cls(
            hostname=local_hostname,
            segment_bytes=nbytes_of(global_segment_size),
            buffer_bytes=nbytes_of(local_buffer_size),
            devices=tuple(filter(None, names)),
            deployment=f"{master_server_addr} {tenant_id}",
        )

    @classmethod
    def of_mapping(cls, given: Mapping[str, Any]) -> Self:
        """As Mooncake takes a dictionary: values may be texts, names that it does not know count
        for nothing. ``ValueError`` also for one that lacks a name that is needed."""
        values = {_NAMES.get(name, name): value for name, value in given.items()}
        for name in ("local_hostname", "metadata_server"):
            if not values.get(name):
                raise ValueError(f"setup needs {name}")
        flags = ("enable_ssd_offload", "enable_client_http_server")
        kept: dict[str, Any] = {name: str(values[name]) for name in _TEXTS if name in values}
        kept |= {name: _is_true(values[name]) for name in flags if name in values}
        return cls.of(**kept)


def _is_true(given: object) -> bool:
    return str(given).strip().lower() in ("1", "true", "yes", "on")
