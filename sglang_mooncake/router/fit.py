# SPDX-License-Identifier: Apache-2.0
"""How long a prefill server takes for a prompt, fitted from what it took. Pure."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

__all__ = ["Kin", "LoadFit", "Times", "WorkFit", "pairs_of"]

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
#: A pair takes such a part of what a token takes at most: attention takes as long as all else where
#: as many tokens lie before. That is at 53,000 for Llama 3 70B, and at 8,000 for DeepSeek V3.
BEND: Final = 1 / 4_000
#: By such a part less is taken to be known of pairs: where they are nearly in proportion to tokens
#: it is left to these what both take.
PAIRS_DOUBT: Final = 0.01
#: Where no more than such a part is left that is not in proportion, what two things take cannot be
#: told apart.
TOLD_APART: Final = 1e-9
#: A time that is smaller than this is not known to a part of itself.
NOISE_S: Final = 0.02
#: A time that is less than such a part of what was expected is a mistake, and counts as that part.
LEAST: Final = 1 / 4
#: Until a load was measured, a token is taken to load in this part of the time that it is computed.
FIRST_LOAD: Final = 0.1


def pairs_of(computed: float, before: float) -> float:
    """How many pairs of a token that is computed and one before it there are, which is what
    attention takes time for: so many tokens are computed behind so many that need not be."""
    return computed * (before + computed / 2)


class Times(NamedTuple):
    """What a prompt takes: any, each token that is computed, and each of its pairs
    (``pairs_of``)."""

    fixed_s: float
    token_s: float
    pair_s: float = 0.0

    def work_s(self, tokens: float, pairs: float) -> float:
        """Of so much that is computed."""
        return self.fixed_s + tokens * self.token_s + pairs * self.pair_s


class _Sums:
    """Of (tokens, pairs, seconds), for least squares with weights."""

    def __init__(self) -> None:
        self.requests = 0.0
        #: Of the weights, x (tokens), y (seconds), x x, x y, z (pairs), x z, z z and z y.
        self._all = [0.0] * 9

    def fade(self, part: float) -> None:
        """So much of each stays."""
        self.requests *= part
        self._all = [one * part for one in self._all]

    def add(self, tokens: float, pairs: float, took_s: float, weight: float) -> None:
        self.requests += 1
        x, y, z = weight * tokens, weight * took_s, weight * pairs
        new = (weight, x, y, x * tokens, x * took_s, z, x * pairs, z * pairs, z * took_s)
        self._all = [one + more for one, more in zip(self._all, new, strict=True)]

    def with_part(self, other: _Sums, part: float) -> _Sums:
        """Both, of the other's so much of each."""
        both = _Sums()
        both.requests = self.requests + part * other.requests
        both._all = [one + part * more for one, more in zip(self._all, other._all, strict=True)]
        return both

    def times(self) -> Times:
        """There is one prompt at least. Pairs have a time where all that is found is as it can
        be: else they have none, and what remains is a line."""
        for has_fixed in (True, False):
            found = self._curve(has_fixed=has_fixed)
            if found is not None and min(found) >= 0.0 and found.pair_s <= BEND * found.token_s:
                return found
        return self._line()

    def _curve(self, *, has_fixed: bool) -> Times | None:
        """By all three, or without a fixed time; None where they cannot be told apart. What the
        fixed time explains is taken out of the other sums first."""
        count, x, y, xx, xy, z, xz, zz, zy = self._all
        part = 1 / count if has_fixed else 0.0
        all_xx, zz = xx, zz * (1 + PAIRS_DOUBT) - part * z * z
        xx, xz, xy, zy = xx - part * x * x, xz - part * x * z, xy - part * x * y, zy - part * z * y
        spread = xx * zz - xz * xz
        if xx <= TOLD_APART * all_xx or spread <= TOLD_APART * xx * zz:
            return None
        token_s, pair_s = (xy * zz - zy * xz) / spread, (zy * xx - xy * xz) / spread
        fixed_s = part * (y - token_s * x - pair_s * z) if has_fixed else 0.0
        return Times(fixed_s, token_s, pair_s)

    def _line(self) -> Times:
        """Fixed time and time for each token."""
        count, x, y, xx, xy, *_ = self._all
        spread = count * xx - x * x
        if spread > TOLD_APART * count * xx:
            token_s = (count * xy - x * y) / spread
            fixed_s = (y - token_s * x) / count
            if token_s >= 0.0 and fixed_s >= 0.0:
                return Times(fixed_s, token_s)
            if token_s >= 0.0:
                return Times(0.0, xy / xx)
            # Longer prompts took less: by chance, or because of something else. A token costs time.
            return Times(0.0, y / x)
        # All prompts were of one length: the share of the fixed time cannot be told.
        if x == 0.0:
            return Times(y / count, FIRST_TOKEN_S)
        return Times(0.0, y / x)


