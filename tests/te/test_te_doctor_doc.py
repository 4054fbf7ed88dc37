# SPDX-License-Identifier: Apache-2.0
"""docs/doctor.md is what its generator makes of the catalogue as it is."""

from __future__ import annotations

import re

import doctor_doc
import pytest

from te.doctor.catalogue import CATALOGUE

pytestmark = pytest.mark.pure


def test_the_document_is_up_to_date() -> None:
    assert doctor_doc.PATH.read_text() == doctor_doc.document(), (
        "docs/doctor.md is not what the code says; run: .venv/bin/python scripts/doctor_doc.py"
    )


def test_every_finding_has_its_place() -> None:
    text = doctor_doc.document()
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert headings == list(CATALOGUE)
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) == set(headings)
    assert not re.search(r"^@\w+@$|\{\w+\}", text, re.MULTILINE)


def test_the_examples_have_findings_that_there_are() -> None:
    for path in doctor_doc.EXAMPLES.glob("*.txt"):
        found = re.findall(r"^(?:error|warning|hint) +([\w-]+)", path.read_text(), re.MULTILINE)
        assert found
        assert set(found) <= set(CATALOGUE)
