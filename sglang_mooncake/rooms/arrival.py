# SPDX-License-Identifier: Apache-2.0
"""Whether one source of a room has left all that it was asked for: its seal beside the request and
beside what the engine has counted. Pure: `poll()` calls it with what it has just read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_mooncake.layout import Seal

__all__ = ["Awaited", "SealDisagrees", "check_dealt", "has_arrived"]


@dataclass(frozen=True, slots=True)
class Awaited:
    """What one source of a room was asked for, and where its seal will lie.

    tag: of te, under which its transfers are counted.
    slot: of the seal.
    generation: of the request.
    pages: how many it may send. It is one number, except where only prefill knows.
    layers: of each of these pages.
    states: how many state lists it may follow. It is one number, except where a draft model on this
        side alone has lists that nobody sends.
    aux: 1 when it sends the request's metadata, else 0.
    dealt_over: see `RoomSource`.
    """

    tag: int
    slot: int
    generation: int
    pages: range
    layers: int
    states: range
    aux: int
    dealt_over: int = 1


class SealDisagrees(Exception):
    """All that the source has sent is here, and it is not what was asked for."""


def has_arrived(awaited: Awaited, seal: Seal, writes: int, nbytes: int) -> bool:
    """Whether every byte is here. False for a seal of which a part is still to land: its last
    field, the bytes, is never 0 in one that is whole, and it is believed only once the transfer
    that carries it is among those counted.

    Args:
        seal: what lies in the slot; read after `writes`.
        writes: transfers that the engine has counted under the tag.
        nbytes: their payload in bytes; read after `writes`.

    Raises:
        SealDisagrees: the seal is whole and says other figures; the sentence has both.
    """
    if seal.generation != awaited.generation or not seal.nbytes or writes < max(seal.writes, 1):
        return False
    differ = [
        f"{what}: {expected} {verb}, {found} {ending}"
        for what, expected, verb, found, ending, is_right in (
            ("transfers", seal.writes, "sent", writes, "landed", seal.writes == writes),
            ("bytes", seal.nbytes, "sent", nbytes, "landed", seal.nbytes == nbytes),
            (
                "pages",
                _told(awaited.pages),
                "asked for",
                seal.pages,
                "sent",
                seal.pages in awaited.pages,
            ),
            (
                "layers of pages",
                seal.pages * awaited.layers,
                "asked for",
                seal.page_layers,
                "sent",
                seal.page_layers == seal.pages * awaited.layers,
            ),
            (
                "state lists",
                _told(awaited.states),
                "asked for",
                seal.states,
                "sent",
                seal.states in awaited.states,
            ),
            ("metadata", awaited.aux, "asked for", seal.aux, "sent", awaited.aux == seal.aux),
        )
        if not is_right
    ]
    if differ:
        raise SealDisagrees(
            f"the prefill side ended the hand-over, but it is not complete: {'; '.join(differ)}. "
            "Do both servers run the same release of sglang-mooncake and of SGLang?"
        )
    return True


def check_dealt(seals: Sequence[tuple[Awaited, Seal]], pages: int) -> None:
    """Of sources that have each its part of `pages` pages, all of which have arrived: whether the
    parts are the whole.

    Raises:
        SealDisagrees: they are not; the sentence has both figures.
    """
    dealt = [(awaited.dealt_over, seal.pages) for awaited, seal in seals if awaited.dealt_over > 1]
    if not dealt:
        return
    over = dealt[0][0]
    sent, expected = sum(count for _, count in dealt), pages * len(dealt) // over
    if sent != expected:
        raise SealDisagrees(
            f"{len(dealt)} prefill ranks, which hold {over} parts of the pages, have sent {sent} "
            f"pages where {expected} were asked for"
        )


def _told(numbers: range) -> str:
    least, most = numbers[0], numbers[-1]
    return str(least) if least == most else f"{least} to {most}"
