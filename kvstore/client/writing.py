# SPDX-License-Identifier: Apache-2.0
"""Stores objects at one owner: claim, write, publish; or all at once, if the owner is
in this process, or they are small."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np

import te
from kvstore.client.deadline import Deadline
from kvstore.client.handles import Handle
from kvstore.objects.changes import Keys
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Put
from kvstore.objects.pieces import Pieces
from kvstore.owner.claims import Grant
from kvstore.protocol.asking import NoAnswer
from kvstore.rules.object_table import Verdict

__all__ = ["OUTCOMES", "put_at_once", "put_group"]

logger = logging.getLogger(__name__)

OUTCOMES: Final = {
    Verdict.EXISTS: Put.EXISTS,
    Verdict.BEING_STORED: Put.BEING_STORED,
    Verdict.NO_SPACE: Put.NO_SPACE,
    Verdict.TOO_LARGE: Put.TOO_LARGE,
    Verdict.NOT_COPIED: Put.UNREACHABLE,
}
"""Of objects that no slot was granted for."""


def put_group(
    handle: Handle,
    keys: Keys,
    signature: bytes,
    source: Pieces,
    deadline: Deadline,
    copier: Copier | None,
) -> Sequence[Put]:
    """One outcome for each key. ``copier``: computes checksums; None for a source that the
    processor cannot read. ``te.BoundsError`` if a source is not registered."""
    if handle.source.link is None:  # Before anything is claimed, which nobody could write.
        logger.warning("nothing was stored: te has no connection to the owner now")
        return [Put.UNREACHABLE] * len(keys)
    grant = handle.claimed_ahead(keys, signature, source.object_bytes)
    if grant is not None:
        outcomes = _put_granted(handle, grant, source, deadline, copier)
        if Put.FAILED not in outcomes:
            return outcomes
    try:
        grant = handle.claim(keys, signature, source.object_bytes, deadline.left_s)
    except NoAnswer as exc:
        logger.warning("nothing was stored: %s", exc)
        return [Put.UNREACHABLE] * len(keys)
    return _put_granted(handle, grant, source, deadline, copier)


def _put_granted(
    handle: Handle, grant: Grant, source: Pieces, deadline: Deadline, copier: Copier | None
) -> Sequence[Put]:
    granted = [i for i, one in enumerate(grant.verdicts) if one is Verdict.GRANTED]
    if len(granted) < len(source):
        source = source.of(granted)
    outcome, verdicts = Put.STORED, grant.verdicts
    if granted:
        try:
            outcome, verdicts = _write(handle, grant, source, deadline, copier)
        except te.BoundsError:
            handle.abandon(grant.claim_id)
            raise
    return [OUTCOMES.get(one, outcome) for one in verdicts]


def put_at_once(
    handle: Handle, keys: Keys, signature: bytes, source: Pieces, deadline: Deadline
) -> Sequence[Put]:
    """As ``put_group``, for objects that the processor can read: at most
    ``Handle.take_bytes_max``."""
    try:
        verdicts = handle.take(keys, signature, source, deadline)
    except NoAnswer as exc:
        logger.warning("nothing was stored: %s", exc)
        return [Put.TIMED_OUT if deadline.is_over else Put.UNREACHABLE] * len(keys)
    if verdicts == [Verdict.GRANTED] * len(keys):
        return [Put.STORED] * len(keys)
    return [OUTCOMES.get(one, Put.STORED) for one in verdicts]


def _write(
    handle: Handle, grant: Grant, source: Pieces, deadline: Deadline, copier: Copier | None
) -> tuple[Put, Sequence[Verdict]]:
    slots = handle.source.slots(np.array(grant.slots, np.uint64))
    outcome, why = Put.FAILED, ""
    try:
        transfer = handle.source.peer.write(source.blocks(slots, 0, to_slots=True), grant.tag)
        try:
            # Meanwhile: the owner would have to read all of it once more.
            checksums = None if copier is None else copier.checksums(source)
            transfer.wait(deadline.left_s)
        except BaseException:
            transfer.cancel()
            raise
        # Its end may mean that the source was used again: but not before this, if it comes later.
        if deadline.is_over:
            raise te.WaitTimeout("the deadline was over before the objects were published")
        why, verdicts = handle.publish(grant, checksums, deadline.left_s)
        if not why:
            return Put.STORED, verdicts
    except (te.WaitTimeout, NoAnswer) as exc:
        outcome, why = Put.TIMED_OUT, str(exc)
    except (te.TransferFailed, te.QueueFull) as exc:
        why = str(exc)
    logger.warning("%d objects were not stored: %s", len(source), why)
    handle.abandon(grant.claim_id)
    return outcome, grant.verdicts
