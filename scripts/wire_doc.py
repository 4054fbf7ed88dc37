# SPDX-License-Identifier: Apache-2.0
"""Writes docs/wire.md: the text of wire_doc.in.md, with tables made from te/core/wire.h, from the
greeting and from the messages of te/handshake.py and of the transports. The examples are checked by
the rules of the plane."""

from __future__ import annotations

import inspect
import re
import struct
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from command_line import Parser

if __name__ == "__main__":  # before the packages that only .venv has are imported
    Parser(".venv/bin/python scripts/wire_doc.py", __doc__).parse_args()

import msgspec
from wire_spec.table import HEADER, LIMITS, RING, RULES, Bounds, Layout, Over, Rule, check

from te import nesting
from te.connect.greeting import (
    CLAIM,
    CLAIM_FIELDS,
    GREETING,
    GREETING_BODY_MAX,
    HELLO_BODY_MAX,
    MAGIC,
    NONCE_BYTES,
    GreetingKind,
)
from te.handshake import (
    BODY_BYTES_MAX,
    PROTOCOL_VERSION,
    Card,
    CardRegion,
    Refusal,
    Refuse,
    Welcome,
)
from te.proof import CHALLENGE_BYTES, KEY_BYTES, KEY_ID_BYTES, KEYS_MAX, PROOF_BYTES
from te.topology.gids import Gid, GidKind
from te.transports.rdma.direct import FENCES
from te.transports.rdma.messages import (
    CardNic,
    RailAnswer,
    RailOffer,
    RdmaHello,
    RdmaOffer,
    RdmaWelcome,
)
from te.transports.samehost._core import RINGS_NBYTES
from te.transports.samehost.messages import HostHello, HostWelcome, Nonce, Shared

TEXT = Path(__file__).with_name("wire_doc.in.md")
PATH = Path(__file__).resolve().parents[1] / "docs" / "wire.md"
GREETINGS = (Welcome, Refuse, Refusal)
HOST = (HostHello, Nonce, Shared, HostWelcome)
RDMA = (RdmaOffer, CardNic, Gid, GidKind, RdmaHello, RailOffer, RdmaWelcome, RailAnswer)
LINKS = {Over.TCP: "TCP", Over.RINGS: "rings", Over.RDMA: "RDMA"}
U64_MAX = (1 << 64) - 1

#: Which way, what, with which fields; or a remark.
Line = tuple[str, str, dict[str, int]]
EXAMPLES: dict[str, tuple[Over, list[Line]]] = {
    "tcp": (Over.TCP, [
        (">", "SEGMENT", {"transfer": 1, "tag": 7, "count": 2, "nbytes": 6, "total": 10}),
        ("", "2 × Landing, 6 bytes, trailer 0", {}),
        (">", "SEGMENT", {"transfer": 1, "tag": 7, "count": 1, "nbytes": 4, "total": 10}),
        ("", "1 × Landing, 4 bytes, trailer 0; perhaps on another rail", {}),
        ("<", "ACK LANDED", {"transfer": 1}),
        (">", "SEGMENT", {"transfer": 2, "tag": 8, "count": 1, "nbytes": 5, "total": 9}),
        ("", "1 × Landing, 5 bytes, trailer 0", {}),
        (">", "ABANDON", {"transfer": 2, "tag": 8, "total": 5}),
        ("<", "ACK ABANDONED", {"transfer": 2}),
        (">", "READ", {"transfer": 3, "count": 1, "nbytes": 4, "total": 4}),
        ("", "1 × Block", {}),
        ("<", "SEGMENT reply",
         {"transfer": 1, "tag": 3, "flags": 1, "count": 1, "nbytes": 4, "total": 4}),
        ("", "1 × Landing, 4 bytes, trailer 0", {}),
        (">", "ACK LANDED", {"transfer": 1}),
    ]),
    "rings": (Over.RINGS, [
        (">", "PULL", {"transfer": 1, "tag": 7, "count": 3, "nbytes": 9000, "total": 9000}),
        ("", "3 × Block; the destination copies", {}),
        ("<", "ACK LANDED", {"transfer": 1}),
        (">", "PULL", {"transfer": 2, "count": 9, "nbytes": 1 << 22, "total": 1 << 30}),
        ("", "9 × Block; and more such frames", {}),
        ("<", "ACK PROGRESS", {"transfer": 2, "nbytes": 1 << 24}),
    ]),
    "rdma": (Over.RDMA, [
        (">", "ASK", {"transfer": 1, "tag": 7, "count": 2, "total": 2 << 20}),
        ("<", "TABLE", {"flags": 1, "count": 3}),
        ("", "3 × RemoteRange", {}),
        ("<", "ACK GRANTED", {"transfer": 1, "tag": 5 << 24 | 9 << 16}),
        ("", "piece 0 on rail 0, followed by the mark 0x05090000", {}),
        ("", "piece 1 on rail 1, followed by the mark 0x05090001", {}),
        ("<", "ACK LANDED", {"transfer": 1}),
    ]),
    "lost": (Over.RDMA, [
        (">", "RAIL_LOST", {"transfer": 1, "tag": 4, "count": 2}),
        ("", "2 × PieceId: (1, 0) and (1, 1)", {}),
        ("<", "RAIL_CLOSED", {"transfer": 1, "tag": 4, "count": 1}),
        ("", "1 × PieceId: (1, 0); the source writes piece 1 again on another rail", {}),
    ]),
}  # fmt: skip


