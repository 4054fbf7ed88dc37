# SPDX-License-Identifier: Apache-2.0
"""The compiled modules form layers: each cimports those before it alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TE = Path(__file__).parents[2] / "te"
#: Each knows those before it.
LAYERS = (
    "sync",
    "posix",
    "heap",
    "wire",
    "maps",
    "vectors",
    "channels",
    "sections",
    "regions",
    "tags",
    "kinds",
    "staging",
)
CIMPORT = re.compile(r"^\s*(?:from\s+(te[\w.]*)\s+cimport|cimport\s+(te[\w.]*))", re.MULTILINE)


def cimported(file: Path) -> set[str]:
    """The modules of te that a compiled file names."""
    return {one or other for one, other in CIMPORT.findall(file.read_text())}


def test_every_module_of_the_core_has_a_layer() -> None:
    files = [*(TE / "core").glob("*.pxd"), *(TE / "core").glob("*.pyx")]
    assert {file.stem for file in files} == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_core_knows_lower_layers_alone(layer: str) -> None:
    lower = {f"te.core.{name}" for name in LAYERS[: LAYERS.index(layer)]}
    for file in (TE / "core").glob(f"{layer}.p*x*"):
        assert cimported(file) <= lower, file.name


def test_what_stands_on_the_core_knows_nothing_else_but_the_verbs() -> None:
    files = [file for file in TE.rglob("*.p[xy]*") if file.parent.name != "core"]
    found = {file: cimported(file) for file in files if file.suffix in (".pxi", ".pyx", ".pxd")}
    assert any(found.values()), "the pattern finds nothing"
    known = {f"te.core.{layer}" for layer in LAYERS} | {"te.verbs.abi"}
    for file, names in found.items():
        assert names <= (set() if file.name == "abi.pxd" else known), file.name
