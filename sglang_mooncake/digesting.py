# SPDX-License-Identifier: Apache-2.0
"""What both sides do with digests: cells are read and digested in pieces, and what differs is put
into words. Which requests and cells are digested is for the rules (`rooms/`, `layout/chosen.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt

import te
from bootstrap_server.admission.refusals import Pace
from sglang_mooncake.digest_thread import DigestThread, Pause
from sglang_mooncake.kept_bytes import KeptBytes
from sglang_mooncake.layout import (
    Cells,
    Difference,
    Digests,
    Verify,
    bytes_of,
    chosen_cells,
    digest,
    sample_size,
)
from sglang_mooncake.layout.indices import Indices
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.stats import Recorder

__all__ = [
    "Bytes",
    "Unmade",
    "Unwanted",
    "check_wanted",
    "close_all",
    "digester_of",
    "drawn",
    "in_words",
    "make_digests",
    "read_bytes",
    "sizes",
    "why_of",
]

logger = logging.getLogger(__name__)

#: How many pages and buffers a sentence names.
_NAMED_MAX = 8

#: Of cells, by name.
Bytes = dict[str, npt.NDArray[np.uint8]]


class Unwanted(Exception):
    """The end of the room is decided: SGLang may give its pages to another request."""


class Unmade:
    """Digests that could not be made or compared, in the log at a bounded rate."""

    def __init__(self) -> None:
        self._pace = Pace()

    def log(self, what: str, error: Exception) -> None:
        more = self._pace.more()
        if more is not None:
            logger.warning("%s%s", what, more, exc_info=None if _is_ordinary(error) else error)


def why_of(error: Exception) -> str:
    return str(error) if _is_ordinary(error) else f"internal error: {error!r}"


def _is_ordinary(error: Exception) -> bool:
    return isinstance(error, te.Error | ValueError)


def digester_of(engine: te.Engine, verify: Verify) -> te.Digester | None:
    """None where registered memory cannot be read, such as a GPU's in a context of somebody else's:
    then nothing is digested here.

    Raises:
        te.DigestError: that is so, and everything is to be digested.
    """
    try:
        return engine.digester()
    except te.DigestError as error:
        if verify is Verify.ALL:
            raise
        logger.warning("no digests are made on this rank: %s", error)
        return None


def close_all(thread: DigestThread, digester: te.Digester | None, kept: KeptBytes | None) -> None:
    thread.close()
    if digester is not None:
        digester.close()
    if kept is not None:
        kept.close()


def check_wanted(room: Room | None) -> None:
    """Raises Unwanted once the end of the room, if any, is decided."""
    if room is not None and room.view.decided:
        raise Unwanted


def read_bytes(
    lists: Sequence[Cells],
    differ: Sequence[Difference],
    chosen: Indices | range,
    digester: te.Digester,
    room: Room | None = None,
) -> Generator[Pause, None, Bytes]:
    """Of the chosen cells that differ. Raises Unwanted once the end of the room, if any, is
    decided."""
    cells: Bytes = {}
    for some in bytes_of(lists, differ, chosen, digester.read):
        yield Pause.OTHERS_TURN
        check_wanted(room)
        cells |= some
    return cells


def make_digests(
    lists: Sequence[Cells],
    verify: Verify,
    seed: int,
    digester: te.Digester,
    room: Room | None,
    recorder: Recorder,
) -> Generator[Pause, None, tuple[Digests, ...]]:
    """Raises Unwanted once the end of the room, if any, is decided."""
    check_wanted(room)
    began_s, spent_s = time.monotonic(), 0.0
    chosen = drawn(lists, verify, seed)
    made: list[Digests] = []
    for found in digest(lists, chosen, digester.digests):
        made += found
        spent_s += time.monotonic() - began_s
        yield Pause.OTHERS_TURN
        check_wanted(room)
        began_s = time.monotonic()
    cells, nbytes = sizes(lists)
    part = len(chosen) / cells if cells else 1.0
    recorder.digested(len(chosen), int(nbytes * part), spent_s)
    return tuple(made)


def drawn(lists: Sequence[Cells], verify: Verify, seed: int) -> Indices | range:
    cells, nbytes = sizes(lists)
    return chosen_cells(seed, sample_size(verify, cells, nbytes), cells)


def sizes(lists: Sequence[Cells]) -> tuple[int, int]:
    """How many cells there are, and of how many bytes."""
    return sum(len(cells) for cells in lists), sum(cells.nbytes for cells in lists)


def in_words(differ: Sequence[Difference]) -> str:
    return "; ".join(
        f"{one.name} {_some([str(item) for item in one.items])} in {_some(one.buffers)}"
        for one in differ
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_MAX])
    return shown + (f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else "")
