# SPDX-License-Identifier: Apache-2.0
"""Into which groups of layers the KV of one forward is cut, to be sent while it goes on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUPS_MAX", "ForwardPace", "borders"]

#: More would not help: the last group, which alone is sent after the forward, is then at most a
#: fiftieth of the bytes.
GROUPS_MAX = 16
#: With less to hide than this, a hand-over costs what it saves.
WORTH_S = 1e-3
#: How much of a forward's time the scheduler's thread may spend on handing groups over.
SHARE_OF_FORWARD = 0.01
#: Of handing one group of one room over, before any was measured: 20 to 70 µs were seen.
HAND_OVER_S = 50e-6
#: What is left of a belief after a forward without groups.
_FADES = 0.9
#: What a measurement is worth when the next one has come.
_DECAY = 0.75
#: A thread that loses its core takes milliseconds for what costs microseconds: a sample counts as
#: at most this many times what was known.
_OUTLIER = 4.0


def borders(
    layers: int, layer_nbytes: int, bytes_per_s: float, forward_s: float, hand_over_s: float
) -> tuple[int, ...]:
    """Numbers of finished layers at which what is finished is handed over, rising, each in
    `1 … layers - 1`; what follows the last of them goes at the end of the forward. None where
    nothing is gained.

    The groups are equal but for the last two, which are smaller: only the last one's bytes, and
    what is left of the one before, are still to be sent when the forward ends.

    Args:
        layer_nbytes: bytes of the forward's chunk in one layer.
        bytes_per_s: at which they land; 0.0: not known yet.
        forward_s: time of the whole forward.
        hand_over_s: what handing one group over costs the thread that runs the forward.
    """
    nbytes = layers * layer_nbytes
    if layers < 2 or nbytes <= 0:
        return ()
    if forward_s < WORTH_S or nbytes < WORTH_S * bytes_per_s:
        return ()
    affordable = forward_s * SHARE_OF_FORWARD / max(hand_over_s, 1e-9)
    count = int(min(affordable, GROUPS_MAX, layers))
    if count < 2:
        return ()
    weights = [*[4] * (count - 2), 2, 1]
    total, so_far, found = sum(weights), 0, []
    for weight in weights[:-1]:
        so_far += weight
        found.append(min(max(round(layers * so_far / total), 1), layers - 1))
    return tuple(sorted(set(found)))


@dataclass(slots=True)
class ForwardPace:
    """What forwards and hand-overs were seen to take, as estimates.

    A forward is judged by its tokens, and those of many count for more: the first ones of a server
    have few, and take long for other reasons.
    """

    #: What handing one room's group over costs.
    hand_over_s: float = HAND_OVER_S
    _seconds: float = 0.0
    _tokens: float = 0.0

    def forward_s(self, tokens: int) -> float:
        """Of a forward with so many tokens; 0.0 before any was seen."""
        return self._seconds / self._tokens * tokens if self._tokens else 0.0

    def forward_took(self, seconds: float, tokens: int) -> None:
        self._seconds = _DECAY * self._seconds + seconds
        self._tokens = _DECAY * self._tokens + tokens

    def hand_over_took(self, seconds: float) -> None:
        sample = min(seconds, _OUTLIER * self.hand_over_s)
        self.hand_over_s = _DECAY * self.hand_over_s + (1 - _DECAY) * sample

    def nothing_went(self) -> None:
        """A forward had no groups, perhaps since they were believed to be dear: as that shows only
        when some go, the belief fades."""
        self.hand_over_s = min(self.hand_over_s, max(HAND_OVER_S, _FADES * self.hand_over_s))
