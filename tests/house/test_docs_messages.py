# SPDX-License-Identifier: Apache-2.0
"""Each sentence on docs/troubleshooting.md is one that the code can say."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
#: What stands for a value, in the templates of the code.
HOLE = "\N{REPLACEMENT CHARACTER}"
FORMAT = re.compile(r"%(?:\([a-z_]+\))?[#0-9.+ -]*[a-zA-Z]|\{[a-z_.:!]*\}")


@functools.cache  # Not when this file is read: that takes a second in each worker of pytest.
def templates() -> list[str]:
    """Every string of the code, with its values replaced."""
    found = []
    for package in ("bootstrap_server", "kvstore", "sglang_mooncake", "te"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found += strings(ast.parse(path.read_text()))
    return found


def strings(tree: ast.AST) -> Iterator[str]:
    documentation = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in documentation:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else HOLE for p in node.values)
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield FORMAT.sub(HOLE, node.value)


def fits(sentence: str, template: str) -> bool:
    """Whether the template can say it: `…` stands for values, and for words around them."""
    fragments = [part for part in re.split(r"\s*…\s*", sentence) if part.strip(" :;,.s")]
    at = 0
    for fragment in fragments:
        at = template.find(fragment, at)
        if at < 0:
            return False
        at += len(fragment)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("sentence", QUOTED)
def test_the_code_says_this_sentence(sentence: str) -> None:
    assert any(fits(sentence, one) for one in templates()), (
        "docs/troubleshooting.md quotes a sentence that no string of the code contains"
    )


def test_the_page_has_the_likely_sentences_each_once() -> None:
    assert len(QUOTED) >= 30
    assert len(set(QUOTED)) == len(QUOTED)
    assert PAGE.count("\n### ") == len(QUOTED), "each entry is a sentence in back quotes"


@pytest.mark.slow
def test_a_sentence_that_no_code_says_is_found() -> None:
    assert fits("a … of … is gone", f"a {HOLE} of {HOLE} is gone")
    assert not fits("a … of … is gone", f"of {HOLE} a {HOLE} is gone")
    assert not any(fits("the flux capacitor of … is empty", one) for one in templates())
