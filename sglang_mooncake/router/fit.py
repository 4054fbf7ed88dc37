# SPDX-License-Identifier: Apache-2.0
"""How long a prefill server takes for a prompt, fitted from what it took. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["Kin", "LoadFit", "Times", "Work", "WorkFit", "pairs_of", "work_of"]

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
#: By such a part less is taken to be known of pairs, and of all tokens: where they are nearly in
#: proportion to the computed ones it is left to these what both take.
DOUBT: Final = 0.01
#: Where no more than such a part is left that is not in proportion, what two things take cannot be
#: told apart.
TOLD_APART: Final = 1e-9
#: A time that is smaller than this is not known to a part of itself.
NOISE_S: Final = 0.02
#: A time that is less than such a part of what was expected is a mistake, and counts as that part.
LEAST: Final = 1 / 2
#: Until a load was measured, a token is taken to load in this part of the time that it is computed.
FIRST_LOAD: Final = 0.1


def pairs_of(computed: float, before: float) -> float:
    """How many pairs of a token that is computed and one before it there are, which is what
    attention takes time for: so many tokens are computed behind so many that need not be."""
    return computed * (before + computed / 2)


class Work(NamedTuple):
    """What a prompt asks of a server."""

    #: Tokens that are computed.
    computed: float
    #: Of these with each one before (``pairs_of``).
    pairs: float = 0.0
    #: All tokens of the prompt, which are handed over.
    tokens: float = 0.0

    def and_also(self, other: Work) -> Work:
        """Both together."""
        return Work(*(one + more for one, more in zip(self, other, strict=True)))


def work_of(tokens: float, hits: float) -> Work:
    """Of a prompt of so many tokens, where so many need not be computed."""
    computed = max(0.0, tokens - hits)
    return Work(computed, pairs_of(computed, tokens - computed), tokens)


class Times(NamedTuple):
    """What a prompt takes: any, each token that is computed, each of its pairs (``pairs_of``), and
    each token of the whole prompt: those of the cache are handed over, too, and SGLang's
    ``torch_native`` computes attention for them again."""

    fixed_s: float
    token_s: float
    pair_s: float = 0.0
    hand_over_s: float = 0.0

    def slowed(self, slowdown: float) -> Times:
        """Where everything takes so many times as long."""
        return Times(*(slowdown * one for one in self))

    def work_s(self, work: Work) -> float:
        """Of so much."""
        return (
            self.fixed_s
            + work.computed * self.token_s
            + work.pairs * self.pair_s
            + work.tokens * self.hand_over_s
        )


#: Where each stands in the sums. In this order they are looked at: of two that are in proportion to
#: each other the first is taken to take it all, as what each takes cannot be told.
_COMPUTED, _ANY, _TOKENS, _PAIRS = range(4)


class _Sums:
    """Of (work, seconds), for least squares with weights."""

    def __init__(self) -> None:
        self.requests = 0.0
        #: Of each two of (computed, 1, tokens, pairs, seconds) the products, summed up.
        self._all = [0.0] * 14

    def fade(self, part: float) -> None:
        """So much of each stays."""
        self.requests *= part
        self._all = [one * part for one in self._all]

    def add(self, work: Work, took_s: float, weight: float) -> None:
        self.requests += 1
        computed, pairs, tokens = work
        x, y, n, z = weight * computed, weight * took_s, weight * tokens, weight * pairs
        new = (
            *(x * computed, x, x * tokens, x * pairs, x * took_s),
            *(weight, n, z, y),
            *(n * tokens, n * pairs, n * took_s),
            *(z * pairs, z * took_s),
        )
        self._all = [one + more for one, more in zip(self._all, new, strict=True)]

    def with_part(self, other: _Sums, part: float) -> _Sums:
        """Both, of the other's so much of each."""
        both = _Sums()
        both.requests = self.requests + part * other.requests
        both._all = [one + part * more for one, more in zip(self._all, other._all, strict=True)]
        return both

    def times(self) -> Times:
        """There is one prompt at least. Nothing takes less than no time: what would, by chance or
        because of something else, is left out, and the others are found again. A token that is
        computed is left out last, or a cache would be of no use."""
        xx, x, xn, xz, xy, one, n, z, y, nn, nz, ny, zz, zy = self._all
        nn, zz = nn * (1 + DOUBT), zz * (1 + DOUBT)
        rows = [[xx, x, xn, xz, xy], [x, one, n, z, y], [xn, n, nn, nz, ny], [xz, z, nz, zz, zy]]
        squares = (xx, one, nn, zz)
        kept: list[int] = []
        for at, square in enumerate(squares):
            if rows[at][at] > TOLD_APART * square:
                rows = _exchanged(rows, at)
                kept.append(at)
        while True:
            found = [rows[at][-1] if at in kept else 0.0 for at in range(len(rows))]
            least = min(kept, key=lambda at: found[at] * math.sqrt(squares[at]))
            if found[least] < 0.0 and len(kept) > 1:
                least = kept[-1] if least == _COMPUTED else least
            elif found[_PAIRS] > BEND * found[_COMPUTED]:
                least = _PAIRS
            else:
                break
            rows = _exchanged(rows, least)
            kept.remove(least)
        if x == 0.0:
            found[_COMPUTED] = FIRST_TOKEN_S
        computed, fixed, tokens, pairs = (max(0.0, one) for one in found)
        return Times(fixed, computed, pairs, tokens)


def _exchanged(rows: Sequence[Sequence[float]], at: int) -> list[list[float]]:
    """Of linear equations, the one at this place solved for its unknown, which is put into the
    others (Gauss and Jordan); or, if it was solved so before, no more."""
    pivot = rows[at][at]
    solved = [one / pivot for one in rows[at]]
    new = []
    for row in rows:
        part = row[at]
        put_in = [one - part * other for one, other in zip(row, solved, strict=True)]
        put_in[at] = -part / pivot
        new.append(put_in)
    solved[at] = 1 / pivot
    new[at] = solved
    return new


class Kin:
    """What all servers together took, which says something of each."""

    def __init__(self) -> None:
        self.sums = _Sums()
        #: How often it has learnt.
        self.learnt = 0
        #: Requests that have ended, several of which may have been computed together.
        self.requests = 0

    def learn(self, work: Work, took_s: float, weight: float) -> None:
        """One of them has taken so long for a prompt of which so much was computed."""
        self.sums.fade(_FADE)
        self.sums.add(work, took_s, weight)
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

    def work_s(self, work: Work) -> float:
        """What so much takes."""
        return self.times.work_s(work)

    def learn(self, work: Work, took_s: float) -> None:
        """So much has taken so long."""
        expected_s = self.work_s(work) if self._kin.learnt else took_s
        usual_s = math.sqrt(expected_s * max(took_s, LEAST * expected_s))
        weight = 1 / max(NOISE_S, usual_s) ** 2
        self._keep_up()
        self._own.fade(_FADE)
        self._own.add(work, took_s, weight)
        self._kin.learn(work, took_s, weight)
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
