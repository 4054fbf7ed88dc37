# SPDX-License-Identifier: Apache-2.0
"""Codes of the compiled half have names in Python, and sentences."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from te.reasons import Reason, sentence
from te.transports.rdma.rails import RailReason
from te.transports.rdma.reasons import rail_sentence

pytestmark = pytest.mark.pure

TE = Path(__file__).parents[2] / "te"
#: What of a stub is an enumeration, which the compiled module makes of one in its .pxd file.
STUBS = sorted(
    (
        stub,
        node.name,
        tuple(ast.unparse(one.targets[0]) for one in node.body if isinstance(one, ast.Assign)),
    )
    for stub in TE.rglob("*.pyi")
    for node in ast.parse(stub.read_text()).body
    if isinstance(node, ast.ClassDef)
    and [ast.unparse(one) for one in node.bases] == ["enum.IntEnum"]
)


@pytest.mark.parametrize(("stub", "name", "members"), STUBS, ids=[name for _, name, _ in STUBS])
def test_stubs_have_the_names_that_are_compiled(
    stub: Path, name: str, members: tuple[str, ...]
) -> None:
    module = ".".join(("te", *stub.relative_to(TE).with_suffix("").parts))
    compiled = getattr(importlib.import_module(module), name)
    assert tuple(compiled.__members__) == members


def test_no_code_is_of_both() -> None:
    assert max(Reason) < 20 <= min(RailReason)


@pytest.mark.parametrize("code", sorted(set(Reason) - {Reason.NO_REASON, Reason.LINK_DIED}))
def test_each_reason_has_a_sentence(code: Reason) -> None:
    assert "code" not in sentence("engine 12ab", code, 5, "why", 30.0)


@pytest.mark.parametrize("code", sorted(set(RailReason) - {RailReason.ATTEMPT_FAILED}))
def test_each_reason_to_give_a_rail_up_has_a_sentence(code: RailReason) -> None:
    assert not rail_sentence(code, 5, 10.0).startswith("code")


def test_what_no_sentence_is_known_for_is_told_as_a_number() -> None:
    assert rail_sentence(99, 7, 10.0) == "code 99, errno 7"
    assert sentence("engine 12ab", 99, 7, "", 30.0).startswith("engine 12ab: code 99, errno 7")


def test_a_rail_that_the_destination_broke_has_its_reason() -> None:
    told = rail_sentence(RailReason.PEER_BROKE, RailReason.PORT_DOWN, 10.0)
    assert told == "the destination broke its end: the port has lost its link"
    assert rail_sentence(RailReason.PEER_BROKE, 0, 10.0) == "the destination broke its end"
    assert rail_sentence(RailReason.READ_CANCELLED, 0, 10.0) == "broken to end a cancelled read"
    assert "unknown" in rail_sentence(RailReason.BAD_STATUS, 99, 10.0)


def test_a_rail_that_others_left_behind_says_for_how_long_it_was_silent() -> None:
    told = rail_sentence(RailReason.NO_COMPLETION, 150, 2.0)
    assert told == "no completion for 150 ms, while another rail moved bytes"
    assert rail_sentence(RailReason.NO_COMPLETION, 0, 2.0) == "no completion for 2 s"
