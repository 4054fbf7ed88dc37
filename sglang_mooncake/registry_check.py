# SPDX-License-Identifier: Apache-2.0
"""Whether the registries that an operator has named, and the prefill servers that they tell of, can
serve a decode rank: said in the log from its start on, before the first request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    Instance,
    MismatchError,
    NeverServed,
)
from bootstrap_server.admission.secret import Keys
from sglang_mooncake.fetching import fetch_named

__all__ = ["RegistryCheck", "news"]

logger = logging.getLogger(__name__)

AGAIN_S = 5.0
#: Of each registry.
SERVERS_MAX = 1_024


#: A registry's address, and the name of one of its prefill servers; empty for itself.
_Who = tuple[str, str]
_Key = TypeVar("_Key", bound=Hashable)


def news(
    former: Mapping[_Key, str], now: Mapping[_Key, str], known: set[_Key]
) -> tuple[list[str], list[_Key]]:
    """The sentences that have not been said, and who has no problem any more. `former` and `now`:
    the sentence about each who has a problem; `known`: who is there now. Pure."""
    new = [sentence for who, sentence in now.items() if former.get(who) != sentence]
    over = [who for who in former if who in known and who not in now]
    return new, over


class RegistryCheck:
    """Looks every `AGAIN_S`, in a thread, until it is closed.

    Args:
        addresses: of the registries.
        protocol: the version that this rank speaks.
        fits: raises MismatchError for an instance that cannot serve this rank.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keys,
        protocol: int,
        fits: Callable[[Instance], None],
    ) -> None:
        self._addresses, self._keys = addresses, keys
        self._protocol, self._fits = protocol, fits
        #: By registry and name: the revision that was looked at, and what is wrong with it.
        self._looked: dict[tuple[str, str], tuple[int, str | None]] = {}
        self._said: dict[_Who, str] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-registries", daemon=True)

    def start(self) -> None:
        if self._addresses:
            self._thread.start()

    def close(self) -> None:
        """Does not wait for a question that is under way. Idempotent."""
        self._closing.set()

    def look(self) -> None:
        """Once; waits for the registries."""
        problems: dict[_Who, str] = {}
        known: set[_Who] = set()
        for address in self._addresses:
            registry = address, ""
            try:
                names = self._names(address)
            except NeverServed as error:
                known.add(registry)
                problems[registry] = f"{_called(registry)} does not serve this server: {error}"
                continue
            except BootstrapError as error:
                # It may be starting, or away. What was wrong with it may still be.
                logger.debug("%s: %s", _called(registry), error)
                problems |= {who: said for who, said in self._said.items() if who[0] == address}
                continue
            known.add(registry)
            for name, revision in names.items():
                server = address, name
                known.add(server)
                problem = self._problem(address, name, revision)
                if problem is not None:
                    problems[server] = f"{_called(server)} does not fit this one: {problem}"
        self._say(problems, known)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.look()
            except Exception:
                logger.exception("internal error: registries are not checked any more")
                return
            self._closing.wait(AGAIN_S)

    def _names(self, address: str) -> dict[str, int]:
        """The revisions of its instances, by name. Forgets what was found about others."""
        with BootstrapClient(address, keys=self._keys.registry) as client:
            names = dict(list(client.instances().items())[:SERVERS_MAX])
        self._looked = {
            key: found
            for key, found in self._looked.items()
            if key[0] != address or key[1] in names
        }
        return names

    def _problem(self, address: str, name: str, revision: int) -> str | None:
        looked = self._looked.get((address, name))
        if looked is not None and looked[0] == revision:
            return looked[1]
        problem = None
        try:
            self._fits(fetch_named(address, self._keys, name, 0.0, self._protocol))
        except (NeverServed, MismatchError) as error:
            problem = str(error)
        except BootstrapError as error:
            logger.debug("prefill server %s at %s: %s", name, address, error)
            return None if looked is None else looked[1]
        self._looked[address, name] = revision, problem
        return problem

    def _say(self, problems: dict[_Who, str], known: set[_Who]) -> None:
        new, over = news(self._said, problems, known)
        for sentence in new:
            # A registry may have servers of other deployments: requests show which matter.
            logger.warning("%s", sentence)
        for who in over:
            logger.warning("%s fits this server now", _called(who))
        self._said = problems


def _called(who: _Who) -> str:
    address, name = who
    registry = f"the registry {address}"
    return f"the prefill server {name} at {registry}" if name else registry
