# SPDX-License-Identifier: Apache-2.0
"""The table of the wire format: each of its rules is enforced, over every kind of link and from
both sides, and it says what ``te_frames``, which was written by itself, says too."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import te_frames
from te_wire import PATHS, Edge, Path, edges, links, pack, rules_on, smallest, violations
from wire_spec.table import HEADER, LIMITS, RULES, Over, Rule, check

on_each_path = pytest.mark.parametrize("path", PATHS, ids=str)
UNKNOWN_KIND = 200


def complaint(edge: Edge) -> str:
    """How the sentence about it begins."""
    return f"{edge.rule.title} has {edge.field} {edge.given[edge.field]}, which must be "


def unexpected(path: Path) -> list[Rule]:
    """Rules of kinds that do not go that way at all."""
    kinds = {one.kind for one in rules_on(path)}
    return [one for one in RULES if one.kind not in kinds]


@on_each_path
def test_on_inside_and_outside_each_bound(path: Path) -> None:
    outside = 0
    for rule in rules_on(path):
        for edge in edges(rule):
            verdict = check(pack(rule.kind, edge.fields), *path)
            if edge.is_allowed:
                size = rule.item.nbytes if rule.item else 0
                assert verdict == edge.fields["count"] * size, str(edge)
            else:
                outside += 1
                assert isinstance(verdict, str), str(edge)
                assert verdict.startswith(complaint(edge)), str(edge)
    assert outside > 20


@on_each_path
def test_kinds_and_statuses_that_have_no_rule(path: Path) -> None:
    kinds = {one.kind for one in rules_on(path)}
    for kind in set(range(256)) - kinds:
        fields = dict.fromkeys(RULES[0].bounds, 1)
        assert check(pack(kind, fields), *path) == f"a frame of kind {kind} is not expected here"
    acks = [one for one in rules_on(path) if one.kind == te_frames.Kind.ACK]
    for status in set(range(256)) - {one.bounds["status"].least for one in acks}:
        for one in acks:
            verdict = check(pack(one.kind, smallest(one) | {"status": status}), *path)
            assert verdict == f"ACK has the unknown status {status}"


@pytest.mark.slow
@on_each_path
def test_what_breaks_a_rule_ends_the_link(path: Path) -> None:
    frames = [
        pack(rule.kind, one.fields)
        for rule in rules_on(path)
        for one in edges(rule)
        if not one.is_allowed
    ]
    frames += [pack(one.kind, smallest(one)) for one in unexpected(path)]
    frames.append(pack(UNKNOWN_KIND, smallest(RULES[0])))
    with links(path) as open_links, violations() as found:
        for frame in frames:
            with open_links.send(frame):
                assert found.next() == check(frame, *path)


def layout_of(item: np.dtype[np.void] | None) -> list[tuple[str, int, int, int]] | None:
    """Name, offset, bytes and number of each member."""
    if item is None:
        return None
    found = []
    for name, (kind, offset) in (item.fields or {}).items():
        length = kind.shape[0] if kind.shape else 1
        found.append((name, offset, kind.base.itemsize, length))
    return found


def test_the_same_is_written_a_second_time() -> None:
    assert HEADER.format == te_frames.HEADER.format
    assert {one.kind: one.name for one in RULES} == {one: one.name for one in te_frames.Kind}
    acks = {one.bounds["status"].least: one.variant for one in RULES if one.name == "ACK"}
    assert acks == {one: one.name for one in te_frames.AckStatus}
    replies = [one for one in RULES if one.variant == "reply"]
    assert {one.bounds["flags"][:2] for one in replies} == {(te_frames.REPLY, te_frames.REPLY)}
    for rule in RULES:
        told = te_frames.FRAMES[te_frames.Kind(rule.kind), rule.variant]
        sides = tuple(sum(Over[link] for link in side.split()) for side in told.sides)
        assert sides == (rule.source, rule.destination)
        assert layout_of(told.item) == (rule.item and [one[:4] for one in rule.item.members])
        assert told.count == rule.bounds["count"][:2]
        assert rule.has_payload == (rule.kind == te_frames.Kind.SEGMENT)
    assert len(te_frames.FRAMES) == len(RULES)
    assert len(te_frames.trailer()) == LIMITS["TRAILER_BYTES"]


def test_structs_have_no_holes() -> None:
    for layout in [HEADER, *(one.item for one in RULES if one.item)]:
        assert struct.calcsize(layout.format) == layout.nbytes
        at = 0
        for member in layout.members:
            assert member.offset == at
            at += member.width * member.length


def test_a_header_has_forty_bytes() -> None:
    with pytest.raises(ValueError, match="39 bytes are not a header of 40"):
        check(bytes(39), Over.TCP, from_source=True)