class Kin:
    """What all servers together took, which says something of each."""

    def __init__(self) -> None:
        self.sums = _Sums()
        #: How often it has learnt.
        self.learnt = 0
        #: Requests that have ended, several of which may have been computed together.
        self.requests = 0

    def learn(self, tokens: float, pairs: float, took_s: float, weight: float) -> None:
        """One of them has taken so long for a prompt of which so much was computed."""
        self.sums.fade(_FADE)
        self.sums.add(tokens, pairs, took_s, weight)
        self.learnt += 1


class WorkFit:
    """A curve through (what is to be computed, seconds): a fixed time, a time for each token and
    one for each pair (``pairs_of``), none of them negative, by least squares in which older answers
    fade. Errors count in parts of
    what was expected: else a few long prompts would say what the many short ones take. How much a
    time can count for is bounded, however long or short it is.

    A server is taken to be like its kin as long as it has told little, and again when it has told
    nothing for long: one whose first prompt was slow would be asked no more, and never be seen to
    be as fast as the others.
    """

    def __init__(self, kin: Kin | None = None) -> None:
        self._kin = Kin() if kin is None else kin
        self._own = _Sums()
        #: What its kin had learnt when the own sums were brought up to date.
        self._learnt = 0
        self._times = Times(FIRST_FIXED_S, FIRST_TOKEN_S)
        self._times_of = 0

    @property
    def times(self) -> Times:
        """As they are known now."""
        if self._times_of != self._kin.learnt:
            self._times_of = self._kin.learnt
            self._keep_up()
            all_of_them = self._kin.sums
            part = min(1.0, KIN_REQUESTS / all_of_them.requests)
            self._times = self._own.with_part(all_of_them, part).times()
        return self._times

    @property
    def learnt(self) -> int:
        """From how many requests it and its kin have learnt."""
        return self._kin.requests

    def counted(self) -> None:
        """One more request has ended."""
        self._kin.requests += 1

    def work_s(self, tokens: float, pairs: float = 0.0) -> float:
        """What a prompt takes of which so much is to be computed."""
        return self.times.work_s(tokens, pairs)

    def learn(self, tokens: float, took_s: float, pairs: float = 0.0) -> None:
        """A prompt of which so much was computed has taken so long."""
        expected_s = self.work_s(tokens, pairs) if self._kin.learnt else took_s
        usual_s = math.sqrt(expected_s * max(took_s, LEAST * expected_s))
        weight = 1 / max(NOISE_S, usual_s) ** 2
        self._keep_up()
        self._own.fade(_FADE)
        self._own.add(tokens, pairs, took_s, weight)
        self._kin.learn(tokens, pairs, took_s, weight)
        self._learnt = self._kin.learnt

    def _keep_up(self) -> None:
        self._own.fade(_OTHERS_FADE ** (self._kin.learnt - self._learnt))
        self._learnt = self._kin.learnt


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
