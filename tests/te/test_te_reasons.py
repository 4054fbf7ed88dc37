# SPDX-License-Identifier: Apache-2.0
"""Codes of the compiled half have the same names and numbers in Python, and sentences."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import pytest

from te.reasons import Reason, sentence
from te.transports.rdma.reasons import RailReason, rail_sentence

TE = Path(__file__).parents[2] / "te"
#: The enum of a file that holds them.
CODES = re.compile(r"^cdef enum:  # why .*\n((?:    \w+ = \d+.*\n)+)", re.MULTILINE)


@pytest.mark.parametrize(
    ("file", "codes"), [("core/link.pxd", Reason), ("transports/rdma/state.pxd", RailReason)]
)
def test_codes_are_those_of_the_compiled_half(file: str, codes: type[enum.IntEnum]) -> None:
    (text,) = CODES.findall((TE / file).read_text())
    compiled = {name: int(code) for name, code in re.findall(r"(\w+) = (\d+)", text)}
    assert compiled == {one.name: one.value for one in codes}


def test_no_code_is_of_both() -> None:
    assert max(Reason) < 20 <= min(RailReason)


@pytest.mark.parametrize("code", sorted(set(Reason) - {Reason.NO_REASON, Reason.LINK_DIED}))
def test_each_reason_has_a_sentence(code: Reason) -> None:
    assert "code" not in sentence("engine 12ab", code, 5, "why", 30.0)


@pytest.mark.parametrize("code", [one for one in RailReason if not one.name.startswith("RAIL_")])
def test_each_reason_to_give_a_rail_up_has_a_sentence(code: RailReason) -> None:
    assert not rail_sentence(code, 5, 10.0).startswith("code")


def test_what_no_sentence_is_known_for_is_told_as_a_number() -> None:
    assert rail_sentence(99, 7, 10.0) == "code 99, errno 7"
    assert sentence("engine 12ab", 99, 7, "", 30.0).startswith("engine 12ab: code 99, errno 7")


def test_a_rail_that_the_destination_broke_has_its_reason() -> None:
    told = rail_sentence(RailReason.PEER_BROKE, RailReason.PORT_DOWN, 10.0)
    assert told == "the destination broke its end: the port has lost its link"
    assert rail_sentence(RailReason.PEER_BROKE, 0, 10.0) == "the destination broke its end"
    assert rail_sentence(Reason.FENCED, 0, 10.0) == "broken to end a cancelled read"
    assert "unknown" in rail_sentence(RailReason.BAD_STATUS, 99, 10.0)
