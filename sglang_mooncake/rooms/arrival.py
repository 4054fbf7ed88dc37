# SPDX-License-Identifier: Apache-2.0
"""Whether one source of a room has left all that it was asked for: its completion record beside the
request and beside what the engine has counted. Pure: `poll()` calls it with what it has just read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_mooncake.layout import CompletionRecord

__all__ = ["CompletionDisagrees", "Expected", "check_dealt", "has_arrived"]


@dataclass(frozen=True, slots=True)
class Expected:
    """What one source of a room was asked for, and where its completion record will lie.

    tag: of te, under which its transfers are counted.
    slot: of the completion record.
    generation: of the request.
    pages: how many it may send. It is one number, except where only prefill knows.
    layers: of each of these pages.
    states: how many state lists it may follow. It is one number, except where a draft model on this
        side alone has lists that nobody sends.
    aux: 1 when it sends the request's metadata, else 0.
    dealt_over: see `RoomSource`.
    digests: 1 when digests must follow; else it may send some or none.
    """

    tag: int
    slot: int
    generation: int
    pages: range
    layers: int
    states: range
    aux: int
    dealt_over: int = 1
    digests: int = 0


class CompletionDisagrees(Exception):
    """All that the source has sent is here, and it is not what was asked for."""


def has_arrived(expected: Expected, completion: CompletionRecord, writes: int, nbytes: int) -> bool:
    """Whether every byte is here. False for a completion record of which a part is still to land:
    its last field, the bytes, is never 0 in one that is whole, and it is believed only once the
    transfer that carries it is among those counted.

    Args:
        completion: what lies in the slot; read after `writes`.
        writes: transfers that the engine has counted under the tag.
        nbytes: their payload in bytes; read after `writes`.

    Raises:
        CompletionDisagrees: the record is whole and says other figures; the sentence has both.
    """
    if (
        completion.generation != expected.generation
        or not completion.nbytes
        or writes < max(completion.writes, 1)
    ):
        return False
    differ = [
        f"{what}: {wanted} {verb}, {found} {ending}"
        for what, wanted, verb, found, ending, is_right in (
            ("transfers", completion.writes, "sent", writes, "landed", completion.writes == writes),
            ("bytes", completion.nbytes, "sent", nbytes, "landed", completion.nbytes == nbytes),
            (
                "pages",
                _told(expected.pages),
                "asked for",
                completion.pages,
                "sent",
                completion.pages in expected.pages,
            ),
            (
                "layers of pages",
                completion.pages * expected.layers,
                "asked for",
                completion.page_layers,
                "sent",
                completion.page_layers == completion.pages * expected.layers,
            ),
            (
                "state lists",
                _told(expected.states),
                "asked for",
                completion.states,
                "sent",
                completion.states in expected.states,
            ),
            (
                "metadata",
                expected.aux,
                "asked for",
                completion.aux,
                "sent",
                expected.aux == completion.aux,
            ),
            (
                "digests",
                expected.digests,
                "asked for",
                completion.digests,
                "sent",
                expected.digests <= completion.digests,
            ),
        )
        if not is_right
    ]
    if differ:
        raise CompletionDisagrees(
            f"the prefill side ended the hand-over, but it is not complete: {'; '.join(differ)}. "
            "Do both servers run the same release of sglang-mooncake and of SGLang?"
        )
    return True


def check_dealt(completions: Sequence[tuple[Expected, CompletionRecord]], pages: int) -> None:
    """Of sources that have each its part of `pages` pages, all of which have arrived: whether the
    parts are the whole.

    Raises:
        CompletionDisagrees: they are not; the sentence has both figures.
    """
    dealt = [
        (expected.dealt_over, completion.pages)
        for expected, completion in completions
        if expected.dealt_over > 1
    ]
    if not dealt:
        return
    over = dealt[0][0]
    sent, wanted = sum(count for _, count in dealt), pages * len(dealt) // over
    if sent != wanted:
        raise CompletionDisagrees(
            f"{len(dealt)} prefill ranks, which hold {over} parts of the pages, have sent {sent} "
            f"pages where {wanted} were asked for"
        )


def _told(numbers: range) -> str:
    least, most = numbers[0], numbers[-1]
    return str(least) if least == most else f"{least} to {most}"