def document() -> str:
    """All of docs/wire.md."""
    numbers = {
        "PROTOCOL_VERSION": PROTOCOL_VERSION,
        "GREETING_BYTES": GREETING.size,
        "NONCE_BYTES": NONCE_BYTES,
        "KEYS_MAX": KEYS_MAX,
        "KEY_BYTES": KEY_BYTES,
        "KEY_ID_BYTES": KEY_ID_BYTES,
        "CHALLENGE_BYTES": CHALLENGE_BYTES,
        "PROOF_BYTES": PROOF_BYTES,
        "CLAIM_BYTES": CLAIM.size,
        "BODY_BYTES_MAX": BODY_BYTES_MAX,
        "HEADER_BYTES": HEADER.nbytes,
        "DEPTH_MAX": nesting.DEPTH_MAX,
        "ITEMS_MAX": nesting.ITEMS_MAX,
        "FENCES_BYTES": FENCES.size,
        "RINGS_BYTES": RINGS_NBYTES,
        "SEGMENT_MIB_MAX": LIMITS["SEGMENT_BYTES_MAX"] >> 20,
        **LIMITS,
        **{f"ring_{name}": offset for name, offset in RING.items()},
    }
    parts = {
        "card": _messages(Card, CardRegion),
        "greeting": _greeting(),
        "claim": _claim(),
        "greetings": _messages(*GREETINGS),
        "host": _messages(*HOST),
        "devices": _messages(*RDMA),
        "header": _layout(HEADER),
        "items": _items(),
        "frames": _overview(),
        "rules": "\n\n".join(_rule(one) for one in RULES),
        "example_bytes": _bytes("SEGMENT", transfer=1, tag=7, count=1, nbytes=4, total=4),
        **{f"example_{name}": _said(over, lines) for name, (over, lines) in EXAMPLES.items()},
    }
    return TEXT.read_text().format(**numbers, **parts)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- messages


def _messages(*types: type[Any]) -> str:
    return "\n\n".join(part for one in types for part in _message(one))


def _message(one: type[Any]) -> Iterator[str]:
    yield f"### {one.__name__}"
    yield inspect.cleandoc(one.__doc__ or "")
    says = _comments(one)
    if issubclass(one, StrEnum):
        yield _table(["value", "means"], [[f"`{k.value}`", says.get(k.name, "")] for k in one])
        return
    info = msgspec.inspect.type_info(one)
    assert isinstance(info, msgspec.inspect.StructType)
    if info.array_like:
        yield "An array of these values in this order."
    rows = [
        [f"`{f.encode_name}`", _type(f.type) + _default(f), says.get(f.name, "")]
        for f in info.fields
    ]
    yield _table(["field", "type", "means"], rows)


def _comments(message: type[Any]) -> dict[str, str]:
    """What the comments above its fields say (``#:``), by field."""
    found: dict[str, str] = {}
    said: list[str] = []
    for line in inspect.getsource(message).splitlines():
        field = re.match(r"    (\w+)(:| =)", line)
        if line.startswith("    #:"):
            said.append(line[6:].strip())
        elif field:
            found[field[1]] = " ".join(said).replace("``", "`")
            said = []
    return found


def _default(field: msgspec.inspect.Field) -> str:
    if field.required:
        return ""
    if field.default is None:
        return "; may be left out"
    default = [] if field.default is msgspec.NODEFAULT else field.default
    return f"; `{default!r}` if left out"


def _type(type_: msgspec.inspect.Type) -> str:
    match type_:
        case msgspec.inspect.IntType(ge=least):
            most = type_.le if type_.le is not None else type_.lt and type_.lt - 1
            return "int" if least is None else f"int{_range(least, most)}"
        case msgspec.inspect.StrType(pattern=pattern) if pattern:
            return f"str, `{pattern}`"
        case msgspec.inspect.StrType():
            return f"str{_length(type_, 'characters')}"
        case msgspec.inspect.BytesType():
            return f"bin{_length(type_, 'bytes')}"
        case msgspec.inspect.BoolType():
            return "bool"
        case msgspec.inspect.ListType(item_type=item):
            return f"array{_length(type_, '')} of {_type(item)}"
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return f"map{_length(type_, '')} of {_type(key)} to {_type(value)}"
        case msgspec.inspect.StructType(cls=cls) | msgspec.inspect.EnumType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case msgspec.inspect.UnionType(types=(one, msgspec.inspect.NoneType())):
            return f"{_type(one)} or nil"
    raise TypeError(f"no words for {type_}")


def _range(least: int, most: int | None) -> str:
    return f", {least} or more" if most is None else f", {least} to {most:,}"


def _length(type_: Any, of_what: str) -> str:
    least, most = type_.min_length or 0, type_.max_length
    if most is None:
        return ""
    return f" ({least} to {most} {of_what})".replace(" )", ")")


