# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, by who has to act on it.

Every message is one sentence that can be shown to an operator as it stands. Names say the
state of affairs where that reads better than another `…Error` (hence the N818 exemptions).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bootstrap_server.ranks.records import RankCoords

__all__ = [
    "BootstrapError",
    "LeaseLost",
    "MismatchError",
    "NeverServed",
    "NotReady",
    "PlaceTaken",
    "RegistrationRefused",
    "RegistryFull",
    "Unreachable",
    "Why",
]

#: How many missing coordinates a message spells out before it only counts.
COORDS_IN_MESSAGE = 4


class Why(enum.StrEnum):
    """On what two servers differ, so that one never serves the other: a label of metrics."""

    SECRET = "secret"
    MODEL = "model"
    PAGE_SIZE = "page size"
    DTYPE = "dtype"
    LAYOUT = "layout"
    TOPOLOGY = "topology"
    #: A flag or variable that is none of the others.
    SETTING = "setting"
    #: Nothing moves bytes between their engines: no transport that both have, or one encrypts.
    TRANSPORT = "transport"
    #: Of sglang-mooncake.
    RELEASE = "release"
    #: What answers at the address is no registry of ours.
    REGISTRY = "registry"


class BootstrapError(Exception):
    """Base of all errors of this package; raised itself when nothing finer fits."""


class Unreachable(BootstrapError):
    """Nothing answered at the address in time; asking again later can help.

    `nothing_listens`: the host answered that no process listens on the port.
    """

    def __init__(self, sentence: str, *, nothing_listens: bool = False) -> None:
        self.nothing_listens = nothing_listens
        super().__init__(sentence)


class NeverServed(BootstrapError):
    """The other side answers, and will answer the same until somebody changes a setting."""

    def __init__(self, sentence: str, why: Why) -> None:
        self.why = why
        super().__init__(sentence)


class RegistrationRefused(BootstrapError):
    """The registry refuses a rank's record; the same record will be refused again."""


class PlaceTaken(RegistrationRefused):
    """A live rank holds the place, for `left_s` more seconds unless it renews its lease.

    A rank that was restarted asks again until then; who is still refused after that is not a
    restart of the holder but another server.
    """

    def __init__(self, sentence: str, left_s: float) -> None:
        self.left_s = left_s
        super().__init__(sentence)


class LeaseLost(BootstrapError):
    """A life of a rank holds no lease: it never registered, or the lease lapsed, or another life
    has its place. Registering again tells which."""


class RegistryFull(BootstrapError):
    """The server keeps as much as it may; asking again later can help."""


class MismatchError(BootstrapError):
    """A prefill and a decode instance cannot be paired; somebody must change a flag."""

    def __init__(self, sentence: str, why: Why = Why.TOPOLOGY) -> None:
        self.why = why
        super().__init__(sentence)


class NotReady(BootstrapError):
    """The instance is known but not all of its ranks have registered yet.

    `registered` and `expected` count ranks (`expected` is 0 before the first rank
    registers, because only ranks know the topology). `missing` lists coordinates that
    have no live rank, cut to a bounded number. `note` adds why ranks may have gone.
    `instance` is the name of the instance, None for the only one of an SGLang server.
    """

    def __init__(
        self,
        registered: int,
        expected: int,
        missing: tuple[RankCoords, ...] = (),
        note: str | None = None,
        instance: str | None = None,
    ) -> None:
        self.registered = registered
        self.expected = expected
        self.missing = missing
        self.note = note
        self.instance = instance
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        which = "" if self.instance is None else f" {self.instance}"
        if self.expected == 0:
            return f"the prefill instance{which} is not ready: none of its ranks has registered yet"
        named = ", ".join(f"({coords})" for coords in self.missing[:COORDS_IN_MESSAGE])
        absent = self.expected - self.registered
        more = absent - min(len(self.missing), COORDS_IN_MESSAGE)
        sentence = (
            f"the prefill instance{which} is not ready: {self.registered} of {self.expected} ranks "
            f"have registered, missing {named or absent}"
        )
        if named and more > 0:
            sentence += f" and {more} more"
        return sentence if self.note is None else f"{sentence}; {self.note}"
