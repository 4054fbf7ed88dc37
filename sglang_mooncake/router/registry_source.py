# SPDX-License-Identifier: Apache-2.0
"""Asks registries, again and again, which servers there are.

A registry is asked over blocking sockets in a thread of its own: questions to it are proved with
the deployment's secret, and its client does that (`bootstrap_server/client/http.py` says why it is
none of aiohttp's).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    Instance,
    NotReady,
    Unreachable,
    split_address,
)
from bootstrap_server.admission.secret import Keys
from bootstrap_server.ranks.records import DEFAULT_INSTANCE, registry_port_of
from bootstrap_server.ranks.router_report import RouterReport
from sglang_mooncake.fetching import fetch_named
from sglang_mooncake.router.addresses import is_host
from sglang_mooncake.router.each import one_for_each
from sglang_mooncake.router.membership import Change, Listed, Membership
from sglang_mooncake.router.servers import ROLES, Role

__all__ = ["Registry", "RegistrySource", "listed_of"]

logger = logging.getLogger(__name__)

#: How often a registry is asked; servers that have gone are ill before it lists them no more.
ASK_S: Final = 1.0
#: A registry that has not answered for so long is said to be silent.
SILENT_S: Final = 3.0


class Registry:
    """What is known of one registry. ``look`` runs in its own thread, all else in the loop's."""

    def __init__(self, address: str, keys: Keys) -> None:
        self.address: Final = address
        self._keys = keys
        self._known: dict[tuple[Role, str], tuple[int, Listed | None]] = {}
        #: When it has answered last, and why it does not; None before its first answer.
        self.heard_s: float | None = None
        self.why = "it was not asked yet"
        self.servers = 0
        self.is_silent = False
        #: Whether it shows routers; one of an older release does not.
        self.shows_routers = True

    def __repr__(self) -> str:
        return f"the registry at {self.address}"

    def age_s(self, now_s: float) -> float | None:
        """Time since its last answer; None if there was none."""
        return None if self.heard_s is None else now_s - self.heard_s

    def look(self, report: RouterReport) -> tuple[list[Listed], list[str]]:
        """The servers that are complete, and sentences about those that cannot be used. The
        registry is told of the router. Raises ``BootstrapError``."""
        found: list[Listed] = []
        whys: list[str] = []
        known: dict[tuple[Role, str], tuple[int, Listed | None]] = {}
        for role in ROLES:
            with BootstrapClient(self.address, keys=self._keys.registry, role=role) as client:
                revisions = client.instances()
                if role == ROLES[0] and self.shows_routers:
                    self.shows_routers = client.report_router(report)
            for name, revision in revisions.items():
                seen = self._known.get((role, name))
                if seen is None or seen[0] != revision:
                    try:
                        listed = self._ask(role, name)
                    except NotReady:
                        continue  # A rank has gone in between.
                    except Unreachable:
                        raise
                    except BootstrapError as error:
                        listed = None
                        whys.append(str(error))
                    seen = revision, listed
                known[role, name] = seen
                if seen[1] is not None:
                    found.append(seen[1])
        self._known = known
        return found, whys

    def _ask(self, role: Role, name: str) -> Listed:
        instance = fetch_named(self.address, self._keys, name, 0.0, role=role)
        return listed_of(role, name, instance, self.address)


def listed_of(role: Role, name: str, instance: Instance, address: str) -> Listed:
    """The server whose instance the registry at ``address`` keeps by that name. ``BootstrapError``
    for one that requests cannot be sent to."""
    first = instance.ranks[0]
    if not is_host(first.host):
        raise BootstrapError(
            f"the {role} server {name!r} at the registry {address} has the host {first.host!r},"
            " which is neither an IP address nor a host name: let it register with one"
        )
    host = f"[{first.host}]" if ":" in first.host else first.host
    if role == "decode":
        return Listed(role, f"http://{host}:{first.port}")
    if first.prefill_http_port is None:
        raise BootstrapError(
            f"the prefill server {name!r} at the registry {address} does not say at which port its"
            " HTTP API listens: name it with --prefill"
        )
    url = f"http://{host}:{first.prefill_http_port}"
    if name == DEFAULT_INSTANCE:  # The registry is its own.
        own, port = split_address(address)
        return Listed(role, url, f"[{own}]" if ":" in own else own, port)
    own_port = registry_port_of(name)
    if own_port is None:
        raise BootstrapError(
            f"the prefill server {name!r} at the registry {address} is not named by the address of"
            " its own registry: name it with --prefill"
        )
    return Listed(role, url, host, own_port)


class RegistrySource:
    """``run`` asks all registries until it is cancelled, and lets servers join and leave."""

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keys,
        membership: Membership,
        on_change: Callable[[Change], None],
        report: Callable[[], RouterReport],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_change`` hears of servers that have joined and left. ``report``: of the router, for
        the registries' status pages."""
        self.registries: Final = tuple(Registry(address, keys) for address in addresses)
        self._membership, self._on_change, self._clock = membership, on_change, clock
        self._report = report

    async def run(self) -> None:
        """Never returns."""
        await one_for_each("asking", lambda: self.registries, self._follow)

    async def _follow(self, registry: Registry) -> None:
        began_s = self._clock()
        said: set[str] = set()
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "asking a registry")
        try:
            while True:
                try:
                    asked = partial(registry.look, self._report())
                    found, whys = await loop.run_in_executor(thread, asked)
                except BootstrapError as error:
                    self._silent(registry, str(error), began_s)
                else:
                    for why in sorted(set(whys) - said):
                        logger.warning("a server cannot be used: %s", why)
                    said = set(whys)
                    self._heard(registry, found)
                self._settle()
                await asyncio.sleep(ASK_S)
        finally:
            thread.shutdown(wait=False)

    def _heard(self, registry: Registry, found: Sequence[Listed]) -> None:
        if registry.is_silent:
            logger.info("the registry at %s answers again", registry.address)
        registry.heard_s, registry.why, registry.is_silent = self._clock(), "", False
        registry.servers = len(found)
        self._membership.told(registry.address, found)

    def _silent(self, registry: Registry, why: str, began_s: float) -> None:
        registry.why = why
        since_s = began_s if registry.heard_s is None else registry.heard_s
        if not registry.is_silent and self._clock() - since_s >= SILENT_S:
            registry.is_silent = True
            logger.warning(
                "the registry at %s does not answer, so the router goes on with the servers that it"
                " has: %s",
                registry.address,
                why,
            )

    def _settle(self) -> None:
        change = self._membership.settle(self._clock())
        for sentence in change.refused:
            logger.warning("%s", sentence)
        for server in change.joined:
            logger.info("%s has joined; it gets requests once it is well", server)
        for server in change.left:
            logger.info("%s has left", server)
        if change.joined or change.left:
            self._on_change(change)