def _greeting() -> str:
    names = [("magic", f"`{MAGIC!r}`"), ("version", "of the protocol")]
    kinds = ", ".join(f"{one.value} {one.name}" for one in GreetingKind)
    names += [
        ("kind", kinds),
        ("body bytes", f"at most {GREETING_BODY_MAX:,}, of a HELLO {HELLO_BODY_MAX:,}"),
    ]
    sizes = {"8s": 8, "H": 2, "I": 4}
    rows, at = [], 0
    for (name, means), code in zip(names, re.findall(r"\d*[a-zA-Z]", GREETING.format), strict=True):
        rows.append([str(at), str(sizes[code]), name, means])
        at += sizes[code]
    assert at == GREETING.size
    return _table(["offset", "bytes", "field", "means"], rows)


def _claim() -> str:
    rows, at = [], 0
    fields = [*CLAIM_FIELDS, ("proof", f"{PROOF_BYTES}s", "see below"), ("body", "", "the rest")]
    for name, code, means in fields:
        nbytes = struct.calcsize(f"<{code}") if code else 0
        rows.append([str(at), str(nbytes or ""), name, means])
        at += nbytes
    return _table(["offset", "bytes", "field", "means"], rows)


# -- frames


def _layout(layout: Layout) -> str:
    return _table(
        ["offset", "type", "field", "means"],
        [
            [
                str(one.offset),
                f"u{8 * one.width}" + (f"[{one.length}]" if one.length > 1 else ""),
                f"`{one.name}`",
                one.means,
            ]
            for one in layout.members
        ],
    )


def _items() -> str:
    layouts = dict.fromkeys(one.item for one in RULES if one.item)
    return "\n\n".join(f"### {one.name}\n\n{_layout(one)}" for one in layouts)


def _over(over: Over) -> str:
    return ", ".join(text for one, text in LINKS.items() if one & over)


def _spoken(over: Over) -> str:
    *first, last = _over(over).split(", ")
    return f"{', '.join(first)} and {last}" if first else last


def _follows(rule: Rule) -> str:
    parts = [f"{rule.item.name} × `count`"] if rule.item else []
    parts += ["payload, trailer"] if rule.has_payload else []
    return ", ".join(parts)


def _overview() -> str:
    rows = [
        [
            str(one.kind),
            f"[{one.title}](#{one.title.lower().replace(' ', '-')})",
            _over(one.source),
            _over(one.destination),
            _follows(one),
        ]
        for one in RULES
    ]
    columns = ["kind", "frame", "from the source over", "from the destination over", "follows"]
    return f"### All frames\n\n{_table(columns, rows)}"


def _rule(rule: Rule) -> str:
    sides = [("the source", rule.source), ("the destination", rule.destination)]
    sent = ", and by ".join(f"{who} over {_spoken(over)}" for who, over in sides if over)
    text = f"### {rule.title}\n\n{rule.says}\n\nKind {rule.kind}, sent by {sent}."
    if rule.item or rule.has_payload:
        text += f" Behind the header come {_follows(rule)}."
    rows = [
        [f"`{name}`", _bounds(bounds), bounds.means]
        for name, bounds in rule.bounds.items()
        if bounds.means
    ]
    return f"{text}\n\n{_table(['field', 'value', 'means'], rows)}"


def _bounds(bounds: Bounds) -> str:
    least, most = bounds.least, bounds.most
    if least == most:
        return str(least)
    text = f"{least} to {most:,}"
    if most == U64_MAX:
        text = f"{least} or more" if least else "any"
    if bounds.floor:
        text += f", at least `{bounds.floor}`"
    return text


# -- examples


def _header(title: str, fields: dict[str, int]) -> bytes:
    (rule,) = (one for one in RULES if one.title == title)
    values = {"kind": rule.kind, "status": rule.bounds["status"].least} | fields
    return struct.pack(HEADER.format, *(values.get(one.name, 0) for one in HEADER.members))


def _words(title: str, fields: dict[str, int]) -> str:
    return " ".join([title, *(f"{name}={value}" for name, value in fields.items())])


def _bytes(title: str, **fields: int) -> str:
    """A header byte by byte."""
    data = _header(title, fields)
    lines = [
        f"    {data[one.offset :][: one.width].hex(' '):<24} {one.name}" for one in HEADER.members
    ]
    return "\n".join([f"The header of `{_words(title, fields)}`:\n", *lines])


def _said(over: Over, lines: list[Line]) -> str:
    """Frames and remarks, source to the left. ``ValueError`` if one breaks the rules."""
    text = []
    for way, title, fields in lines:
        verdict = check(_header(title, fields), over, way == ">") if way else 0
        if isinstance(verdict, str):
            raise ValueError(verdict)
        arrow = {">": "──▶", "<": "◀──", "": "   "}[way]
        text.append(f"    {arrow}  {_words(title, fields)}")
    return "\n".join(["From source (──▶) and destination (◀──):\n", *text])


if __name__ == "__main__":
    PATH.write_text(document())
