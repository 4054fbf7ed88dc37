# SPDX-License-Identifier: Apache-2.0
"""No module of te imports itself by a detour. (Which layer knows which: pyproject.toml.)"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]


def imported(path: Path, modules: set[str]) -> set[str]:
    """The modules of te that a module names, wherever in it; not what packages have in common with
    them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                parts = {f"{module}.{one.name}" for one in names} & modules
                found |= parts or {module}
            case ast.Import(names=names):
                found |= {one.name for one in names}
    return found & modules


def graph() -> dict[str, set[str]]:
    paths = {}
    for path in (ROOT / "te").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        paths[name] = path
    # Everything is below the package itself, which re-exports its objects.
    del paths["te"]
    return {name: imported(path, set(paths)) - {name} for name, path in paths.items()}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, or none."""
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges[name]):
            found = visit(other, [*above, name])
            if found:
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := visit(name, []))), [])


def test_no_module_reaches_itself() -> None:
    edges = graph()
    assert "te.connect.dial" in edges["te.transports.tcp.transport"]
    assert not circle(edges)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.slow
def test_connecting_knows_no_transport() -> None:
    for name, others in graph().items():
        if name.startswith("te.connect"):
            below = {other for other in others if other.startswith("te.transports.")}
            assert below <= {"te.transports.base", "te.transports.registry"}, name


@pytest.mark.slow
def test_importing_te_leaves_out_what_takes_long_to_import() -> None:
    """Commands that are over in a moment import te, too, such as `te --version`."""
    heavy = {"aiohttp", "asyncio", "email", "multiprocessing", "rich", "sglang", "torch", "zmq"}
    code = f"import sys, te; print(*sorted({heavy} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "\n"
