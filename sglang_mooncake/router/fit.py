# SPDX-License-Identifier: Apache-2.0
"""How long a prefill server takes for a prompt, fitted from what it took. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["LoadFit", "WorkFit"]

#: What came so many requests ago counts for 1/e.
MEMORY_REQUESTS: Final = 64
#: Before anything was measured: what some GPU takes. It matters only until the first answers.
FIRST_FIXED_S: Final = 0.02
FIRST_TOKEN_S: Final = 1e-4
_FADE: Final = 1 - 1 / MEMORY_REQUESTS
#: Until a load was measured, a token is taken to load in this part of the time that it is computed.
FIRST_LOAD: Final = 0.1


class WorkFit:
    """A line through (tokens to be computed, seconds): a fixed time and a time for each token,
    neither of them negative, by least squares in which older answers fade."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0
        self.fixed_s, self.token_s = FIRST_FIXED_S, FIRST_TOKEN_S

    def work_s(self, tokens: float) -> float:
        """What a prompt takes of which so many tokens are to be computed."""
        return self.fixed_s + tokens * self.token_s

    def learn(self, tokens: float, took_s: float) -> None:
        """A prompt of which so many tokens were computed has taken so long."""
        self._count = self._count * _FADE + 1
        self._x = self._x * _FADE + tokens
        self._y = self._y * _FADE + took_s
        self._xx = self._xx * _FADE + tokens * tokens
        self._xy = self._xy * _FADE + tokens * took_s
        self.fixed_s, self.token_s = self._line()

    def _line(self) -> tuple[float, float]:
        spread = self._count * self._xx - self._x * self._x
        if spread > 1e-9 * self._count * self._xx:
            token_s = (self._count * self._xy - self._x * self._y) / spread
            fixed_s = (self._y - token_s * self._x) / self._count
            if token_s >= 0.0 and fixed_s >= 0.0:
                return fixed_s, token_s
            if token_s >= 0.0:
                return 0.0, self._xy / self._xx
            # Longer prompts took less: by chance, or because of something else. A token costs time.
            return 0.0, self._y / self._x
        # All prompts were of one length: the share of the fixed time cannot be told.
        if self._x == 0.0:
            return self._y / self._count, self.token_s
        return 0.0, self._y / self._x


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
