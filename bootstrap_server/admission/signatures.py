# SPDX-License-Identifier: Apache-2.0
"""Rank records signed by their ranks, so that a registry cannot send decode ranks elsewhere. Pure.

A signature is an HMAC with a `secret.Keys.record` over the name of the instance, what its ranks
agree on, and everything that the rank says about itself but the signature.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final

import msgspec

from bootstrap_server.admission.secret import mac
from bootstrap_server.ranks.errors import NeverServed, Why
from bootstrap_server.ranks.records import (
    DEFAULT_INSTANCE,
    Instance,
    InstanceConfig,
    Rank,
    RankRecord,
    Role,
)

__all__ = ["check_signatures", "key_index", "signed", "signed_name"]

_LABEL: Final = b"rank record 1"


def signed(
    record: RankRecord, keys: Sequence[bytes], instance: str = DEFAULT_INSTANCE
) -> RankRecord:
    """The record with a signature by the first key, or as it is when there is none."""
    if not keys:
        return record
    signature = _signature(keys[0], record.config, record.rank, instance)
    return RankRecord(record.config, msgspec.structs.replace(record.rank, signature=signature))


def key_index(
    config: InstanceConfig, rank: Rank, keys: Sequence[bytes], instance: str = DEFAULT_INSTANCE
) -> int | None:
    """Which of `keys` has signed the rank's record; None for none of them."""
    given = rank.signature.encode("ascii")
    for index, key in enumerate(keys):
        if hmac.compare_digest(_signature(key, config, rank, instance).encode("ascii"), given):
            return index
    return None


def signed_name(name: str, role: Role) -> str:
    """What the records of a server of that name and role are signed for, so that none can be passed
    off as one of the other role."""
    return name if role == "prefill" else f"{role} {name}"


def check_signatures(
    instance: Instance, keys: Sequence[bytes], address: str, name: str = DEFAULT_INSTANCE
) -> None:
    """Raise `NeverServed` unless all records of the instance that the registry at `address`
    gave are signed with one of `keys`; without keys nothing is asked."""
    if not keys:
        return
    for rank in instance.ranks:
        if key_index(instance.config, rank, keys, name) is None:
            cause = (
                "is signed, but not with our secret, or not by the version of sglang-mooncake that "
                "we have"
                if rank.signature
                else "is not signed: the rank has no secret"
            )
            raise NeverServed(
                f"rank {rank.coords} at {rank.host} port {rank.port} is not asked: its "
                f"record, from the registry at {address}, {cause}; give all servers the same "
                "secret (SGLANG_MOONCAKE_SECRET_FILE)",
                Why.SECRET,
            )


def _signature(key: bytes, config: InstanceConfig, rank: Rank, instance: str) -> str:
    plain = msgspec.structs.replace(rank, signature="")
    # Of each value one text, whatever the order in which a JSON object had its names.
    parts = (msgspec.json.encode(part, order="sorted") for part in (instance, config, plain))
    return mac(key, _LABEL, *parts).hex()
