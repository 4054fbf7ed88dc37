# SPDX-License-Identifier: Apache-2.0
"""The compiled modules form layers: each cimports those before it alone."""

from __future__ import annotations

import graphlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

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
    "kinds",
    "staging",
    "sections",
    "regions",
    "tags",
    "tally",
    "worker",
    "stager",
    "notes",
    "notices",
    "plane",
    "link",
    "transfer",
    "inbound",
    "frames",
    "connections",
    "callers",
    "staged",
    "payload",
    "sending",
    "landing",
    "receiving",
    "engine",
    "handles",
)
COMPILED = sorted([*TE.rglob("*.pxd"), *TE.rglob("*.pyx")])
CIMPORT = re.compile(r"^\s*(?:from\s+(te[\w.]*)\s+cimport|cimport\s+(te[\w.]*))", re.MULTILINE)
#: The names in one such line, or in its brackets.
NAMES = re.compile(r"^from\s+[\w.]+\s+cimport\s+(\([^)]*\)|[^\n*]*)$", re.MULTILINE)
#: What is no code, as far as there are no such signs in strings.
WORDS = re.compile(r'"""(?s:.*?)"""|#.*')


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


@pytest.mark.parametrize(
    "folder", sorted(one.parent.name for one in (TE / "transports").glob("*/__init__.py"))
)
def test_a_transport_knows_the_core_and_its_own_modules_without_a_circle(folder: str) -> None:
    own = f"te.transports.{folder}."
    known: dict[str, set[str]] = {}
    for file in (TE / "transports" / folder).glob("*.p[xy][xd]"):
        names = cimported(file)
        foreign = {one for one in names if not one.startswith((own, "te.core."))}
        assert foreign <= {"te.verbs.abi"}, file.name
        mine = {one.removeprefix(own) for one in names if one.startswith(own)}
        known.setdefault(file.stem, set()).update(mine - {file.stem})
    tuple(graphlib.TopologicalSorter(known).static_order())  # Raises for a circle.


@pytest.mark.parametrize(
    "file", sorted(TE.glob("memory_kinds/*/*.p[xy][xd]")), ids=lambda f: f.name
)
def test_a_kind_of_memory_knows_its_contract_alone(file: Path) -> None:
    own = f"te.memory_kinds.{file.parent.name}."
    foreign = {one for one in cimported(file) if not one.startswith(own)}
    assert foreign <= {"te.core.heap", "te.core.kinds", "te.core.sync"}, file.name


def test_what_else_is_compiled_knows_the_core_and_the_verbs() -> None:
    files = [
        *TE.glob("*.pyx"),
        *(TE.parent / "te_bench").glob("*.p[xy]*"),
        *(TE / "verbs").glob("*.p[xy]*"),
    ]
    known = {f"te.core.{layer}" for layer in LAYERS} | {"te.verbs.abi"}
    formats = {"te.transports.samehost.rings", "te.transports.tcp.encryption"}
    of_file = {"abi.pxd": set(), "_wire.pyx": known | formats}
    for file in files:
        if file.suffix in (".pxi", ".pyx", ".pxd"):
            assert cimported(file) <= of_file.get(file.name, known), file.name


@pytest.mark.parametrize("file", COMPILED, ids=lambda file: str(file.relative_to(TE)))
def test_what_is_cimported_by_name_is_used(file: Path) -> None:
    """In that file: who needs a name cimports it, and not by way of others."""
    parts = [file, *(file.parent.glob("*.pxi") if file.suffix == ".pyx" else ())]
    code = WORDS.sub("", "\n".join(part.read_text() for part in parts))
    named = {name for names in NAMES.findall(code) for name in re.findall(r"\w+", names)}
    used = set(re.findall(r"\w+", NAMES.sub("", code)))
    assert not named - used
