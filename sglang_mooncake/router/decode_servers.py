# SPDX-License-Identifier: Apache-2.0
"""The decode servers that there are, and the choice among them. Pure: the time and chance are
handed in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple, Protocol

from sglang_mooncake.router.choice import Chooser
from sglang_mooncake.router.decode_view import DecodeView, best_decode, decode_reason
from sglang_mooncake.router.fit import Kin, Work
from sglang_mooncake.router.options import CACHE_AWARE
from sglang_mooncake.router.placement import Look, Placed
from sglang_mooncake.router.servers import Server

__all__ = ["DecodeChoice", "DecodeServers"]


class DecodeChoice(NamedTuple):
    """``handed_over``: tokens of the prompt that its cache does not have. ``reason``: one of
    ``DECODE_REASONS``; None where the policy looks at nothing. ``rank``: the DP rank that the
    client has named."""

    server: Server
    handed_over: float = 0.0
    reason: str | None = None
    rank: int | None = None


class _Gaps(Protocol):
    """Of a stream: times between its events, and how long they were in all."""

    gaps: int
    gaps_s: float


class DecodeServers:
    """What is known of each of them."""

    def __init__(self, policy: str, tbt_max_s: float | None, random: Random) -> None:
        """``policy``: of ``options.POLICIES``; ``tbt_max_s``: a limit for the time between tokens,
        None is none."""
        self._is_aware = policy == CACHE_AWARE
        self._tbt_max_s, self._random = tbt_max_s, random
        self._chooser = Chooser(policy, random)
        self._kin = Kin()
        self._views: dict[Server, DecodeView] = {}

    @property
    def views(self) -> Mapping[Server, DecodeView]:
        """Of those that are there."""
        return self._views

    def changed(self, there: Iterable[Server]) -> None:
        """Some have joined or left."""
        self._views = {one: self._views.get(one) or DecodeView(one, self._kin) for one in there}

    def in_time(self, servers: Sequence[Server]) -> Sequence[Server]:
        """Those whose tokens are expected within the limit with one request more. One that has none
        is asked in any case: else it would never be seen to be faster."""
        limit_s = self._tbt_max_s
        if limit_s is None:
            return servers
        return [
            one
            for one in servers
            if not one.under_way or self._views[one].pace.work_s(Work(one.under_way + 1)) <= limit_s
        ]

    def choose(self, look: Look | None, servers: Sequence[Server], now_s: float) -> DecodeChoice:
        """One of ``servers``, of which there is one at least."""
        if not self._is_aware:
            return DecodeChoice(self._chooser.choose(servers))
        tokens, rank = (0.0, None) if look is None else (look.tokens, look.ranks.decode)
        figures = [self._views[server].figures(look, now_s, rank) for server in servers]
        at = best_decode(tokens, figures, self._random)
        reason = decode_reason(tokens, figures, at)
        return DecodeChoice(servers[at], figures[at].missing(tokens), reason, rank)

    def send(self, choice: DecodeChoice) -> None:
        """The one that was chosen is sent the prompt."""
        self._views[choice.server].send(choice.handed_over, choice.rank)

    def learn(
        self, server: Server, gaps: _Gaps, placed: Placed | None, handed_over: float, now_s: float
    ) -> None:
        """From a prompt that was answered, with what was handed over of it; ``placed``: None where
        nothing is known of its tokens."""
        if server not in self._views:
            return  # It has left meanwhile.
        view = self._views[server]
        if gaps.gaps:
            server.counts.gaps += gaps.gaps
            server.counts.gaps_s += gaps.gaps_s
            view.pace.learn(Work(1 + server.under_way), gaps.gaps_s / gaps.gaps)
        if placed is not None and not placed.look.is_limited:
            view.answered(placed.look, handed_over, placed.sent_s, now_s)
