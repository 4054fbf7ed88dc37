# SPDX-License-Identifier: Apache-2.0
"""The drawings of the documentation can be read: in light and dark, by a screen reader, without
anything from elsewhere. Their text stays inside, and ports and times are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvstore.config import Config
from kvstore.membership.index_etcd import DEFAULT_PORT as ETCD_PORT
from kvstore.membership.index_redis import DEFAULT_PORT as REDIS_PORT
from sglang_mooncake.context import Deadlines
from te import Config as Engine

ROOT = Path(__file__).parents[2]
DRAWINGS = sorted((ROOT / "docs/images").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
#: Of the widest of the fonts that are named, in parts of its size.
CHAR_WIDTH, BOLD = 0.5, 1.1


def parsed(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text())


def said(path: Path) -> str:
    """All text that is drawn."""
    texts = (" ".join(one.itertext()) for one in parsed(path).iter(f"{SVG}text"))
    return " ".join(" ".join(texts).split())


def test_there_are_drawings() -> None:
    assert {path.stem for path in DRAWINGS} >= {"failures", "ports", "request", "store-failures"}


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_drawing_says_what_it_shows_and_takes_nothing_from_elsewhere(path: Path) -> None:
    root, text = parsed(path), path.read_text()
    assert root.get("role") == "img"
    named = (root.get("aria-labelledby") or "").split()
    for tag, minimum in (("title", 10), ("desc", 80)):
        one = root.find(f"{SVG}{tag}")
        assert one is not None
        assert one.get("id") in named
        assert len(one.text or "") >= minimum
    assert "prefers-color-scheme: dark" in text
    # The site's own switch may show it on a page of the other scheme.
    page = root.find(f"{SVG}rect")
    assert page is not None
    assert page.get("class") == "page"
    assert not re.search(
        r"@import|@font-face|<image|<script|https?:(?!//www\.w3\.org/2000/svg)", text
    )
    assert all(href.startswith("#") for href in re.findall(r'href="([^"]*)"', text))


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_text_of_a_drawing_stays_inside(path: Path) -> None:
    root = parsed(path)
    width, height = map(float, (root.get("viewBox") or "").split()[2:])
    bold = set(re.findall(r"\.(\w+) \{[^}]*font-weight: 600", path.read_text()))
    sizes = dict(re.findall(r"\.(\w+) \{[^}]*font-size: ([0-9.]+)px", path.read_text()))

    def look(node: ElementTree.Element, left: float, top: float, right: float, size: str) -> None:
        size = node.get("font-size", size)
        if node.tag == f"{SVG}g" and (moved := node.get("transform")):
            x, y = map(float, re.findall(r"[0-9.]+", moved))
            panel = next(one for one in node if one.get("class") == "panel")
            left, top, right = left + x, top + y, left + x + float(panel.get("width", "0"))
        if node.tag == f"{SVG}text":
            words = "".join(node.itertext())
            kinds = (node.get("class") or "").split()
            size = next((sizes[one] for one in kinds if one in sizes), size)
            long = len(words) * float(size) * CHAR_WIDTH * (BOLD if bold & set(kinds) else 1)
            begin = left + float(node.get("x", "0"))
            begin -= {"middle": long / 2, "end": long}.get(node.get("text-anchor", ""), 0)
            assert begin >= left, words
            assert begin + long <= right, words
            assert 0 < top + float(node.get("y", "0")) <= height, words
        for child in node:
            look(child, left, top, right, size)

    look(root, 0.0, 0.0, width, "15")


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_drawing_is_on_a_page_and_described_there(path: Path) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    alts = [
        alt
        for page in pages
        for alt in re.findall(rf"!\[([^]]*)\]\([^)]*{path.name}\)", page.read_text())
    ]
    assert alts
    assert all(len(alt) > 20 for alt in alts)


def test_ports_are_those_of_the_programs() -> None:
    reference = (ROOT / "docs/configuration.md").read_text()  # Written out of the code.
    registry = re.search(
        r"### bootstrap_server\.port\n.*?\| default \| `(\d+)`", reference, re.DOTALL
    )
    assert registry
    shown = said(ROOT / "docs/images/ports.svg")
    assert shown.count(registry[1]) == 3  # of a prefill server, of its own, for Prometheus
    assert f"{REDIS_PORT} or {ETCD_PORT}" in shown


def test_times_are_those_of_the_code() -> None:
    deadlines, store = Deadlines(), Config()
    shown = said(ROOT / "docs/images/failures.svg")
    silent_s = deadlines.heartbeat_s * (deadlines.heartbeat_failures_max + 1)
    assert silent_s <= 5
    assert shown.count("within 5 s") == 3
    assert f"fail after {Engine().stall_timeout_s:g} s" in shown
    shown = said(ROOT / "docs/images/store-failures.svg")
    assert f"After {store.request_timeout_s + 1:g} s without an answer" in shown
    assert f"free after {store.claim_timeout_s:g} s" in shown
