# SPDX-License-Identifier: Apache-2.0
"""docs/wire.md is what its generator makes of the code as it is."""

from __future__ import annotations

import re

import pytest
import wire_doc
from wire_spec.table import RULES, Over

pytestmark = pytest.mark.pure


def test_the_document_is_up_to_date() -> None:
    assert wire_doc.PATH.read_text() == wire_doc.document(), (
        "docs/wire.md is not what the code says; run: .venv/bin/python scripts/wire_doc.py"
    )


def test_every_frame_has_a_place_and_every_reference_leads_somewhere() -> None:
    text = wire_doc.document()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert {one.title for one in RULES} < set(headings)
    places = {one.lower().replace(" ", "-") for one in headings}
    assert len(places) == len(headings)
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= places


def test_an_example_that_breaks_a_rule_is_found() -> None:
    with pytest.raises(ValueError, match="END has count 1, which must be 0"):
        wire_doc._said(Over.TCP, [(">", "END", {"transfer": 1, "count": 1})])
    with pytest.raises(ValueError, match="kind 22 is not expected here"):
        wire_doc._said(Over.TCP, [(">", "ASK", {"transfer": 1})])
