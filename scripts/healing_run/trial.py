# SPDX-License-Identifier: Apache-2.0
"""One row, once: two processes, and a fault between them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, TypeAlias

import msgspec

from healing_run.figures import Times
from healing_run.messages import Card, Log
from healing_run.places import Place
from healing_run.rows import Row

__all__ = ["TrialError", "trial"]

Process: TypeAlias = subprocess.Popen[bytes]

_QUIET_S: Final = 0.5
#: Behind the end of a fault: longer than te takes to try again whatever it tries.
_AFTER_S: Final = 8.0
_AFTER_RAILS_S: Final = 3.0
_ENDS_S: Final = 60.0


class TrialError(Exception):
    """A process of the row has failed; it has said why."""


def trial(place: Place, row: Row) -> tuple[Times, Log]:
    """Raises TrialError."""
    with ExitStack() as running:
        far, card = running.enter_context(_far(place, row))
        near = running.enter_context(_near(place, row, card))
        if _line(near) != b"flows\n":
            raise TrialError("nothing flows before there is any fault")
        time.sleep(_QUIET_S)
        if row.fault == "restart":
            fault_s = time.monotonic()
            far.kill()
            far.wait()
            _, card = running.enter_context(_far(place, row))
            times = Times(fault_s, time.monotonic())
            _tell(near, card)
        else:
            times = _disturb(place, row)
        time.sleep(_AFTER_RAILS_S if row.rails > 1 else _AFTER_S)
        said, _ = near.communicate(timeout=_ENDS_S)
        if near.returncode:
            raise TrialError(f"the source has ended with status {near.returncode}")
    return times, msgspec.json.decode(said, type=Log)


def _disturb(place: Place, row: Row) -> Times:
    fault_s = time.monotonic()
    place.begin(row.fault)
    try:
        time.sleep(max(0.0, row.lasts_s - (time.monotonic() - fault_s)))
    finally:
        place.end(row.fault)
    return Times(fault_s, time.monotonic())


@contextmanager
def _far(place: Place, row: Row) -> Iterator[tuple[Process, Card]]:
    process = _start(place, "far", row)
    try:
        yield process, msgspec.json.decode(_line(process), type=Card)
    finally:
        process.kill()
        process.wait()


@contextmanager
def _near(place: Place, row: Row, card: Card) -> Iterator[Process]:
    process = _start(place, "near", row)
    try:
        _tell(process, card)
        yield process
    finally:
        process.kill()
        process.wait()


def _start(place: Place, side: str, row: Row) -> Process:
    with place.on(side):
        process = subprocess.Popen(
            [sys.executable, "-m", f"healing_run.{side}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    _tell(process, place.setup(side, row))
    return process


def _tell(process: Process, message: msgspec.Struct) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(message) + b"\n")
    process.stdin.flush()


def _line(process: Process) -> bytes:
    """Of what it says; empty if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline()
