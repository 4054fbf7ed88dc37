# SPDX-License-Identifier: Apache-2.0
"""The servers that the router has, and which of them are ill. Pure: the caller tells the time.

Whether a server is well follows from what requests and probes have seen of it. The event loop's
thread alone changes these records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, Literal, TypeAlias

import msgspec

from sglang_mooncake.router.addresses import host_of

__all__ = ["PROBE_ILL_S", "ROLES", "Counts", "Role", "Server", "Servers"]

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, Role]] = ("prefill", "decode")
#: How often one that is ill is asked whether it is back.
PROBE_ILL_S: Final = 1.0


class Counts(msgspec.Struct):
    """What has been counted of one server since the router's start."""

    chosen: int = 0
    failed: int = 0
    #: How often it has become ill.
    ills: int = 0
    #: Tokens of prompts that it has told of, and how many of them it had in a cache.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: Times between events of streams, and how long they were in all.
    gaps: int = 0
    gaps_s: float = 0.0


class Server:
    """One server. ``bootstrap_host`` and ``bootstrap_port`` are of a prefill server's registry:
    None is the server's own host, and SGLang's own setting. One that joins while the router runs
    is ill until it answers: ``joined_s`` is when it has."""

    def __init__(
        self,
        role: Role,
        url: str,
        bootstrap_port: int | None = None,
        *,
        bootstrap_host: str | None = None,
        joined_s: float | None = None,
    ) -> None:
        self.role: Final = role
        self.url: Final = url
        self.bootstrap_host: Final = bootstrap_host or host_of(url)
        self.bootstrap_port: Final = bootstrap_port
        #: Requests that it has been sent and that have not ended.
        self.under_way = 0
        self.counts = Counts()
        self._failures = 0
        #: Since when it has been ill, and why; None while it is well.
        self._ill_since_s = joined_s
        self._why = "" if joined_s is None else "it has joined and not answered yet"
        self._probed_s: float | None = None

    def __repr__(self) -> str:
        return f"{self.role} server {self.url}"

    @property
    def is_well(self) -> bool:
        """Whether it is sent requests."""
        return self._ill_since_s is None

    @property
    def why_ill(self) -> str:
        """The last failure, while it is ill; else nothing."""
        return "" if self.is_well else self._why

    def ill_for_s(self, now_s: float) -> float:
        """0 while it is well."""
        return 0.0 if self._ill_since_s is None else now_s - self._ill_since_s

    def served(self) -> None:
        """It has answered a request. That makes no server well that is ill: it was sent the request
        before, and what it says of its health since then counts."""
        if self.is_well:
            self._failures = 0

    def answered(self) -> bool:
        """It says that it is well: whether it has been ill until now."""
        was_ill = not self.is_well
        self._failures, self._ill_since_s = 0, None
        return was_ill

    def failed(self, why: str, now_s: float, failures_max: int) -> bool:
        """It has not answered: whether it is ill from now on, after ``failures_max`` failures one
        after another. 1 is for what leaves no doubt, such as a refused connection."""
        self.counts.failed += 1
        self._failures += 1
        self._why = why
        if not self.is_well:
            return False
        if self._failures < failures_max:
            self.doubted()
            return False
        self._ill_since_s = now_s
        self.counts.ills += 1
        return True

    def doubted(self) -> None:
        """It may be gone: it is asked at once."""
        self._probed_s = None

    def is_to_be_probed(self, now_s: float, interval_s: float) -> bool:
        """Whether its health is to be asked for now, after which it counts as asked."""
        wait_s = interval_s if self.is_well else min(interval_s, PROBE_ILL_S)
        if self._probed_s is not None and now_s - self._probed_s < wait_s:
            return False
        self._probed_s = now_s
        return True


class Servers:
    """All of them. Who waits in between holds servers that may have left meanwhile."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._of: dict[Role, tuple[Server, ...]] = dict.fromkeys(ROLES, ())
        for server in servers:
            self.join(server)

    def join(self, server: Server) -> None:
        """From now on it may be chosen, once it is well."""
        self._of[server.role] += (server,)

    def leave(self, server: Server) -> None:
        """From now on nothing more is sent there; what is under way comes to its end."""
        self._of[server.role] = tuple(one for one in self._of[server.role] if one is not server)

    def of(self, role: Role) -> tuple[Server, ...]:
        """Those of one role, in the order in which they were named."""
        return self._of[role]

    def all(self) -> tuple[Server, ...]:
        """Prefill servers first."""
        return self._of["prefill"] + self._of["decode"]

    def usable(self, role: Role, avoided: Collection[Server] = ()) -> list[Server]:
        """Those that are well, without the ``avoided`` ones unless there are no others."""
        well = [server for server in self._of[role] if server.is_well]
        return [server for server in well if server not in avoided] or well

    def nobody(self, role: Role) -> str:
        """The sentence for clients when no server of the role is well."""
        if not self._of[role]:
            return f"no {role} server has joined"
        whys = "; ".join(f"{one.url}: {one.why_ill}" for one in self._of[role])
        return f"no {role} server is well: {whys}"
