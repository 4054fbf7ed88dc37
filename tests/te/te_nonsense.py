# SPDX-License-Identifier: Apache-2.0
"""Seeded frames out of the table of the wire format: a kind that is added to it comes by itself."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from te_wire import Edge, Path, edges, pack, rules_on, smallest
from wire_spec.table import RULES, Bounds, Layout, Rule

__all__ = ["U64_EDGES", "Nonsense"]

U64_EDGES = [0, 1, 31, 1 << 12, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
TAGS = [0, 0, 0, 5, 9]
SIZES = [1, 7, 64, 900, 4096]
SENT_MAX = 32 << 10
"""Bytes of payload: a header may say more, and is refused for it, or waits for ever."""


class Nonsense:
    """What one side says over a kind of link."""

    def __init__(self, rng: random.Random, path: Path, address: Callable[[], int]) -> None:
        self._rng, self._address = rng, address
        #: The share of frames that have a field at one of its bounds.
        self.at_edges = 0.9
        self._rules = rules_on(path)
        self._weights = [5 if one.has_payload else 1 for one in self._rules]
        kinds = {one.kind for one in self._rules}
        strange = [one for one in RULES if one.kind not in kinds]
        strange += [RULES[0]._replace(kind=kind) for kind in (0, RULES[0].kind - 1, 255)]
        #: Every bound in turn, and every kind that does not go that way, or is none at all.
        self._every = [edge for rule in self._rules for edge in edges(rule)]
        self._every += [Edge(one, "count", {}, False) for one in strange]
        self._deck: list[Edge] = []
        #: How often all of them have come.
        self.rounds = 0

    def frame(self, number: int) -> bytes:
        """One with all that follows it. If it has to do with a transfer, that is the number."""
        if self._rng.random() < self.at_edges:
            return self._edge(number)
        rule = self._rng.choices(self._rules, self._weights)[0]
        return self._whole(rule, self._fields(rule, number))

    def _edge(self, number: int) -> bytes:
        if not self._deck:
            self._deck = self._rng.sample(self._every, len(self._every))
        edge = self._deck.pop()
        self.rounds += not self._deck
        transfer = edge.rule.bounds["transfer"]
        given = {"transfer": min(max(number, transfer.least), transfer.most)} | edge.given
        return self._whole(edge.rule, smallest(edge.rule, **given))

    def _fields(self, rule: Rule, number: int) -> dict[str, int]:
        """As they may be, and mostly so that something comes of it."""
        fields: dict[str, int] = {}
        for name, bounds in rule.bounds.items():
            floor = fields[bounds.floor] if bounds.floor else 0
            liked = {
                "transfer": [number],
                "tag": range(1, 7) if bounds.least else TAGS,
                "count": range(1, 7),
                "nbytes": [floor * self._rng.choice(SIZES)],
                "total": [floor] * 9 + [floor + 10],
            }.get(name, [0])
            fields[name] = self._value(bounds, floor, self._rng.choice(liked))
        return fields

    def _value(self, bounds: Bounds, floor: int, liked: int) -> int:
        least, most = max(bounds.least, floor), bounds.most
        kind = self._rng.random()
        if least <= liked <= most and kind < 0.9:
            return liked
        if kind < 0.97:
            return least + self._rng.randrange(min(most - least, 300) + 1)
        return self._rng.choice([least, most])

    def _whole(self, rule: Rule, fields: dict[str, int]) -> bytes:
        data = pack(rule.kind, fields)
        if rule.item is not None and fields["count"] <= rule.bounds["count"].most:
            each, rest = divmod(fields["nbytes"], max(fields["count"], 1))
            for i in range(fields["count"]):
                data += self._item(rule.item, each + rest * (i == 0))
        if rule.has_payload:
            fault = self._rng.choice([0, 0, 0, 14])
            data += b"\x11" * min(fields["nbytes"], SENT_MAX) + struct.pack("<Q", fault)
        return data

    def _item(self, item: Layout, nbytes: int) -> bytes:
        values = []
        for member in item.members:
            for _ in range(member.length):
                if member.name == "nbytes":
                    values.append(nbytes)
                elif member.name == "rights":
                    values.append(self._rng.choice([7, 7, 7, 7, 1, 2, 4, 6, 0, 8]))
                elif member.width == 1:
                    values.append(self._rng.randrange(32, 127))
                elif self._rng.random() < 0.98:
                    values.append(self._address() % (1 << 8 * member.width))
                else:
                    values.append(self._rng.choice(U64_EDGES) % (1 << 8 * member.width))
        return struct.pack(item.format, *values)
