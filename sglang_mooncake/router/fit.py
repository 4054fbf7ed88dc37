# SPDX-License-Identifier: Apache-2.0
"""How long a prefill server takes for a prompt, fitted from what it took. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["Kin", "LoadFit", "WorkFit"]

#: What came so many requests ago counts for 1/e.
MEMORY_REQUESTS: Final = 64
#: Before anything was measured: what some GPU takes. It matters only until the first answers.
FIRST_FIXED_S: Final = 0.02
FIRST_TOKEN_S: Final = 1e-4
_FADE: Final = 1 - 1 / MEMORY_REQUESTS
#: What all servers took counts for so many requests of each. In three runs of route-bench 2 to 8
#: gave median errors that were 3 to 12 points lower than without.
KIN_REQUESTS: Final = 4.0
#: What a server told so many requests of others ago counts for 1/e.
OTHERS_REQUESTS: Final = 256
_OTHERS_FADE: Final = 1 - 1 / OTHERS_REQUESTS
#: Until a load was measured, a token is taken to load in this part of the time that it is computed.
FIRST_LOAD: Final = 0.1


class _Sums:
    """Of (tokens, seconds), for a line by least squares."""

    def __init__(self) -> None:
        self.count = self.x = self.y = self.xx = self.xy = 0.0

    def fade(self, part: float) -> None:
        """So much of each stays."""
        self.count *= part
        self.x *= part
        self.y *= part
        self.xx *= part
        self.xy *= part

    def add(self, tokens: float, took_s: float) -> None:
        self.count += 1
        self.x += tokens
        self.y += took_s
        self.xx += tokens * tokens
        self.xy += tokens * took_s

    def add_sums(self, other: _Sums, part: float) -> None:
        """So much of each of the other's."""
        self.count += part * other.count
        self.x += part * other.x
        self.y += part * other.y
        self.xx += part * other.xx
        self.xy += part * other.xy

    def line(self) -> tuple[float, float]:
        """Fixed time and time for each token. There is one pair at least."""
        spread = self.count * self.xx - self.x * self.x
        if spread > 1e-9 * self.count * self.xx:
            token_s = (self.count * self.xy - self.x * self.y) / spread
            fixed_s = (self.y - token_s * self.x) / self.count
            if token_s >= 0.0 and fixed_s >= 0.0:
                return fixed_s, token_s
            if token_s >= 0.0:
                return 0.0, self.xy / self.xx
            # Longer prompts took less: by chance, or because of something else. A token costs time.
            return 0.0, self.y / self.x
        # All prompts were of one length: the share of the fixed time cannot be told.
        if self.x == 0.0:
            return self.y / self.count, FIRST_TOKEN_S
        return 0.0, self.y / self.x


class Kin:
    """What all servers together took, which says something of each."""

    def __init__(self) -> None:
        self.sums = _Sums()
        #: How many requests it has learnt from.
        self.learnt = 0

    def learn(self, tokens: float, took_s: float) -> None:
        """One of them has taken so long for a prompt of which so many tokens were computed."""
        self.sums.fade(_FADE)
        self.sums.add(tokens, took_s)
        self.learnt += 1


class WorkFit:
    """A line through (tokens to be computed, seconds): a fixed time and a time for each token,
    neither of them negative, by least squares in which older answers fade.

    A server is taken to be like its kin as long as it has told little, and again when it has told
    nothing for long: one whose first prompt was slow would be asked no more, and never be seen to
    be as fast as the others.
    """

    def __init__(self, kin: Kin | None = None) -> None:
        self._kin = Kin() if kin is None else kin
        self._own = _Sums()
        #: What its kin had learnt when the own sums were brought up to date.
        self._learnt = 0
        self._line = FIRST_FIXED_S, FIRST_TOKEN_S
        self._line_of = 0

    @property
    def fixed_s(self) -> float:
        """Of any prompt."""
        return self._fitted()[0]

    @property
    def token_s(self) -> float:
        """Of each token that is computed."""
        return self._fitted()[1]

    @property
    def learnt(self) -> int:
        """How many prompts it and its kin have learnt from."""
        return self._kin.learnt

    def work_s(self, tokens: float) -> float:
        """What a prompt takes of which so many tokens are to be computed."""
        fixed_s, token_s = self._fitted()
        return fixed_s + tokens * token_s

    def learn(self, tokens: float, took_s: float) -> None:
        """A prompt of which so many tokens were computed has taken so long."""
        self._keep_up()
        self._own.fade(_FADE)
        self._own.add(tokens, took_s)
        self._kin.learn(tokens, took_s)
        self._learnt = self._kin.learnt

    def _keep_up(self) -> None:
        self._own.fade(_OTHERS_FADE ** (self._kin.learnt - self._learnt))
        self._learnt = self._kin.learnt

    def _fitted(self) -> tuple[float, float]:
        if self._line_of != self._kin.learnt:
            self._line_of = self._kin.learnt
            self._keep_up()
            both = _Sums()
            both.add_sums(self._own, 1.0)
            all_of_them = self._kin.sums
            both.add_sums(all_of_them, min(1.0, KIN_REQUESTS / all_of_them.count))
            self._line = both.line()
        return self._line


class LoadFit:
    """What a token takes that is loaded from a store: older measurements fade."""

    def __init__(self) -> None:
        self._tokens = self._took_s = 0.0

    def token_s(self, computed_s: float) -> float:
        """``computed_s``: what it would take to compute it."""
        return self._took_s / self._tokens if self._tokens else FIRST_LOAD * computed_s

    def learn(self, tokens: float, took_s: float) -> None:
        """A prompt of which so many tokens were loaded has taken so much longer than what was
        computed of it."""
        self._tokens = self._tokens * _FADE + tokens
        self._took_s = max(0.0, self._took_s * _FADE + took_s)
