# SPDX-License-Identifier: Apache-2.0
"""No line outside a transport's folder asks which transport this is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from te.transports import registry

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
NAMES = registry.NAMES

#: What may know names, and why. A folder ends with a slash.
ALLOWED = {
    "te/transports/registry.py": "the list of them",
    "te/doctor/": "says what a machine lacks for each",
    "sglang_mooncake/sglang/mooncake_variables.py": "such as MC_FORCE_TCP",
    "sglang_mooncake/faces/mooncake_engine/engine.py": "takes Mooncake's names of protocols",
    "sglang_mooncake/faces/mooncake_store/settings.py": "takes them, too",
}
#: Names of variables, parameters and attributes that stand for one.
TELLING = re.compile(
    rf"(is|has|only|no|not|over|by)_({'|'.join(NAMES)}|direct|pull|rings)|{'|'.join(NAMES)}"
)


def asked(source: str) -> Iterator[tuple[int, str]]:
    """Lines that name a transport, or hold a word for one."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if text in NAMES:
                yield node.lineno, repr(text)
            case ast.Name(id=name) | ast.Attribute(attr=name) if TELLING.fullmatch(name):
                yield node.lineno, name
            case ast.arg(arg=name) if TELLING.fullmatch(name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)) if TELLING.fullmatch(name):
                yield node.value.lineno, name


def folder(path: str) -> str | None:
    """The transport that a file belongs to."""
    found = re.match(r"te/transports/(\w+)/", path)
    return found[1] if found else None


def files() -> Iterator[str]:
    for package in ("te", "bootstrap_server", "sglang_mooncake"):
        for path in (ROOT / package).rglob("*.py"):
            yield str(path.relative_to(ROOT))


def is_allowed(path: str) -> bool:
    return any(path == one or (one.endswith("/") and path.startswith(one)) for one in ALLOWED)


def test_what_is_allowed_is_there() -> None:
    assert all((ROOT / one).exists() for one in ALLOWED)


def test_no_compiled_line_outside_a_transport_asks() -> None:
    """Which links a frame may go over stands in the table of the wire format, and is checked by
    what the link says of itself."""
    words = re.compile(rf"\b(?:{TELLING.pattern}|OVER_[A-Z]+|te\.transports)\b")
    sources = [path for path in (ROOT / "te" / "core").iterdir() if path.stem != "wire"]
    for path in sources:
        if path.suffix in (".pyx", ".pxd", ".h"):
            code = re.sub(r'#.*|/\*.*?\*/|""".*?"""', "", path.read_text())
            assert not words.search(code), path.name
    assert words.search("if link.is_direct:")


@pytest.mark.slow
def test_nobody_outside_a_transport_asks_for_its_name() -> None:
    found = {}
    for path in files():
        if not is_allowed(path):
            lines = list(asked((ROOT / path).read_text()))
            own = folder(path)
            if own is not None:
                others = tuple(name for name in NAMES if name != own)
                lines = [(line, word) for line, word in lines if word.strip("'") in others]
            if lines:
                found[path] = lines
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'x = "tcp"',
        'if link.transport == "rdma": pass',
        "if link.is_direct: pass",
        "link(is_pull=True)",
        "def f(only_rdma): pass",
        "opened.samehost",
    ],
)
def test_a_line_that_asks_is_found(line: str) -> None:
    assert list(asked(line))


@pytest.mark.parametrize("line", ['"""over tcp or rdma"""', "socket.IPPROTO_TCP", "is_directory"])
def test_a_line_that_does_not_ask_is_not_found(line: str) -> None:
    assert not list(asked(line))


def test_every_transport_is_registered_under_its_own_name() -> None:
    for name in NAMES:
        assert registry.load(name).name == name
    folders = {path.parent.name for path in (ROOT / "te" / "transports").glob("*/transport.py")}
    assert folders == set(NAMES)
