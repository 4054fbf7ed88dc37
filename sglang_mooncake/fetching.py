# SPDX-License-Identifier: Apache-2.0
"""What registries tell of prefill instances, as far as it is proved. Calls wait for the network."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    Instance,
    NeverServed,
    Unreachable,
    Why,
    instance_name_of,
)
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.signatures import check_signatures, signed_name
from bootstrap_server.ranks.records import DEFAULT_INSTANCE, Role

__all__ = ["LOOKUP_WAIT_S", "fetch_instance", "fetch_named"]

logger = logging.getLogger(__name__)

#: A registry whose instance lacks ranks answers when they come, or after this long: shorter than
#: the 15 s for which SGLang's scheduler goes on asking us, so that we can say who was missing.
LOOKUP_WAIT_S = 3.0
_NO_KEYS = Keys()


def fetch_instance(
    address: str,
    keys: Keys = _NO_KEYS,
    beside: Sequence[str] = (),
    protocol: int | None = None,
) -> Instance:
    """The instance behind the registry at `address`; takes up to `LOOKUP_WAIT_S` longer than a
    request does while ranks are missing. When that registry does not answer, those `beside` it are
    asked, at which prefill ranks register by the address of their own. `protocol`: the version that
    this rank speaks, for the sentence about one that speaks another.

    Raises:
        BootstrapError: a sentence that says why it is not known.
    """
    try:
        return fetch_named(address, keys, DEFAULT_INSTANCE, LOOKUP_WAIT_S, protocol)
    except Unreachable as error:
        name = instance_name_of(address)
        for other in beside:
            try:
                return fetch_named(other, keys, name, 0.0, protocol)
            except BootstrapError as also:
                logger.debug("prefill instance at %s: %s", address, also)
        raise error


def fetch_named(
    address: str,
    keys: Keys,
    name: str,
    wait_s: float,
    protocol: int | None = None,
    role: Role = "prefill",
) -> Instance:
    """The instance of that name and role at the registry at `address`; raises as `fetch_instance`
    does."""
    with BootstrapClient(address, keys=keys.registry, instance=name, role=role) as client:
        instance = client.instance(wait_s=wait_s)
    try:
        check_signatures(instance, keys.record, address, signed_name(name, role))
    except NeverServed as error:
        theirs = instance.config.protocol
        if protocol is None or theirs == protocol:
            raise
        # What other releases sign differs, too.
        raise NeverServed(
            f"the prefill ranks at {address} speak version {theirs} of the hand-over protocol, and "
            f"this server speaks version {protocol}: install the same release of sglang-mooncake "
            "on both",
            Why.RELEASE,
        ) from error
    return instance
