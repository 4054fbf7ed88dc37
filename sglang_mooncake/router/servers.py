# SPDX-License-Identifier: Apache-2.0
"""The servers that the router has, and which of them are ill. Pure: the caller tells the time.

Whether a server is well follows from what requests and probes have seen of it. The event loop's
thread alone changes these records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, Literal, TypeAlias

import msgspec

from sglang_mooncake.router.sglang_http import bootstrap_host

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


class Server:
    """One server. ``bootstrap_port`` is that of a prefill server's registry; None is SGLang's own
    setting."""

    def __init__(self, role: Role, url: str, bootstrap_port: int | None = None) -> None:
        self.role: Final = role
        self.url: Final = url
        self.bootstrap_host: Final = bootstrap_host(url)
        self.bootstrap_port: Final = bootstrap_port
        #: Requests that it has been sent and that have not ended.
        self.under_way = 0
        self.counts = Counts()
        self._failures = 0
        #: Since when it has been ill, and why; None while it is well.
        self._ill_since_s: float | None = None
        self._why = ""
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
            self._probed_s = None  # It may be gone: it is asked at once.
            return False
        self._ill_since_s = now_s
        self.counts.ills += 1
        return True

    def is_to_be_probed(self, now_s: float, interval_s: float) -> bool:
        """Whether its health is to be asked for now, after which it counts as asked."""
        wait_s = interval_s if self.is_well else min(interval_s, PROBE_ILL_S)
        if self._probed_s is not None and now_s - self._probed_s < wait_s:
            return False
        self._probed_s = now_s
        return True


class Servers:
    """All of them."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._of: dict[Role, tuple[Server, ...]] = {}
        known = tuple(servers)
        for role in ROLES:
            self._of[role] = tuple(one for one in known if one.role == role)

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
        whys = "; ".join(f"{one.url}: {one.why_ill}" for one in self._of[role])
        return f"no {role} server is well: {whys}"
